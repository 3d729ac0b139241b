// LayerNorm backward, strategy `warp`: a run of `lanes` lanes of a warp per row, held in registers.
//
//   dy, x, dx (rows, length); mean, rstd (rows); gamma (length) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   a team of Tile::lanes lanes holds Tile::packs packs a lane of dy and of x; `teams` of them take the rows in turn,
//   and each keeps the sums of its columns over all its rows, in float32 (float64 for float64 data): in registers where
//   a lane has few enough columns, else in shared memory
//   sums: workspace row i of [teams / teams in a block, length] pairs (dbeta, dgamma) holds those of the i-th block's
//   teams; for one row they go straight to the results
//   grid: teams, a block's worth each; shared memory: a row of sums for each team of a block, for every second where the
//   teams' sums are in registers
//
// Every byte of dy and x is read once, and before the team writes dx, so dx may be dy or x. Wins for rows up to about two
// thousand elements.
#include "rows.cuh"

constexpr int most_kept = 32;  // columns of a lane whose sums fit into its registers beside its part of dy and x
constexpr bool in_registers = Tile::packs * pack_size <= most_kept;
typedef Team<Tile::lanes> team_t;

// A row of sums of columns, the `index`-th in shared memory.
__device__ __forceinline__ ColumnSums row_of(Pair* shared, int index, int length) {
    return ColumnSums(shared + index * ColumnSums::size(length), length);
}

// The sums of a team's columns over its rows, in registers.
struct KeptInRegisters {
    Pair sums[Tile::packs][pack_size];

    // Calls use(column, sums) for the columns of this lane, of rows that are covered from `shift` elements before them.
    template <typename Use>
    __device__ __forceinline__ void each(int shift, int length, Use use) {
#pragma unroll
        for (int k = 0; k < Tile::packs; ++k) {
            const int at = (k * Tile::lanes + team_t::lane()) * pack_size - shift;
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                if (at + i >= 0 && at + i < length) {
                    use(at + i, sums[k][i]);
                }
            }
        }
    }
    // The upper half of the block's teams hands its sums to the lower half, until the first team has them all.
    template <typename Give>
    __device__ __forceinline__ void gather(Pair* shared, int shift, int length, Give give) {
#pragma unroll 1
        for (int half = team_t::count / 2; half > 0; half /= 2) {
            const int team = team_t::index();
            if (team >= half && team < 2 * half) {
                const ColumnSums handed = row_of(shared, team - half, length);
                each(shift, length, [&](int column, Pair& sum) { handed.of(column) = sum; });
            }
            __syncthreads();
            if (team < half) {
                const ColumnSums handed = row_of(shared, team, length);
                each(shift, length, [&](int column, Pair& sum) { sum = sum + handed.of(column); });
            }
            __syncthreads();
        }
        if (team_t::index() == 0) {
            each(shift, length, give);
        }
    }
};

// The same in shared memory, where each team has a row of its own.
struct KeptInSharedMemory {
    template <typename Give>
    __device__ __forceinline__ static void gather(Pair* shared, int length, Give give) {
        __syncthreads();
        for (int column = threadIdx.x; column < length; column += Tile::threads) {
            Pair sum = row_of(shared, 0, length).of(column);
            for (int team = 1; team < team_t::count; ++team) {
                sum = sum + row_of(shared, team, length).of(column);
            }
            give(column, sum);
        }
        __syncthreads();  // the next item takes over the rows
    }
};

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                             long long rows, long long length, long long teams) {
    const int elements = static_cast<int>(length);
    const ParameterGradients parameters = {workspace, dgamma, dbeta, length};
    const bool wanted = parameters.wanted();
    team_t team = {nullptr};
    int offset = 0;
    const int rows_kept = wanted ? team_t::count / (in_registers ? 2 : 1) : 0;
    Pair* const shared = shared_array<Pair>(offset, rows_kept * ColumnSums::size(elements));
    const ColumnSums own_row = row_of(shared, team.index(), elements);
    // A lane keeps its columns over several rows only if all of them are covered from the same place.
    const bool may_shift = teams >= rows || teams * length % pack_size == 0;
    for (long long item = blockIdx.x; item < teams / team_t::count; item += gridDim.x) {
        const long long own = item * team_t::count + team.index();
        KeptInRegisters kept = {};
        if (!in_registers && wanted) {
            for (int at = threadIdx.x; at < rows_kept * ColumnSums::size(elements); at += Tile::threads) {
                shared[at] = Pair{};
            }
            __syncthreads();
        }
        int shift = 0;
#pragma unroll 1
        for (long long first = 0; first < rows; first += teams) {
            const long long row = first + own;
            const Run<Tile::lanes> run(dy, row, elements, row < rows, may_shift);
            shift = run.length > 0 ? run.shift : shift;
            row_gradients(team, run, dy, x, mean, rstd, gamma, dx, row, elements,
                          [&](int k, int i, int column, Pair terms) {
                              if (in_registers) {
                                  kept.sums[k][i] = kept.sums[k][i] + terms;
                              } else if (wanted) {
                                  own_row.of(column) = own_row.of(column) + terms;
                              }
                          });
        }
        const auto give = [&](int column, Pair sums) { parameters.give(item, column, sums); };
        if (wanted && in_registers) {
            kept.gather(shared, shift, elements, give);
        } else if (wanted) {
            KeptInSharedMemory::gather(shared, elements, give);
        }
    }
}

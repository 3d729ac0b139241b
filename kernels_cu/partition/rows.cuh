// LayerNorm of rows that a team holds in registers: what the strategies `warp` (teams of a warp or less), `block` (teams
// of several warps, up to a block) and `cluster` (teams across the blocks of a cluster) share. x, y, dy, dx (rows, length);
// gamma, beta (length) or null; mean, rstd (rows).
//
// A team takes every `teams`-th row: what it needs of its columns stays in registers from row to row, and, where
// Tile::reads_ahead, a row is on its way while the one before it is worked on. The teams of a block ask for the parameters of their columns once.
//
// GroupNorm with HxW = 1 is the same thing: N * groups rows of the channels of a group, whose parameters are those of row
// `row % groups`. `teams` is a multiple of `groups` then, so that all rows of a team are of one group. One group else.
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "partition/team.cuh"

// Whether the teams of a block share parameters: those of several groups would, where their rows are many to a team, save
// little.
template <int lanes, int blocks, bool grouped>
constexpr bool teams_share = Team<lanes, blocks>::count > 1 && !grouped;

// A parameter of the columns of `run` in shared memory, whole packs of it, where the teams of a block share it: null where
// there is none, or they do not. A barrier lies between this and its use.
template <bool grouped, typename T, int lanes, int blocks>
__device__ __forceinline__ const Pack<T>* shared_parameter(const T* array, const Run<lanes, blocks>& run, int& offset) {
    if (!teams_share<lanes, blocks, grouped> || array == nullptr) {
        return nullptr;
    }
    const int packs = ceil_div(run.columns, Pack<T>::size);
    Pack<T>* const shared = shared_array<Pack<T>>(offset, packs);
    for (int j = threadIdx.x; j < packs; j += Tile::threads) {
        shared[j] = load_pack(array + run.from, j * Pack<T>::size, run.columns);
    }
    return shared;
}

// The parameters of a lane's columns: in registers, as they are stored, or read again for every row where those are too
// few.
template <typename T, int lanes, int blocks, bool grouped>
struct RowParameters {
    static constexpr bool shares = teams_share<lanes, blocks, grouped>;
    static constexpr bool resident =
        Tile::packs_per_thread * static_cast<int>(sizeof(ParameterPack<T>)) <= Tile::most_parameter_bytes;
    const T* array;
    const Pack<T>* shared;  // the same, or null
    acc_t absent;           // where there is no array
    ParameterPack<T> held[resident ? Tile::packs_per_thread : 1];

    // Of any row of the team, here of the group's: all are covered from the same place.
    __device__ __forceinline__ RowParameters(const T* array_, long long group, const Pack<T>* shared_, acc_t absent_,
                                             const Run<lanes, blocks>& run)
        : array(array_ == nullptr || !grouped ? array_ : array_ + group * run.columns),
          shared(shared_),
          absent(absent_) {
#pragma unroll
        for (int k = 0; resident && k < Tile::packs_per_thread; ++k) {
            load(held[resident ? k : 0], run, k);
        }
    }
    // Between two uses: they stay as they are stored, and are widened again.
    __device__ __forceinline__ void narrow_again() {
#pragma unroll
        for (int k = 0; resident && k < Tile::packs_per_thread; ++k) {
            make_opaque(held[resident ? k : 0].part);
        }
    }
    // Of the lane's k-th pack.
    __device__ __forceinline__ ParameterPack<T> of(const Run<lanes, blocks>& run, int k) const {
        if (resident) {
            return held[resident ? k : 0];
        }
        ParameterPack<T> found;
        load(found, run, k);
        return found;
    }

private:
    __device__ __forceinline__ void load(ParameterPack<T>& into, const Run<lanes, blocks>& run, int k) const {
        if (shares && shared != nullptr) {
            into.load_from(shared, run.first(k), run.length);
        } else if (shares) {
            into.load_from(static_cast<const T*>(nullptr), run.first(k), run.length, absent);
        } else {
            into.load_from(array == nullptr ? nullptr : array + run.from, run.first(k), run.length, absent);
        }
    }
};

// Whether a team that takes every `teams`-th row may cover them from the 16-byte boundary before them: only if that lies
// at the same place in all of them, because its lanes keep what belongs to their columns.
__device__ __forceinline__ bool rows_may_shift(long long rows, long long teams, int length) {
    return teams >= rows || teams * length % pack_size == 0;
}

// A row of x on its way.
template <int lanes, int blocks>
struct RowOfX {
    Pack<data_t> x[Tile::packs_per_thread];
    data_t centre;

    __device__ __forceinline__ void load_from(const data_t* tensor, const Run<lanes, blocks>& run) {
        run.load_from(tensor, x);
        centre = run.centre(tensor);
    }
};

// Every byte of x is read once, and before the team writes y, so y may be x.
template <int lanes, int blocks = 1, bool grouped = false>
__device__ __forceinline__ void normalise_rows(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y,
                                               acc_t* mean, acc_t* rstd, long long rows, int length, acc_t eps,
                                               long long teams, long long groups = 1) {
    int offset = 0;
    Team<lanes, blocks> team = {Team<lanes, blocks>::shared_scratch(offset)};
    // Several teams across blocks have slices of the same columns: the host sees to it that all rows begin alike.
    const Run<lanes, blocks> first_row(x, 0, length, true, rows_may_shift(rows, teams, length));
    const Pack<gamma_t>* const shared_gamma = shared_parameter<grouped>(gamma, first_row, offset);
    const Pack<beta_t>* const shared_beta = shared_parameter<grouped>(beta, first_row, offset);
    if (teams_share<lanes, blocks, grouped>) {
        __syncthreads();
    }
    for (long long item = blockIdx.x / blocks; item < teams / team.count; item += gridDim.x / blocks) {
        const long long own = item * team.count + team.index();
        int asked_again = length;
        make_opaque(asked_again);  // or whether rows may shift would take a register from item to item
        Run<lanes, blocks> run(x, own, length, own < rows, rows_may_shift(rows, teams, asked_again));
        const long long group = grouped ? own % groups : 0;
        RowParameters<gamma_t, lanes, blocks, grouped> scales(gamma, group, shared_gamma, acc_t(1), run);
        RowParameters<beta_t, lanes, blocks, grouped> offsets(beta, group, shared_beta, acc_t(0), run);
        RowOfX<lanes, blocks> held, next;
        held.load_from(x, run);
#pragma unroll 1
        for (long long first = 0; first < rows; first += teams) {
            const long long row = first + own;
            make_opaque(run.shift);
            scales.narrow_again();
            offsets.narrow_again();
            const Run<lanes, blocks> run_behind = run.behind(teams * length, row + teams < rows);
            if (Tile::reads_ahead) {
                next.load_from(x, run_behind);
            }
            const Statistics found = run_statistics(team, run, held.centre, held.x, length, eps);
            make_opaque(run.shift);  // the predicates of its elements do not fit beside their parameters
            if (run.live && team.lane() == 0 && team.rank() == 0) {
                store(mean, row, found.mean);
                store(rstd, row, found.rstd);
            }
            write_run(
                y, run, held.x, found, [&](int k) { return scales.of(run, k); },
                [&](int k) { return offsets.of(run, k); }, [](acc_t value) { return activation_t::apply(value); });
            run = run_behind;
            if (Tile::reads_ahead) {
                held = next;
            } else {
                held.load_from(x, run);
            }
        }
    }
    team.leave();
}

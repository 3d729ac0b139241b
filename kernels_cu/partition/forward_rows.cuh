// LayerNorm and RMSNorm of rows that a team holds in registers. The strategies `warp` (teams of a warp or less), `block`
// (teams of several warps, up to a block) and `cluster` (teams across the blocks of a cluster) share this code. x, y, dy,
// dx, residual, h, dh (rows, length); gamma, beta (length) or null; mean, rstd (rows). RMSNorm has no mean and no beta.
//
// If Tile::addend, a forward normalises h = x + residual, which it rounds to data_t and stores, and a backward adds dh,
// the gradient that reaches h past the norm, to dx.
//
// A team processes every `teams`-th row, so that the parameters and sums of its columns stay in registers from row to
// row. If Tile::reads_ahead, the next row is loaded while the current one is processed. The teams of a block load the
// parameters of their columns once. If Tile::single_row, every team of a forward has one row and the loops end after it:
// the first load then waits for fewer instructions, and fewer registers are used.
//
// GroupNorm with HxW = 1 uses the same code: it has N * groups rows of the channels of one group each, and row `row`
// has the parameters of group `row % groups`. `teams` is then a multiple of `groups`, so that all rows of a team belong
// to one group. Otherwise there is one group.
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "common/text.cuh"
#include "partition/team.cuh"

// Blocks per multiprocessor in the launch bounds. Tile::resident_blocks follows from the registers of the specialised
// text. The generic text also holds predicates of elements and parts of addresses, and in a cluster the addresses of
// other blocks' sums. It has registers for them with `quarters` quarters of the blocks.
constexpr int resident_blocks_in_quarters(int quarters) {
    return is_specialised || Tile::resident_blocks == 1 ? Tile::resident_blocks : Tile::resident_blocks * quarters / 4;
}

// Of a forward with `cluster` blocks per row.
constexpr int resident_blocks(int cluster) {
    const bool few_packs = Tile::packs_per_thread * (Tile::addend ? 2 : 1) <= 4;
    return resident_blocks_in_quarters(cluster > 1 || Tile::packs_per_thread > 8 ? 2 : few_packs ? 4 : 3);
}

// Whether the teams of a block share parameters. Teams of several groups do not: sharing would save little if a team
// has many rows.
template <int lanes, int blocks, bool grouped>
constexpr bool teams_share = Team<lanes, blocks>::count > 1 && !grouped;

// Place of a parameter of the columns of `run` in shared memory, for copy_parameter. Null if the parameter is null, or if
// the teams of a block do not share parameters.
template <bool grouped, typename T, int lanes, int blocks>
__device__ __forceinline__ Pack<T>* shared_parameter(const T* array, const Run<lanes, blocks>& run, int& offset) {
    if (!teams_share<lanes, blocks, grouped> || array == nullptr) {
        return nullptr;
    }
    return shared_array<Pack<T>>(offset, ceil_div(run.columns, Pack<T>::size));
}

// Copies a parameter of the columns of `run` to shared memory, in whole packs. A barrier must separate this call from
// the use of the packs.
template <typename T, int lanes, int blocks>
__device__ __forceinline__ void copy_parameter(const T* array, const Run<lanes, blocks>& run, Pack<T>* shared) {
    if (shared == nullptr) {
        return;
    }
    const bool plain = run.is_plain(array);
#pragma unroll 1
    for (int j = threadIdx.x; j < ceil_div(run.columns, Pack<T>::size); j += Tile::threads) {
        shared[j] = load_pack_of(array, run.from, j * Pack<T>::size, run.columns, plain);
    }
}

// The parameters of a lane's columns. They stay in registers in their storage type; if they need more than
// `most_bytes`, they are loaded again for every row.
template <typename T, int lanes, int blocks, bool grouped>
struct RowParameters {
    static constexpr bool shares = teams_share<lanes, blocks, grouped>;
    // In a cluster the generic text of a loop that reads ahead has registers for half as many parameters.
    static constexpr int most_bytes =
        Tile::most_parameter_bytes / (blocks > 1 && Tile::reads_ahead && !is_specialised ? 2 : 1);
    static constexpr bool resident = Tile::packs_per_thread * static_cast<int>(sizeof(ParameterPack<T>)) <= most_bytes;
    const T* array;
    const Pack<T>* shared;  // the columns of the array in shared memory, if the teams share it
    acc_t absent;           // value if `array` is null
    ParameterPack<T> held[resident ? Tile::packs_per_thread : 1];

    // The parameters are the same for every row of the team: all its rows are of `group`, and are covered from the same
    // position. `run` may be any of them.
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
    // Between two uses: the parameters stay in registers in their storage type, and are widened again.
    __device__ __forceinline__ void narrow_again() {
#pragma unroll
        for (int k = 0; resident && k < Tile::packs_per_thread; ++k) {
            make_opaque(held[resident ? k : 0].part);
        }
    }
    // The parameters of the lane's k-th pack.
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
        if (shares && array != nullptr) {
            into.load_from(shared, run.first(k), run.columns);
        } else if (shares) {
            into.load_from(static_cast<const T*>(nullptr), run.first(k), run.columns, absent);
        } else {
            into.load_from(array == nullptr ? nullptr : array + run.from, run.first(k), run.columns, absent);
        }
    }
};

// Whether a team that processes every `teams`-th row may cover each of them from the 16-byte boundary before it. The
// boundary must be at the same distance before all of these rows, because the values that a lane keeps belong to its
// columns.
__device__ __forceinline__ bool rows_may_shift(long long rows, long long teams, int length) {
    if (length % pack_size == 0) {  // a constant if the length is
        return true;
    }
    make_opaque(length);  // otherwise the result would occupy a register from item to item
    return teams >= rows || teams * length % pack_size == 0;
}

// A row of x, and of the residual if there is one. Its loads may still be in flight.
template <typename Norm, int lanes, int blocks>
struct RowOfX {
    static constexpr bool joins = bool(Tile::addend);
    Pack<data_t> x[Tile::packs_per_thread], residual[joins ? Tile::packs_per_thread : 1];
    data_t centre, centre_residual;

    __device__ __forceinline__ void load_from(const data_t* tensor, const data_t* addend,
                                              const Run<lanes, blocks>& run) {
        run.load_from(tensor, x);
        if constexpr (joins) {
            run.load_from(addend, residual);
        }
        if constexpr (Norm::has_mean) {
            if constexpr (joins) {
                centre_residual = run.centre(addend);
            }
            centre = run.centre(tensor);
        }
    }
    // Replaces x by h = x + residual.
    __device__ __forceinline__ void join() {
        if constexpr (joins) {
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                x[k] = joined(x[k], residual[k]);
            }
            if constexpr (Norm::has_mean) {
                centre = joined(centre, centre_residual);
            }
        }
    }
};

// The arrays and sizes of a launch. A team reads every byte of its row of x and residual before it writes y and h: y may
// be x, and h may be the residual.
template <typename Norm>
struct NormalisedRows {
    const data_t* x;
    const data_t* residual;  // null unless Tile::addend
    const gamma_t* gamma;
    const beta_t* beta;  // null without a mean
    y_t* y;
    data_t* h;    // null unless Tile::addend
    acc_t* mean;  // null without a mean
    acc_t* rstd;
    long long rows;
    int length;
    long long teams;
    long long groups;
    acc_t eps;
    acc_t gamma_offset;  // 0 with a mean

    template <int lanes, int blocks = 1, bool grouped = false>
    __device__ __forceinline__ void run() const {
        typedef Team<lanes, blocks, typename Norm::sums_t> team_t;
        int offset = 0;
        team_t team = {team_t::shared_scratch(offset)};
        // If a block of a cluster has several teams, their slices must have the same columns: the host ensures that all
        // rows begin at the same distance from a 16-byte boundary.
        const Run<lanes, blocks> first_row(x, 0, length, true, rows_may_shift(rows, teams, length));
        Pack<gamma_t>* const shared_gamma = shared_parameter<grouped>(gamma, first_row, offset);
        Pack<beta_t>* const shared_beta = shared_parameter<grouped>(beta, first_row, offset);
        const long long first_item = blockIdx.x / blocks;
        for (long long item = first_item; Tile::single_row || item < teams / team.count; item += gridDim.x / blocks) {
            const long long own = item * team.count + team.index();
            const bool live = (Tile::single_row && team.count == 1) || own < rows;
            Run<lanes, blocks> run(x, own, length, live, rows_may_shift(rows, teams, length));
            RowOfX<Norm, lanes, blocks> held, next;
            held.load_from(x, residual, run);
            if (teams_share<lanes, blocks, grouped> && item == first_item) {  // while the first row is on its way
                copy_parameter(gamma, first_row, shared_gamma);
                copy_parameter(beta, first_row, shared_beta);
                __syncthreads();
            }
            const long long group = grouped ? own % groups : 0;
            RowParameters<gamma_t, lanes, blocks, grouped> scales(gamma, group, shared_gamma, acc_t(1), run);
            RowParameters<beta_t, lanes, blocks, grouped> offsets(beta, group, shared_beta, acc_t(0), run);
#pragma unroll 1
            for (long long first = 0; Tile::single_row || first < rows; first += teams) {
                const long long row = first + own;
                run.recompute();
                scales.narrow_again();
                if (Norm::has_mean) {
                    offsets.narrow_again();
                }
                const Run<lanes, blocks> run_behind = run.behind(teams * length, row + teams < rows);
                if (Tile::reads_ahead) {
                    next.load_from(x, residual, run_behind);
                }
                held.join();
                const Statistics found = statistics_of(team, run, held);
                run.recompute();  // element predicates and parameters do not fit in registers together
                if (run.live) {
                    store_row(team, run, held.x, found, row, scales, offsets);
                }
                if (Tile::single_row) {
                    break;
                }
                run = run_behind;
                if (Tile::reads_ahead) {
                    held = next;
                } else {
                    held.load_from(x, residual, run);
                }
            }
            if (Tile::single_row) {
                break;
            }
        }
        team.leave();
    }

private:
    template <int lanes, int blocks>
    __device__ __forceinline__ Statistics statistics_of(Team<lanes, blocks, typename Norm::sums_t>& team,
                                                        const Run<lanes, blocks>& run,
                                                        RowOfX<Norm, lanes, blocks>& held) const {
        if constexpr (Norm::has_mean) {
            return run_statistics(team, run, held.centre, held.x, length, eps);
        } else {
            return run_statistics(team, held.x, length, eps);
        }
    }

    template <int lanes, int blocks, bool grouped>
    __device__ __forceinline__ void store_row(const Team<lanes, blocks, typename Norm::sums_t>& team,
                                              const Run<lanes, blocks>& run,
                                              const Pack<data_t> (&held)[Tile::packs_per_thread],
                                              const Statistics& found, long long row,
                                              const RowParameters<gamma_t, lanes, blocks, grouped>& scales,
                                              const RowParameters<beta_t, lanes, blocks, grouped>& offsets) const {
        if (team.lane() == 0 && team.rank() == 0) {
            if (Norm::has_mean) {
                store(mean, row, found.mean);
            }
            store(rstd, row, found.rstd);
        }
        if (Tile::addend) {
            // After the sums of the row: all threads of its team have read x and residual, the centre included.
            const bool plain = run.is_plain(h);
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                store_pack_of(h, run.start, run.first(k), run.columns, held[k], plain);
            }
        }
        write_run(
            y, run, held, found, [&](int k) { return Weights{scales.of(run, k), gamma_offset}; },
            [&](int k) { return offsets.of(run, k); }, [](acc_t value) { return activation_t::apply(value); });
    }

    // The factors of xhat in y for the elements of a pack.
    struct Weights {
        ParameterPack<gamma_t> gamma;
        acc_t gamma_offset;
        __device__ __forceinline__ acc_t of(int i) const { return Norm::weight(gamma.of(i), gamma_offset); }
    };
};

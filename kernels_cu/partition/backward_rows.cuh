// The gradients of LayerNorm and RMSNorm for rows that a team holds in registers (forward_rows.cuh): dx, and the sums of
// the team's columns over all its rows. If Tile::staged_rows is not 0, that many rows of a team are in shared memory
// instead.
#include "common/async.cuh"
#include "partition/column_sums.cuh"
#include "partition/forward_rows.cuh"

// The column sums of the teams of a block, in registers or in shared memory. If they are in shared memory, each team has
// a row of sums. If they are in registers, there is a row for two teams: at the end, one of them stores its sums and the
// other one adds its own.
template <typename Norm, int lanes, int blocks, bool in_registers>
struct KeptSums {
    typedef Run<lanes, blocks> run_t;
    typedef typename Norm::sums_t sums_t;
    typedef SpreadColumnSums<sums_t> row_t;
    static constexpr int teams = Tile::threads / lanes;
    sums_t* shared;  // [rows, row_t::size(length)]
    int length;      // upper bound of the columns of the block's slice of a row
    sums_t sums[in_registers ? Tile::packs_per_thread : 1][pack_size];

    // Number of rows in shared memory if `kinds` neighbouring teams have different columns.
    static __device__ __forceinline__ int rows_for(int kinds) {
        return !in_registers ? teams : kinds < teams ? teams / 2 : 0;
    }
    __device__ __forceinline__ row_t row(int index) const {
        return row_t(shared + index * row_t::size(length), length);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; in_registers && k < Tile::packs_per_thread; ++k) {
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                sums[k][i] = sums_t{};
            }
        }
        if (!in_registers) {
            for (int at = threadIdx.x; at < teams * row_t::size(length); at += Tile::threads) {
                shared[at] = sums_t{};
            }
            __syncthreads();
        }
    }
    // Adds the gradient and gradient * xhat of the i-th element of the lane's k-th pack.
    __device__ __forceinline__ void add(const run_t& run, int k, int i, acc_t gradient, acc_t xhat) {
        if (in_registers) {
            sums_t& kept = sums[in_registers ? k : 0][i];
            kept = with_product(kept, gradient, xhat);
        } else if (run.inside(k)(i)) {
            sums_t& kept = row(Team<lanes>::index()).of(run.first(k) + i);
            kept = with_product(kept, gradient, xhat);
        }
    }
    // Calls use(column, sums) for the columns of this lane.
    template <typename Use>
    __device__ __forceinline__ void each(const run_t& run, Use use) {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            const auto inside = run.inside(k);
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                if (inside(i)) {
                    use(run.first(k) + i, sums[in_registers ? k : 0][i]);
                }
            }
        }
    }
    // Calls emit(team, column, sums) in one thread for each column of the first `kinds` teams. The sums are over this
    // team and all later teams at distances that are multiples of `kinds`: these teams have the same columns. The whole
    // block calls.
    template <typename Emit>
    __device__ __forceinline__ void gather(const run_t& run, int kinds, Emit emit) {
        const int team = Team<lanes>::index(), rows = rows_for(kinds);
        if (rows == 0) {
            each(run, [&](int column, sums_t& sum) { emit(team, column, sum); });
            return;
        }
        if (in_registers) {
            run_t own = run;
            if (lanes > warp_size) {
                own.recompute();  // column indices and sums do not fit in registers together
            }
            if (team >= rows) {
                const row_t handed = row(team - rows);
                each(own, [&](int column, sums_t& sum) { handed.of(column) = sum; });
            }
            __syncthreads();
            if (team < rows) {
                const row_t handed = row(team);
                each(own, [&](int column, sums_t& sum) { handed.of(column) = sum + handed.of(column); });
            }
        }
        __syncthreads();
        // All kinds at once: most threads would have no column of a single one.
        for (int at = threadIdx.x; at < kinds * run.columns; at += Tile::threads) {
            const int kind = kinds == 1 ? 0 : at / run.columns, column = at - kind * run.columns;
            sums_t sum = row(kind).of(column);
#pragma unroll 4
            for (int other = kind + kinds; other < rows; other += kinds) {
                sum = sum + row(other).of(column);
            }
            emit(kind, column, sum);
        }
        __syncthreads();  // the next item reuses the rows
    }
};

// Blocks per multiprocessor in the launch bounds of a backward with teams of a warp. In float64 the places of the
// generic text take most of its registers beside few packs, so it has half of the blocks.
constexpr int resident_blocks_of_gradients() {
    return resident_blocks_in_quarters(sizeof(acc_t) > sizeof(float) ? 2 : 4);
}

// The arrays that a backward reads row by row.
struct RowArrays {
    const data_t* dy;
    const data_t* x;
    const data_t* dh;    // null unless Tile::addend
    const stat_t* mean;  // null without a mean
    const stat_t* rstd;
};

// The rows of a team: every `teams`-th row from its first one on. They begin `step` elements apart.
struct RowWalk {
    long long rows, teams, step;
};

// A row of dy, x and dh whose loads may still be in flight.
template <typename Norm, int lanes, int blocks>
struct RowOfAll {
    static constexpr bool joins = bool(Tile::addend);
    Pack<data_t> dy[Tile::packs_per_thread], x[Tile::packs_per_thread], dh[joins ? Tile::packs_per_thread : 1];
    stat_t mean, rstd;  // in their storage type: a conversion here would wait for the loads

    __device__ __forceinline__ void load_from(const RowArrays& from, long long row, const Run<lanes, blocks>& run) {
        if (run.live) {
            run.load_both(from.dy, from.x, dy, x);
            if constexpr (joins) {
                run.load_from(from.dh, dh);
            }
            if (Norm::has_mean) {
                mean = load(from.mean, row);
            }
            rstd = load(from.rstd, row);
        }
    }
};

// A team's present row, in registers, and the next row if Tile::reads_ahead.
template <typename Norm, int lanes, int blocks, bool staged>
struct TeamRows {
    typedef Run<lanes, blocks> run_t;
    static constexpr int shared_packs = 0;
    RowArrays from;
    RowOfAll<Norm, lanes, blocks> present, next;

    __device__ __forceinline__ TeamRows(const RowArrays& from_, Pack<data_t>*) : from(from_) {}
    // Loads the first row, which is row `row` of the arrays.
    __device__ __forceinline__ void begin(const run_t& run, long long row, const RowWalk&) {
        next.load_from(from, row, run);
    }
    // Makes row `row` the present one. `behind` is the next one. The loads of the present row all end here: otherwise its
    // first use would also wait for those of the next row, because loads share their few scoreboards.
    __device__ __forceinline__ void advance(const run_t&, const run_t& behind, long long row, const RowWalk& walk) {
        present = next;
        if (Tile::reads_ahead) {
            next.load_from(from, row + walk.teams, behind);
        }
    }
    // Called after the use of row `row`.
    __device__ __forceinline__ void leave(const run_t& behind, long long row, const RowWalk& walk) {
        if (!Tile::reads_ahead) {
            next.load_from(from, row + walk.teams, behind);
        }
    }
    __device__ __forceinline__ acc_t mean() const { return Norm::has_mean ? acc_t(widen(present.mean)) : acc_t(0); }
    __device__ __forceinline__ acc_t rstd() const { return widen(present.rstd); }
    __device__ __forceinline__ Pack<data_t> dy(int k) const { return present.dy[k]; }
    __device__ __forceinline__ Pack<data_t> x(int k) const { return present.x[k]; }
    __device__ __forceinline__ Pack<data_t> dh(int k) const { return present.dh[Tile::addend ? k : 0]; }
    // Between two uses: the packs stay in registers in their storage type, and are widened again.
    __device__ __forceinline__ void narrow_again() {
        make_opaque(present.dy);
        make_opaque(present.x);
        if (Tile::addend) {
            make_opaque(present.dh);
        }
    }
};

// The same in shared memory: the present row, and the next Tile::staged_rows - 1 rows, whose copies may be in flight. So
// memory is busy while a team waits for its sums, and the registers of a row are free. A lane copies and reads its own
// packs only: no barrier is needed.
template <typename Norm, int lanes, int blocks>
struct TeamRows<Norm, lanes, blocks, true> {
    typedef Run<lanes, blocks> run_t;
    static constexpr int rows = Tile::staged_rows, last = rows - 1;
    // Packs of dy, x and dh of a row, of all lanes.
    static constexpr int row_packs = (2 + Tile::addend) * Tile::packs_per_thread * Tile::threads;
    static constexpr int shared_packs = rows * row_packs;
    RowArrays from;
    Pack<data_t>* own;  // the first of this lane's packs, which are Tile::threads apart
    int present;        // index of the present row's first pack
    stat_t present_mean, present_rstd, next_mean, next_rstd;

    __device__ __forceinline__ TeamRows(const RowArrays& from_, Pack<data_t>* shared)
        : from(from_), own(shared + threadIdx.x), present(0) {}
    __device__ __forceinline__ void begin(const run_t& run, long long row, const RowWalk& walk) {
        present = 0;
        if (run.live) {
            load_statistics(row);
        }
#pragma unroll
        for (int ahead = 0; ahead < rows; ++ahead) {
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {  // packs beyond the row read as zeros
                if (run.first(k) >= run.columns) {
                    *dy_at(ahead * row_packs, k) = Pack<data_t>{};
                }
                if (run.first(k) >= run.columns || from.x == nullptr) {
                    *x_at(ahead * row_packs, k) = Pack<data_t>{};
                }
            }
            if (ahead < last) {
                issue(ahead * row_packs, run.behind(ahead * walk.step, row + ahead * walk.teams < walk.rows));
            }
        }
    }
    __device__ __forceinline__ void advance(const run_t& run, const run_t& behind, long long row, const RowWalk& walk) {
        present_mean = next_mean;
        present_rstd = next_rstd;
        if (behind.live) {
            load_statistics(row + walk.teams);
        }
        // In the place of the row before, whose packs have all been used.
        issue(present == 0 ? last * row_packs : present - row_packs,
              run.behind(last * walk.step, row + last * walk.teams < walk.rows));
        copy_async_wait<last>();
    }
    __device__ __forceinline__ void leave(const run_t&, long long, const RowWalk&) {
        present = present == last * row_packs ? 0 : present + row_packs;
    }
    __device__ __forceinline__ acc_t mean() const { return Norm::has_mean ? acc_t(widen(present_mean)) : acc_t(0); }
    __device__ __forceinline__ acc_t rstd() const { return widen(present_rstd); }
    __device__ __forceinline__ Pack<data_t> dy(int k) const { return *dy_at(present, k); }
    __device__ __forceinline__ Pack<data_t> x(int k) const { return *x_at(present, k); }
    __device__ __forceinline__ Pack<data_t> dh(int k) const { return *dh_at(present, k); }
    __device__ __forceinline__ void narrow_again() { make_opaque(present); }  // read again: registers are scarce

private:
    __device__ __forceinline__ Pack<data_t>* dy_at(int row, int k) const { return own + row + k * Tile::threads; }
    __device__ __forceinline__ Pack<data_t>* x_at(int row, int k) const {
        return own + row + (Tile::packs_per_thread + k) * Tile::threads;
    }
    __device__ __forceinline__ Pack<data_t>* dh_at(int row, int k) const {
        return own + row + (2 * Tile::packs_per_thread + k) * Tile::threads;
    }
    __device__ __forceinline__ void load_statistics(long long row) {
        if (Norm::has_mean) {
            next_mean = load(from.mean, row);
        }
        next_rstd = load(from.rstd, row);
    }
    // Packs that are not whole, or not at multiples of 16 bytes, are loaded at once.
    __device__ __forceinline__ void copy(const data_t* array, Pack<data_t>* to, const run_t& run, int k, bool plain) {
        if (!plain) {
            *to = load_pack_of(array, run.start, run.first(k), run.columns, plain);
        } else if (run.first(k) < run.columns) {
            copy_async(to, array + run.start + run.first(k));
        }
    }
    __device__ __forceinline__ void issue(int into, const run_t& run) {
        if (run.live) {
            const bool plain_dy = run.is_plain(from.dy), plain_x = run.is_plain(from.x);
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                copy(from.dy, dy_at(into, k), run, k, plain_dy);
                if (from.x != nullptr) {
                    copy(from.x, x_at(into, k), run, k, plain_x);
                }
                if (Tile::addend) {
                    copy(from.dh, dh_at(into, k), run, k, run.is_plain(from.dh));
                }
            }
        }
        copy_async_commit();
    }
};

// The arrays and sizes of a launch. dx is null if it is not wanted. x is null if only dbeta is wanted and there is no
// activation.
template <typename Norm>
struct RowGradients {
    typedef typename Norm::sums_t sums_t;
    RowArrays from;
    const gamma_t* gamma;
    const beta_t* beta;  // read only if there is an activation
    data_t* dx;
    typename Norm::results_t parameters;
    long long rows;
    int length;
    long long teams;
    long long groups;
    acc_t gamma_offset;  // 0 with a mean

    // A team has `lanes` lanes in each of `blocks` blocks. The teams of `merged` blocks of a cluster add their sums
    // together. Every byte of dy and x is read once, before dx is written: dx may be dy or x.
    template <int lanes, int blocks, int merged, bool grouped = false>
    __device__ __forceinline__ void run() const {
        typedef Team<lanes, blocks, sums_t> team_t;
        typedef Run<lanes, blocks> run_t;
        static_assert(blocks == 1 || merged == 1, "the blocks of a cluster share a row, or have rows of their own");
        const bool wanted = parameters.wanted();
        const int columns = blocks > 1 ? run_t::slice(length + pack_size - 1) : length;
        int offset = 0;
        team_t team = {team_t::shared_scratch(offset)};
        typedef KeptSums<Norm, lanes, blocks, bool(Tile::sums_in_registers)> kept_t;
        typedef typename kept_t::row_t row_of_sums;
        // Teams of a block whose indices differ by a multiple of `kinds` have the same columns. If the number of groups
        // does not divide the number of teams in the block, `kinds` is the latter: every team then stores its own sums.
        const int kinds = !grouped ? 1 : team.count % groups == 0 ? static_cast<int>(groups) : team.count;
        const int least = merged > 1, shared_rows = kept_t::rows_for(kinds) > least ? kept_t::rows_for(kinds) : least;
        kept_t kept;
        kept.length = columns;
        kept.shared = shared_array<sums_t>(offset, wanted ? shared_rows * row_of_sums::size(columns) : 0);
        const run_t first_row(from.dy, 0, length, true, rows_may_shift(rows, teams, length));  // see normalise_rows
        Pack<gamma_t>* const shared_gamma = shared_parameter<grouped>(gamma, first_row, offset);
        constexpr bool staged = Tile::staged_rows > 0;
        typedef TeamRows<Norm, lanes, blocks, staged> rows_t;
        Pack<data_t>* const staged_packs = shared_array<Pack<data_t>>(offset, rows_t::shared_packs);
        const RowWalk walk = {rows, teams, teams * length};
        const long long first_item = blockIdx.x / blocks;
        // The parameter is copied while the first row is on its way. A cluster has no registers for that row meanwhile.
        constexpr bool copies_first = blocks > 1;
        if (teams_share<lanes, blocks, grouped> && copies_first) {
            copy_parameter(gamma, first_row, shared_gamma);
            __syncthreads();
        }
        for (long long item = first_item; item < teams / team.count; item += gridDim.x / blocks) {
            const long long own = item * team.count + team.index();
            run_t run(from.dy, own, length, own < rows, rows_may_shift(rows, teams, length));
            rows_t held(from, staged_packs);
            held.begin(run, own, walk);
            if (wanted) {
                kept.clear();
            }
            if (teams_share<lanes, blocks, grouped> && !copies_first && item == first_item) {
                copy_parameter(gamma, first_row, shared_gamma);
                __syncthreads();
            }
            const long long group = grouped ? own % groups : 0;
            RowParameters<gamma_t, lanes, blocks, grouped> weights(gamma, group, shared_gamma, acc_t(1), run);
            RowParameters<beta_t, lanes, blocks, grouped> offsets(is_identity ? nullptr : beta, group, nullptr,
                                                                  acc_t(0), run);
#pragma unroll 1
            for (long long first = 0; first < rows; first += teams) {
                const long long row = first + own;
                run.recompute();
                const run_t run_behind = run.behind(walk.step, row + teams < rows);
                held.advance(run, run_behind, row, walk);
                one_row(team, run, held, weights, offsets, [&](int k, int i, acc_t gradient, acc_t xhat) {
                    if (wanted) {
                        kept.add(run, k, i, gradient, xhat);
                    }
                });
                run = run_behind;
                held.leave(run, row, walk);
            }
            if (!wanted) {
                continue;
            }
            if (lanes > warp_size && team.count > 1) {
                run.recompute();
            }
            if (merged == 1) {
                kept.gather(run, kinds, [&](int first, int column, sums_t sums) {
                    const long long giver = item * team.count + first, row = giver / groups * kinds / team.count;
                    const long long head = grouped ? giver % groups * length : run.from;
                    if (!grouped || giver < rows) {  // with many groups, blocks may have teams without a sample
                        parameters.store_channel(grouped ? row : item, head + column, sums);
                    }
                });
                continue;
            }
            const row_of_sums of_block = kept.row(0);
            kept.gather(run, 1, [&](int, int column, sums_t& sums) { of_block.of(column) = sums; });
            cluster_arrive();
            cluster_wait();
            for (int column = static_cast<int>(cluster_rank()) * Tile::threads + threadIdx.x; column < length;
                 column += merged * Tile::threads) {
                sums_t sums = {};
#pragma unroll
                for (int rank = 0; rank < merged; ++rank) {
                    sums = sums + *cluster_map(&of_block.of(column), rank);
                }
                parameters.store_channel(item / merged, column, sums);
            }
            cluster_arrive_relaxed();
            cluster_wait();  // until the other blocks have read this block's sums
        }
        team.leave();
    }

private:
    // Computes dx of a row, and calls keep(k, i, gradient, xhat) for each element of the lane's packs. `gradient` is the
    // one with respect to the normalised element: dy if there is no activation.
    template <int lanes, int blocks, bool grouped, bool staged, typename Keep>
    __device__ __forceinline__ void one_row(Team<lanes, blocks, sums_t>& team, const Run<lanes, blocks>& run,
                                            TeamRows<Norm, lanes, blocks, staged>& held,
                                            RowParameters<gamma_t, lanes, blocks, grouped>& weights,
                                            RowParameters<beta_t, lanes, blocks, grouped>& offsets, Keep keep) const {
        const acc_t mean_of_row = held.mean(), rstd_of_row = held.rstd();
        // The gradient with respect to the normalised element.
        const auto activation_grad = [&](acc_t gradient, acc_t value, acc_t weight, acc_t offset) {
            return ActivationGrad{Affine{mean_of_row, rstd_of_row * weight, offset}}(gradient, value);
        };
        sums_t sums = {};
        weights.narrow_again();
        if (!is_identity) {
            offsets.narrow_again();
        }
        const auto add_pack = [&](int k) {
            const ParameterPack<gamma_t> weight = weights.of(run, k);
            const ParameterPack<beta_t> offset = offsets.of(run, k);
            const Pack<data_t> pack_dy = held.dy(k), pack_x = held.x(k);
            const auto inside = run.inside(k);
            sums_t of_pack = {};
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                // Elements outside the row read as zeros. Without inside(i) they would contribute only if the mean is
                // infinite, or if there is an activation and the mean is infinite in units of rstd.
                const acc_t value = widen(pack_x.get(i));
                const acc_t gradient = is_identity || inside(i)
                                           ? activation_grad(widen(pack_dy.get(i)), value, weight.of(i), offset.of(i))
                                           : acc_t(0);
                const bool there = !Norm::has_mean || inside(i);
                const acc_t xhat = from.x != nullptr && there ? (value - mean_of_row) * rstd_of_row : acc_t(0);
                of_pack = with_product(of_pack, Norm::weight(weight.of(i), gamma_offset) * gradient, xhat);
                keep(k, i, gradient, xhat);
            }
            sums = sums + of_pack;
        };
        if (bool(Tile::sums_in_registers) || lanes > warp_size) {
            if (run.live) {
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    add_pack(k);
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                if (run.live) {
                    add_pack(k);
                }
                __syncwarp();  // else the compiler loads all packs' column sums at once and runs out of registers
            }
        }
        if (dx == nullptr) {
            return;
        }
        sums = team.sum(sums);
        if (!run.live) {
            return;
        }
        const acc_t inverse = acc_t(1) / acc_t(length);  // a constant if the length is
        LinearGradient linear = linear_gradient(
            Coefficients{acc_t(1), mean_of_row, rstd_of_row, sums.first * inverse, sums.second * inverse});
        if (!Norm::has_mean) {
            linear.offset = acc_t(0);  // the compiler cannot know that 0 * rstd is 0
        }
        const bool plain = run.is_plain(dx);
        held.narrow_again();
        weights.narrow_again();
        if (!is_identity) {
            offsets.narrow_again();
        }
        ParameterPack<gamma_t> next_weight = weights.of(run, 0);
        ParameterPack<beta_t> next_offset = offsets.of(run, 0);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            const ParameterPack<gamma_t> weight = next_weight;
            const ParameterPack<beta_t> offset = next_offset;
            if (k + 1 < Tile::packs_per_thread) {  // before the store: the compiler moves no load across it
                next_weight = weights.of(run, k + 1);
                next_offset = offsets.of(run, k + 1);
            }
            const Pack<data_t> pack_dy = held.dy(k), pack_x = held.x(k);
            acc_t out[pack_size];
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                linear.scale = rstd_of_row * Norm::weight(weight.of(i), gamma_offset);
                const acc_t value = widen(pack_x.get(i));
                const acc_t gradient = activation_grad(widen(pack_dy.get(i)), value, weight.of(i), offset.of(i));
                out[i] = input_gradient(gradient, value, linear);
            }
            if (Tile::addend) {
                const Pack<data_t> pack_dh = held.dh(k);
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    out[i] = out[i] + acc_t(widen(pack_dh.get(i)));
                }
            }
            store_pack_of(dx, run.start, run.first(k), run.columns, narrow_pack<data_t>(out), plain);
        }
    }
};

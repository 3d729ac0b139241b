// LayerNorm backward of rows that a team holds in registers (forward_rows.cuh): dx, and the sums of the team's columns over all
// its rows.
#include "partition/column_sums.cuh"
#include "partition/forward_rows.cuh"

// The column sums of the teams of a block, in registers or in shared memory. If they are in shared memory, each team has
// a row of sums. If they are in registers, there is a row for two teams: at the end, one of them stores its sums and the
// other one adds its own.
template <int lanes, int blocks, bool in_registers>
struct KeptSums {
    typedef Run<lanes, blocks> run_t;
    static constexpr int teams = Tile::threads / lanes;
    Pair* shared;  // [rows, ColumnSums::size(length)]
    int length;    // upper bound of the columns of the block's slice of a row
    Pair sums[in_registers ? Tile::packs_per_thread : 1][pack_size];

    // Number of rows in shared memory if `kinds` neighbouring teams have different columns.
    static __device__ __forceinline__ int rows_for(int kinds) {
        return !in_registers ? teams : kinds < teams ? teams / 2 : 0;
    }
    __device__ __forceinline__ ColumnSums row(int index) const {
        return ColumnSums(shared + index * ColumnSums::size(length), length);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; in_registers && k < Tile::packs_per_thread; ++k) {
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                sums[k][i] = Pair{};
            }
        }
        if (!in_registers) {
            for (int at = threadIdx.x; at < teams * ColumnSums::size(length); at += Tile::threads) {
                shared[at] = Pair{};
            }
            __syncthreads();
        }
    }
    // Adds the gradient and gradient * xhat of the i-th element of the lane's k-th pack.
    __device__ __forceinline__ void add(const run_t& run, int k, int i, acc_t gradient, acc_t xhat) {
        if (in_registers) {
            Pair& kept = sums[in_registers ? k : 0][i];
            kept = with_product(kept, gradient, xhat);
        } else if (run.inside(k)(i)) {
            Pair& kept = row(Team<lanes>::index()).of(run.first(k) + i);
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
            each(run, [&](int column, Pair& sum) { emit(team, column, sum); });
            return;
        }
        if (in_registers) {
            run_t own = run;
            if (lanes > warp_size) {
                own.recompute();  // column indices and sums do not fit in registers together
            }
            if (team >= rows) {
                const ColumnSums handed = row(team - rows);
                each(own, [&](int column, Pair& sum) { handed.of(column) = sum; });
            }
            __syncthreads();
            if (team < rows) {
                const ColumnSums handed = row(team);
                each(own, [&](int column, Pair& sum) { handed.of(column) = sum + handed.of(column); });
            }
        }
        __syncthreads();
        for (int kind = 0; kind < kinds; ++kind) {
            // In the order of the sums in shared memory: neighbouring threads read neighbouring sums.
            for (int at = threadIdx.x; at < ColumnSums::size(length); at += Tile::threads) {
                const int column = row(kind).column(at);
                if (column < run.columns) {
                    Pair sum = row(kind).sums[at];
#pragma unroll 4
                    for (int other = kind + kinds; other < rows; other += kinds) {
                        sum = sum + row(other).sums[at];
                    }
                    emit(kind, column, sum);
                }
            }
        }
        __syncthreads();  // the next item reuses the rows
    }
};

// A row of dy and x whose loads may still be in flight.
template <int lanes, int blocks>
struct RowOfBoth {
    Pack<data_t> dy[Tile::packs_per_thread], x[Tile::packs_per_thread];
    stat_t mean, rstd;  // in their storage type: a conversion here would wait for the loads

    __device__ __forceinline__ void load_from(const data_t* dy_, const data_t* x_, const stat_t* mean_,
                                              const stat_t* rstd_, long long row, const Run<lanes, blocks>& run) {
        if (run.live) {
            run.load_both(dy_, x_, dy, x);
            mean = load(mean_, row);
            rstd = load(rstd_, row);
        }
    }
};

// The arrays and sizes of a launch. dx is null if it is not wanted. x is null if only dbeta is wanted and there is no
// activation.
struct RowGradients {
    const data_t* dy;
    const data_t* x;
    const stat_t* mean;
    const stat_t* rstd;
    const gamma_t* gamma;
    const beta_t* beta;  // read only if there is an activation
    data_t* dx;
    ParameterGradients parameters;
    long long rows;
    int length;
    long long teams;
    long long groups;

    // A team has `lanes` lanes in each of `blocks` blocks. The teams of `merged` blocks of a cluster add their sums
    // together. Every byte of dy and x is read once, before dx is written: dx may be dy or x.
    template <int lanes, int blocks, int merged, bool grouped = false>
    __device__ __forceinline__ void run() const {
        typedef Team<lanes, blocks> team_t;
        typedef Run<lanes, blocks> run_t;
        static_assert(blocks == 1 || merged == 1, "the blocks of a cluster share a row, or have rows of their own");
        const bool wanted = parameters.wanted();
        const int columns = blocks > 1 ? run_t::slice(length + pack_size - 1) : length;
        int offset = 0;
        team_t team = {team_t::shared_scratch(offset)};
        typedef KeptSums<lanes, blocks, bool(Tile::sums_in_registers)> kept_t;
        // Teams of a block whose indices differ by a multiple of `kinds` have the same columns. If the number of groups
        // does not divide the number of teams in the block, `kinds` is the latter: every team then stores its own sums.
        const int kinds = !grouped ? 1 : team.count % groups == 0 ? static_cast<int>(groups) : team.count;
        const int least = merged > 1, shared_rows = kept_t::rows_for(kinds) > least ? kept_t::rows_for(kinds) : least;
        kept_t kept;
        kept.length = columns;
        kept.shared = shared_array<Pair>(offset, wanted ? shared_rows * ColumnSums::size(columns) : 0);
        const run_t first_row(dy, 0, length, true, rows_may_shift(rows, teams, length));  // see normalise_rows
        Pack<gamma_t>* const shared_gamma = shared_parameter<grouped>(gamma, first_row, offset);
        const long long first_item = blockIdx.x / blocks;
        // The parameter is copied while the first row is on its way. A cluster has no registers for that row meanwhile.
        constexpr bool copies_first = blocks > 1;
        if (teams_share<lanes, blocks, grouped> && copies_first) {
            copy_parameter(gamma, first_row, shared_gamma);
            __syncthreads();
        }
        for (long long item = first_item; item < teams / team.count; item += gridDim.x / blocks) {
            const long long own = item * team.count + team.index();
            run_t run(dy, own, length, own < rows, rows_may_shift(rows, teams, length));
            RowOfBoth<lanes, blocks> held, next;
            held.load_from(dy, x, mean, rstd, own, run);
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
                const run_t run_behind = run.behind(teams * length, row + teams < rows);
                if (Tile::reads_ahead) {
                    next.load_from(dy, x, mean, rstd, row + teams, run_behind);
                }
                one_row(team, run, held, weights, offsets, [&](int k, int i, acc_t gradient, acc_t xhat) {
                    if (wanted) {
                        kept.add(run, k, i, gradient, xhat);
                    }
                });
                run = run_behind;
                if (Tile::reads_ahead) {
                    held = next;
                } else {
                    held.load_from(dy, x, mean, rstd, row + teams, run);
                }
            }
            if (!wanted) {
                continue;
            }
            if (lanes > warp_size && team.count > 1) {
                run.recompute();
            }
            if (merged == 1) {
                kept.gather(run, kinds, [&](int first, int column, Pair sums) {
                    const long long giver = item * team.count + first, row = giver / groups * kinds / team.count;
                    const long long head = grouped ? giver % groups * length : run.from;
                    if (!grouped || giver < rows) {  // with many groups, blocks may have teams without a sample
                        parameters.store_channel(grouped ? row : item, head + column, sums);
                    }
                });
                continue;
            }
            const ColumnSums of_block = kept.row(0);
            kept.gather(run, 1, [&](int, int column, Pair& sums) { of_block.of(column) = sums; });
            cluster_arrive();
            cluster_wait();
            for (int column = static_cast<int>(cluster_rank()) * Tile::threads + threadIdx.x; column < length;
                 column += merged * Tile::threads) {
                Pair sums = {};
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
    template <int lanes, int blocks, bool grouped, typename Keep>
    __device__ __forceinline__ void one_row(Team<lanes, blocks>& team, const Run<lanes, blocks>& run,
                                            RowOfBoth<lanes, blocks>& held,
                                            RowParameters<gamma_t, lanes, blocks, grouped>& weights,
                                            RowParameters<beta_t, lanes, blocks, grouped>& offsets, Keep keep) const {
        const acc_t mean_of_row = widen(held.mean), rstd_of_row = widen(held.rstd);
        // The gradient with respect to the normalised i-th element of the k-th pack.
        const auto activation_grad = [&](int k, int i, acc_t weight, acc_t offset) {
            const Affine affine = {mean_of_row, rstd_of_row * weight, offset};
            return ActivationGrad{affine}(widen(held.dy[k].get(i)), widen(held.x[k].get(i)));
        };
        Pair sums = {};
        weights.narrow_again();
        if (!is_identity) {
            offsets.narrow_again();
        }
        const auto add_pack = [&](int k) {
            const ParameterPack<gamma_t> weight = weights.of(run, k);
            const ParameterPack<beta_t> offset = offsets.of(run, k);
            const auto inside = run.inside(k);
            Pair of_pack = {};
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                // Elements outside the row read as zeros. Without inside(i) they would contribute only if the mean is
                // infinite, or if there is an activation and the mean is infinite in units of rstd.
                const acc_t gradient =
                    is_identity || inside(i) ? activation_grad(k, i, weight.of(i), offset.of(i)) : acc_t(0);
                const acc_t xhat =
                    x != nullptr && inside(i) ? (acc_t(widen(held.x[k].get(i))) - mean_of_row) * rstd_of_row : acc_t(0);
                of_pack = with_product(of_pack, weight.of(i) * gradient, xhat);
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
        const bool plain = run.is_plain(dx);
        make_opaque(held.dy);
        make_opaque(held.x);
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
            acc_t out[pack_size];
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                linear.scale = rstd_of_row * weight.of(i);
                const acc_t gradient = activation_grad(k, i, weight.of(i), offset.of(i));
                out[i] = input_gradient(gradient, widen(held.x[k].get(i)), linear);
            }
            store_pack_of(dx, run.start, run.first(k), run.columns, narrow_pack<data_t>(out), plain);
        }
    }
};

// LayerNorm backward, strategy `grid`: a block draws a slab of columns of all rows by ticket (column_slabs.cuh). It
// computes the sums of the slab first. When the sums of whole rows are complete, it computes dx from the elements of dy
// and x that it has kept.
//
//   dy, x, dx: (rows, length). mean, rstd: (rows). gamma: (length) or null. dgamma, dbeta: (length) or null.
//   columns: columns of a slab, in whole sectors; the registers of a team hold them. kept: number of rounds of rows
//   that stay in shared memory (RoundSlots::resident_rounds), at most all.
//   Workspace: [rows, slabs] pairs (sum gamma * dy, sum gamma * dy * xhat) of a row's part in a slab. A / L and B / L
//   of a row later replace its first pair. From pair `words` on: the ticket and the count of kept_items.cuh, all 0 at
//   launch.
//   Grid: any number of blocks. Best is one resident block per slab.
//   Shared memory: the slabs drawn; sums [rows, warps of a team], later A / L and B / L [rows]; statistics [rows];
//   gamma of a slab; if they are wanted, (dbeta, dgamma) of a slab, and of all teams some at a time [slots_at_once,
//   threads]; the dy and x that are kept.
//
// With as many blocks as slabs, gamma is loaded once. So are the elements of dy and x for which shared memory has room.
// The others are loaded again from the L2 cache, the latest first. One block owns all rows of a column, so dgamma and
// dbeta need no partial rows. An element of dx is written by the thread that has read the same elements of dy and x,
// after all of dy and x have been read. So dx may be the same array as dy or x. By the cost model, the strategy wins for
// few long rows.
// There, blocks that own whole rows would each load all of gamma and store sums of all columns, or would be fewer than
// the multiprocessors.
#include "partition/column_sums.cuh"
#include "layer_norm/column_slabs.cuh"

typedef ColumnSums<Pair> SlabSums;
// Elements of a pack whose sums of all teams are in shared memory at a time. `of_teams` in grid.py has the same number.
constexpr int slots_at_once = pack_size < 4 ? pack_size : 4;
// Fewer teams take no longer in turn, without shared memory for their sums. grid.py has the same number.
constexpr int many_teams = 8;

// Whether a thread per column adds up the sums of the teams: the lanes of all teams have the same columns if all rows
// begin at the same place of a pack.
__device__ __forceinline__ bool adds_at_once(long long length) {
    return TeamSlab::teams >= many_teams && length % pack_size == 0;
}

// Adds up the sums of the teams, in their order, if adds_at_once. The whole block calls. `of_teams` is in shared memory
// [slots_at_once, threads].
__device__ __forceinline__ void add_teams(const TeamSlab& slab, const Pair (&sums)[Tile::packs_per_thread][pack_size],
                                          Pair* of_teams, const SlabSums& column_sums) {
#pragma unroll
    for (int k = 0; k < Tile::packs_per_thread; ++k) {
#pragma unroll
        for (int first = 0; first < pack_size; first += slots_at_once) {
#pragma unroll
            for (int i = 0; i < slots_at_once; ++i) {
                of_teams[i * Tile::threads + threadIdx.x] = sums[k][first + i];
            }
            __syncthreads();
            for (int at = threadIdx.x; at < slots_at_once * TeamSlab::lanes; at += Tile::threads) {
                const int i = at / TeamSlab::lanes, lane = at % TeamSlab::lanes;
                Pair total = {};
#pragma unroll
                for (int team = 0; team < TeamSlab::teams; ++team) {
                    total = total + of_teams[i * Tile::threads + team * TeamSlab::lanes + lane];
                }
                const int column = (k * TeamSlab::lanes + lane) * pack_size - slab.shift + first + i;
                if (within(column, slab.columns)) {
                    column_sums.of(column) = total;
                }
            }
            __syncthreads();
        }
    }
}

// The same for any teams: one team after the other adds its sums.
__device__ __forceinline__ void add_teams_in_turn(const TeamSlab& slab,
                                                  const Pair (&sums)[Tile::packs_per_thread][pack_size],
                                                  const SlabSums& column_sums) {
    for (int team = 0; team < TeamSlab::teams; ++team) {
#pragma unroll
        for (int k = 0; team == TeamSlab::team() && k < Tile::packs_per_thread; ++k) {
            Pair before[pack_size] = {};
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                if (team > 0 && slab.holds(k, i)) {
                    before[i] = column_sums.of(slab.first(k) + i);
                }
            }
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                if (slab.holds(k, i)) {
                    column_sums.of(slab.first(k) + i) = before[i] + sums[k][i];
                }
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, 1)
    layer_norm_backward_grid(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                             long long rows, long long length, long long columns, long long slabs, long long kept,
                             long long words) {
    const RowSlabs cut = {rows, length, columns, static_cast<int>(slabs)};
    const ParameterGradients parameters = {nullptr, dgamma, dbeta, length};
    const int count = static_cast<int>(rows);
    int offset = 0;
    const DrawnItems drawn(words_at(workspace, words), cut.slabs, offset);
    unsigned* const complete = shared_array<unsigned>(offset, 1);
    Pair* const row_sums = shared_array<Pair>(offset, count * TeamSlab::warps);
    Pair* const statistics = shared_array<Pair>(offset, count);
    SlabParameter<gamma_t> weight(gamma, cut, acc_t(1), offset);
    const int summed = parameters.wanted() ? static_cast<int>(columns) : 0;
    const SlabSums column_sums(shared_array<Pair>(offset, SlabSums::size(summed)), summed);
    const bool at_once = adds_at_once(length);
    Pair* const of_teams = shared_array<Pair>(offset, at_once && summed > 0 ? slots_at_once * Tile::threads : 0);
    const RoundSlots<2> slots({dy, x}, cut, kept, offset);
    take_items(
        drawn, complete,
        [&](unsigned index, auto signal) {
            TeamSlab slab(dy, cut, index);
            begin_slab(slab, slots);
            for (int row = threadIdx.x; row < count; row += Tile::threads) {
                statistics[row] = Pair{widen(load(mean, row)), widen(load(rstd, row))};
            }
            weight.share(slab);
            __syncthreads();
            weight.keep(slab);
            Pair sums[Tile::packs_per_thread][pack_size] = {};
            sweep_slab(slab, slots, [&](long long row, Pack<data_t>(&held)[2][Tile::packs_per_thread]) {
                const Pair of_row = statistics[row];
                Pair total = {};
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    Pair of_pack = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        if (slab.holds(k, i)) {
                            const acc_t gradient = widen(held[0][k].get(i));
                            const acc_t xhat = (acc_t(widen(held[1][k].get(i))) - of_row.first) * of_row.second;
                            const Pair terms = {gradient, gradient * xhat};
                            sums[k][i] = sums[k][i] + terms;
                            const acc_t gamma_here = weight.held[k].of(i);
                            of_pack = of_pack + Pair{gamma_here * terms.first, gamma_here * terms.second};
                        }
                    }
                    total = total + of_pack;
                }
                total = warp_sum(total);
                if (threadIdx.x % warp_size == 0) {
                    row_sums[row * TeamSlab::warps + slab.warp()] = total;
                }
            });
            __syncthreads();
            for (int row = threadIdx.x; row < count; row += Tile::threads) {
                Pair total = {};
                for (int warp = 0; warp < TeamSlab::warps; ++warp) {
                    total = total + row_sums[row * TeamSlab::warps + warp];
                }
                store(workspace, cut.part(row, index), total);
            }
            signal();
            if (!parameters.wanted()) {
                return;
            }
            if (at_once) {
                add_teams(slab, sums, of_teams, column_sums);
            } else {
                add_teams_in_turn(slab, sums, column_sums);
            }
            for (int column = threadIdx.x; column < slab.columns; column += Tile::threads) {
                parameters.store_channel(0, slab.column + column, column_sums.of(column));
            }
        },
        [&] {
            fold_rows_of_slabs<Pair>(
                cut, [&](int row, int slab) { return load(workspace, cut.part(row, slab)); },
                [&](int row, const Pair(&parts)[lane_parts]) {
                    Pair total = {};
#pragma unroll
                    for (int i = 0; i < lane_parts; ++i) {
                        total = total + parts[i];
                    }
                    total = warp_sum(total);
                    if (threadIdx.x % warp_size == 0) {  // all lanes have loaded their parts before warp_sum
                        const acc_t all = acc_t(length);
                        store(workspace, cut.part(row, 0), Pair{total.first / all, total.second / all});
                    }
                });
        },
        [&](unsigned index, bool latest) {
            TeamSlab slab(dy, cut, index);
            if (!latest) {
                weight.share(slab);
            }
            for (int row = threadIdx.x; row < count; row += Tile::threads) {
                row_sums[row] = load(workspace, cut.part(row, 0));
            }
            __syncthreads();
            weight.keep(slab);
            sweep_slab_back(slab, slots, latest, [&](long long row, Pack<data_t>(&held)[2][Tile::packs_per_thread]) {
                const Pair of_row = statistics[row], means = row_sums[row];
                Coefficients of = {acc_t(1), of_row.first, of_row.second, means.first, means.second};
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    Pack<data_t> out = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        of.gamma = weight.held[k].of(i);
                        out.set(i,
                                narrow<data_t>(input_gradient(widen(held[0][k].get(i)), widen(held[1][k].get(i)), of)));
                    }
                    store_pack(dx + slab.start(row), slab.first(k), slab.columns, out);
                }
            });
        });
}

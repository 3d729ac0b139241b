// LayerNorm forward, strategy `grid`: a block draws a slab of columns of all rows by ticket (column_slabs.cuh). It
// computes the moments of the slab first. When the statistics of whole rows are complete, it computes y from the
// elements of x that it has kept.
//
//   x, y: (rows, length). gamma, beta: (length) or null. mean, rstd: (rows).
//   columns: columns of a slab, in whole sectors; the registers of a team hold them. kept: number of rounds of rows
//   that stay in shared memory (RoundSlots::resident_rounds), at most all.
//   Workspace: [rows, slabs] moments of a row's part in a slab. From pair `words` on: the ticket and the count of
//   kept_items.cuh, all 0 at launch.
//   Grid: any number of blocks. Best is one resident block per slab.
//   Shared memory: the slabs drawn; moments [rows, warps of a team]; statistics [rows]; gamma and beta of a slab; the x
//   that is kept.
//
// With as many blocks as slabs, gamma and beta are loaded once. So are the elements of x for which shared memory has
// room. The others are loaded again from the L2 cache, the latest first. An element of y is written by the thread that
// has read the same element of x, after all of x has been read. So y may be the same array as x. By the cost model, the
// strategy wins for few long rows. There, blocks that own whole rows would each load all of gamma and beta, or would be
// fewer than the multiprocessors.
#include "common/moments.cuh"
#include "layer_norm/column_slabs.cuh"

// Moments of the elements of a row that a warp holds, in all its lanes. The first pass finds their mean relative to one
// of them, the second pass sums about that mean. inverse = 1 / count. For count = 0 only the count of the result has a
// meaning. Between the passes the packs keep their storage type.
__device__ __forceinline__ Moments warp_moments(const TeamSlab& slab, Pack<data_t> (&held)[Tile::packs_per_thread],
                                                acc_t count, acc_t inverse) {
    acc_t own = acc_t(0);  // a warp with elements has some in its first lane's first pack
    const auto& values = selectable(held[0]);
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        own = slab.holds(0, i) ? acc_t(widen(values.get(i))) : own;
    }
    const acc_t shift = usable_shift(__shfl_sync(whole_warp, own, 0));
    const auto sums_about = [&](acc_t centre, auto of_pack) {
        Pair sums = {};
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            sums = sums + of_pack(slab.whole(k) ? deviations(held[k], centre, Always())
                                                : deviations(held[k], centre, [&](int i) { return slab.holds(k, i); }));
        }
        return warp_sum(sums);
    };
    const Pair first_sums = sums_about(shift, [](Pair sums) { return with_square(sums.first); });
    const acc_t centre = second_centre(shift, first_sums, inverse, pack_size);
    make_opaque(held);
    return moments_about(count, inverse, centre, sums_about(centre, [](Pair sums) { return sums; }));
}

// Statistics of a row in all lanes of a warp, whose lanes hold the moments of the row's slabs.
__device__ __forceinline__ Statistics row_statistics(const Moments (&parts)[lane_parts], acc_t length, acc_t eps) {
    const acc_t first = __shfl_sync(whole_warp, parts[0].mean, 0);
    const Moments whole = merge_sets(length, first, 1, [&](auto use) {
#pragma unroll
        for (int i = 0; i < lane_parts; ++i) {
            use(parts[i]);
        }
    });
    return whole.statistics(eps);
}

extern "C" __global__ void __launch_bounds__(Tile::threads, 1)
    layer_norm_grid(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                    Pair* workspace, long long rows, long long length, long long columns, long long slabs,
                    long long kept, long long words, double eps) {
    const RowSlabs cut = {rows, length, columns, static_cast<int>(slabs)};
    const int count = static_cast<int>(rows);
    int offset = 0;
    const DrawnItems drawn(words_at(workspace, words), cut.slabs, offset);
    unsigned* const complete = shared_array<unsigned>(offset, 1);
    Moments* const parts = shared_array<Moments>(offset, count * TeamSlab::warps);
    Pair* const statistics = shared_array<Pair>(offset, count);
    SlabParameter<gamma_t> scale(gamma, cut, acc_t(1), offset);
    SlabParameter<beta_t> bias(beta, cut, acc_t(0), offset);
    const RoundSlots<1> slots({x}, cut, kept, offset);
    take_items(
        drawn, complete,
        [&](unsigned index, auto signal) {
            TeamSlab slab(x, cut, index);
            begin_slab(slab, slots);
            scale.share(slab);  // for the outputs, which follow after barriers
            bias.share(slab);
            const acc_t of_warp = acc_t(slab.warp_elements()), inverse = acc_t(1) / of_warp;
            sweep_slab(slab, slots, [&](long long row, Pack<data_t>(&held)[1][Tile::packs_per_thread]) {
                const Moments found = warp_moments(slab, held[0], of_warp, inverse);
                if (threadIdx.x % warp_size == 0) {
                    parts[row * TeamSlab::warps + slab.warp()] = found;
                }
            });
            __syncthreads();
            for (int row = threadIdx.x; row < count; row += Tile::threads) {
                Moments found = {};
                for (int warp = 0; warp < TeamSlab::warps; ++warp) {
                    found = merge(found, parts[row * TeamSlab::warps + warp]);
                }
                store_moments(workspace, cut.part(row, index), found);
            }
            signal();
        },
        [&] {
            fold_rows_of_slabs<Moments>(
                cut, [&](int row, int slab) { return load_moments(workspace, cut.part(row, slab)); },
                [&](int row, const Moments(&parts)[lane_parts]) {
                    const Statistics found = row_statistics(parts, acc_t(length), acc_t(eps));
                    if (threadIdx.x % warp_size == 0) {
                        store(mean, row, found.mean);
                        store(rstd, row, found.rstd);
                    }
                });
        },
        [&](unsigned index, bool latest) {
            TeamSlab slab(x, cut, index);
            if (!latest) {
                scale.share(slab);
                bias.share(slab);
            }
            for (int row = threadIdx.x; row < count; row += Tile::threads) {
                statistics[row] = Pair{load(mean, row), load(rstd, row)};
            }
            __syncthreads();
            scale.keep(slab);
            bias.keep(slab);
            sweep_slab_back(slab, slots, latest, [&](long long row, Pack<data_t>(&held)[1][Tile::packs_per_thread]) {
                const Pair of = statistics[row];
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    Outputs<y_t> out = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        const Affine affine = {of.first, of.second * scale.held[k].of(i), bias.held[k].of(i)};
                        out.set(i, narrow<y_t>(normalised(widen(held[0][k].get(i)), affine)));
                    }
                    store_pack(y + slab.start(row), slab.first(k), slab.columns, out);
                }
            });
        });
}

// LayerNorm forward, strategy `grid`: a block takes a slab of columns of all rows by ticket (row_slabs.cuh), moments
// first, y from what it has kept of x when the statistics of whole rows are there.
//
//   x, y (rows, length); gamma, beta (length) or null; mean, rstd (rows)
//   columns: of a slab, whole sectors, that the registers of a team hold; kept: rounds of rows that stay in shared memory
//   (RoundSlots::resident_rounds), at most all
//   workspace: [rows, slabs] moments of a row's part in a slab; from pair `words` the ticket and the count of
//   row_slabs.cuh, all 0
//   grid: any number of blocks, best as many as slabs, all of them resident
//   shared memory: the slabs drawn; [rows, warps of a team] moments; [rows] statistics; gamma and beta of a slab; x kept
//
// x, gamma and beta are asked for once by as many blocks as slabs; what of x there was no room for is asked for again, the
// latest first, from the L2 cache. An element of y is written by the thread that has read the same element of x, after all
// of x has been read: y may be x. Wins where rows are so few, and so long, that blocks with rows of their own would each
// ask for all of gamma and beta, or be fewer than multiprocessors.
#include "common/moments.cuh"
#include "layer_norm/row_slabs.cuh"

// The moments of what a warp holds of a row, in all its lanes: about their mean, which is found relative to one of them.
// 1 / count is given; no elements have no moments. The packs stay as narrow as they are stored between the passes.
__device__ __forceinline__ Moments warp_moments(const TeamSlab& slab, Pack<data_t> (&held)[Tile::packs_per_thread],
                                                acc_t count, acc_t inverse) {
    acc_t own = acc_t(0);  // if the warp has elements, its first lane has some in its first pack
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        own = slab.holds(0, i) ? acc_t(widen(held[0].get(i))) : own;
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

// Of a row whose slabs' moments the lanes of a warp have, in all its lanes: no chain of merges, with a division each, but
// the mean of the means, and what the parts deviate from it. Quotients are summed, so that no sum is larger than its terms.
__device__ __forceinline__ Statistics row_statistics(const Moments (&parts)[lane_parts], acc_t length, acc_t eps) {
    const acc_t first = __shfl_sync(whole_warp, parts[0].mean, 0), inverse = acc_t(1) / length;
    acc_t further = acc_t(0);  // how much the mean of the means is from the first of them
#pragma unroll
    for (int i = 0; i < lane_parts; ++i) {
        further += parts[i].count * inverse * (parts[i].mean - first + parts[i].rest);
    }
    const acc_t centre = first + warp_sum(further);
    Pair sums = {};
#pragma unroll
    for (int i = 0; i < lane_parts; ++i) {
        const acc_t d = parts[i].mean - centre + parts[i].rest;
        sums = sums +
               (parts[i].count == acc_t(0) ? Pair{} : Pair{parts[i].count * d, parts[i].m2 + parts[i].count * d * d});
    }
    return moments_about(length, inverse, centre, warp_sum(sums)).statistics(eps);
}

extern "C" __global__ void __launch_bounds__(Tile::threads, 1)
    layer_norm_grid(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                    Pair* workspace, long long rows, long long length, long long columns, long long slabs,
                    long long kept, long long words, double eps) {
    const RowSlabs cut = {rows, length, columns, static_cast<int>(slabs)};
    const int count = static_cast<int>(rows);
    int offset = 0;
    const DrawnSlabs drawn(words_at(workspace, words), cut.slabs, offset);
    Moments* const parts = shared_array<Moments>(offset, count * TeamSlab::warps);
    Pair* const statistics = shared_array<Pair>(offset, count);
    SlabParameter<gamma_t> scale(gamma, cut, acc_t(1), offset);
    SlabParameter<beta_t> bias(beta, cut, acc_t(0), offset);
    const RoundSlots<1> slots({x}, cut, kept, offset);
    take_slabs(
        drawn,
        [&](unsigned index, auto signal) {
            TeamSlab slab(x, cut, index);
            begin_slab(slab, slots);
            scale.share(slab);  // for the outputs: barriers lie between
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
                    Pack<data_t> out = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        const Affine affine = {of.first, of.second * scale.held[k].of(i), bias.held[k].of(i)};
                        out.set(i, narrow<data_t>(normalised(widen(held[0][k].get(i)), affine)));
                    }
                    store_pack(y + slab.start(row), slab.first(k), slab.columns, out);
                }
            });
        });
}

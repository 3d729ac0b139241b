// The slabs of a block (slab_range.cuh) in shared memory, one sample at a time. stage() loads a slab through registers.
#include "batch_norm/slab_range.cuh"
#include "partition/slab.cuh"

// Copies the slabs of several tensors into shared memory. Their loads are in flight together. A null tensor is left
// out. No barrier.
template <int tensors>
__device__ __forceinline__ void stage(const slab_t& slab, const data_t* const (&from)[tensors],
                                      Pack<data_t>* const (&staged)[tensors]) {
    const int packs = slab.packs();
    for (int base = threadIdx.x; base < packs; base += Tile::threads * loads_in_flight) {
        Pack<data_t> held[tensors][loads_in_flight];
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            const int j = base + k * Tile::threads;
            if (j < packs) {
                const PackSpan where = slab.span_of(j);
#pragma unroll
                for (int t = 0; t < tensors; ++t) {
                    if (from[t] != nullptr) {
                        held[t][k] = load_pack(from[t] + where.row, where.first, where.length);
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            const int j = base + k * Tile::threads;
            if (j < packs) {
#pragma unroll
                for (int t = 0; t < tensors; ++t) {
                    if (from[t] != nullptr) {
                        staged[t][j] = held[t][k];
                    }
                }
            }
        }
    }
}

// Sets totals[channel] to the sum of terms over the channel's elements. `terms` may read shared memory that the block
// has written before the call. When the call returns, all threads have finished reading it.
template <typename Terms>
__device__ __forceinline__ void channel_totals(const slab_t& slab, Pair* partials, Pair* totals, Terms terms) {
    for (int channel = threadIdx.x; channel < slab.channels; channel += Tile::threads) {
        totals[channel] = Pair{};
    }
    __syncthreads();
    slab.add_sums<Tile::partial_sums>(0, slab.packs(), partials, totals, terms);
    __syncthreads();
}

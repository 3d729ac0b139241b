// How the blocks of BatchNorm's `block` kernels divide a channels-first tensor: into slabs of neighbouring channels and
// ranges of samples. The last slab may have fewer channels, the last range fewer samples. stage() loads a slab into
// shared memory through registers.
#include "partition/slab.cuh"

struct SlabRange {
    long long range;       // row in a workspace [ranges, C]
    long long first;       // first channel
    long long begin, end;  // samples [begin, end)
    int own;               // channels of the slab

    static __device__ __forceinline__ long long items(long long N, long long C, long long channels, long long samples) {
        return (C + channels - 1) / channels * ((N + samples - 1) / samples);
    }
    __device__ __forceinline__ SlabRange(long long N, long long C, long long channels, long long samples,
                                         long long item) {
        const long long slabs = (C + channels - 1) / channels;
        range = item / slabs;
        first = (item - range * slabs) * channels;
        begin = range * samples;
        end = begin + samples < N ? begin + samples : N;
        own = static_cast<int>(C - first < channels ? C - first : channels);
    }
};

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

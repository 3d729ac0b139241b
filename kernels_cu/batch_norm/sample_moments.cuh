// The moments of the channels of a block's columns of packs (sample_columns.cuh), for BatchNorm's statistics.
#include "batch_norm/sample_columns.cuh"
#include "partition/column_moments.cuh"

// The moments of the threads' elements in shared memory: those of all threads for one slot of their packs after those
// for another. Neighbouring lanes read neighbouring elements, and eight lanes at a time access 128 bytes. Slots are
// `of_slot` moments apart, so that the elements of eight lanes, of one pack or of a few, are in different banks.
struct SlotMoments {
    static constexpr int apart = 8 / pack_size, period = 2 * apart;
    static constexpr int size = (Tile::threads + period - 1) * pack_size;
    Moments* moments;
    int of_slot;

    // `threads` is the number of threads that have a part of the samples.
    __device__ __forceinline__ SlotMoments(Moments* moments_, int threads)
        : moments(moments_), of_slot(threads + ((apart - threads) & (period - 1))) {}
    __device__ __forceinline__ Moments* of(int slot, int thread) const { return moments + slot * of_slot + thread; }
};

// Merges the moments of the elements of a channel in the block's columns into totals[channel]. `here` is the first of
// these columns. `partials` is in shared memory, SlotMoments::size long. One warp merges a channel. The whole block
// calls. Ends with a barrier.
__device__ __forceinline__ void merge_into_totals(const SampleColumn& path, int here, int HxW, int own,
                                                  Moments* partials, const ColumnMoments& found, Moments* totals) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const SlotMoments slots(partials, path.parts * path.columns);
    const ElementLanes lanes(HxW);
    if (path.part < path.parts) {
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            *slots.of(slot, threadIdx.x) = found.at(slot);
        }
    }
    __syncthreads();
    const int from = here * pack_size, to = from + path.columns * pack_size;  // elements from the start of column 0
    for (int channel = warp; channel < own; channel += block_warps) {
        const int start = path.shift + channel * HxW, past = start + HxW;
        const int begin = start < from ? from : start, end = past < to ? past : to;
        if (begin >= end) {
            continue;
        }
        const acc_t count = acc_t(static_cast<long long>(end - begin) * path.rows);
        const auto of_element = [&](int at) { return slots.of(at % pack_size, (at - from) / pack_size); };
        const auto each_set = [&](auto use) {
            for (int at = begin + lanes.element; at < end; at += warp_size) {
                const Moments* const of_parts = of_element(at);
                for (int part = lanes.part; part < path.parts; part += lanes.parts) {
                    use(of_parts[part * path.columns]);
                }
            }
        };
        const Moments whole = merge_sets(count, of_element(begin)->mean, 1, each_set);
        if (lane == 0) {
            totals[channel] = merge(totals[channel], whole);
        }
    }
    __syncthreads();
}

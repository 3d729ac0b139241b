// The moments of the channels of a block's columns of packs (sample_columns.cuh), for BatchNorm's statistics.
#include "batch_norm/sample_columns.cuh"
#include "partition/column_moments.cuh"

// Merges the moments of the elements of a channel in the block's columns into totals[channel]. `here` is the first of
// these columns. `partials` is in shared memory, pack_size moments per thread. One warp merges a channel. The whole
// block calls. Ends with a barrier.
__device__ __forceinline__ void merge_into_totals(const SampleColumn& path, int here, int HxW, int own,
                                                  Moments* partials, const ColumnMoments& found, Moments* totals) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const int of_slot = path.parts * path.columns;
    if (path.part < path.parts) {
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            partials[slot * of_slot + threadIdx.x] = found.at(slot);
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
        const auto of_element = [&](int at) { return partials + at % pack_size * of_slot + (at - from) / pack_size; };
        const auto each_set = [&](auto use) {
            for (int at = begin + lane; at < end; at += warp_size) {
                const Moments* const of_parts = of_element(at);
                for (int part = 0; part < path.parts; ++part) {
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

// Cuts a channels-first tensor into runs of `chunk` consecutive elements, for any HxW.
//
// Only the packs at the ends of a run can be ragged. A run may start and end in the middle of a plane. The values of
// the channels are stored in shared memory, one entry per plane that the run touches.
#include "partition/slab.cuh"

struct FlatRun {
    long long start;  // elements from the tensor's start
    long long plane;  // index of the first plane of the run, counted over all samples
    int length;
    int shift;   // elements between the 16-byte boundary and the run's start
    int HxW;     // elements of a plane, at most `chunk`: a plane may have more elements than an int
    int before;  // elements before the run in its first plane, if planes have HxW elements

    __device__ __forceinline__ FlatRun(const data_t* tensor, long long elements, long long HxW_, long long chunk,
                                       long long item)
        : start(item * chunk), plane(start / HxW_) {
        const long long left_in_plane = (plane + 1) * HxW_ - start;
        length = static_cast<int>(elements - start < chunk ? elements - start : chunk);
        shift = misalignment(tensor, start);
        HxW = static_cast<int>(HxW_ < chunk ? HxW_ : chunk);
        before = HxW - static_cast<int>(left_in_plane < chunk ? left_in_plane : chunk);
    }
    __device__ __forceinline__ int planes() const { return ceil_div(before + length, HxW); }
    __device__ __forceinline__ int packs() const { return ceil_div(shift + length, pack_size); }
    __device__ __forceinline__ PackSpan span_of(int j) const { return PackSpan{start, j * pack_size - shift, length}; }

    // Channel of the first element of pack j. Planes are counted from the run's first one.
    __device__ __forceinline__ ChannelWalk walk_of(int j) const { return ChannelWalk(before + span_of(j).first, HxW); }
};

// Sets known[p] = of(channel) for each plane p of the run. Ends with a barrier.
template <typename T, typename Of>
__device__ __forceinline__ void stage_channels(const FlatRun& run, long long C, T* known, Of of) {
    for (int plane = threadIdx.x; plane < run.planes(); plane += Tile::threads) {
        known[plane] = of((run.plane + plane) % C);
    }
    __syncthreads();
}

// The outputs element(values, known[plane]) for the elements of a pack, where values[t] is the element of tensor t.
template <typename Y, typename T, typename Element>
__device__ __forceinline__ Outputs<Y> output_of(const FlatRun& run, const PackSpan& where, const ChannelWalk& walk,
                                                T* known, Element element, Pack<data_t> (&held)[1]) {
    const PackSpan in_planes = {where.row, run.before + where.first, run.before + where.length};
    return outputs_in_channels<Y>(
        in_planes, walk, run.HxW, [&](int plane, bool there) { return known[there ? plane : 0]; },
        [&](int i, const T& k) {
            const acc_t values[1] = {widen(held[0].get(i))};
            return element(values, k);
        },
        held[0]);
}

template <typename Y, typename T, typename Element>
__device__ __forceinline__ Outputs<Y> output_of(const FlatRun& run, const PackSpan& where, const ChannelWalk& walk,
                                                T* known, Element element, Pack<data_t> (&held)[2]) {
    const PackSpan in_planes = {where.row, run.before + where.first, run.before + where.length};
    return outputs_in_channels<Y>(
        in_planes, walk, run.HxW, [&](int plane, bool there) { return known[there ? plane : 0]; },
        [&](int i, const T& k) {
            const acc_t values[2] = {widen(held[0].get(i)), widen(held[1].get(i))};
            return element(values, k);
        },
        held[0], held[1]);
}

// Stores element(values, known[plane]) in `to` for the elements of a run, where values[t] is the element of tensor t and
// `plane` is the index of its plane in the run. A thread loads several packs before it uses the first. The packs of all
// threads are loaded and stored without a test of each if all of them are whole, at 16-byte boundaries. The whole block
// calls.
template <int tensors, typename Y, typename T, typename Element>
__device__ __forceinline__ void stream(const FlatRun& run, const data_t* const (&from)[tensors], Y* to, T* known,
                                       Element element) {
    bool aligned = misalignment(to, run.start - run.shift) == 0;
#pragma unroll
    for (int t = 0; t < tensors; ++t) {
        aligned = aligned && misalignment(from[t], run.start - run.shift) == 0;
    }
    const int packs = run.packs(), whole = aligned ? (run.shift + run.length) / pack_size : 0;
    const ChannelStride stride(Tile::threads * pack_size, run.HxW);
    ChannelWalk walk = run.walk_of(threadIdx.x);
    for (int first = 0; first < packs; first += Tile::threads * loads_in_flight) {
        const bool plain = (first > 0 || run.shift == 0) && first + Tile::threads * loads_in_flight <= whole;
        Pack<data_t> held[loads_in_flight][tensors];
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            const int j = first + k * Tile::threads + threadIdx.x;
            const PackSpan where = run.span_of(j);
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                if (plain) {
                    held[k][t] = load_whole(from[t] + where.row + where.first);
                } else if (j < packs) {
                    held[k][t] = load_pack(from[t] + where.row, where.first, where.length);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            const int j = first + k * Tile::threads + threadIdx.x;
            const PackSpan where = run.span_of(j);
            if (plain || j < packs) {
                const Outputs<Y> out = output_of<Y>(run, where, walk, known, element, held[k]);
                if (plain) {
                    store_whole(to + where.row + where.first, out);
                } else {
                    store_pack(to + where.row, where.first, where.length, out);
                }
            }
            stride.advance(walk, run.HxW);
        }
    }
}

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
        shift = misalignment(tensor + start);
        HxW = static_cast<int>(HxW_ < chunk ? HxW_ : chunk);
        before = HxW - static_cast<int>(left_in_plane < chunk ? left_in_plane : chunk);
    }
    __device__ __forceinline__ int planes() const { return ceil_div(before + length, HxW); }
    __device__ __forceinline__ int packs() const { return ceil_div(shift + length, pack_size); }
    __device__ __forceinline__ PackSpan span_of(int j) const { return PackSpan{start, j * pack_size - shift, length}; }

    // Calls use(i, value) for the elements of the pack at `where`. i is the element's index in `packs`. value = of(p),
    // where p is the index of the element's plane in the run. use may also be called for elements outside the run.
    // store_pack leaves those out.
    template <typename Of, typename Use, typename... Packs>
    __device__ __forceinline__ void each(const PackSpan& where, Of of, Use use, Packs&... packs) const {
        const PackSpan in_planes = {where.row, before + where.first, before + length};
        each_in_channels(
            in_planes, ChannelWalk(in_planes.first, HxW), HxW,
            [&](int of_run, bool there) { return of(there ? of_run : 0); }, use, packs...);
    }
};

// Sets known[p] = of(channel) for each plane p of the run. Ends with a barrier.
template <typename T, typename Of>
__device__ __forceinline__ void stage_channels(const FlatRun& run, long long C, T* known, Of of) {
    for (int plane = threadIdx.x; plane < run.planes(); plane += Tile::threads) {
        known[plane] = of((run.plane + plane) % C);
    }
    __syncthreads();
}

// Calls use(where, held) for the thread's packs of a run. held[t] is the pack of tensor t. Several packs are loaded
// before the first is used.
template <int tensors, typename Use>
__device__ __forceinline__ void stream(const FlatRun& run, const data_t* const (&from)[tensors], Use use) {
    const int packs = run.packs();
    for (int base = threadIdx.x; base < packs; base += Tile::threads * loads_in_flight) {
        Pack<data_t> held[loads_in_flight][tensors];
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            const int j = base + k * Tile::threads;
            if (j < packs) {
                const PackSpan where = run.span_of(j);
#pragma unroll
                for (int t = 0; t < tensors; ++t) {
                    held[k][t] = load_pack(from[t] + where.row, where.first, where.length);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            const int j = base + k * Tile::threads;
            if (j < packs) {
                use(run.span_of(j), held[k]);
            }
        }
    }
}

// Columns of packs of a slab of channels, over a range of samples (channels-first).
//
// The packs of the slab are columns, and the samples are rows. A thread owns one column and every parts-th row. The
// elements of its pack belong to the same channels in every row, so that the values of these channels stay in registers.
// If samples are not whole packs apart, packs start at the slab's first element in every row, and are read element by
// element where they are misaligned.
#include "batch_norm/slab_range.cuh"
#include "partition/sweep.cuh"

struct SampleColumn {
    static constexpr int slots = pack_size;
    static constexpr int loads(int) { return loads_in_flight; }
    long long start;  // index in the tensor of the slab's first element in the first row of the range
    long long pitch;  // elements of a sample
    int length;       // elements of the slab
    int shift;        // elements from the start of column 0 to the start of the slab
    int columns;      // columns that the block processes at a time
    int parts;
    int part, column;  // of the thread; it has no row if part >= parts
    int rows;

    // `channels` is the number of channels of all slabs but the last one.
    __device__ __forceinline__ SampleColumn(const data_t* tensor, const SlabRange& at, long long C, int channels,
                                            int HxW)
        : start((at.begin * C + at.first) * HxW),
          pitch(C * HxW),
          length(at.own * HxW),
          rows(static_cast<int>(at.end - at.begin)) {
        shift = pitch % pack_size == 0 ? misalignment(tensor, start) : 0;
        const int most = ceil_div(shift + channels * HxW, pack_size);
        columns = most < Tile::threads ? most : Tile::threads;
        parts = Tile::threads / columns;
        part = threadIdx.x / columns;
        column = threadIdx.x - part * columns;
    }
    __device__ __forceinline__ int packs() const { return ceil_div(shift + length, pack_size); }
    __device__ __forceinline__ bool live() const { return part < parts && column < packs(); }
    // Index in the slab of the first element of the thread's pack; negative before the slab's start.
    __device__ __forceinline__ int first() const { return column * pack_size - shift; }

    __device__ __forceinline__ int steps() const {
        return live() && part < rows ? (rows - part + parts - 1) / parts : 0;
    }
    __device__ __forceinline__ PackSpan span_of(int step) const {
        return PackSpan{start + (part + static_cast<long long>(step) * parts) * pitch, first(), length};
    }
    __device__ __forceinline__ long long stride() const { return parts * pitch; }
    __device__ __forceinline__ bool even() const { return shift == 0 && length % pack_size == 0; }
    __device__ __forceinline__ int whole_begin() const { return 0; }
    __device__ __forceinline__ int whole_end() const {
        const bool whole = first() >= 0 && first() + pack_size <= length;
        return live() && (even() || whole) ? rows / parts : 0;
    }
    static __device__ __forceinline__ int slot(int i) { return i; }
    // The sums of slots outside the slab are not used.
    template <typename Span>
    static __device__ __forceinline__ bool full(const Span&) {
        return true;
    }
};

// Calls use(slot, channel) for the elements of a thread's pack, with the channel's number in the slab.
template <typename Use>
__device__ __forceinline__ void each_channel(const SampleColumn& path, int HxW, Use use) {
    ChannelWalk walk(path.first(), HxW);
#pragma unroll
    for (int slot = 0; slot < pack_size; ++slot) {
        if (path.live() && within(path.first() + slot, path.length)) {
            use(slot, walk.channel);
        }
        walk.step(HxW);
    }
}

// Which elements of a channel, and which of their parts, a lane adds up: every warp_size-th element from `element` on, and
// of each of them every parts-th part from `part` on. If a plane has at most a quarter as many elements as a warp has
// lanes, an element has several lanes: most of the warp would have nothing to do.
struct ElementLanes {
    int element, part, parts;

    __device__ __forceinline__ ElementLanes(int HxW) : element(threadIdx.x % warp_size), part(0), parts(1) {
        if (4 * HxW <= warp_size) {
            parts = warp_size / HxW;
            part = element / HxW;
            element -= part * HxW;
            part = part < parts ? part : Tile::threads;  // the lanes left over have no part
        }
    }
};

// Adds the sums of the elements of a channel in the block's columns to totals[channel]. sums[slot] is a thread's sum.
// `here` is the first of these columns. `partials` is in shared memory, pack_size pairs per thread. One warp sums a
// channel. The whole block calls. Ends with a barrier.
__device__ __forceinline__ void add_to_totals(const SampleColumn& path, int here, int HxW, int own, Pair* partials,
                                              const Pair (&sums)[pack_size], Pair* totals) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const int of_slot = path.parts * path.columns;
    const ElementLanes lanes(HxW);
    if (path.part < path.parts) {
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            partials[slot * of_slot + threadIdx.x] = sums[slot];
        }
    }
    __syncthreads();
    const int from = here * pack_size, to = from + path.columns * pack_size;  // elements from the start of column 0
    for (int channel = warp; channel < own; channel += block_warps) {
        const int begin = path.shift + channel * HxW, end = begin + HxW;
        Pair sum = {};
        for (int at = (begin < from ? from : begin) + lanes.element; at < (end < to ? end : to); at += warp_size) {
            const Pair* const of_element = partials + at % pack_size * of_slot + (at - from) / pack_size;
            Pair of_parts = {};
#pragma unroll 4
            for (int part = lanes.part; part < path.parts; part += lanes.parts) {
                of_parts = of_parts + of_element[part * path.columns];
            }
            sum = sum + of_parts;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            totals[channel] = totals[channel] + sum;
        }
    }
    __syncthreads();
}

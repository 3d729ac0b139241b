// Where the elements of some channels of one sample lie, in global memory and staged in shared memory.
//
// A slab is `channels` consecutive channels of sample n (one group, or several whole groups). Channels-first (N, C,
// HxW) it is one contiguous run; channels-last (N, HxW, C) it is HxW rows, `pitch` elements apart. Either way it is
// covered by packs, numbered from 0: pack j stands at `place(j)` in a tensor and at index j of an array of packs in
// shared memory. A run is covered from the 16-byte boundary at or before its first element, so that misaligned slices
// cost two ragged packs and not every vector access; tensors that are aligned differently are read element by element.
#include "norm.cuh"

struct Place {
    long long row;  // elements from the tensor's start to the run or row
    int first;      // the pack's first element in the run, or column in the row; negative before a run's start
    int length;     // of the run or row

    __device__ __forceinline__ bool holds(int i) const { return first + i >= 0 && first + i < length; }
    __device__ __forceinline__ int count() const {
        const int begin = first < 0 ? 0 : first, end = first + pack_size < length ? first + pack_size : length;
        return end > begin ? end - begin : 0;
    }
    __device__ __forceinline__ bool whole() const { return first >= 0 && first + pack_size <= length; }
};

// For an element's place that is known to hold it.
struct Always {
    __device__ __forceinline__ bool operator()(int) const { return true; }
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The channels of consecutive elements of a channels-first run: one division for a pack, then a comparison an element.
struct ChannelWalk {
    int channel;
    int left;  // elements left in the channel, the current one included

    __device__ __forceinline__ ChannelWalk(int element, int HxW) {
        element = element < 0 ? 0 : element;
        channel = element / HxW;
        left = HxW - (element - channel * HxW);
    }
    // True where the next element starts a new channel.
    __device__ __forceinline__ bool step(int HxW) {
        if (--left > 0) {
            return false;
        }
        left = HxW;
        ++channel;
        return true;
    }
};

// Calls use(i, value) for the elements of a pack of a channels-first run, in order; value = of(channel), looked up once
// a channel, and once in all where the pack lies in one channel, as most do.
template <typename Of, typename Use>
__device__ __forceinline__ void each_in_channels(const Place& where, int HxW, Of of, Use use) {
    if (where.first + pack_size <= 0 || where.first >= where.length) {
        return;
    }
    ChannelWalk walk(where.first, HxW);
    auto value = of(walk.channel);
    if (where.first >= 0 && walk.left >= pack_size) {  // a channel ends within the run, so the pack is whole
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            use(i, value);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        if (where.holds(i)) {
            use(i, value);
            if (walk.step(HxW) && i + 1 < pack_size && where.holds(i + 1)) {
                value = of(walk.channel);
            }
        }
    }
}

template <typename Layout>
struct Slab;

template <>
struct Slab<ChannelsFirst> {
    int channels;
    int HxW;
    int shift;  // elements between the 16-byte boundary and the run's start
    long long start;

    __device__ __forceinline__ Slab(const data_t* x, long long n, long long C, long long first_channel, int channels_,
                                    int HxW_)
        : channels(channels_), HxW(HxW_), start((n * C + first_channel) * HxW_) {
        shift = misalignment(x + start);
    }
    __device__ __forceinline__ int packs() const { return ceil_div(shift + channels * HxW, pack_size); }
    __device__ __forceinline__ Place place(int j) const { return Place{start, j * pack_size - shift, channels * HxW}; }

    __device__ __forceinline__ long long first_element(int channel) const { return start + (long long)channel * HxW; }
    __device__ __forceinline__ acc_t first_of(const Pack<data_t>* staged, int channel) const {
        const int at = shift + channel * HxW;
        return widen(staged[at / pack_size].item[at % pack_size]);
    }

    // Calls use(i, value) for the elements of the pack at `where`, in order; value = of(channel), looked up once a
    // channel.
    template <typename Of, typename Use>
    __device__ __forceinline__ void each(const Place& where, Of of, Use use) const {
        each_in_channels(where, HxW, of, use);
    }

    // How many partial sums a channel has: several units of lanes share a channel where there are more units.
    __device__ __forceinline__ int lanes() const {
        int lanes = 1;
        while (lanes < warp_size && lanes < HxW / pack_size + 2) {
            lanes *= 2;
        }
        return lanes;
    }
    __device__ __forceinline__ int parts() const {
        const int parts = Tile::threads / lanes() / channels;
        return parts < 1 ? 1 : parts;
    }

    // partials[channel * parts() + part] = sum of terms.pack(j, channel, use) over the packs of the part. No barrier.
    template <typename Terms>
    __device__ __forceinline__ void channel_sums(Pair* partials, Terms terms) const {
        const int lanes = this->lanes(), parts = this->parts();
        const int units = Tile::threads / lanes, unit = threadIdx.x / lanes, lane = threadIdx.x % lanes;
        for (int base = 0; base < channels * parts; base += units) {
            const int item = base + unit;
            const bool live = item < channels * parts;  // the others come along for the shuffles
            const int channel = live ? item / parts : 0, part = live ? item % parts : 0;
            const int begin = shift + channel * HxW, end = live ? begin + HxW : 0;
            Pair sums = {};
            for (int j = begin / pack_size + part * lanes + lane; j * pack_size < end; j += parts * lanes) {
                const int first = j * pack_size;
                if (first >= begin && first + pack_size <= end) {
                    sums = sums + terms.pack(j, channel, Always());
                } else {
                    sums = sums + terms.pack(j, channel, [&](int i) { return first + i >= begin && first + i < end; });
                }
            }
            sums = lanes_sum(sums, lanes);
            if (live && lane == 0) {
                partials[item] = sums;
            }
        }
    }
};

template <>
struct Slab<ChannelsLast> {
    int channels;
    int HxW;
    int row_packs;
    long long start;
    long long pitch;

    __device__ __forceinline__ Slab(const data_t*, long long n, long long C, long long first_channel, int channels_,
                                    int HxW_)
        : channels(channels_), HxW(HxW_), start(n * C * HxW_ + first_channel), pitch(C) {
        row_packs = ceil_div(channels, pack_size);
    }
    __device__ __forceinline__ int packs() const { return HxW * row_packs; }
    __device__ __forceinline__ Place place(int j) const {
        const int row = j / row_packs;
        return Place{start + row * pitch, (j - row * row_packs) * pack_size, channels};
    }
    __device__ __forceinline__ long long first_element(int channel) const { return start + channel; }

    template <typename Of, typename Use>
    __device__ __forceinline__ void each(const Place& where, Of of, Use use) const {
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            if (where.holds(i)) {
                use(i, of(where.first + i));
            }
        }
    }

    __device__ __forceinline__ int parts() const {
        const int parts = Tile::threads / channels;
        return parts < 1 ? 1 : parts;
    }

    // Neighbouring threads take neighbouring channels of a row, so that shared memory is read without bank conflicts.
    template <typename Terms>
    __device__ __forceinline__ void channel_sums(Pair* partials, Terms terms) const {
        const int parts = this->parts();
        for (int item = threadIdx.x; item < channels * parts; item += Tile::threads) {
            const int part = item / channels, channel = item - part * channels;
            Pair sums = {};
            for (int row = part; row < HxW; row += parts) {
                const int i = channel % pack_size;
                sums = sums + terms.element(row * row_packs + channel / pack_size, i, channel);
            }
            partials[channel * parts + part] = sums;
        }
    }
};

typedef Slab<layout_t> slab_t;

constexpr int loads_in_flight = 4;  // packs a thread asks for before it uses the first: hides DRAM latency

// Copies slabs of several tensors into shared memory, their loads side by side; a null tensor is left out. No barrier.
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
                const Place where = slab.place(j);
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

// totals[channel] = the sum of terms over the channel's elements, by way of `partials`, which are the totals themselves
// where each channel has one part. Ends with a barrier.
template <typename Terms>
__device__ __forceinline__ void channel_totals(const slab_t& slab, Pair* partials, Pair* totals, Terms terms) {
    slab.channel_sums(partials, terms);
    __syncthreads();
    const int parts = slab.parts();
    if (parts == 1) {
        return;
    }
    for (int channel = threadIdx.x; channel < slab.channels; channel += Tile::threads) {
        Pair total = {};
        for (int part = 0; part < parts; ++part) {
            total = total + partials[channel * parts + part];
        }
        totals[channel] = total;
    }
    __syncthreads();
}

// Room for the partial sums of channel_totals.
__device__ __forceinline__ Pair* shared_partials(const slab_t& slab, Pair* totals, int& offset) {
    return slab.parts() == 1 ? totals : shared_array<Pair>(offset, slab.channels * slab.parts());
}

// A warp for each group of a slab sums totals[channel] over the group's channels; all its lanes call give(group, sums).
template <typename Give>
__device__ __forceinline__ void group_sums(const Pair* totals, int groups, int group_channels, Give give) {
    const int lane = threadIdx.x % warp_size;
    for (int group = threadIdx.x / warp_size; group < groups; group += block_warps) {
        Pair sums = {};
        for (int c = lane; c < group_channels; c += warp_size) {
            sums = sums + totals[group * group_channels + c];
        }
        give(group, warp_sum(sums));
    }
}

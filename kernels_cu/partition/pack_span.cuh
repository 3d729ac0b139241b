// The position of a pack in a run or a row, and the channels of the pack's elements.
#include "common/norm.cuh"

// Position of a pack in its run or row.
struct PackSpan {
    long long row;  // elements from the tensor's start to the run or row
    int first;      // the pack's first element: index in the run, or column in the row; negative before a run's start
    int length;     // elements of the run or row

    __device__ __forceinline__ bool holds(int i) const { return within(first + i, length); }
    __device__ __forceinline__ int count() const {
        const int begin = first < 0 ? 0 : first, end = first + pack_size < length ? first + pack_size : length;
        return end > begin ? end - begin : 0;
    }
    __device__ __forceinline__ bool whole() const { return first >= 0 && first + pack_size <= length; }
};

// The `holds` predicate of a pack whose elements all exist.
struct Always {
    __device__ __forceinline__ bool operator()(int) const { return true; }
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Walks over the channels of consecutive elements of a channels-first run. Elements before the run have negative
// channels.
struct ChannelWalk {
    int channel;
    int left;    // elements left in the channel, including the current one
    bool whole;  // whether channels are whole packs that begin where packs begin; steps of whole packs keep it

    __device__ __forceinline__ ChannelWalk(int element, int HxW) {
        channel = (element < 0 ? element - HxW + 1 : element) / HxW;
        left = HxW - (element - channel * HxW);
        whole = HxW % pack_size == 0 && element % pack_size == 0;
    }
    // Moves to the next element. Returns true if that element starts a new channel.
    __device__ __forceinline__ bool step(int HxW) {
        if (--left > 0) {
            return false;
        }
        left = HxW;
        ++channel;
        return true;
    }
};

// Moves a ChannelWalk by a fixed number of elements, without another division.
struct ChannelStride {
    int channels;
    int rest;

    __device__ __forceinline__ ChannelStride(int elements, int HxW)
        : channels(elements / HxW), rest(elements - channels * HxW) {}
    __device__ __forceinline__ void advance(ChannelWalk& walk, int HxW) const {
        walk.channel += channels;
        walk.left -= rest;
        if (walk.left <= 0) {
            walk.left += HxW;
            ++walk.channel;
        }
    }
};

// Calls emit(channel, known, sums) for each channel that has elements in a pack of a channels-first run, in order.
// `known` is of(channel, true). `sums` is what sums = added(i, known, sums) makes of Pair{} for these elements in turn,
// where i is the index of the element in `packs`. The lanes of a warp diverge in here, so the callbacks must not
// shuffle.
//
// If HxW >= pack_size, a pack spans at most two channels. Most packs have one channel, and no element selects. For the
// others, the values of both channels are loaded up front, and each element selects its own. If one of the channels does
// not exist, its value is of(channel, false), which must not load. The outermost elements may belong to no channel of
// the run; their sums are not emitted.
//
// Channels smaller than a pack are rare. Their elements are processed one by one in a loop that is not unrolled:
// unrolled, it would be most of the kernel's code. The loop rotates the packs and uses their element 0, because packs
// are in registers, which cannot be indexed at run time.
template <typename Of, typename Added, typename Emit, typename... Packs>
__device__ __forceinline__ void sums_in_channels(const PackSpan& where, const ChannelWalk& from, int HxW, Of of,
                                                 Added added, Emit emit, Packs&... packs) {
    if (where.first >= where.length) {
        return;
    }
    if (HxW >= pack_size) {
        const int channel = from.channel, next = from.left;
        if (from.whole || (channel >= 0 && next >= pack_size)) {
            const auto known = of(channel, true);
            Pair sums = {};
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                sums = added(i, known, sums);
            }
            emit(channel, known, sums);
            return;
        }
        const bool here = channel >= 0, both = next < pack_size && where.first + next < where.length;
        const auto first = of(channel, here);
        const auto second = of(channel + 1, both);
        auto known = first;
        Pair of_first = {}, sums = {};  // of_first is complete where the second channel begins
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            if (i == next) {
                known = second;  // a copy: a reference to either would put both on the stack
                of_first = sums;
                sums = Pair{};
            }
            sums = added(i, known, sums);
        }
        if (here) {
            emit(channel, first, next < pack_size ? of_first : sums);
        }
        if (both) {
            emit(channel + 1, second, sums);
        }
        return;
    }
    ChannelWalk walk = from;
    auto known = of(walk.channel, walk.channel >= 0);
    Pair sums = {};
#pragma unroll 1
    for (int i = 0; i < pack_size; ++i) {
        const bool held = where.holds(i);
        if (held) {
            sums = added(0, known, sums);
        }
        (packs.rotate(), ...);
        const int channel = walk.channel;
        const bool last = walk.step(HxW);
        if (held && (last || i + 1 == pack_size)) {
            emit(channel, known, sums);
            sums = Pair{};
        }
        if (last && i + 1 < pack_size && where.holds(i + 1)) {
            known = of(walk.channel, true);
        }
    }
}

// Calls use(i, known) for the elements of a pack, with `i` and `known` as in sums_in_channels. It may also be called
// for elements outside the run.
template <typename Of, typename Use, typename... Packs>
__device__ __forceinline__ void each_in_channels(const PackSpan& where, const ChannelWalk& from, int HxW, Of of,
                                                 Use use, Packs&... packs) {
    sums_in_channels(
        where, from, HxW, of,
        [&](int i, const auto& known, Pair) {
            use(i, known);
            return Pair{};
        },
        [](int, const auto&, Pair) {}, packs...);
}

// The outputs element(i, of(channel)) for the elements of a pack, with `i` and the value of of() as in
// sums_in_channels.
template <typename T, typename Of, typename Element, typename... Packs>
__device__ __forceinline__ Outputs<T> outputs_in_channels(const PackSpan& where, const ChannelWalk& from, int HxW,
                                                          Of of, Element element, Packs&... packs) {
    if (HxW >= pack_size) {
        acc_t values[pack_size] = {};
        each_in_channels(
            where, from, HxW, of, [&](int i, const auto& known) { values[i] = element(i, known); }, packs...);
        return narrow_pack<T>(values);
    }
    Outputs<T> out = {};
    each_in_channels(
        where, from, HxW, of, [&](int i, const auto& known) { out.set(i, narrow<T>(element(i, known))); }, packs...,
        out);
    return out;
}

// Whether registers have room for more than the packs of a thread. It then computes the outputs of all packs before it
// stores the first: the compiler moves no load across a store, so a store between two packs delays the loads of the next
// parameters.
constexpr bool are_few_packs(int packs) { return packs <= 5; }

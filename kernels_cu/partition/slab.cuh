// Positions of the elements of some channels of one sample, in global memory and staged in shared memory.
//
// A slab is `channels` consecutive channels of sample n: one group, or several whole groups. Channels-first (N, C,
// HxW), it is one contiguous run. Channels-last (N, HxW, C), it is HxW rows that are `pitch` elements apart. Each block
// of a cluster owns one piece of it: a part of the run, or some of the rows.
//
// A piece is covered by packs, numbered from 0. Pack j is at `span_of(j)` in a tensor, and at index j of an array of
// packs in shared memory. A run is covered from the 16-byte boundary at or before its first element. A misaligned slice
// therefore costs two ragged packs, and not every vector access. A tensor whose alignment differs from that of the
// constructor's x is read element by element.
#include "partition/pack_span.cuh"

template <typename Layout>
struct Slab;

template <>
struct Slab<ChannelsFirst> {
    int channels;
    int HxW;
    int count;        // packs of the piece
    int shift;        // elements from the start of the first pack to the start of the run; negative in later pieces
    long long start;  // index in the tensor of the run's first element

    __device__ __forceinline__ Slab(const data_t* x, long long n, long long C, long long first_channel, int channels_,
                                    int HxW_, int piece = 0, int piece_packs = 0)
        : channels(channels_), HxW(HxW_), start((n * C + first_channel) * HxW_) {
        shift = misalignment(x, start);
        count = ceil_div(shift + channels * HxW, pack_size);
        if (piece_packs > 0) {
            const int begin = piece * piece_packs;  // at most the end of the last pack: the strategy ensures it
            count = count - begin < piece_packs ? count - begin : piece_packs;
            shift -= begin * pack_size;
        }
    }
    // Place of a channel in a ChannelArray.
    static __device__ __forceinline__ int place(int channel) { return channel; }
    __device__ __forceinline__ int packs() const { return count; }
    __device__ __forceinline__ int length() const { return channels * HxW; }
    __device__ __forceinline__ PackSpan span_of(int j) const {
        return PackSpan{start, j * pack_size - shift, length()};
    }
    // The first pack of the n-th of `parts` parts.
    __device__ __forceinline__ int cut(int n, int parts) const {
        return static_cast<int>((long long)count * n / parts);
    }

    // The packs [from, to) cover the elements [first_in(from), last_in(to)) of the run.
    __device__ __forceinline__ int first_in(int from) const {
        const int element = from * pack_size - shift;
        return element < 0 ? 0 : element;
    }
    __device__ __forceinline__ int last_in(int to) const {
        const int element = to * pack_size - shift;
        return element < length() ? element : length();
    }
    // Number of elements of a group of channels in the piece.
    __device__ __forceinline__ int held(int group, int group_channels) const {
        const int begin = group * group_channels * HxW, end = begin + group_channels * HxW;
        const int first = first_in(0) < begin ? begin : first_in(0), last = last_in(count) < end ? last_in(count) : end;
        return first < last ? last - first : 0;
    }
    // Position in a tensor of the first of these elements.
    __device__ __forceinline__ long long first_held(int group, int group_channels) const {
        const int begin = group * group_channels * HxW;
        return start + (first_in(0) < begin ? begin : first_in(0));
    }
    __device__ __forceinline__ acc_t first_of(const Pack<data_t>* staged, int channel) const {
        const int at = shift + channel * HxW;
        return widen(staged[at / pack_size].get(at % pack_size));
    }

    // Adds the sum of terms.pack(j, channel, use) over the packs [from, to) to totals[channel], for the channels that
    // have elements in these packs. The threads form `partial_sums` units. A unit is a warp or a part of one, and sums
    // one channel, or a part of one channel if there are more units than channels. `partials` is in shared memory,
    // partial_sums long. The whole block calls. A barrier must separate two calls.
    template <int partial_sums, typename Totals, typename Terms>
    __device__ __forceinline__ void add_sums(int from, int to, Pair* partials, Totals totals, Terms terms) const {
        if (first_in(from) >= last_in(to)) {
            return;
        }
        constexpr int units = partial_sums, lanes = Tile::threads / units;
        const int unit = threadIdx.x / lanes, lane = threadIdx.x % lanes;
        const int first = first_in(from) / HxW, here = (last_in(to) - 1) / HxW - first + 1;
        const int parts = units / here < 1 ? 1 : units / here;
        for (int base = 0; base < here * parts; base += units) {
            const int item = base + unit, channel = first + item / parts, part = item % parts;
            const bool live = item < here * parts;  // other units only take part in the shuffles
            int begin = shift + channel * HxW, end = begin + HxW;
            begin = begin < from * pack_size ? from * pack_size : begin;
            end = live ? (end < to * pack_size ? end : to * pack_size) : 0;
            Pair sums = {};
            const int step = parts * lanes;
            for (int j = begin / pack_size + part * lanes + lane; j * pack_size < end;) {
                Pair latest = {};
                for (const int past = j + chain * step; j < past && j * pack_size < end; j += step) {
                    const int at = j * pack_size;
                    if (at >= begin && at + pack_size <= end) {
                        latest = latest + terms.pack(j, channel, Always());
                    } else {
                        latest =
                            latest + terms.pack(j, channel, [&](int i) { return at + i >= begin && at + i < end; });
                    }
                }
                sums = sums + latest;
            }
            sums = lanes_sum(sums, lanes);
            if (live && lane == 0) {
                (parts > 1 ? partials[item] : totals[channel]) = parts > 1 ? sums : totals[channel] + sums;
            }
        }
        if (parts == 1) {
            return;
        }
        __syncthreads();
        for (int channel = threadIdx.x; channel < here; channel += Tile::threads) {
            Pair total = totals[first + channel];
            for (int part = 0; part < parts; ++part) {
                total = total + partials[channel * parts + part];
            }
            totals[first + channel] = total;
        }
    }

    // Stores element(held(j), i, of(channel)) in `to` for the elements of the piece's packs. of() is called once per
    // channel of a pack, not once per element.
    template <typename T, typename Held, typename Of, typename Element>
    __device__ __forceinline__ void write(T* to, Held held, Of of, Element element) const {
        const ChannelStride stride(Tile::threads * pack_size, HxW);
        ChannelWalk walk(span_of(threadIdx.x).first, HxW);
        for (int j = threadIdx.x; j < count; j += Tile::threads) {
            const PackSpan where = span_of(j);
            auto packs = held(j);
            const Outputs<T> out = outputs_in_channels<T>(
                where, walk, HxW, [&](int channel, bool there) { return of(there ? channel : 0); },
                [&](int i, const auto& known) { return element(packs, i, known); }, packs);
            store_pack(to, where.row, where.first, where.length, out);
            stride.advance(walk, HxW);
        }
    }
};

template <>
struct Slab<ChannelsLast> {
    int channels;
    int rows;  // rows of the piece
    int row_packs;
    long long start;
    long long pitch;

    __device__ __forceinline__ Slab(const data_t*, long long n, long long C, long long first_channel, int channels_,
                                    int HxW, int piece = 0, int piece_packs = 0)
        : channels(channels_), rows(HxW), start(n * C * HxW + first_channel), pitch(C) {
        row_packs = ceil_div(channels, pack_size);
        if (piece_packs > 0) {
            const int each = piece_packs / row_packs, begin = piece * each;  // the strategy leaves no piece empty
            rows = HxW - begin < each ? HxW - begin : each;
            start += begin * pitch;
        }
    }
    // Place of a channel in a ChannelArray. Neighbouring threads access channels that are a pack apart. An unused place
    // after each pack puts these into different banks of shared memory.
    static __device__ __forceinline__ int place(int channel) { return channel + channel / pack_size; }
    __device__ __forceinline__ int packs() const { return rows * row_packs; }
    __device__ __forceinline__ PackSpan span_of(int j) const {
        const int row = j / row_packs;
        return PackSpan{start + row * pitch, (j - row * row_packs) * pack_size, channels};
    }
    __device__ __forceinline__ int cut(int n, int parts) const {
        return static_cast<int>((long long)rows * n / parts) * row_packs;
    }
    __device__ __forceinline__ int held(int, int group_channels) const { return rows * group_channels; }
    __device__ __forceinline__ long long first_held(int group, int group_channels) const {
        return start + group * group_channels;
    }
    // Columns of packs that the block's threads can process at a time.
    __device__ __forceinline__ int columns() const { return row_packs < Tile::threads ? row_packs : Tile::threads; }

    // A thread processes one column of packs at a time, and every parts-th row of it. Calls use(first, column, part,
    // parts, known), where known[slot] is of(channel) for the channels of the column. A thread without a column has
    // part = parts.
    template <typename Of, typename Use>
    __device__ __forceinline__ void each_column(Of of, Use use) const {
        const int columns = this->columns(), parts = Tile::threads / columns, part = threadIdx.x / columns;
        for (int first = 0; first < row_packs; first += columns) {
            const int column = first + threadIdx.x - part * columns;
            decltype(of(0)) known[pack_size] = {};
#pragma unroll
            for (int slot = 0; slot < pack_size; ++slot) {
                if (column * pack_size + slot < channels) {
                    known[slot] = of(column * pack_size + slot);
                }
            }
            use(first, column, column < row_packs ? part : parts, parts, known);
        }
    }

    // Same as channels-first, except that a thread stores partial sums of several of its channels at a time:
    // partial_sums / Tile::threads. The lanes of a part of a warp then add up the partial sums of one channel. `from`
    // and `to` are results of cut(). terms.of(channel) is the value that terms.add(j, known, sums) needs per channel.
    template <int partial_sums, typename Totals, typename Terms>
    __device__ __forceinline__ void add_sums(int from, int to, Pair* partials, Totals totals, Terms terms) const {
        constexpr int slots_at_once = partial_sums / Tile::threads;
        const int begin = from / row_packs, end = to / row_packs, columns = this->columns();
        each_column([&](int channel) { return terms.of(channel); },
                    [&](int first, int column, int part, int parts, const auto& known) {
                        Pair sums[pack_size] = {};
                        if (part < parts) {
                            for (int row = begin + part; row < end;) {
                                Pair latest[pack_size] = {};
                                for (const int past = row + chain * parts; row < past && row < end; row += parts) {
                                    terms.add(row * row_packs + column, known, latest);
                                }
#pragma unroll
                                for (int slot = 0; slot < pack_size; ++slot) {
                                    sums[slot] = sums[slot] + latest[slot];
                                }
                            }
                        }
#pragma unroll
                        for (int slot = 0; slot < pack_size; slot += slots_at_once) {
                            if (part < parts) {
#pragma unroll
                                for (int i = 0; i < slots_at_once; ++i) {
                                    partials[(i * parts + part) * columns + column - first] = sums[slot + i];
                                }
                            }
                            __syncthreads();
                            add_parts<slots_at_once>(partials, parts, columns, first, slot, totals);
                            __syncthreads();
                        }
                    });
    }

    // Adds partials[i][part][column] over all parts to the totals of the channels of slot + i, for 0 <= i < slots.
    template <int slots, typename Totals>
    __device__ __forceinline__ void add_parts(const Pair* partials, int parts, int columns, int first, int slot,
                                              Totals totals) const {
        const int sums_here = columns * slots;
        int lanes = warp_size;
        while (lanes > 1 && sums_here * lanes > Tile::threads) {
            lanes /= 2;
        }
        const int unit = threadIdx.x / lanes, lane = threadIdx.x % lanes, units = Tile::threads / lanes;
        for (int base = 0; base < sums_here; base += units) {
            const int at = base + unit, i = at / columns, column = at - i * columns;
            Pair sums = {};
            if (at < sums_here) {
                for (int part = lane; part < parts; part += lanes) {
                    sums = sums + partials[(i * parts + part) * columns + column];
                }
            }
            sums = lanes_sum(sums, lanes);
            const int channel = (first + column) * pack_size + slot + i;
            if (lane == 0 && at < sums_here && channel < channels) {
                totals[channel] = totals[channel] + sums;
            }
        }
    }

    template <typename T, typename Held, typename Of, typename Element>
    __device__ __forceinline__ void write(T* to, Held held, Of of, Element element) const {
        each_column(of, [&](int, int column, int part, int parts, const auto& known) {
            for (int row = part; part < parts && row < rows; row += parts) {
                const auto packs = held(row * row_packs + column);
                acc_t values[pack_size];
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    values[i] = element(packs, i, known[i]);
                }
                store_pack(to, start + row * pitch, column * pack_size, channels, narrow_pack<T>(values));
            }
        });
    }
};

typedef Slab<layout_t> slab_t;

constexpr int loads_in_flight = 4;  // packs that a thread loads before it uses the first: hides DRAM latency

// An array in shared memory with one item per channel of a slab.
template <typename T>
struct ChannelArray {
    T* items;

    __device__ __forceinline__ T& operator[](int channel) const { return items[slab_t::place(channel)]; }
};
// The array with `channels` items from `offset` on; see shared_array().
template <typename T>
__device__ __forceinline__ ChannelArray<T> channel_array(int& offset, int channels) {
    return ChannelArray<T>{shared_array<T>(offset, slab_t::place(channels))};
}

// One warp per group of a slab sums totals[channel] over the group's channels. All its lanes call emit(group, sums).
template <typename Totals, typename Emit>
__device__ __forceinline__ void group_sums(Totals totals, int groups, int group_channels, Emit emit) {
    const int lane = threadIdx.x % warp_size;
    for (int group = threadIdx.x / warp_size; group < groups; group += block_warps) {
        Pair sums = {};
        for (int c = lane; c < group_channels; c += warp_size) {
            sums = sums + totals[group * group_channels + c];
        }
        emit(group, warp_sum(sums));
    }
}

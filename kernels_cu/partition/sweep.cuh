// Partition of a tensor of any size, channels-first or channels-last, among the blocks of a kernel: of the strategies
// `split` and `grid`, and of BatchNorm's sweeps.
//
// HxW is cut into `chunks` chunks of `chunk` positions. During its sweep, a thread processes the same channels in every
// pack. Channels-first, it is one channel: each warp sweeps a chunk of a plane. Channels-last, it is one pack of
// neighbouring channels: each block sweeps a chunk of rows and some columns of packs, at most as many as it has
// threads; each thread sweeps one column and every parts-th row. The values that a thread needs for its `slots`
// channels therefore stay in registers. The sums of a chunk are stored in a workspace [rows, C], in row
// n * chunks + chunk.
//
// The parts of the tensor that blocks process are numbered in one of two ways. Items are one sequence over the whole
// tensor. Kernels that must know when some channels of a sample are complete use the tiles of a slab: a slab is all
// chunks of `slab_channels` neighbouring channels.
#include "partition/slab.cuh"

struct Chunking {
    long long N, C, HxW, chunk, chunks;
    // Channels of a slab; divides C. Channels-last, it is C or whole packs, and at most one pack per thread of a block.
    long long slab_channels = 0;
    // Upper bound of the columns of packs that a channels-last block processes; at most its number of threads.
    long long most_columns = Tile::threads;

    // Index in a workspace of a channel's part of a chunk.
    __device__ __forceinline__ long long part(long long n, long long of_chunk, long long channel) const {
        return (n * chunks + of_chunk) * C + channel;
    }
};

template <typename Layout>
struct Sweep;

template <>
struct Sweep<ChannelsFirst> {
    static constexpr int slots = 1;
    // Packs of each of `tensors` tensors that a thread loads at a time.
    static constexpr int loads(int) { return loads_in_flight; }
    long long n, chunk, start;
    long long channel;
    int length, shift;

    // `item` is the item of the block. A warp past the last chunk has an empty sweep.
    __device__ __forceinline__ Sweep(const data_t* tensor, const Chunking& cut, long long item)
        : Sweep(tensor, cut, 0, item * block_warps + threadIdx.x / warp_size, cut.N * cut.C * cut.chunks) {}
    __device__ __forceinline__ Sweep(const data_t* tensor, const Chunking& cut, long long slab, long long tile)
        : Sweep(tensor, cut, slab * cut.slab_channels * cut.chunks, tile * block_warps + threadIdx.x / warp_size,
                cut.slab_channels * cut.chunks) {}
    // The warp's chunk is number first + own of all chunks if own < count. Otherwise the sweep has a position, and
    // length 0.
    __device__ __forceinline__ Sweep(const data_t* tensor, const Chunking& cut, long long first, long long own,
                                     long long count) {
        const bool live = own < count;
        own += first;
        const long long plane = own / cut.chunks;
        chunk = own - plane * cut.chunks;
        n = plane / cut.C;
        channel = plane - n * cut.C;
        const long long begin = chunk * cut.chunk;
        start = plane * cut.HxW + begin;
        length = live ? static_cast<int>(cut.HxW - begin < cut.chunk ? cut.HxW - begin : cut.chunk) : 0;
        shift = misalignment(tensor, start);
    }
    __device__ __forceinline__ bool live() const { return length > 0; }
    // Number of packs of this thread, and the position of the step-th of them.
    __device__ __forceinline__ int steps() const {
        const int lane = threadIdx.x % warp_size;
        return length == 0 ? 0 : (ceil_div(shift + length, pack_size) - lane + warp_size - 1) / warp_size;
    }
    __device__ __forceinline__ PackSpan span_of(int step) const {
        const int lane = threadIdx.x % warp_size;
        return PackSpan{start, (step * warp_size + lane) * pack_size - shift, length};
    }
    // Whether all steps are whole packs if the tensor is aligned. In any case, the steps [whole_begin(), whole_end())
    // of all threads of a warp are. Steps are `stride()` elements apart.
    __device__ __forceinline__ bool even() const { return shift == 0 && length % pack_size == 0; }
    __device__ __forceinline__ int whole_begin() const { return shift == 0 ? 0 : 1; }
    __device__ __forceinline__ int whole_end() const { return (shift + length) / pack_size / warp_size; }
    static __device__ __forceinline__ int stride() { return warp_size * pack_size; }
    static __device__ __forceinline__ int slot(int) { return 0; }
    // Whether all elements of a pack count for their slots.
    template <typename Span>
    static __device__ __forceinline__ bool full(const Span& where) {
        return where.whole();
    }
    __device__ __forceinline__ bool has(int) const { return live(); }
    __device__ __forceinline__ long long channel_of(int) const { return channel; }

    // Combines the values that the threads found per channel. Calls emit(channel, whole), where whole is
    // over_lanes(found(0)) of a warp.
    template <typename T, typename Found, typename OverLanes, typename Merge, typename Emit>
    __device__ __forceinline__ void gather(T*, Found found, OverLanes over_lanes, Merge, Emit emit) const {
        const T whole = over_lanes(found(0));
        if (live() && threadIdx.x % warp_size == 0) {
            emit(channel, whole);
        }
    }
};

template <>
struct Sweep<ChannelsLast> {
    static constexpr int slots = pack_size;
    // Fewer than channels-first: the values of the thread's channels occupy registers.
    static constexpr int loads(int tensors) { return loads_in_flight / tensors; }
    long long n, chunk, start, pitch;
    long long first_channel, C;
    int column, columns, part, parts, rows;

    static __device__ __forceinline__ long long columns_of(const Chunking& cut) {
        return (cut.C + pack_size - 1) / pack_size;
    }
    static __device__ __forceinline__ int columns_of_block(const Chunking& cut) {
        return static_cast<int>(columns_of(cut) < cut.most_columns ? columns_of(cut) : cut.most_columns);
    }
    static __device__ __forceinline__ long long column_blocks(const Chunking& cut) {
        return (columns_of(cut) + columns_of_block(cut) - 1) / columns_of_block(cut);
    }
    __device__ __forceinline__ Sweep(const data_t*, const Chunking& cut, long long item) : pitch(cut.C), C(cut.C) {
        const long long row = item / column_blocks(cut);
        const long long column_block = item - row * column_blocks(cut);
        n = row / cut.chunks;
        chunk = row - n * cut.chunks;
        columns = columns_of_block(cut);
        settle(cut, column_block * columns * pack_size);
    }
    __device__ __forceinline__ Sweep(const data_t*, const Chunking& cut, long long slab, long long tile)
        : chunk(tile), pitch(cut.C), C(cut.C) {
        const long long slabs = cut.C / cut.slab_channels;
        n = slab / slabs;
        columns = static_cast<int>((cut.slab_channels + pack_size - 1) / pack_size);
        settle(cut, (slab - n * slabs) * cut.slab_channels);
    }
    __device__ __forceinline__ void settle(const Chunking& cut, long long block_channel) {
        parts = Tile::threads / columns;
        part = threadIdx.x / columns;
        column = threadIdx.x - part * columns;
        first_channel = block_channel + column * pack_size;
        const long long begin = chunk * cut.chunk;
        start = (n * cut.HxW + begin) * cut.C;
        rows = static_cast<int>(cut.HxW - begin < cut.chunk ? cut.HxW - begin : cut.chunk);
    }
    __device__ __forceinline__ bool live() const { return part < parts && first_channel < C; }
    __device__ __forceinline__ int rows_of(int of_part) const {
        return of_part < rows ? (rows - of_part + parts - 1) / parts : 0;
    }
    __device__ __forceinline__ int steps() const { return live() ? rows_of(part) : 0; }
    __device__ __forceinline__ PackSpan span_of(int step) const {
        const long long left = C - first_channel;
        const int length = left < pack_size ? static_cast<int>(left) : pack_size;
        return PackSpan{start + (part + static_cast<long long>(step) * parts) * pitch + first_channel, 0, length};
    }
    __device__ __forceinline__ bool even() const { return C % pack_size == 0; }
    __device__ __forceinline__ int whole_begin() const { return 0; }
    __device__ __forceinline__ int whole_end() const {
        return C - first_channel < pack_size || !live() ? 0 : rows / parts;
    }
    __device__ __forceinline__ long long stride() const { return parts * pitch; }
    static __device__ __forceinline__ int slot(int i) { return i; }
    // Slots past the last channel read zeros, and their results are not emitted.
    template <typename Span>
    static __device__ __forceinline__ bool full(const Span&) {
        return true;
    }
    __device__ __forceinline__ bool has(int slot) const { return live() && first_channel + slot < C; }
    __device__ __forceinline__ long long channel_of(int slot) const { return first_channel + slot; }

    // Combines the values that the threads found per channel. The found(slot) of all parts are merged by halves through
    // partials[slot][part][column], which is in shared memory. Calls emit(channel, whole). The whole block calls. Ends
    // with a barrier.
    template <typename T, typename Found, typename OverLanes, typename Merge, typename Emit>
    __device__ __forceinline__ void gather(T* partials, Found found, OverLanes, Merge merge, Emit emit) const {
        share(partials, found);
        fold_parts<pack_size>(partials, parts, columns, part, column, merge);
        const long long block_channel = first_channel - column * pack_size;
        for (int at = threadIdx.x; at < columns * pack_size && block_channel + at < C; at += Tile::threads) {
            emit(block_channel + at, partials[at % pack_size * parts * columns + at / pack_size]);
        }
        __syncthreads();
    }
    // Same for sets that are merged all at once: whole is merge(width, one of the sets, each_set), where each_set(use)
    // calls use(set) for the sets that a lane merges. Lanes that are `width` apart merge the sets of a channel, as many
    // lanes as there are threads for it. Neighbouring lanes merge those of neighbouring columns, which are in different
    // banks of shared memory.
    template <typename T, typename Found, typename Merge, typename Emit>
    __device__ __forceinline__ void gather_sets(T* partials, Found found, Merge merge, Emit emit) const {
        share(partials, found);
        const int channels = columns * pack_size;
        int width = 1;
        while (width < warp_size && width * block_warps < channels) {
            width *= 2;
        }
        const int lane = threadIdx.x % warp_size, unit = threadIdx.x / warp_size * width + lane % width;
        for (int base = 0; base < channels; base += block_warps * width) {
            const int item = base + unit, slot = item / columns;
            const bool live = item < channels;  // other lanes merge the first sets, and only take part in the shuffles
            const int of_column = item - slot * columns;
            const T* const sets = partials + (live ? slot * parts * columns + of_column : 0);
            const T whole = merge(width, *sets, [&](auto use) {
                for (int at = lane / width; at < parts; at += warp_size / width) {
                    use(sets[at * columns]);
                }
            });
            const long long channel = first_channel + (of_column - column) * pack_size + slot;
            if (live && lane < width && channel < C) {
                emit(channel, whole);
            }
        }
        __syncthreads();
    }

private:
    // Stores the found(slot) of all parts as partials[slot][part][column]. The whole block calls. Ends with a barrier.
    template <typename T, typename Found>
    __device__ __forceinline__ void share(T* partials, Found found) const {
        if (part < parts) {
#pragma unroll
            for (int slot = 0; slot < pack_size; ++slot) {
                partials[(slot * parts + part) * columns + column] = found(slot);
            }
        }
        __syncthreads();
    }
};

typedef Sweep<layout_t> sweep_t;

// Calls use(slot, channel, of(group)) for the channels of a thread. One division finds the first group, and comparisons
// find the others. If a pack has channels of at most two groups, of() is called once for each of them, up front, so
// that the loads of both are in flight together: neighbouring channels would load the same values again.
template <typename Of, typename Use>
__device__ __forceinline__ void each_slot(const sweep_t& sweep, long long group_channels, Of of, Use use) {
    const bool few = sweep_t::slots > 1 && group_channels >= sweep_t::slots;
    const long long first = sweep.channel_of(0) / group_channels;
    long long group = first, next = (first + 1) * group_channels;
    const long long before = next - sweep.channel_of(0);  // channels of the first group
    decltype(of(first)) here = {}, behind = {};
    if (few && sweep.has(0)) {
        here = of(first);
    }
    if (few && before < sweep_t::slots && sweep.has(static_cast<int>(before))) {
        behind = of(first + 1);
    }
#pragma unroll
    for (int slot = 0; slot < sweep_t::slots; ++slot) {
        if (sweep.channel_of(slot) == next) {
            ++group;
            next += group_channels;
        }
        if (sweep.has(slot)) {
            use(slot, sweep.channel_of(slot), few ? (group == first ? here : behind) : of(group));
        }
    }
}

// Distributes the (row, channel) pairs of a group in a workspace [rows, C] among the threads of a block, in order.
template <typename Use>
__device__ __forceinline__ void each_part(long long rows, long long group_channels, Use use) {
    const long long row_step = Tile::threads / group_channels, channel_step = Tile::threads % group_channels;
    long long row = threadIdx.x / group_channels, channel = threadIdx.x % group_channels;
    while (row < rows) {
        use(row, channel);
        row += row_step;
        channel += channel_step;
        if (channel >= group_channels) {
            channel -= group_channels;
            ++row;
        }
    }
}

// ---- packs of a thread --------------------------------------------------------------------------------------------
//
// The functions below process the packs of any `Path` with the members of Sweep that describe the packs of one thread:
// slots, slot(), full(), loads(), steps(), span_of(), even(), whole_begin(), whole_end() and stride().

// Position of a pack of which all elements exist, at a 16-byte boundary. Stands for a PackSpan where this is known at
// compile time.
struct WholeSpan {
    long long row;

    __device__ __forceinline__ bool holds(int) const { return true; }
    __device__ __forceinline__ int count() const { return pack_size; }
    __device__ __forceinline__ bool whole() const { return true; }
};

template <typename T>
__device__ __forceinline__ void store_at(T* to, const PackSpan& where, const Outputs<T>& out) {
    store_pack(to + where.row, where.first, where.length, out);
}
template <typename T>
__device__ __forceinline__ void store_at(T* to, const WholeSpan& where, const Outputs<T>& out) {
    store_whole(to + where.row, out);
}

// Whether the whole packs of a path are at 16-byte boundaries of every tensor. A null tensor does not count.
template <int tensors, typename Path, typename T>
__device__ __forceinline__ bool sweeps_aligned(const Path& sweep, const T* const (&tensor)[tensors]) {
    const PackSpan where = sweep.span_of(0);
    bool aligned = sweep.stride() % pack_size == 0;
#pragma unroll
    for (int t = 0; t < tensors; ++t) {
        aligned = aligned && (tensor[t] == nullptr || misalignment(tensor[t], where.row + where.first) == 0);
    }
    return aligned;
}

// The packs of a batch, and their spans. The first `live` packs exist.
template <int tensors, int count, typename Span>
struct SweepBatch {
    static constexpr int loads = count;
    Pack<data_t> packs[tensors][loads];
    Span spans[loads];
    int live;
};

// Loads whole packs at 16-byte boundaries, `stride` elements apart.
template <int loads, int tensors>
__device__ __forceinline__ SweepBatch<tensors, loads, WholeSpan> load_plain(const data_t* const (&from)[tensors],
                                                                            long long at, long long stride, int live) {
    SweepBatch<tensors, loads, WholeSpan> batch = {};
    batch.live = live;
#pragma unroll
    for (int k = 0; k < batch.loads; ++k) {
        batch.spans[k].row = at + k * stride;
#pragma unroll
        for (int t = 0; t < tensors; ++t) {
            if (k < live && from[t] != nullptr) {
                batch.packs[t][k] = load_whole(from[t] + batch.spans[k].row);
            }
        }
    }
    return batch;
}

template <int loads, int tensors, typename Path>
__device__ __forceinline__ SweepBatch<tensors, loads, PackSpan> load_ragged(const data_t* const (&from)[tensors],
                                                                            const Path& sweep, int step, int live) {
    SweepBatch<tensors, loads, PackSpan> batch = {};
    batch.live = live;
#pragma unroll
    for (int k = 0; k < batch.loads; ++k) {
        if (k < live) {
            const PackSpan where = batch.spans[k] = sweep.span_of(step + k);
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                if (from[t] != nullptr) {
                    batch.packs[t][k] = load_pack(from[t] + where.row, where.first, where.length);
                }
            }
        }
    }
    return batch;
}

// Calls use(batch) for the thread's packs, Path::loads(tensors) of each tensor at a time. All of them are loaded before the
// first is used. A null tensor reads as zeros.
//
// Whole packs at 16-byte boundaries are loaded without a test of each, and their spans are WholeSpans. `aligned` is the
// result of sweeps_aligned for all tensors, including those that `use` stores to. It does not change the batches.
template <int tensors, typename Path, typename Use>
__device__ __forceinline__ void sweep_packs(const Path& sweep, const data_t* const (&from)[tensors], bool aligned,
                                            Use use) {
    constexpr int loads = Path::loads(tensors);
    const int steps = sweep.steps(), whole = aligned ? sweep.whole_end() : 0;
    const long long stride = sweep.stride();
    for (int base = 0; base < steps; base += loads) {
        const PackSpan begin = sweep.span_of(base);
        long long at = begin.row + begin.first;
        for (; base >= sweep.whole_begin() && base + loads <= whole; base += loads) {
            use(load_plain<loads>(from, at, stride, loads));
            at += loads * stride;
        }
        const int live = steps - base < loads ? steps - base : loads;
        if (live <= 0) {
            break;
        }
        if (aligned && sweep.even()) {
            use(load_plain<loads>(from, at, stride, live));
        } else {
            use(load_ragged<loads>(from, sweep, base, live));
        }
    }
}

// element(slot, values) for every element of a pack, in the dtype T, where values[t] is the element of packs[t].
template <typename T, int tensors, typename Element>
__device__ __forceinline__ Outputs<T> pack_elements(const Pack<data_t> (&packs)[tensors], Element element) {
    acc_t results[pack_size];
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        acc_t values[tensors];
#pragma unroll
        for (int t = 0; t < tensors; ++t) {
            values[t] = widen(packs[t].get(i));
        }
        results[i] = element(sweep_t::slot(i), values);
    }
    return narrow_pack<T>(results);
}

// Stores pack_elements of the thread's packs in `to`. The thread that has read an element stores it afterwards: `to` may
// be one of the tensors.
template <int tensors, typename T, typename Element>
__device__ __forceinline__ void sweep_write(const sweep_t& sweep, const data_t* const (&from)[tensors], T* to,
                                            Element element) {
    const T* const written[1] = {to};
    const bool aligned = sweeps_aligned(sweep, from) && sweeps_aligned(sweep, written);
    sweep_packs(sweep, from, aligned, [&](const auto& batch) {
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            if (k >= batch.live) {
                continue;
            }
            Pack<data_t> packs[tensors];
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                packs[t] = batch.packs[t][k];
            }
            store_at(to, batch.spans[k], pack_elements<T>(packs, element));
        }
    });
}

// ---- results of a sweep -------------------------------------------------------------------------------------------

// Adds a pack's terms to the sums of a thread's channels: one channel (channels-first), or one channel per element.
template <typename Use, typename Grad>
__device__ __forceinline__ void add_terms(Pair (&sums)[1], const Pack<data_t>& dy, const Pack<data_t>& x,
                                          const acc_t (&mean)[1], Use use, const Grad (&activation_grad)[1]) {
    sums[0] = sums[0] + gradient_sums(dy, x, mean[0], use, activation_grad[0]);
}

template <typename Use, typename Grad>
__device__ __forceinline__ void add_terms(Pair (&sums)[pack_size], const Pack<data_t>& dy, const Pack<data_t>& x,
                                          const acc_t (&mean)[pack_size], Use,
                                          const Grad (&activation_grad)[pack_size]) {
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        const acc_t value = widen(x.get(i)), gradient = activation_grad[i](widen(dy.get(i)), value);
        sums[i] = with_product(sums[i], gradient, value - mean[i]);
    }
}

// Batches whose terms a thread adds up before it adds them to the rest of its sums.
template <typename Path>
constexpr int batches_of_chain = chain;

// Adds g and g * (x - mean[slot]) over the thread's packs to sums[slot], with g = activation_grad[slot](dy, x).
template <typename Path, typename Grad>
__device__ __forceinline__ void sweep_gradient_sums(const Path& sweep, const data_t* dy, const data_t* x,
                                                    const acc_t (&mean)[Path::slots],
                                                    const Grad (&activation_grad)[Path::slots],
                                                    Pair (&sums)[Path::slots]) {
    const data_t* const from[2] = {dy, x};
    Pair latest[Path::slots] = {};
    const auto join = [&] {
#pragma unroll
        for (int slot = 0; slot < Path::slots; ++slot) {
            sums[slot] = sums[slot] + latest[slot];
            latest[slot] = Pair{};
        }
    };
    int batches = 0;
    sweep_packs(sweep, from, sweeps_aligned(sweep, from), [&](const auto& batch) {
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            if (k >= batch.live) {
                continue;
            }
            const Pack<data_t>&of_dy = batch.packs[0][k], &of_x = batch.packs[1][k];
            if (Path::full(batch.spans[k])) {
                add_terms(latest, of_dy, of_x, mean, Always(), activation_grad);
            } else {
                const auto holds = [&](int i) { return batch.spans[k].holds(i); };
                add_terms(latest, of_dy, of_x, mean, holds, activation_grad);
            }
        }
        if (++batches % batches_of_chain<Path> == 0) {
            join();
        }
    });
    join();
}

template <typename Path>
__device__ __forceinline__ void sweep_gradient_sums(const Path& sweep, const data_t* dy, const data_t* x,
                                                    const acc_t (&mean)[Path::slots], Pair (&sums)[Path::slots]) {
    const NoActivationGrad activation_grad[Path::slots] = {};
    sweep_gradient_sums(sweep, dy, x, mean, activation_grad, sums);
}

// Calls emit(channel, sums of the whole block or warp) in one thread per channel.
template <typename Emit>
__device__ __forceinline__ void gather_sums(const sweep_t& sweep, Pair* partials, const Pair (&sums)[sweep_t::slots],
                                            Emit emit) {
    sweep.gather(
        partials, [&](int slot) { return sums[slot]; }, [](Pair value) { return warp_sum(value); },
        [](Pair a, Pair b) { return a + b; }, emit);
}

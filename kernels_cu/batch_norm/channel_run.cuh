// A channel of a channels-first tensor as one sequence of packs over all samples, which a cluster of blocks divides.
//
// Each block takes one part of the sequence, and its threads take the packs of the part in turn: short planes leave no
// threads idle, and no plane is the work of a single warp. A pack that begins before its plane, or ends after it, is
// loaded whole where that stays inside the tensor. The elements of the neighbouring planes are in the same 16 bytes, and
// are not used.
#include "common/async.cuh"
#include "partition/sweep.cuh"

struct ChannelRun {
    static constexpr int slots = 1;
    long long start;     // index in the tensor of the channel's first element
    long long pitch;     // elements of a sample
    long long elements;  // elements of the tensor
    int length;          // elements of a plane
    int columns;         // packs of a plane, wherever it begins: the last one of some planes has no elements
    int first, end;      // the packs of the thread: first, first + Tile::threads, ... below end

    __device__ __forceinline__ ChannelRun(const data_t* tensor, long long N, long long C, long long HxW,
                                          long long channel)
        : start(channel * HxW), pitch(C * HxW), elements(N * C * HxW), length(static_cast<int>(HxW)) {
        const bool same_shift = pitch % pack_size == 0;  // of all planes of the channel
        columns = ceil_div((same_shift ? misalignment(tensor, start) : pack_size - 1) + length, pack_size);
        const int total = static_cast<int>(N) * columns, part = ceil_div(total, Tile::cluster);
        const int begin = slice_rank<Tile::cluster>() * part;
        first = begin + threadIdx.x;
        end = begin + part < total ? begin + part : total;
    }
    static __device__ __forceinline__ bool full(const WholeSpan&) { return true; }
    // Not where.whole(): almost every warp has both kinds of packs.
    static __device__ __forceinline__ bool full(const PackSpan&) { return false; }
};

// Whether all packs are whole and at 16-byte boundaries of every tensor. A null tensor does not count.
template <int tensors>
__device__ __forceinline__ bool sweeps_aligned(const ChannelRun& run, const data_t* const (&from)[tensors]) {
    bool aligned = run.length % pack_size == 0;
#pragma unroll
    for (int t = 0; t < tensors; ++t) {
        aligned = aligned && (from[t] == nullptr || misalignment(from[t]) == 0);
    }
    return aligned;
}

// Calls use(batch) for the thread's packs that have elements, loads_in_flight of each tensor at a time. span_of(row,
// column) is the span of a pack of the plane that begins at `row`, and load_from(tensor, span) loads it.
template <typename Span, int tensors, typename SpanOf, typename LoadFrom, typename Use>
__device__ __forceinline__ void sweep_spans(const ChannelRun& run, const data_t* const (&from)[tensors], SpanOf span_of,
                                            LoadFrom load_from, Use use) {
    // One division finds the first pack. A step to the next one is some planes and less than one plane's columns.
    const int plane = run.first / run.columns, planes = Tile::threads / run.columns;
    int column = run.first - plane * run.columns;
    const int columns = Tile::threads - planes * run.columns;
    long long row = run.start + plane * run.pitch;
    const long long far = planes * run.pitch;
    int at = run.first;
    const auto advance = [&] {
        at += Tile::threads;
        column += columns;
        row += far;
        if (column >= run.columns) {
            column -= run.columns;
            row += run.pitch;
        }
    };
    while (at < run.end) {
        SweepBatch<tensors, loads_in_flight, Span> batch = {};
#pragma unroll
        for (int k = 0; k < loads_in_flight; ++k) {
            while (at < run.end && span_of(row, column).count() == 0) {
                advance();
            }
            if (at < run.end) {
                batch.live = k + 1;
                batch.spans[k] = span_of(row, column);
#pragma unroll
                for (int t = 0; t < tensors; ++t) {
                    if (from[t] != nullptr) {
                        batch.packs[t][k] = load_from(from[t], batch.spans[k]);
                    }
                }
                advance();
            }
        }
        if (batch.live > 0) {
            use(batch);
        }
    }
}

// As sweep_packs of any path (sweep.cuh).
template <int tensors, typename Use>
__device__ __forceinline__ void sweep_packs(const ChannelRun& run, const data_t* const (&from)[tensors], bool aligned,
                                            Use use) {
    if (aligned) {
        sweep_spans<WholeSpan>(
            run, from, [](long long row, int column) { return WholeSpan{row + column * pack_size}; },
            [](const data_t* tensor, const WholeSpan& where) { return load_whole(tensor + where.row); }, use);
        return;
    }
    bool alike = true;  // a pack at a 16-byte boundary of one tensor is at one of every tensor
#pragma unroll
    for (int t = 1; t < tensors; ++t) {
        alike = alike && (from[t] == nullptr || misalignment(from[t]) == misalignment(from[0]));
    }
    sweep_spans<PackSpan>(
        run, from,
        [&](long long row, int column) {
            return PackSpan{row, column * pack_size - misalignment(from[0], row), run.length};
        },
        [&](const data_t* tensor, const PackSpan& where) {
            const long long begin = where.row + where.first;
            const bool inside = alike && begin >= 0 && begin + pack_size <= run.elements;
            return inside ? load_whole(tensor + begin) : load_pack(tensor + where.row, where.first, where.length);
        },
        use);
}

// The results of the warps of a cluster for one channel, in the shared memory of its first block.
template <typename T>
struct WarpResults {
    static constexpr int count = Tile::cluster * block_warps;
    T* results;  // in shared memory, `count` long

    // Called once per channel, before gather().
    static __device__ __forceinline__ void begin() {
        arrive();  // the first block has started, and has folded the results of the channel before
    }
    // Calls fold() in the first warp of the first block when the results of all warps are there. The first lane of each
    // warp has its result. The whole cluster calls.
    template <typename Fold>
    __device__ __forceinline__ void gather(T of_warp, Fold fold) const {
        const int rank = slice_rank<Tile::cluster>(), warp = threadIdx.x / warp_size;
        meet();
        if (threadIdx.x % warp_size == 0) {
            T* const own = results + rank * block_warps + warp;
            *(Tile::cluster > 1 ? cluster_map(own, 0) : own) = of_warp;
            if (Tile::cluster > 1) {
                cluster_fence();
            }
        }
        arrive();
        meet();
        if (rank == 0 && warp == 0) {
            fold();
        }
    }

private:
    static __device__ __forceinline__ void arrive() {
        if (Tile::cluster > 1) {
            cluster_arrive_relaxed();
        }
    }
    static __device__ __forceinline__ void meet() {
        if (Tile::cluster > 1) {
            cluster_wait();
        } else {
            __syncthreads();
        }
    }
};

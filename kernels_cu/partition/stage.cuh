// Slabs on their way into shared memory: asynchronous copies in Tile::chunks parts, so that the first may be summed
// while the last are under way.
//
// Tile::engine says who copies: 1 the threads, 16 bytes each (sm_80); 2 one thread the whole run of a chunk
// (channels-first, sm_90). Packs at the ends of a run, and tensors that are aligned differently, come through registers.
#include "common/async.cuh"
#include "partition/slab.cuh"

constexpr bool by_bulk = Tile::engine == 2;
// Packs that no engine copies, asked for at a time: more would not fit in registers.
constexpr int others_in_flight = 2;

template <int tensors>
struct Stage {
    const data_t* from[tensors];  // null: left out
    Pack<data_t>* to[tensors];
    mbarrier_t* barriers;  // shared, Tile::chunks of them, where copies are by bulk
    unsigned parity;

    static __device__ __forceinline__ mbarrier_t* shared_barriers(int& offset) {
        mbarrier_t* barriers = shared_array<mbarrier_t>(offset, by_bulk ? Tile::chunks : 0);
        if (by_bulk && threadIdx.x == 0) {
            for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
                mbarrier_init(barriers + chunk, 1);
            }
        }
        return barriers;  // the next barrier of the block lies before their first use
    }

    // Whether a pack comes by the engine.
    __device__ __forceinline__ bool copied(int t, const PackSpan& where) const {
        return where.whole() && misalignment(from[t] + where.row + where.first) == 0;
    }
    __device__ __forceinline__ void through_registers(int t, int j, const PackSpan& where) const {
        to[t][j] = load_pack(from[t] + where.row, where.first, where.length);
    }
    // The packs of a tensor that do not come by the engine, several asked for before the first is stored.
    __device__ __forceinline__ void the_others(const slab_t& slab, int t, int begin, int end) const {
        for (int base = begin + threadIdx.x; base < end; base += Tile::threads * others_in_flight) {
            Pack<data_t> held[others_in_flight] = {};
#pragma unroll
            for (int k = 0; k < others_in_flight; ++k) {
                const int j = base + k * Tile::threads;
                const PackSpan where = slab.span_of(j);
                if (j < end && !copied(t, where)) {
                    held[k] = load_pack(from[t] + where.row, where.first, where.length);
                }
            }
#pragma unroll
            for (int k = 0; k < others_in_flight; ++k) {
                const int j = base + k * Tile::threads;
                if (j < end && !copied(t, slab.span_of(j))) {
                    to[t][j] = held[k];
                }
            }
        }
    }

    __device__ __forceinline__ void by_threads(const slab_t& slab, int begin, int end) const {
        bool left = false;
        for (int j = begin + threadIdx.x; j < end; j += Tile::threads) {
            const PackSpan where = slab.span_of(j);
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                if (from[t] != nullptr && copied(t, where)) {
                    copy_async(to[t] + j, from[t] + where.row + where.first);
                } else {
                    left = left || from[t] != nullptr;
                }
            }
        }
        copy_async_commit();
#pragma unroll
        for (int t = 0; t < tensors; ++t) {
            if (left && from[t] != nullptr) {
                the_others(slab, t, begin, end);
            }
        }
    }
    // Of packs that follow each other in a tensor, only the first and the last may be ragged.
    __device__ __forceinline__ void by_one(const slab_t& slab, int begin, int end, mbarrier_t* barrier) const {
        const int first = slab.span_of(begin).whole() ? begin : begin + 1;
        const int last = slab.span_of(end - 1).whole() ? end : end - 1;
        unsigned bytes = 0;
#pragma unroll
        for (int t = 0; t < tensors; ++t) {
            const bool bulk = from[t] != nullptr && first < last && copied(t, slab.span_of(first));
            bytes += bulk ? (last - first) * access_bytes : 0;
            if (from[t] != nullptr && !bulk) {
                the_others(slab, t, begin, end);
            } else if (bulk && threadIdx.x < 2) {
                const int j = threadIdx.x == 0 ? begin : end - 1;
                if (j < first || j >= last) {
                    through_registers(t, j, slab.span_of(j));
                }
            }
        }
        if (threadIdx.x != 0) {
            return;
        }
        mbarrier_arrive_expect(barrier, bytes);
#pragma unroll
        for (int t = 0; t < tensors; ++t) {
            const PackSpan where = slab.span_of(first);
            if (from[t] != nullptr && first < last && copied(t, where)) {
                bulk_load(to[t] + first, from[t] + where.row + where.first, (last - first) * access_bytes, barrier);
            }
        }
    }

    // Sets all copies going. The barriers must be known to the block, and nobody reads `to` any more.
    __device__ __forceinline__ void issue(const slab_t& slab) const {
#pragma unroll 1
        for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
            const int begin = slab.cut(chunk, Tile::chunks), end = slab.cut(chunk + 1, Tile::chunks);
            if (by_bulk) {
                by_one(slab, begin, end, barriers + chunk);
            } else {
                by_threads(slab, begin, end);
            }
        }
    }
    // The chunk is there for the whole block. Ends with a barrier.
    template <int chunk>
    __device__ __forceinline__ void wait() const {
        if (by_bulk) {
            mbarrier_wait(barriers + chunk, parity);
        } else {
            copy_async_wait<Tile::chunks - 1 - chunk>();
        }
        __syncthreads();
    }
};

// Calls use(begin, end) for the packs of each chunk in turn, when they are there: behind a barrier.
template <int chunk = 0, int tensors, typename Use>
__device__ __forceinline__ void each_chunk(const Stage<tensors>& stage, const slab_t& slab, Use use) {
    stage.template wait<chunk>();
    use(slab.cut(chunk, Tile::chunks), slab.cut(chunk + 1, Tile::chunks));
    if constexpr (chunk + 1 < Tile::chunks) {
        each_chunk<chunk + 1>(stage, slab, use);
    }
}

// Between the last reading of what was staged and the next issue: the whole block calls.
__device__ __forceinline__ void staged_is_free() {
    if (by_bulk) {
        fence_async();
    }
    __syncthreads();
}

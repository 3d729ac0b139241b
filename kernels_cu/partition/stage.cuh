// Staging of slabs in shared memory: asynchronous copies in Tile::stages parts, so that the first parts can be summed
// while the last ones are in flight.
//
// Tile::load selects the kind of copy. `cp_async`: the threads copy 16 bytes each (sm_80). `bulk`: one thread copies
// the whole run of a stage (channels-first, sm_90). Ragged packs at the ends of a run, and tensors with another
// alignment, are loaded through registers.
#include "common/async.cuh"
#include "partition/slab.cuh"

constexpr bool by_bulk = Tile::load == Tile::Load::bulk;
// Packs that are loaded through registers at a time: more would not fit in registers.
constexpr int others_in_flight = 2;

template <int tensors>
struct StagedSlab {
    const data_t* from[tensors];  // null: not staged
    Pack<data_t>* to[tensors];
    mbarrier_t* barriers;  // in shared memory, Tile::stages of them, for bulk copies
    unsigned parity;

    static __device__ __forceinline__ mbarrier_t* shared_barriers(int& offset) {
        mbarrier_t* barriers = shared_array<mbarrier_t>(offset, by_bulk ? Tile::stages : 0);
        if (by_bulk && threadIdx.x == 0) {
            for (int stage = 0; stage < Tile::stages; ++stage) {
                mbarrier_init(barriers + stage, 1);
            }
        }
        return barriers;  // a barrier of the block must precede the first wait()
    }

    // Whether a pack is copied asynchronously.
    __device__ __forceinline__ bool copied(int t, const PackSpan& where) const {
        return where.whole() && misalignment(from[t], where.row + where.first) == 0;
    }
    __device__ __forceinline__ void through_registers(int t, int j, const PackSpan& where) const {
        to[t][j] = load_pack(from[t], where.row, where.first, where.length);
    }
    // Loads the packs of a tensor that are not copied asynchronously. Several are loaded before the first is stored.
    __device__ __forceinline__ void the_others(const slab_t& slab, int t, int begin, int end) const {
        for (int base = begin + threadIdx.x; base < end; base += Tile::threads * others_in_flight) {
            Pack<data_t> held[others_in_flight] = {};
#pragma unroll
            for (int k = 0; k < others_in_flight; ++k) {
                const int j = base + k * Tile::threads;
                const PackSpan where = slab.span_of(j);
                if (j < end && !copied(t, where)) {
                    held[k] = load_pack(from[t], where.row, where.first, where.length);
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
    // Only the first and the last of consecutive packs of a run can be ragged.
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

    // Issues all copies. No thread may still read `to`. Thread 0 initialises the barriers, arrives and issues the bulk
    // copies, so a barrier of the block is needed between shared_barriers() and the other threads' wait() only.
    __device__ __forceinline__ void issue(const slab_t& slab) const {
#pragma unroll 1
        for (int stage = 0; stage < Tile::stages; ++stage) {
            const int begin = slab.cut(stage, Tile::stages), end = slab.cut(stage + 1, Tile::stages);
            if (by_bulk) {
                by_one(slab, begin, end, barriers + stage);
            } else {
                by_threads(slab, begin, end);
            }
        }
    }
    // Waits until the stage has arrived for the whole block. Ends with a barrier.
    template <int stage>
    __device__ __forceinline__ void wait() const {
        if (by_bulk) {
            mbarrier_wait(barriers + stage, parity);
        } else {
            copy_async_wait<Tile::stages - 1 - stage>();
        }
        __syncthreads();
    }
};

// Calls use(begin, end) for the packs of each stage in turn, when they have arrived: after a barrier.
template <int stage = 0, int tensors, typename Use>
__device__ __forceinline__ void each_stage(const StagedSlab<tensors>& copies, const slab_t& slab, Use use) {
    copies.template wait<stage>();
    use(slab.cut(stage, Tile::stages), slab.cut(stage + 1, Tile::stages));
    if constexpr (stage + 1 < Tile::stages) {
        each_stage<stage + 1>(copies, slab, use);
    }
}

// Separates the last read of staged packs from the next issue(). The whole block calls.
__device__ __forceinline__ void staged_is_free() {
    if (by_bulk) {
        fence_async();
    }
    __syncthreads();
}

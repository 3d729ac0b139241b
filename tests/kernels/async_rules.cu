// gate: sm_90
// One rule of clusters, asynchronous copies or words between threads per `kind`. Block 1 breaks it if `broken` is 1; it
// is kept if `broken` is 0. x, y: 64 floats per block. Clusters have two blocks. `bytes` of dynamic shared memory, a
// multiple of the guard's size. The test finds the lines by the words "rule <kind>".
#include "common/async.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    async_rules(const float* x, float* y, unsigned* flag, const float* absent, long long kind, long long broken,
                long long bytes) {
    __shared__ float fixed[Tile::threads];
    const int thread = threadIdx.x;
    const bool breaks = broken != 0 && blockIdx.x == 1;
    const unsigned other = cluster_rank() ^ 1u;
    int offset = 0;
    mbarrier_t* barrier = shared_array<mbarrier_t>(offset, 2);
    Pack<float>* packs = shared_array<Pack<float>>(offset, Tile::threads);
    float* shared = shared_array<float>(offset, Tile::threads);
    const float* from = x + blockIdx.x * Tile::threads;
    float* to = y + blockIdx.x * Tile::threads;
    float value = load(from, thread);
    fixed[thread] = value;
    if (thread == 0 && !(breaks && kind == 0)) {
        mbarrier_init(barrier, 1);
    }
    __syncthreads();
    const bool remote = kind >= 9 && kind <= 15;
    if (remote && !(breaks && kind == 9)) {
        if (breaks && kind == 12) {
            cluster_wait();  // rule 12: wait without an arrival
        }
        cluster_arrive();
        if (breaks && kind == 11) {
            cluster_arrive();  // rule 11: second arrival without a wait
        }
        cluster_wait();
    }
    if (kind == 0 && thread == 5) {
        mbarrier_arrive(barrier);  // rule 0: arrival before the initialisation
    }
    if (kind == 1 && thread == 0) {
        mbarrier_arrive_expect(barrier, 16);
        if (breaks) {
            mbarrier_arrive(barrier);  // rule 1: second arrival in a phase of one arrival
        }
        bulk_load(packs, from, 16, barrier);
        mbarrier_wait(barrier, 0);
    }
    if (kind == 2 && thread == 5) {
        mbarrier_init(reinterpret_cast<mbarrier_t*>(shared + (breaks ? 1 : 2)), 1);  // rule 2: misaligned mbarrier
    }
    if (kind == 3 && thread == 5) {
        mbarrier_init(breaks ? reinterpret_cast<mbarrier_t*>(to) : barrier + 1, 1);  // rule 3: in global memory
    }
    if (kind == 4 && thread == 4) {
        copy_async(packs, from + (breaks ? 1 : 0));  // rule 4: misaligned source
        copy_async_commit();
        copy_async_wait<0>();
    }
    if (kind == 5 && thread == 4) {
        Pack<float>* const into = breaks ? reinterpret_cast<Pack<float>*>(to) : packs;
        copy_async(into, from);  // rule 5: destination not in shared memory
        copy_async_commit();
        copy_async_wait<0>();
    }
    if (kind == 6 && thread == 4) {
        copy_async(packs, from);  // rule 6: copy without a wait
        copy_async_commit();
        if (!breaks) {
            copy_async_wait<0>();
        }
    }
    if (kind == 7 && thread == 0) {
        mbarrier_arrive_expect(barrier, breaks ? 8 : 16);
        bulk_load(packs, from, breaks ? 8 : 16, barrier);  // rule 7: size not a multiple of 16 bytes
        mbarrier_wait(barrier, 0);
    }
    if (kind == 8) {
        shared[thread] = value;
        if (!breaks) {
            fence_async();
        }
        __syncthreads();
        if (thread == 0) {
            bulk_store(to, shared, 64 * 4);  // rule 8: bulk store without a fence_async
            bulk_commit();
            bulk_wait_read<0>();
        }
    }
    if (kind == 9 && thread == 5) {
        *cluster_map(shared + (breaks ? 0 : 1), other) = value;  // rule 9: remote store before any cluster barrier
    }
    const bool ends = broken != 0 && kind == 10 && blockIdx.x < 2;  // without the last barrier of the cluster
    if (ends && blockIdx.x == 0) {
        atomicAdd(flag, 1u);
    } else if (kind == 10) {
        while (ends && load_acquire(flag) < Tile::threads) {
        }
        *cluster_map(shared + thread, other) = value;  // rule 10: remote store to a block that has ended
    }
    if (kind == 13 && thread == 5) {
        *cluster_map(shared + 2 * other, breaks ? 2 : other) = value;  // rule 13: no such rank
    }
    if (kind == 14 && thread == 5) {
        float* const behind = reinterpret_cast<float*>(barrier) + bytes / 4;
        *cluster_map(breaks ? behind : shared, other) = value;  // rule 14: past the other block's memory
    }
    if (kind == 15 && thread == 5) {
        float* const near = cluster_map(shared, 0);
        const long long step = cluster_map(shared, 1) - near;
        near[breaks ? 2 * step : cluster_rank()] = value;  // rule 15: block of the next cluster
    }
    if (remote && !ends) {
        cluster_arrive();
        cluster_wait();
    }
    if (kind == 16) {
        shared_array<float>(offset, breaks ? 1 << 20 : 1);  // rule 16: more shared memory than launched with
    }
    if (kind == 17 && thread == 5) {
        unsigned* const word = flag + 4 * blockIdx.x + (breaks ? 1 : 0);
        atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ull);  // rule 17: misaligned atomic
    }
    if (kind == 18 && thread == 5) {
        value = static_cast<float>(thread / static_cast<int>(breaks ? broken - 1 : 1));  // rule 18: division by zero
    }
    if (kind == 19 && thread == 5) {
        fixed[breaks ? Tile::threads + 2 : 5] = value;  // rule 19: past a static array
    }
    if (kind == 20 && thread == 5) {
        while (load(flag, 4 * blockIdx.x) == 0 && breaks) {  // rule 20: wait by plain loads
        }
    }
    if (kind == 21) {
        value = fixed[0];
        value += __shfl_xor_sync(0xffffffffu, value, 1);
        if (thread % 32 >= 16) {
            __syncwarp(0xffff0000u);
        }
        value += __shfl_xor_sync(0xffffffffu, value, 1);
        if (!breaks) {
            __syncthreads();
        }
        if (thread == 0) {
            fixed[0] = 2;  // rule 21: write after other threads' reads, without a barrier
        }
    }
    if (kind == 22) {
        unsigned* const count = reinterpret_cast<unsigned*>(shared);
        if (thread == 0) {
            *count = 0;
        }
        __syncthreads();
        atomicAdd(count, 1u);
        if (!breaks) {
            __syncthreads();
        }
        if (thread == 0 || thread == 63) {
            value = static_cast<float>(*count);  // rule 22: read while other threads still count
        }
    }
    if (kind == 23) {
        if (thread == 0) {
            copy_async(packs, from);  // rule 23: copy that lands after the barrier
            copy_async_commit();
        }
        if (thread == 0 && !breaks) {
            copy_async_wait<0>();
        }
        __syncthreads();
        if (thread == 0) {
            copy_async_wait<0>();
        }
        value = packs->get(thread % 4);
    }
    if (kind == 24 && thread == 5) {
        value = load(breaks ? absent : from, breaks ? -1 : 0);  // rule 24: before an absent array
    }
    if (kind == 25 && thread == 5) {
        reinterpret_cast<float*>(barrier)[breaks ? bytes / 4 : 512] = value;  // rule 25: past the end of the arena
    }
    if (kind == 26 && thread == 5) {
        while (breaks && atomicMax(flag + 4 * blockIdx.x, 0u) == 0) {  // rule 26: wait for a word that is never raised
        }
    }
    store(to, thread, value);
}

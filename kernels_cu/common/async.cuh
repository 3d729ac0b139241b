// Asynchronous copies, mbarriers, thread-block clusters, and words by which blocks signal each other: wrappers of
// inline PTX that moves or orders memory. Each wrapper has a plain C++ twin for the CPU executor
// (cunorm/executors/cpu/include/async.h).
//
// The CPU executor is stricter than a GPU. A copy poisons its destination when it is issued, and lands only at the wait
// that covers it. A store to the workspace is invisible to other blocks until a fence publishes it.
//
// Required architectures: sm_80 for copy_async; sm_90 for mbarriers that count bytes, bulk copies and clusters. Source:
// PTX ISA 8.0, chapters "Data Movement and Conversion Instructions" and "Parallel Synchronization and Communication
// Instructions".

#include "common/types.cuh"

typedef unsigned long long mbarrier_t;  // in shared memory, 8-byte aligned

#ifdef CUNORM_CPU
#define CUNORM_SITE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define CUNORM_ONLY_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#else
#define CUNORM_SITE
#define CUNORM_ONLY_SITE
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
#endif

// ---- copies by a thread ---------------------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory. Both addresses are 16-byte aligned. This thread may read the bytes
// after copy_async_wait; other threads may read them after a barrier that follows that wait.
template <typename T>
__device__ __forceinline__ void copy_async(Pack<T>* to, const T* from) {
#ifdef CUNORM_CPU
    cunorm_cpu::copy_async(to, from, access_bytes);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void copy_async_commit() {
#ifdef CUNORM_CPU
    cunorm_cpu::copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last `open` groups of this thread are in flight.
template <int open>
__device__ __forceinline__ void copy_async_wait() {
#ifdef CUNORM_CPU
    cunorm_cpu::copy_wait(open);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(open) : "memory");
#endif
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

// Initialises the mbarrier for `arrivals` arrivals per phase. One thread calls. A barrier of the block must precede the
// first use by other threads.
__device__ __forceinline__ void mbarrier_init(mbarrier_t* barrier, unsigned arrivals) {
#ifdef CUNORM_CPU
    cunorm_cpu::mbarrier_init(barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and releases the earlier accesses of this thread.
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* barrier) {
#ifdef CUNORM_CPU
    cunorm_cpu::mbarrier_arrive(barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives, and makes the phase also wait for `bytes` bytes of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect(mbarrier_t* barrier, unsigned bytes) {
#ifdef CUNORM_CPU
    cunorm_cpu::mbarrier_arrive(barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

// Waits for the end of the phase with this parity. The first phase has parity 0; parities alternate.
__device__ __forceinline__ void mbarrier_wait(mbarrier_t* barrier, unsigned parity CUNORM_SITE) {
#ifdef CUNORM_CPU
    cunorm_cpu::mbarrier_wait(barrier, parity, file, line);
#else
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@!complete bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

// ---- bulk copies: issued by one thread, a multiple of 16 bytes, both addresses 16-byte aligned ----------------------

// Copies from global to shared memory. The bytes count towards the mbarrier's current phase, and are readable after a
// wait for that phase.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, mbarrier_t* barrier) {
#ifdef CUNORM_CPU
    cunorm_cpu::bulk_load(to, from, bytes, barrier);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Copies from shared to global memory. If other threads wrote the source, each of them must call fence_async, and a
// barrier must follow, before this call.
__device__ __forceinline__ void bulk_store(void* to, const void* from, unsigned bytes) {
#ifdef CUNORM_CPU
    cunorm_cpu::bulk_store(to, from, bytes);
#else
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
#endif
}

__device__ __forceinline__ void bulk_commit() {
#ifdef CUNORM_CPU
    cunorm_cpu::bulk_commit();
#else
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last `open` groups of this thread's bulk stores still read shared memory. This wait must
// separate a store from any write to the store's source, and from the end of the block.
template <int open>
__device__ __forceinline__ void bulk_wait_read() {
#ifdef CUNORM_CPU
    cunorm_cpu::bulk_wait(open);
#else
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(open) : "memory");
#endif
}

// Makes this thread's accesses to shared memory visible to bulk copies.
__device__ __forceinline__ void fence_async() {
#ifdef CUNORM_CPU
    cunorm_cpu::proxy_fence();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// Attribute of a kernel that runs in clusters of Tile::cluster blocks. NVRTC rejects __cluster_dims__ below sm_90; the
// strategies refuse clusters there too.
#if !defined(CUNORM_CPU) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(Tile::cluster, 1, 1)
#else
#define CLUSTER
#endif

// The rank of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
#ifdef CUNORM_CPU
    return cunorm_cpu::cluster_rank();
#else
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}

// The rank of this block among the `blocks` consecutive blocks of its cluster that share a run or a slab.
template <int blocks>
__device__ __forceinline__ int slice_rank() {
    return blocks > 1 ? static_cast<int>(cluster_rank()) % blocks : 0;
}

// The address in the block of that rank which corresponds to `address` in this block's dynamic shared memory. A block
// may access another block's shared memory only between two barriers of the cluster: the other block must have started,
// and must not have ended.
template <typename T>
__device__ __forceinline__ T* cluster_map(T* address, unsigned rank) {
#ifdef CUNORM_CPU
    return static_cast<T*>(cunorm_cpu::map_shared(address, rank));
#else
    unsigned long long mapped;
    // volatile: otherwise NVRTC moves it before the caller's guard of the rank. The PTX ISA does not say what mapa
    // returns for a rank outside the cluster.
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(address), "r"(rank));
    return reinterpret_cast<T*>(mapped);
#endif
}

// The cluster's barrier in two halves. Accesses before an arrival are visible to all threads of the cluster after the
// wait.
__device__ __forceinline__ void cluster_arrive() {
#ifdef CUNORM_CPU
    cunorm_cpu::cluster_arrive();
#else
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// An arrival that publishes only the accesses that its thread has fenced. The releasing arrival above makes every
// thread wait until all its stores have reached the L2 cache. (The CPU executor has only the releasing arrival.)
__device__ __forceinline__ void cluster_arrive_relaxed() {
#ifdef CUNORM_CPU
    cunorm_cpu::cluster_arrive();
#else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Precedes a relaxed arrival: this thread's earlier accesses are visible after the wait.
__device__ __forceinline__ void cluster_fence() {
#ifndef CUNORM_CPU
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait(CUNORM_ONLY_SITE) {
#ifdef CUNORM_CPU
    cunorm_cpu::cluster_wait(file, line);
#else
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// ---- words by which blocks signal each other ------------------------------------------------------------------------

// Accesses that precede the write of this value in the writing thread are visible after this load. To wait for another
// block, call it in a loop.
__device__ __forceinline__ unsigned load_acquire(const unsigned* address CUNORM_SITE) {
#ifdef CUNORM_CPU
    return cunorm_cpu::load_acquire(address, file, line);
#else
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
#endif
}

// Publishes this thread's earlier accesses, and the accesses that a barrier has made visible to it.
__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
#ifdef CUNORM_CPU
    cunorm_cpu::store_release(address, value);
#else
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#endif
}

// Adds `value` and returns the previous value. It publishes as store_release does. As after load_acquire, the accesses
// that other threads published by earlier additions are visible afterwards.
__device__ __forceinline__ unsigned add_release_acquire(unsigned* address, unsigned value) {
#ifdef CUNORM_CPU
    cunorm_cpu::fence();
    const unsigned before = atomicAdd(address, value);
    cunorm_cpu::fence();
    return before;
#else
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
#endif
}

// Waits until the word is greater than `value`, and then acquires as load_acquire does. Only the last load acquires,
// because each acquiring load invalidates the multiprocessor's L1 cache.
__device__ __forceinline__ void wait_above(const unsigned* address, unsigned value CUNORM_SITE) {
#ifdef CUNORM_CPU
    while (cunorm_cpu::load_acquire(address, file, line) <= value) {
    }
#else
    unsigned seen;
    do {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(address) : "memory");
    } while (seen <= value);
    load_acquire(address);
#endif
}

// Draws the next ticket in ascending order. A block that waits only for tickets before its own waits only for blocks
// that are running or have ended, however few blocks can be resident.
__device__ __forceinline__ unsigned draw_ticket(unsigned* counter CUNORM_SITE) {
    const unsigned drawn = atomicAdd(counter, 1u);
#ifdef CUNORM_CPU
    cunorm_cpu::poll(cunorm_cpu::POLL, nullptr, 0, file, line);  // blocks draw in turn: the other blocks run first
#endif
    return drawn;
}

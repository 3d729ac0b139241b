// Asynchronous copies, mbarriers, thread-block clusters, and words by which blocks signal each other: every wrapper of
// inline PTX that moves or orders memory, each with its plain C++ twin for the CPU executor
// (cunorm/executors/cpu/include/async.h).
//
// The CPU executor is the adverse one of the two: there a copy poisons its destination when it is issued and lands only at
// the wait that covers it, and a store to the workspace stays unseen by other blocks until a fence publishes it.
//
// sm_80: copy_async. sm_90: mbarriers with bytes, bulk copies, clusters. Source: PTX ISA 8.0, chapters "Data Movement and
// Conversion Instructions" and "Parallel Synchronization and Communication Instructions".

#include "common/types.cuh"

typedef unsigned long long mbarrier_t;  // lies in shared memory, 8-byte aligned

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

// 16 bytes from global to shared memory, both 16-byte aligned. Readable by this thread behind copy_async_wait, by others
// behind a barrier after that.
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

// Waits until at most the `open` last groups of this thread are under way.
template <int open>
__device__ __forceinline__ void copy_async_wait() {
#ifdef CUNORM_CPU
    cunorm_cpu::copy_wait(open);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(open) : "memory");
#endif
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

// One thread initialises for `arrivals` arrivals a phase; a barrier of the block lies before the first use by others.
__device__ __forceinline__ void mbarrier_init(mbarrier_t* barrier, unsigned arrivals) {
#ifdef CUNORM_CPU
    cunorm_cpu::mbarrier_init(barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and releases what this thread has done.
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* barrier) {
#ifdef CUNORM_CPU
    cunorm_cpu::mbarrier_arrive(barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives and has the phase wait for that many bytes of bulk copies as well.
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

// ---- bulk copies: issued by one thread, any multiple of 16 bytes, 16-byte aligned ---------------------------------------

// Its bytes count for the mbarrier's present phase; readable behind a wait for that.
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

// What other threads wrote there needs a fence_async of theirs and a barrier before.
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

// Waits until at most the `open` last groups of this thread's bulk stores still read shared memory. It must lie between
// a store and whatever writes its source, and before the block ends.
template <int open>
__device__ __forceinline__ void bulk_wait_read() {
#ifdef CUNORM_CPU
    cunorm_cpu::bulk_wait(open);
#else
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(open) : "memory");
#endif
}

// Makes this thread's accesses to shared memory known to bulk copies.
__device__ __forceinline__ void fence_async() {
#ifdef CUNORM_CPU
    cunorm_cpu::proxy_fence();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// Of a kernel whose tile says how many blocks make a cluster; NVRTC refuses it below sm_90, as the strategies do.
#if !defined(CUNORM_CPU) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(Tile::cluster, 1, 1)
#else
#define CLUSTER
#endif

// This block's number in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
#ifdef CUNORM_CPU
    return cunorm_cpu::cluster_rank();
#else
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}

// Where `address`, in this block's dynamic shared memory, lies in the block of that rank. A block may touch another's
// shared memory only between two barriers of the cluster: it must have begun, and not have ended.
template <typename T>
__device__ __forceinline__ T* cluster_map(T* address, unsigned rank) {
#ifdef CUNORM_CPU
    return static_cast<T*>(cunorm_cpu::map_shared(address, rank));
#else
    unsigned long long mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(address), "r"(rank));
    return reinterpret_cast<T*>(mapped);
#endif
}

// The cluster's barrier in two halves: what comes before an arrival is seen behind the wait by all threads of the cluster.
__device__ __forceinline__ void cluster_arrive() {
#ifdef CUNORM_CPU
    cunorm_cpu::cluster_arrive();
#else
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// An arrival that publishes nothing but what its thread has fenced: the other one makes every thread wait until all its
// stores have reached the L2 cache. (The executor knows the other one alone.)
__device__ __forceinline__ void cluster_arrive_relaxed() {
#ifdef CUNORM_CPU
    cunorm_cpu::cluster_arrive();
#else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Before a relaxed arrival: what this thread did before is seen behind the wait.
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

// ---- words by which blocks signal each other --------------------------------------------------------------------------

// What the thread that wrote this value did before, is seen behind it. In a loop it is how to wait for another block.
__device__ __forceinline__ unsigned load_acquire(const unsigned* address CUNORM_SITE) {
#ifdef CUNORM_CPU
    return cunorm_cpu::load_acquire(address, file, line);
#else
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
#endif
}

// Publishes what this thread did before, and what a barrier has made it know of.
__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
#ifdef CUNORM_CPU
    cunorm_cpu::store_release(address, value);
#else
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#endif
}

// Adds, publishes as store_release does, and sees as load_acquire does what others published by adding before: what was
// there before.
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

// Waits until the word is above a value; behind it as load_acquire. Only the last look acquires: each one that does takes
// the multiprocessor's L1 away.
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

// The next of ordered tickets. Whoever waits for tickets before
// its own alone waits for blocks that run or have ended, however few may be resident.
__device__ __forceinline__ unsigned draw_ticket(unsigned* counter CUNORM_SITE) {
    const unsigned drawn = atomicAdd(counter, 1u);
#ifdef CUNORM_CPU
    cunorm_cpu::poll(cunorm_cpu::POLL, nullptr, 0, file, line);  // tickets go round: the other blocks come first
#endif
    return drawn;
}

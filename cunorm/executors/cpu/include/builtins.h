// CUDA's built-in names, for the CPU executor: thread indices, barriers, shuffles, votes, atomics, arithmetic. As a
// default argument, __builtin_LINE() is the line of the call, which fault messages name.

// ---- indices --------------------------------------------------------------------------------------------------------

#define threadIdx (cunorm_cpu::thread_index())
#define blockIdx (cunorm_cpu::block_index())
#define blockDim (cunorm_cpu::block_extent())
#define gridDim (cunorm_cpu::grid_extent())
constexpr int warpSize = 32;

namespace cunorm_cpu {
struct Index {
    unsigned x;
    static constexpr unsigned y = 0, z = 0;
};
struct Extent {
    unsigned x;
    static constexpr unsigned y = 1, z = 1;
};

__forceinline__ Index thread_index() {
    CUNORM_CPU_IDENTITY(thread);
    return Index{value};
}
__forceinline__ Index block_index() {
    CUNORM_CPU_IDENTITY(block);
    return Index{value};
}
__forceinline__ Extent block_extent() {
    CUNORM_CPU_IDENTITY(threads);
    return Extent{value};
}
__forceinline__ Extent grid_extent() {
    CUNORM_CPU_IDENTITY(grid);
    return Extent{value};
}
__forceinline__ unsigned cluster_rank() {
    CUNORM_CPU_IDENTITY(rank);
    return value;
}
}  // namespace cunorm_cpu

// ---- waits ----------------------------------------------------------------------------------------------------------

#define CUNORM_CPU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

__forceinline__ void __syncthreads(CUNORM_CPU_SITE) { cunorm_cpu::barrier(file, line); }

__forceinline__ void __syncwarp(unsigned mask = ~0u, CUNORM_CPU_SITE) {
    cunorm_cpu::exchange(cunorm_cpu::SYNCWARP, mask, 0, cunorm_cpu::self()->lane, file, line);
}

template <typename T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUNORM_CPU_SITE) {
    return cunorm_cpu::shuffle(cunorm_cpu::SHUFFLE, mask, value, unsigned(lane), width, file, line);
}
template <typename T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, CUNORM_CPU_SITE) {
    return cunorm_cpu::shuffle(cunorm_cpu::SHUFFLE_XOR, mask, value, unsigned(distance), width, file, line);
}
template <typename T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, CUNORM_CPU_SITE) {
    return cunorm_cpu::shuffle(cunorm_cpu::SHUFFLE_UP, mask, value, distance, width, file, line);
}
template <typename T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, CUNORM_CPU_SITE) {
    return cunorm_cpu::shuffle(cunorm_cpu::SHUFFLE_DOWN, mask, value, distance, width, file, line);
}

namespace cunorm_cpu {
__forceinline__ unsigned vote(Kind kind, unsigned mask, int predicate, const char* file, int line) {
    return unsigned(exchange(kind, mask, predicate != 0, self()->lane, file, line));
}
}  // namespace cunorm_cpu

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate, CUNORM_CPU_SITE) {
    return cunorm_cpu::vote(cunorm_cpu::BALLOT, mask, predicate, file, line);
}
__forceinline__ int __any_sync(unsigned mask, int predicate, CUNORM_CPU_SITE) {
    return cunorm_cpu::vote(cunorm_cpu::ANY, mask, predicate, file, line) != 0;
}
__forceinline__ int __all_sync(unsigned mask, int predicate, CUNORM_CPU_SITE) {
    return cunorm_cpu::vote(cunorm_cpu::ALL, mask, predicate, file, line) == mask;
}

// Votes of all threads of the block, at a barrier. The counter is in the block's record (struct Block).
__forceinline__ int __syncthreads_count(int predicate, CUNORM_CPU_SITE) {
    return cunorm_cpu::barrier_count(predicate != 0, file, line);
}
__forceinline__ int __syncthreads_or(int predicate, CUNORM_CPU_SITE) {
    return cunorm_cpu::barrier_count(predicate != 0, file, line) != 0;
}
__forceinline__ int __syncthreads_and(int predicate, CUNORM_CPU_SITE) {
    return cunorm_cpu::barrier_count(predicate == 0, file, line) == 0;
}

[[noreturn]] __forceinline__ void __trap() { cunorm_cpu::fault("__trap()"); }

// ---- memory ---------------------------------------------------------------------------------------------------------

__forceinline__ void __threadfence() { cunorm_cpu::fence(); }
__forceinline__ void __threadfence_block() { asm volatile("" ::: "memory"); }
__forceinline__ void __nanosleep(unsigned, CUNORM_CPU_SITE) {
    cunorm_cpu::poll(cunorm_cpu::POLL, nullptr, 0, file, line);
}

template <typename T>
__forceinline__ T __ldg(const T* address) {
    cunorm_cpu::touch(address, sizeof(T), false);
    return *address;
}

// Flags between blocks, for async.cuh.
namespace cunorm_cpu {
template <typename T>
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE T load_acquire(const T* address, const char* file, int line) {
    note_global(self(), address, sizeof(T), false, CUNORM_CPU_HERE);
    poll(POLL, address, uint64_t(__atomic_load_n(address, __ATOMIC_ACQUIRE)), file, line);
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <typename T>
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void store_release(T* address, T value) {
    Stack* stack = self();
    note_fence(stack);
    note_atomic(stack, address, sizeof(T), CUNORM_CPU_HERE);
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    ++stack->worker->progress;
}
}  // namespace cunorm_cpu

// An atomic that does not change the value may be a spin. It counts as a poll: other threads run first, and an endless
// spin is reported as a deadlock.
namespace cunorm_cpu {
template <typename T>
CUNORM_CPU_RUNTIME T after_atomic(T* address, T old, T now, const char* file, int line) {
    if (old == now) {
        poll(POLL, address, uint64_t(old), file, line);
    } else {
        ++self()->worker->progress;
    }
    return old;
}
}  // namespace cunorm_cpu

// Blocks run on several operating-system threads, so these are real atomic operations.
#define CUNORM_CPU_ATOMICS(T) \
    CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE T atomicAdd(T* address, T value, CUNORM_CPU_SITE) { \
        cunorm_cpu::note_atomic(cunorm_cpu::self(), address, sizeof(T), CUNORM_CPU_HERE); \
        const T old = __atomic_fetch_add(address, value, __ATOMIC_RELAXED); \
        return cunorm_cpu::after_atomic(address, old, static_cast<T>(old + value), file, line); \
    } \
    CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE T atomicExch(T* address, T value, CUNORM_CPU_SITE) { \
        cunorm_cpu::note_atomic(cunorm_cpu::self(), address, sizeof(T), CUNORM_CPU_HERE); \
        const T old = __atomic_exchange_n(address, value, __ATOMIC_RELAXED); \
        return cunorm_cpu::after_atomic(address, old, value, file, line); \
    } \
    CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE T atomicCAS(T* address, T expected, T value, CUNORM_CPU_SITE) { \
        cunorm_cpu::note_atomic(cunorm_cpu::self(), address, sizeof(T), CUNORM_CPU_HERE); \
        const bool swapped = \
            __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
        return cunorm_cpu::after_atomic(address, expected, swapped ? value : expected, file, line); \
    } \
    CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE T atomicMax(T* address, T value, CUNORM_CPU_SITE) { \
        cunorm_cpu::note_atomic(cunorm_cpu::self(), address, sizeof(T), CUNORM_CPU_HERE); \
        T old = __atomic_load_n(address, __ATOMIC_RELAXED); \
        while (old < value && \
               !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        } \
        return cunorm_cpu::after_atomic(address, old, old < value ? value : old, file, line); \
    }
CUNORM_CPU_ATOMICS(int)
CUNORM_CPU_ATOMICS(unsigned)
CUNORM_CPU_ATOMICS(unsigned long long)
#undef CUNORM_CPU_ATOMICS

// ---- bits -----------------------------------------------------------------------------------------------------------

namespace cunorm_cpu {
template <typename To, typename From>
__forceinline__ To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace cunorm_cpu

__forceinline__ unsigned __float_as_uint(float value) { return cunorm_cpu::bit_cast<unsigned>(value); }
__forceinline__ int __float_as_int(float value) { return cunorm_cpu::bit_cast<int>(value); }
__forceinline__ float __uint_as_float(unsigned bits) { return cunorm_cpu::bit_cast<float>(bits); }
__forceinline__ float __int_as_float(int bits) { return cunorm_cpu::bit_cast<float>(bits); }
__forceinline__ long long __double_as_longlong(double value) { return cunorm_cpu::bit_cast<long long>(value); }
__forceinline__ double __longlong_as_double(long long bits) { return cunorm_cpu::bit_cast<double>(bits); }
__forceinline__ int __popc(unsigned bits) { return __builtin_popcount(bits); }
__forceinline__ int __ffs(int bits) { return __builtin_ffs(bits); }
__forceinline__ int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// Functions of CUDA that the C library has too. <math.h> would make each build some milliseconds longer.
extern "C" {
#define CUNORM_CPU_MATH(T, suffix) \
    T exp##suffix(T) noexcept, exp2##suffix(T) noexcept, log##suffix(T) noexcept, log2##suffix(T) noexcept; \
    T sqrt##suffix(T) noexcept, fabs##suffix(T) noexcept, floor##suffix(T) noexcept, ceil##suffix(T) noexcept; \
    T rint##suffix(T) noexcept, tanh##suffix(T) noexcept, erf##suffix(T) noexcept, pow##suffix(T, T) noexcept; \
    T fmax##suffix(T, T) noexcept, fmin##suffix(T, T) noexcept, fma##suffix(T, T, T) noexcept;
CUNORM_CPU_MATH(double, )
CUNORM_CPU_MATH(float, f)
#undef CUNORM_CPU_MATH
}

#define CUNORM_CPU_MINIMUM(T) \
    __forceinline__ T min(T a, T b) { return a < b ? a : b; } \
    __forceinline__ T max(T a, T b) { return a < b ? b : a; }
CUNORM_CPU_MINIMUM(int)
CUNORM_CPU_MINIMUM(unsigned)
CUNORM_CPU_MINIMUM(long long)
CUNORM_CPU_MINIMUM(unsigned long long)
#undef CUNORM_CPU_MINIMUM
__forceinline__ float min(float a, float b) { return fminf(a, b); }
__forceinline__ float max(float a, float b) { return fmaxf(a, b); }
__forceinline__ double min(double a, double b) { return fmin(a, b); }
__forceinline__ double max(double a, double b) { return fmax(a, b); }

// Composed of correctly rounded or C library operations, whereas the GPU's functions are approximations; the tolerances
// of tests allow for the difference.
__forceinline__ float rsqrtf(float value) { return 1.0f / sqrtf(value); }
__forceinline__ double rsqrt(double value) { return 1.0 / sqrt(value); }
__forceinline__ float __fdividef(float a, float b) { return a / b; }
__forceinline__ float __expf(float value) { return expf(value); }
__forceinline__ float __logf(float value) { return logf(value); }
__forceinline__ float __frcp_rn(float value) { return 1.0f / value; }
__forceinline__ float __fsqrt_rn(float value) { return sqrtf(value); }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Functions and macros that translated PTX calls (translate.py). They follow the CPU executor's runtime. Memory accesses
// and waits go through that runtime, so that its checks, its scheduler and its faults apply.
//
// Accesses are macros, so that a fault names the line of the PTX. The window of shared memory begins at address 0: a
// shared address is an offset in the block's arena. Source of the semantics: PTX ISA 8.7, chapter "Instruction Set".

namespace ptx {

template <typename T>
struct alignas(2 * sizeof(T)) v2 {
    T item[2];
};
template <typename T>
struct alignas(4 * sizeof(T)) v4 {
    T item[4];
};

template <typename To, typename From>
__forceinline__ To as(From from) {
    return cunorm_cpu::bit_cast<To>(from);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

__forceinline__ uint64_t window() { return reinterpret_cast<uintptr_t>(cunorm_cpu::self()->arena); }

// The address of `bytes` bytes at an offset in the window of shared memory.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void* shared(uint64_t offset, unsigned bytes, bool store) {
    cunorm_cpu::Stack* stack = cunorm_cpu::self();
    const uint64_t size = uint64_t(stack->worker->launch->shared_bytes);
    if (offset > size || size - offset < bytes) {
        cunorm_cpu::fault(
            "out-of-bounds %u-byte %s at @{%x}: byte %llu of shared memory, but the launch allocates %llu", bytes,
            store ? "store" : "load", CUNORM_CPU_HERE, (unsigned long long)offset, (unsigned long long)size);
    }
    if (offset % bytes != 0) {
        cunorm_cpu::misaligned_at(stack->arena + offset, bytes, store, CUNORM_CPU_HERE);
    }
    return stack->arena + offset;
}

// Whether a generic address is in shared memory. Faults if it is misaligned.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE bool is_shared(uint64_t address, unsigned bytes, bool store) {
    if (address % bytes != 0) {
        cunorm_cpu::misaligned_at(reinterpret_cast<void*>(address), bytes, store, CUNORM_CPU_HERE);
    }
    return cunorm_cpu::is_shared(*cunorm_cpu::self()->worker, address);
}

#ifdef CUNORM_CPU_CHECKED
#define PTX_TOUCH(address, bytes, store) cunorm_cpu::touch(address, bytes, store)
#else
CUNORM_CPU_NOINLINE void touch(const void* address, unsigned bytes, bool store) {  // not inlined: compiles faster
    cunorm_cpu::touch(address, bytes, store);
}
#define PTX_TOUCH(address, bytes, store) ptx::touch(address, bytes, store)
#endif

#define PTX_ADDRESS(address) reinterpret_cast<void*>(address)
#define PTX_SITE __FILE__, __LINE__

// A reference to the T at an address in a state space, after the checks of the access.
#define PTX_GLOBAL(T, address, store) \
    (*(PTX_TOUCH(PTX_ADDRESS(address), sizeof(T), store), reinterpret_cast<T*>(address)))
#define PTX_SHARED(T, offset, store) (*static_cast<T*>(ptx::shared(offset, sizeof(T), store)))
#define PTX_GENERIC(T, address, store)                                                                         \
    (*(ptx::is_shared(address, sizeof(T), store) ? void() : PTX_TOUCH(PTX_ADDRESS(address), sizeof(T), store), \
       reinterpret_cast<T*>(address)))

// ---- synchronisation ------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME bool incomplete(cunorm_cpu::Stack* stack, cunorm_cpu::Mbarrier& barrier, unsigned parity) {
    return (barrier.phase & 1) == (parity & 1) && !cunorm_cpu::complete(stack, barrier);
}

// One attempt to wait for the end of a phase. If it fails, the other threads run before it returns. They also run if
// the thread sees one complete phase twice in a row, so that a wait that never ends is reported as a deadlock.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE bool try_wait(void* at, unsigned parity, const char* file, int line) {
    cunorm_cpu::Stack* stack = cunorm_cpu::self();
    cunorm_cpu::Mbarrier& barrier = cunorm_cpu::mbarrier_at(stack, at, CUNORM_CPU_HERE);
    const bool failed = incomplete(stack, barrier, parity);
    const uint64_t seen = uint64_t(barrier.phase) << 32 | barrier.pending;
    const bool again = stack->polled == reinterpret_cast<uintptr_t>(at) && stack->seen == seen;
    if (failed || again) {
        cunorm_cpu::poll(cunorm_cpu::MBARRIER, at, seen, file, line);
    }
    if (failed && incomplete(stack, barrier, parity)) {
        return false;
    }
    stack->polled = reinterpret_cast<uintptr_t>(at);
    stack->seen = uint64_t(barrier.phase) << 32 | barrier.pending;
    cunorm_cpu::note_acquire(stack, barrier.row[parity & 1]);
    return true;
}

// A store that publishes no other store.
template <typename T>
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void store_relaxed(T* address, T value) {
    cunorm_cpu::Stack* stack = cunorm_cpu::self();
    cunorm_cpu::note_atomic(stack, address, sizeof(T), CUNORM_CPU_HERE);
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
    ++stack->worker->progress;
}

// The width of a shuffle's segments, from operand c of shfl.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE int width(uint32_t c, bool up, const char* file, int line) {
    if ((c & ~0x1f00u) != (up ? 0u : 31u)) {
        cunorm_cpu::fault("shfl (%s:%d): operand c is 0x%x, expected a clamp of %u", file, line, c, up ? 0u : 31u);
    }
    return 32 - int(c >> 8);
}

// ---- integers -------------------------------------------------------------------------------------------------------

template <typename T>
__forceinline__ T shl(T a, uint32_t by) {
    return by >= 8 * sizeof(T) ? T(0) : T(a << by);
}
template <typename T>
__forceinline__ T shr(T a, uint32_t by) {
    return by >= 8 * sizeof(T) ? (a < 0 ? T(-1) : T(0)) : T(a >> by);
}
__forceinline__ uint32_t funnel(bool left, bool wrap, uint32_t low, uint32_t high, uint32_t by) {
    const uint64_t both = uint64_t(high) << 32 | low;
    by = wrap ? by & 31 : by > 32 ? 32 : by;
    return left ? uint32_t((both << by) >> 32) : uint32_t(both >> by);
}
template <typename T>
__forceinline__ T bfi(T from, T into, uint32_t position, uint32_t length) {
    constexpr uint32_t bits = 8 * sizeof(T);
    position &= 255;
    length &= 255;
    if (position >= bits || length == 0) {
        return into;
    }
    const T mask = T((length >= bits ? ~T(0) : (T(1) << length) - 1) << position);
    return T((into & ~mask) | (T(from << position) & mask));
}
__forceinline__ uint32_t reverse(uint32_t value) {
    uint32_t found = 0;
    for (int i = 0; i < 32; ++i) found |= (value >> i & 1u) << (31 - i);
    return found;
}

// The distance by which the first bit that is set can be shifted to the left; of 0, all bits.
__forceinline__ uint32_t zeros_before(uint32_t value) {
    return value == 0 ? 0xffffffffu : uint32_t(__builtin_clz(value));
}

__forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned selector = selectors >> 4 * i & 15;
        uint32_t byte = uint32_t(both >> 8 * (selector & 7)) & 255;
        if (selector & 8) {  // the byte's sign, in all bits
            byte = byte & 128 ? 255 : 0;
        }
        result |= byte << 8 * i;
    }
    return result;
}
__forceinline__ int32_t relu(int32_t a) { return a < 0 ? 0 : a; }
template <typename T>
__forceinline__ T quotient(T a, T b, bool remainder, const char* file, int line) {
    if (b == 0) {
        cunorm_cpu::fault("division by zero (%s:%d)", file, line);
    }
    if (T(-1) < T(0) && b == T(-1)) {  // the smallest number divided by -1 would trap
        return remainder ? T(0) : T(-(uint64_t)a);
    }
    return T(remainder ? a % b : a / b);
}

// ---- floating point -------------------------------------------------------------------------------------------------

// .ftz: a subnormal operand or result is a zero of the same sign.
__forceinline__ float flush(float a) { return __builtin_fabsf(a) < 0x1p-126f ? __builtin_copysignf(0.0f, a) : a; }
// .sat: to [0, 1]; NaN becomes 0.
__forceinline__ float saturate(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
// fma.rm: rounded towards minus infinity. The product is exact in double; the sum's rounding error is computed exactly.
inline float fma_down(float a, float b, float c) {
    const double product = double(a) * b, sum = product + c, part = sum - product;
    const double error = (product - (sum - part)) + (double(c) - part);
    const float rounded = float(sum);
    return double(rounded) > sum || (double(rounded) == sum && error < 0)
               ? __builtin_nextafterf(rounded, -__builtin_inff())
               : rounded;
}
template <typename T>
__forceinline__ T minimum(T a, T b) {  // of two numbers of different signs that are equal, -0; NaN only of two NaNs
    return a != a ? b : b != b ? a : a == b ? (__builtin_signbit(a) ? a : b) : a < b ? a : b;
}
template <typename T>
__forceinline__ T maximum(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? (__builtin_signbit(a) ? b : a) : a > b ? a : b;
}
// cvt from floating point to an integer: clamped to its range; NaN becomes 0.
template <typename T>
__forceinline__ T to_integer(double a, bool nearest) {
    constexpr bool is_signed = T(-1) < T(0);
    constexpr double above =
        is_signed ? double(uint64_t(1) << (8 * sizeof(T) - 1)) : 2.0 * (uint64_t(1) << (8 * sizeof(T) - 1));
    const double whole = nearest ? __builtin_rint(a) : __builtin_trunc(a);
    const T most = is_signed ? T((uint64_t(1) << (8 * sizeof(T) - 1)) - 1) : T(-1);
    return whole != whole ? T(0) : whole >= above ? most : whole < (is_signed ? -above : 0.0) ? T(~most) : T(whole);
}
// Halves, by the definition of the format: 1 bit sign, 5 bits exponent, 10 bits fraction.
inline float from_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 0    ? __builtin_ldexpf(float(fraction), -24)
                            : exponent != 31 ? __builtin_ldexpf(float(1024 + fraction), exponent - 25)
                            : fraction == 0  ? __builtin_inff()
                                             : __builtin_nanf("");
    return bits & 0x8000 ? -magnitude : magnitude;
}
inline uint16_t to_half(float a) {
    const float magnitude = __builtin_fabsf(a);
    const uint16_t sign = as<uint32_t>(a) >> 16 & 0x8000;
    int exponent;
    const float fraction = __builtin_frexpf(magnitude, &exponent);
    if (a != a) {
        return 0x7fff;
    }
    if (magnitude >= 65520.0f) {
        return sign | 0x7c00;
    }
    if (magnitude < 0x1p-14f) {
        return sign | uint16_t(__builtin_rintf(__builtin_ldexpf(magnitude, 24)));
    }
    return uint16_t(sign + ((exponent + 14) << 10) + int(__builtin_rintf(__builtin_ldexpf(fraction, 11))) - 1024);
}
__forceinline__ uint16_t to_bfloat(float a) {
    const uint32_t bits = as<uint32_t>(a);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace ptx

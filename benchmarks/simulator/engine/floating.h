// Floating-point operations and conversions, lane by lane.

// a + b, a * b or a * b + c in a direction: 1 down, 2 up, 3 towards zero. Volatile values keep the compiler from moving
// the operation out of the lines that change the direction.
enum class Exactly { sum, product, fused };

template <typename T>
__attribute__((noinline)) static T directed(Exactly what, int mode, T a, T b, T c) {
    constexpr int directions[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    volatile T x = a, y = b, z = c;
    fesetround(directions[mode]);
    volatile T value = what == Exactly::sum ? x + y : what == Exactly::product ? x * y : fma(x, y, z);
    fesetround(FE_TONEAREST);
    return value;
}

static inline u32 settled(float value, bool flush, bool saturate) {
    u32 bits = canonical(as_bits(value));
    if (flush) bits = flushed(bits);
    if (saturate) bits = value > 0.0f ? (value < 1.0f ? bits : as_bits(1.0f)) : 0u;
    return bits;
}

static void arithmetic32(Lanewise& on, Exactly what) {
    const bool flush = on.code.mode[1], saturate = on.code.mode[2];
    const int mode = on.code.mode[0];
    const u32 *a = on.real(0, flush), *b = on.real(1, flush), *c = what == Exactly::fused ? on.real(2, flush) : a;
    for (int l = 0; l < on.count; ++l) {
        const float x = as_float(a[l]), y = as_float(b[l]), z = as_float(c[l]);
        float value;
        if (mode != 0) {
            value = directed(what, mode, x, y, z);
        } else {
            value = what == Exactly::sum ? x + y : what == Exactly::product ? x * y : __builtin_fmaf(x, y, z);
        }
        on.low.lane[l] = settled(value, flush, saturate);
    }
}
static void do_FADD(Lanewise& on) { arithmetic32(on, Exactly::sum); }
static void do_FMUL(Lanewise& on) { arithmetic32(on, Exactly::product); }
static void do_FFMA(Lanewise& on) { arithmetic32(on, Exactly::fused); }

static void arithmetic64(Lanewise& on, Exactly what) {
    double a[WARP], b[WARP], c[WARP] = {};
    on.real64(0, a);
    on.real64(1, b);
    if (what == Exactly::fused) on.real64(2, c);
    for (int l = 0; l < on.count; ++l) {
        const double value = directed(what, on.code.mode[0], a[l], b[l], c[l]);
        on.result(l, value != value ? 0x7fffffffffffffffull : as_bits(value));
    }
}
static void do_DADD(Lanewise& on) { arithmetic64(on, Exactly::sum); }
static void do_DMUL(Lanewise& on) { arithmetic64(on, Exactly::product); }
static void do_DFMA(Lanewise& on) { arithmetic64(on, Exactly::fused); }

static void do_FMNMX(Lanewise& on) {
    const bool flush = on.code.mode[1], keeps_nan = on.code.mode[2];
    const u32 *a = on.real(0, flush), *b = on.real(1, flush), smallest = on.given(0);
    for (int l = 0; l < on.count; ++l) {
        const float x = as_float(a[l]), y = as_float(b[l]);
        if (x != x || y != y) {
            on.low.lane[l] = keeps_nan || (x != x && y != y) ? NOT_A_NUMBER : x != x ? b[l] : a[l];
        } else {
            const bool less = x < y || (x == y && (a[l] & SIGN) > (b[l] & SIGN));  // -0 is less than +0
            on.low.lane[l] = less == static_cast<bool>(smallest >> l & 1u) ? a[l] : b[l];
        }
    }
}

// Approximations of the special function unit, here correctly rounded. The unit flushes subnormal numbers.
static void do_MUFU(Lanewise& on) {
    const u32* a = on.real(0, true);
    for (int l = 0; l < on.count; ++l) {
        const double x = as_float(a[l]);
        double value;
        switch (on.code.mode[0]) {
            case 0:
                value = 1.0 / x;
                break;
            case 1:
                value = 1.0 / sqrt(x);
                break;
            case 2:
                value = exp2(x);
                break;
            case 3:
                value = log2(x);
                break;
            default:
                value = sqrt(x);
                break;
        }
        on.low.lane[l] = settled(static_cast<float>(value), true, false);
    }
}
// The upper 32 bits of 1 / x (mode 0) or 1 / sqrt(x), from the upper 32 bits of x.
static void do_MUFU64H(Lanewise& on) {
    const u32* a = on.raw(0);
    for (int l = 0; l < on.count; ++l) {
        const double x = as_double(static_cast<u64>(a[l]) << 32);
        on.low.lane[l] = static_cast<u32>(as_bits(on.code.mode[0] ? 1.0 / sqrt(x) : 1.0 / x) >> 32);
    }
}

// ---- 16-bit formats -------------------------------------------------------------------------------------------------

static u32 bfloat_of(u32 bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
static u32 half_of(u32 bits) {
    const float value = as_float(bits);
    if (value != value) return 0x7fffu;
    const _Float16 rounded = static_cast<_Float16>(value);
    u16 half;
    memcpy(&half, &rounded, sizeof half);
    return half;
}
static float float_of_half(u32 bits) {
    const u16 half = static_cast<u16>(bits);
    _Float16 value;
    memcpy(&value, &half, sizeof value);
    return static_cast<float>(value);
}
static void do_F2F_BF16(Lanewise& on) {
    const u32* a = on.real(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = bfloat_of(a[l]);
}
static void do_F2F_F16(Lanewise& on) {
    const u32* a = on.real(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = half_of(a[l]);
}
static void do_PACK_BF16(Lanewise& on) {
    const u32 *a = on.real(0), *b = on.real(1);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = bfloat_of(a[l]) << 16 | bfloat_of(b[l]);
}
static void do_PACK_F16(Lanewise& on) {
    const u32 *a = on.real(0), *b = on.real(1);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = half_of(a[l]) << 16 | half_of(b[l]);
}
// Arithmetic of pairs of bfloat16, rounded once. The exact value is rounded to a float that is odd if it is inexact, so
// that the second rounding is right.
static u32 bfloat_of_exact(double exact) {
    float value = static_cast<float>(exact);
    if (exact == exact && static_cast<double>(value) != exact && value - value == 0.0f) {
        if (fabs(static_cast<double>(value)) > fabs(exact)) value = nextafterf(value, 0.0f);
        value = as_float(as_bits(value) | 1u);
    }
    return bfloat_of(as_bits(value));
}
static double bfloat_operand(const Operand& from, u32 bits, int half) {
    const bool high = from.flags & HIGH_HALF || (half == 1 && !(from.flags & LOW_HALF));
    u32 value = high ? bits & 0xffff0000u : bits << 16;
    if (from.flags & ABSOLUTE) value &= ~SIGN;
    if (from.flags & NEGATED) value ^= SIGN;
    return static_cast<double>(as_float(value));
}
static void bfloat_pairs(Lanewise& on, Exactly what) {
    const u32 *a = on.raw(0), *b = on.raw(1), *c = what == Exactly::fused ? on.raw(2) : a;
    const Operand* from = on.code.source;
    for (int l = 0; l < on.count; ++l) {
        u32 value = 0;
        for (int half = 0; half < 2; ++half) {
            const double x = bfloat_operand(from[0], a[l], half), y = bfloat_operand(from[1], b[l], half);
            const double z = what == Exactly::fused ? bfloat_operand(from[2], c[l], half) : 0.0;
            value |= bfloat_of_exact(what == Exactly::sum       ? x + y
                                     : what == Exactly::product ? x * y
                                                                : x * y + z)
                     << 16 * half;
        }
        on.low.lane[l] = value;
    }
}
static void do_BF16_ADD(Lanewise& on) { bfloat_pairs(on, Exactly::sum); }
static void do_BF16_MUL(Lanewise& on) { bfloat_pairs(on, Exactly::product); }
static void do_BF16_FMA(Lanewise& on) { bfloat_pairs(on, Exactly::fused); }
// -0 * 0 + (b, c): how the compiler moves a constant on this pipe.
static void do_HALF_PAIR(Lanewise& on) {
    const u32 value = on.code.source[0].low << 16 | on.code.source[1].low;
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = value;
}
// -0 + a half: how the compiler widens it.
static void do_HADD2_F32(Lanewise& on) {
    const u32* a = on.raw(0);
    const int flags = on.code.source[0].flags;
    for (int l = 0; l < on.count; ++l) {
        const float value = float_of_half(flags & HIGH_HALF ? a[l] >> 16 : a[l]);
        on.low.lane[l] = as_bits(value) ^ (flags & NEGATED ? SIGN : 0u);
    }
}

// ---- conversions ----------------------------------------------------------------------------------------------------

// A number rounded to float in a direction.
static u32 rounded(double exact, bool above, bool below, int mode) {
    float value = static_cast<float>(exact);
    if (mode == 2 && below) value = nextafterf(value, INFINITY);
    if (mode == 1 && above) value = nextafterf(value, -INFINITY);
    return as_bits(value);
}
static void do_I2F(Lanewise& on) {
    const u32* a = on.integer(0);
    const u32 bits = on.code.mode[1] == 2 ? 0xffff : 0xffffffff;  // U16 or U32
    for (int l = 0; l < on.count; ++l) {
        const double exact =
            on.code.mode[1] ? static_cast<double>(a[l] & bits) : static_cast<double>(static_cast<int>(a[l]));
        const double near = static_cast<double>(static_cast<float>(exact));
        on.low.lane[l] = rounded(exact, near > exact, near < exact, on.code.mode[0]);
    }
}
static void do_I2F_FROM64(Lanewise& on) {
    u64 a[WARP];
    on.wide(0, a);
    for (int l = 0; l < on.count; ++l) {
        const bool is_unsigned = on.code.mode[1];
        const float near = is_unsigned ? static_cast<float>(a[l]) : static_cast<float>(static_cast<long long>(a[l]));
        const long double exact =
            is_unsigned ? static_cast<long double>(a[l]) : static_cast<long double>(static_cast<long long>(a[l]));
        float value = near;
        if (on.code.mode[0] == 2 && near < exact) value = nextafterf(near, INFINITY);
        if (on.code.mode[0] == 1 && near > exact) value = nextafterf(near, -INFINITY);
        on.low.lane[l] = as_bits(value);
    }
}
static void do_I2F_TO64(Lanewise& on) {
    u64 a[WARP];
    on.wide(0, a);
    for (int l = 0; l < on.count; ++l) {
        double value;
        switch (on.code.mode[2]) {
            case 1:
                value = static_cast<double>(static_cast<long long>(a[l]));
                break;
            case 2:
                value = static_cast<double>(a[l]);
                break;
            default:
                value = on.code.mode[1] ? static_cast<double>(static_cast<u32>(a[l]))
                                        : static_cast<double>(static_cast<int>(a[l]));
        }
        on.result(l, as_bits(value));
    }
}
static void do_F2I(Lanewise& on) {
    const u32* a = on.real(0);
    for (int l = 0; l < on.count; ++l) {
        const float x = as_float(a[l]);
        if (on.code.mode[1]) {
            on.low.lane[l] = !(x > 0.0f) ? 0u : x >= 0x1p32f ? ~0u : static_cast<u32>(x);
        } else {
            const int value = x != x          ? 0
                              : x >= 0x1p31f  ? 0x7fffffff
                              : x <= -0x1p31f ? -0x7fffffff - 1
                                              : static_cast<int>(x);
            on.low.lane[l] = static_cast<u32>(value);
        }
    }
}
static void do_F2I64(Lanewise& on) {
    const u32* a = on.real(0);
    for (int l = 0; l < on.count; ++l) {
        const float x = as_float(a[l]);
        if (on.code.mode[1]) {
            on.result(l, !(x > 0.0f) ? 0ull : x >= 0x1p64f ? ~0ull : static_cast<u64>(x));
        } else {
            const bool high = x >= 0x1p63f, low = x <= -0x1p63f;
            on.result(l, x != x ? 1ull << 63
                         : high ? ~0ull >> 1
                         : low  ? 1ull << 63
                                : static_cast<u64>(static_cast<long long>(x)));
        }
    }
}
static void do_F2F_32_FROM64(Lanewise& on) {
    double a[WARP];
    on.real64(0, a);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = canonical(as_bits(static_cast<float>(a[l])));
}
static void do_F2F_64_FROM32(Lanewise& on) {
    const u32* a = on.real(0);
    for (int l = 0; l < on.count; ++l) {
        const double value = as_float(a[l]);
        on.result(l, value != value ? 0x7fffffffffffffffull : as_bits(value));
    }
}

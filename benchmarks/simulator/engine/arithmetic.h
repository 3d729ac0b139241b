// Operations that compute each lane from its own operands. A uniform instruction computes one lane.

static inline float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline u32 as_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline double as_double(u64 bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline u64 as_bits(double value) {
    u64 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

constexpr u32 SIGN = 0x80000000u, NOT_A_NUMBER = 0x7fffffffu;

static inline u32 flushed(u32 bits) { return (bits & 0x7f800000u) == 0 ? bits & SIGN : bits; }
static inline u32 canonical(u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u ? NOT_A_NUMBER : bits; }

static const Row ZERO_ROW = {};

// The operands and the results of one instruction.
struct Lanewise {
    Warp& warp;
    const Instruction& code;
    const int count;  // 32 lanes, or 1
    Row low, high;    // results
    bool pair = false, writes = true;
    u32 out[2] = {};  // results that are predicates
    Row scratch[6];
    int used = 0;

    Lanewise(Warp& warp, const Instruction& code) : warp(warp), code(code), count(code.once ? 1 : WARP) {}

    const u32* spread(u32 value) {
        Row& row = scratch[used++];
        for (u32& lane : row.lane) lane = value;
        return row.lane;
    }
    // An operand without its signs. `second`: the high half of a 64-bit operand.
    const u32* raw(int k, int second = 0) {
        const Operand& from = code.source[k];
        if (from.kind == KIND_REGISTER) {
            return from.index == ZERO ? ZERO_ROW.lane : warp.rows[static_cast<size_t>(from.index + second)].lane;
        }
        if (from.kind == KIND_UNIFORM)
            return spread(from.index == ZERO_UNIFORM ? 0 : warp.uniform[from.index + second]);
        return spread(second ? from.high : from.low);
    }
    const u32* integer(int k) {
        const u32* from = raw(k);
        const int flags = code.source[k].flags;
        if (flags == 0) return from;
        Row& row = scratch[used++];
        for (int l = 0; l < count; ++l) {
            u32 value = from[l];
            if (flags & INVERTED) value = ~value;
            if (flags & NEGATED) value = 0u - value;
            row.lane[l] = value;
        }
        return row.lane;
    }
    // The bits of a float operand; flushed if the instruction flushes subnormal numbers.
    const u32* real(int k, bool flush = false) {
        const u32* from = raw(k);
        const int flags = code.source[k].flags;
        if (flags == 0 && !flush) return from;
        Row& row = scratch[used++];
        const u32 keep = flags & ABSOLUTE ? ~SIGN : ~0u, turn = flags & NEGATED ? SIGN : 0u;
        for (int l = 0; l < count; ++l) {
            const u32 value = (from[l] & keep) ^ turn;
            row.lane[l] = flush ? flushed(value) : value;
        }
        return row.lane;
    }
    void wide(int k, u64* into) {
        const u32 *below = raw(k), *above = raw(k, 1);
        for (int l = 0; l < count; ++l) into[l] = static_cast<u64>(above[l]) << 32 | below[l];
    }
    void real64(int k, double* into) {
        u64 bits[WARP];
        wide(k, bits);
        const int flags = code.source[k].flags;
        for (int l = 0; l < count; ++l) {
            u64 value = flags & ABSOLUTE ? bits[l] & ~(1ull << 63) : bits[l];
            if (flags & NEGATED) value ^= 1ull << 63;
            into[l] = as_double(value);
        }
    }
    void result(int l, u64 value) {
        low.lane[l] = static_cast<u32>(value);
        high.lane[l] = static_cast<u32>(value >> 32);
        pair = true;
    }
    // A predicate operand, a bit per lane. An absent one is false.
    u32 given(int k) const { return code.given[k].present ? read(warp, code.given[k]) : 0; }
};

// ---- integers -------------------------------------------------------------------------------------------------------

// The sum of three operands and its carries. `carried`: the operands are inverted, not negated, and carries are added.
static void add3(Lanewise& on, bool carried) {
    u64 sum[WARP] = {};
    for (int k = 0; k < 3; ++k) {
        const u32* from = on.raw(k);
        const int flags = on.code.source[k].flags;
        const u32 turn = flags & (NEGATED | INVERTED) ? ~0u : 0u;
        const u64 one = !carried && (flags & NEGATED) ? 1 : 0;
        for (int l = 0; l < on.count; ++l) sum[l] += static_cast<u64>(from[l] ^ turn) + one;
    }
    const u32 first = carried ? on.given(0) : 0, second = carried ? on.given(1) : 0;
    for (int l = 0; l < on.count; ++l) {
        sum[l] += (first >> l & 1u) + (second >> l & 1u);
        on.low.lane[l] = static_cast<u32>(sum[l]);
        on.out[0] |= static_cast<u32>(sum[l] >> 32 >= 1) << l;
        on.out[1] |= static_cast<u32>(sum[l] >> 32 >= 2) << l;
    }
}

static void do_IADD3(Lanewise& on) { add3(on, false); }
static void do_IADD3X(Lanewise& on) { add3(on, true); }
// The sum of three 64-bit operands.
static void do_IADD3WIDE(Lanewise& on) {
    u64 sum[WARP] = {}, from[WARP];
    for (int k = 0; k < 3; ++k) {
        on.wide(k, from);
        const bool negated = on.code.source[k].flags & NEGATED;
        for (int l = 0; l < on.count; ++l) sum[l] += negated ? 0u - from[l] : from[l];
    }
    for (int l = 0; l < on.count; ++l) on.result(l, sum[l]);
}
static void do_VIADD(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = a[l] + b[l];
}
static void do_IMAD(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1), *c = on.integer(2);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = a[l] * b[l] + c[l];
}
static void do_IMADX(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1), *c = on.raw(2);
    const u32 turn = on.code.source[2].flags ? ~0u : 0u, carry = on.given(0);
    for (int l = 0; l < on.count; ++l) {
        const u64 sum = static_cast<u64>(a[l] * b[l]) + (c[l] ^ turn) + (carry >> l & 1u);
        on.low.lane[l] = static_cast<u32>(sum);
        on.out[0] |= static_cast<u32>(sum >> 32) << l;
    }
}

static u64 product(u32 a, u32 b, bool is_unsigned) {
    return is_unsigned ? static_cast<u64>(a) * b
                       : static_cast<u64>(static_cast<long long>(static_cast<int>(a)) * static_cast<int>(b));
}

// a * b + c + carry with a 64-bit c. `high`: the result is the upper half.
static void multiply_wide(Lanewise& on, bool high) {
    const u32 *a = on.integer(0), *b = on.integer(1), carry = on.given(0);
    const int flags = on.code.source[2].flags;
    u64 c[WARP];
    on.wide(2, c);
    for (int l = 0; l < on.count; ++l) {
        if (flags & INVERTED) c[l] = ~c[l];
        if (flags & NEGATED) c[l] = 0u - c[l];
        const u64 added = c[l] + (carry >> l & 1u), sum = product(a[l], b[l], on.code.mode[0] == 1) + added;
        on.out[0] |= static_cast<u32>(added < c[l] || sum < added) << l;
        if (high) {
            on.low.lane[l] = static_cast<u32>(sum >> 32);
        } else {
            on.result(l, sum);
        }
    }
}
static void do_IMADHI(Lanewise& on) { multiply_wide(on, true); }
static void do_IMADWIDE(Lanewise& on) { multiply_wide(on, false); }

static void do_IABS(Lanewise& on) {
    const u32* a = on.raw(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = a[l] & SIGN ? 0u - a[l] : a[l];
}

static void do_LOP3(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1), *c = on.integer(2);
    const u32 table = static_cast<u32>(on.code.mode[0]), given = on.given(0);
    for (int l = 0; l < on.count; ++l) {
        u32 value = 0;
        for (int k = 0; k < 8; ++k) {
            const u32 turn_a = k & 4 ? 0u : ~0u, turn_b = k & 2 ? 0u : ~0u, turn_c = k & 1 ? 0u : ~0u;
            if (table >> k & 1u) value |= (a[l] ^ turn_a) & (b[l] ^ turn_b) & (c[l] ^ turn_c);
        }
        on.low.lane[l] = value;
        on.out[0] |= static_cast<u32>(value != 0 || (given >> l & 1u)) << l;
    }
}

// A funnel shift of the 64 bits high:low. Modes: the type of the shifted value (U32, S32, U64, S64), whether the result
// is the upper half, and whether the distance wraps.
static void shift(Lanewise& on, bool left) {
    const u32 *low = on.raw(0), *by = on.raw(1), *high = on.raw(2);
    const int type = on.code.mode[0];
    const u32 most = type >= 2 ? 63 : 32;
    for (int l = 0; l < on.count; ++l) {
        const u32 n = on.code.mode[2] ? by[l] & (type >= 2 ? 63 : 31) : by[l] < most ? by[l] : most;
        const u64 both = static_cast<u64>(high[l]) << 32 | low[l];
        u64 value;
        if (left) {
            value = both << n;
        } else if (type == 3 || (type == 1 && on.code.mode[1])) {
            value = static_cast<u64>(static_cast<long long>(both) >> n);
        } else {
            value = both >> n;
        }
        // Without .HI the upper half is not an input of a 32-bit shift to the left.
        on.low.lane[l] = static_cast<u32>(on.code.mode[1] ? value >> 32 : value);
    }
}
static void do_SHIFT_LEFT(Lanewise& on) { shift(on, true); }
static void do_SHIFT_RIGHT(Lanewise& on) { shift(on, false); }

// (a << n) + b.
static void do_LEA(Lanewise& on) {
    const u32 *a = on.raw(0), *b = on.raw(1);
    const int a_flags = on.code.source[0].flags, b_flags = on.code.source[1].flags;
    for (int l = 0; l < on.count; ++l) {
        const u32 shifted = a[l] << on.code.mode[0];
        u64 sum = a_flags & NEGATED ? static_cast<u64>(~shifted) + 1 : shifted;
        sum += b_flags & NEGATED ? static_cast<u64>(~b[l]) + 1 : b_flags & INVERTED ? static_cast<u64>(~b[l]) : b[l];
        on.low.lane[l] = static_cast<u32>(sum);
        on.out[0] |= static_cast<u32>(sum >> 32 != 0) << l;
    }
}

// The upper half of (high:a << n), plus b. Mode 1: high is the sign of a. Mode 2: a carry is added.
static void do_LEAHI(Lanewise& on) {
    const bool of_sign = on.code.mode[1], carried = on.code.mode[2];
    const u32 *a = on.raw(0), *b = on.raw(1), *above = of_sign ? a : on.raw(2);
    const int a_flags = on.code.source[0].flags, b_flags = on.code.source[1].flags;
    const u32 carry = carried ? on.given(0) : 0;
    for (int l = 0; l < on.count; ++l) {
        const u32 high = of_sign ? static_cast<u32>(static_cast<int>(a[l]) >> 31) : above[l];
        u64 both = static_cast<u64>(high) << 32 | a[l];
        if (a_flags & NEGATED) both = 0 - both;
        u64 sum = static_cast<u32>(both << on.code.mode[0] >> 32);
        const bool plus_one = (b_flags & NEGATED) && !carried;  // with a carry, ~b + carry is -b
        sum += b_flags & (NEGATED | INVERTED) ? static_cast<u64>(~b[l]) + plus_one : b[l];
        sum += carry >> l & 1u;
        on.low.lane[l] = static_cast<u32>(sum);
        on.out[0] |= static_cast<u32>(sum >> 32 != 0) << l;
    }
}

static u32 least(u32 a, u32 b, bool is_unsigned, bool smallest) {
    const bool less = is_unsigned ? a < b : static_cast<int>(a) < static_cast<int>(b);
    return less == smallest ? a : b;
}
static void do_MINMAX(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1), smallest = on.given(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = least(a[l], b[l], on.code.mode[0], smallest >> l & 1u);
}
static void do_MINMAX3(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1), *c = on.integer(2), smallest = on.given(0);
    for (int l = 0; l < on.count; ++l) {
        const bool s = smallest >> l & 1u, is_unsigned = on.code.mode[0];
        on.low.lane[l] = least(least(a[l], b[l], is_unsigned, s), c[l], is_unsigned, s);
    }
}
static void do_ADDMINMAX(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1), *c = on.integer(2), smallest = on.given(0);
    for (int l = 0; l < on.count; ++l) {
        on.low.lane[l] = least(a[l] + b[l], c[l], on.code.mode[0], smallest >> l & 1u);
    }
}
// The place of the highest bit that is one; of a negative number (not U32), the highest that is zero.
static void do_FLO(Lanewise& on) {
    const u32* a = on.integer(0);
    for (int l = 0; l < on.count; ++l) {
        const u32 value = !on.code.mode[0] && (a[l] & SIGN) ? ~a[l] : a[l];
        const u32 place = value ? 31u - static_cast<u32>(__builtin_clz(value)) : ~0u;
        on.low.lane[l] = on.code.mode[1] && value ? 31u - place : place;
    }
}
static void do_POPC(Lanewise& on) {
    const u32* a = on.integer(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = static_cast<u32>(__builtin_popcount(a[l]));
}
static void do_BREV(Lanewise& on) {
    const u32* a = on.integer(0);
    for (int l = 0; l < on.count; ++l) {
        u32 value = 0;
        for (int k = 0; k < 32; ++k) value |= (a[l] >> k & 1u) << (31 - k);
        on.low.lane[l] = value;
    }
}
// A mask of b ones from bit a upwards.
static void do_BMSK(Lanewise& on) {
    const u32 *a = on.raw(0), *b = on.raw(1);
    for (int l = 0; l < on.count; ++l) {
        const u64 ones = b[l] >= 32 ? 0xffffffffull : (1ull << b[l]) - 1;
        on.low.lane[l] = a[l] >= 32 ? 0u : static_cast<u32>(ones << a[l]);
    }
}
// The low b bits of a, extended by their sign or by zeros (U32).
static void do_SGXT(Lanewise& on) {
    const u32 *a = on.raw(0), *b = on.raw(1);
    for (int l = 0; l < on.count; ++l) {
        const u32 bits = b[l] >= 32 ? 32 : b[l], unused = 32 - bits;
        const u32 moved = bits == 0 ? 0 : a[l] << unused;
        on.low.lane[l] = bits == 0         ? 0
                         : on.code.mode[0] ? moved >> unused
                                           : static_cast<u32>(static_cast<int>(moved) >> unused);
    }
}

// ---- moves and selections -------------------------------------------------------------------------------------------

static void do_MOV(Lanewise& on) {
    const u32* a = on.integer(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = a[l];
}
static void select(Lanewise& on, const u32* a, const u32* b) {
    const u32 first = on.given(0);
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = first >> l & 1u ? a[l] : b[l];
}
static void do_SEL(Lanewise& on) { select(on, on.integer(0), on.integer(1)); }
static void do_FSEL(Lanewise& on) { select(on, on.real(0), on.real(1)); }
static void do_PRMT(Lanewise& on) {
    const u32 *a = on.raw(0), *choice = on.raw(1), *b = on.raw(2);
    for (int l = 0; l < on.count; ++l) {
        const u64 both = static_cast<u64>(b[l]) << 32 | a[l];
        u32 value = 0;
        for (int k = 0; k < 4; ++k) {
            const u32 which = choice[l] >> (4 * k) & 15u, byte = static_cast<u32>(both >> (8 * (which & 7u))) & 0xffu;
            const u32 taken = which & 8u ? (byte & 0x80u ? 0xffu : 0u) : byte;  // bit 3: the sign of the byte
            value |= taken << (8 * k);
        }
        on.low.lane[l] = value;
    }
}
// Predicates P0 to P6 as bits, where b has ones; elsewhere a.
static void do_P2R(Lanewise& on) {
    const u32 *a = on.raw(0), *b = on.raw(1);
    for (int l = 0; l < on.count; ++l) {
        u32 bits = 0;
        for (int k = 0; k < 7; ++k) bits |= (on.warp.predicate[k] >> l & 1u) << k;
        on.low.lane[l] = (bits & b[l]) | (a[l] & ~b[l]);
    }
}
static void do_CLEAR(Lanewise& on) {
    for (int l = 0; l < on.count; ++l) on.low.lane[l] = on.high.lane[l] = 0;
    on.pair = on.code.mode[0] == 0;
}

// ---- predicates -----------------------------------------------------------------------------------------------------

static u32 combined(int with, u32 a, u32 b) { return with == 0 ? a & b : with == 1 ? a | b : a ^ b; }

// Comparisons in the order of decode.COMPARISONS.
static bool compared(int how, bool less, bool equal, bool unordered) {
    switch (how & 7) {
        case 0:
            return less || (how >= 8 && unordered);  // LT, LTU
        case 1:
            return less || equal || (how >= 8 && unordered);  // LE, LEU
        case 2:
            return (!less && !equal && !unordered) || (how >= 8 && unordered);  // GT, GTU
        case 3:
            return (!less && !unordered) || (how >= 8 && unordered);  // GE, GEU
        case 4:
            return how >= 8 ? !unordered : equal;  // EQ, NUM
        default:
            return how >= 8 ? unordered : !equal && !unordered;  // NE, NAN
    }
}
// The comparison's number in a row of 16: unordered ones from 8 on.
static int numbered(int mode) {
    constexpr int places[] = {0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 6, 7, 12, 13};
    return places[mode];
}
static bool ordered_or_not(int mode, bool less, bool equal, bool unordered) {
    const int how = numbered(mode);
    if (how == 6) return equal || unordered;   // EQU
    if (how == 7) return !equal || unordered;  // NEU
    return compared(how, less, equal, unordered);
}
static void set_predicates(Lanewise& on, u32 found) {
    const u32 given = on.given(0);
    on.out[0] = combined(on.code.mode[1], found, given);
    on.out[1] = combined(on.code.mode[1], ~found, given);
    on.writes = false;
}
static void do_ISETP(Lanewise& on) {
    const u32 *a = on.integer(0), *b = on.integer(1);
    const bool is_unsigned = on.code.mode[2], extended = on.code.mode[3];
    const u32 below = extended ? on.given(1) : 0;  // the result of the comparison of the lower halves
    u32 found = 0;
    for (int l = 0; l < on.count; ++l) {
        const bool less = is_unsigned ? a[l] < b[l] : static_cast<int>(a[l]) < static_cast<int>(b[l]),
                   equal = a[l] == b[l];
        bool is = compared(on.code.mode[0], less, equal, false);
        if (extended) {
            const bool lower = below >> l & 1u;
            const int how = on.code.mode[0];
            const bool decided = how <= 1 ? less : how <= 3 ? !less && !equal : how == 5 && !equal;
            is = decided || (equal && lower);
        }
        found |= static_cast<u32>(is) << l;
    }
    set_predicates(on, found);
}
static void do_FSETP(Lanewise& on) {
    const u32 *a = on.real(0, on.code.mode[2]), *b = on.real(1, on.code.mode[2]);
    u32 found = 0;
    for (int l = 0; l < on.count; ++l) {
        const float x = as_float(a[l]), y = as_float(b[l]);
        found |= static_cast<u32>(ordered_or_not(on.code.mode[0], x < y, x == y, x != x || y != y)) << l;
    }
    set_predicates(on, found);
}
static void do_DSETP(Lanewise& on) {
    double a[WARP], b[WARP];
    on.real64(0, a);
    on.real64(1, b);
    u32 found = 0;
    for (int l = 0; l < on.count; ++l) {
        const bool unordered = a[l] != a[l] || b[l] != b[l];
        found |= static_cast<u32>(ordered_or_not(on.code.mode[0], a[l] < b[l], a[l] == b[l], unordered)) << l;
    }
    set_predicates(on, found);
}
static void do_PLOP3(Lanewise& on) {
    const u32 a = on.given(0), b = on.given(1), c = on.given(2);
    for (int l = 0; l < on.count; ++l) {
        const u32 which = (a >> l & 1u) << 2 | (b >> l & 1u) << 1 | (c >> l & 1u);
        for (int k = 0; k < 2; ++k) on.out[k] |= (static_cast<u32>(on.code.mode[k]) >> which & 1u) << l;
    }
    on.writes = false;
}
// Whether a / b needs the slow path of a division: exponents near the limits.
static void do_FCHK(Lanewise& on) {
    const u32 *a = on.real(0), *b = on.real(1);
    for (int l = 0; l < on.count; ++l) {
        const int above = static_cast<int>(a[l] >> 23 & 255u) - 127, below = static_cast<int>(b[l] >> 23 & 255u) - 127;
        const int apart = above - below;
        bool slow = below >= 126 || below <= -126;
        if (a[l] & 0x7fffffffu) slow = slow || above == 128 || apart >= 126 || apart <= -125 || above <= -103;
        on.out[0] |= static_cast<u32>(slow) << l;
    }
    on.writes = false;
}

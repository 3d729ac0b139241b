// Guards, operands and results of an instruction, and the addresses that it accesses.

// A predicate, a bit per lane.
static u32 read(const Warp& warp, const Predicate& from) {
    u32 bits = ALL_LANES;
    if (from.index != TRUE_PREDICATE) {
        bits = from.uniform ? (warp.uniform_predicate[from.index] ? ALL_LANES : 0) : warp.predicate[from.index];
    }
    return from.negated ? ~bits : bits;
}
// The lanes of `mask` whose guard is true.
static u32 guarded(const Warp& warp, const Instruction& code, u32 mask) { return mask & read(warp, code.guard); }
static void put(Warp& warp, const Predicate& into, u32 bits, u32 mask) {
    if (!into.present || into.index == TRUE_PREDICATE) return;
    if (into.uniform) {
        warp.uniform_predicate[into.index] = bits & 1u;
    } else {
        warp.predicate[into.index] = (warp.predicate[into.index] & ~mask) | (bits & mask);
    }
}
static void put(Warp& warp, const Instruction& code, const u32* values, u32 mask, int second = 0) {
    if (code.destination_kind == KIND_UNIFORM) {
        if (code.destination != ZERO_UNIFORM) warp.uniform[code.destination + second] = values[0];
    } else if (code.destination != ZERO) {
        u32* row = warp.rows[static_cast<size_t>(code.destination + second)].lane;
        for (int l = 0; l < WARP; ++l) row[l] = mask >> l & 1u ? values[l] : row[l];
    }
}
static u32 scalar(const Warp& warp, const Operand& from, int l, int second = 0) {
    switch (from.kind) {
        case KIND_REGISTER:
            return from.index == ZERO ? 0 : warp.rows[static_cast<size_t>(from.index + second)].lane[l];
        case KIND_UNIFORM:
            return from.index == ZERO_UNIFORM ? 0 : warp.uniform[from.index + second];
        default:
            return second ? from.high : from.low;
    }
}
static u64 address_of(const Warp& warp, const Address& from, int l) {
    u64 address = static_cast<u64>(static_cast<long long>(from.offset));
    if (from.uniform >= 0 && from.uniform != ZERO_UNIFORM) {
        address += warp.uniform[from.uniform];
        if (from.wide_uniform) address += static_cast<u64>(warp.uniform[from.uniform + 1]) << 32;
    }
    if (from.base >= 0 && from.base != ZERO) {
        const size_t base = static_cast<size_t>(from.base);
        address += warp.rows[base].lane[l];
        if (from.wide) address += static_cast<u64>(warp.rows[base + 1].lane[l]) << 32;
    }
    return from.wide || from.wide_uniform ? address : static_cast<u32>(address);
}

// What a kernel inlines for its shuffles, votes and __syncwarp.

namespace cunorm_cpu {

__forceinline__ uint64_t exchange_inlined(Kind kind, unsigned mask, uint64_t value, unsigned source, const char* file,
                                          int line) {
    Stack* next = arrive(kind, mask, value, source, file, line);
    Stack* stack = self();
    if (next != stack) {
        switch_context(&stack->context, &next->context);
    }
    return stack->warp->result[stack->lane];
}

// Inlined, so that each place in the kernel has its own switch between fibers. Not inlined in the checked build, whose
// hooks would see the runtime's accesses.
#ifndef CUNORM_CPU_CHECKED
__forceinline__ uint64_t exchange(Kind kind, unsigned mask, uint64_t value, unsigned source, const char* file,
                                  int line) {
    return exchange_inlined(kind, mask, value, source, file, line);
}
#endif

// Lane from which a shuffle reads, by the rules of PTX shfl. If the source is outside the segment of `width` lanes, the
// lane reads its own value; but an xor may read from an earlier segment.
__forceinline__ unsigned shuffle_source(Kind kind, unsigned lane, unsigned operand, unsigned width) {
    const unsigned begin = lane & ~(width - 1), end = begin + width;
    operand &= lanes - 1;
    switch (kind) {
        case SHUFFLE:
            return begin | (operand & (width - 1));
        case SHUFFLE_XOR:
            return (lane ^ operand) < end ? lane ^ operand : lane;
        case SHUFFLE_UP:
            return lane >= begin + operand ? lane - operand : lane;
        default:
            return lane + operand < end ? lane + operand : lane;
    }
}

template <typename T>
__forceinline__ T shuffle(Kind kind, unsigned mask, T value, unsigned operand, int width, const char* file, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    if (width < 1 || width > lanes || (width & (width - 1)) != 0) {
        fault("%s (%s:%d): width %d, expected 1, 2, 4, 8, 16 or 32", name_of(kind), file, line, width);
    }
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(kind, mask, bits, shuffle_source(kind, self()->lane, operand, unsigned(width)), file, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace cunorm_cpu

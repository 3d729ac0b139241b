// The CPU executor's warps: shuffles, votes and __syncwarp. The lanes of a mask wait for each other there.

namespace cunorm_cpu {

// Called when the last lane of the mask has arrived: computes the results of all its lanes. One lane does this for all,
// because a lane may reach its next shuffle, with another mask, before its partners have read this one's values.
CUNORM_CPU_RUNTIME void deliver(Warp& warp, Stack* stack, Kind kind, unsigned mask) {
    unsigned differs = 0;
    for (unsigned i = 0; i < lanes; ++i) {
        differs |= unsigned(warp.kind[i] != kind) << i;
    }
    differs &= mask;
    if (differs != 0) {
        stack->kind = kind;
        fault_between(stack, "lanes of one mask disagree", stack->thread,
                      stack->thread - stack->lane + unsigned(__builtin_ctz(differs)));
    }
    if (kind < BALLOT) {
        for (unsigned i = 0; i < lanes; ++i) {  // all lanes, for speed; only the lanes of the mask store the result
            const uint64_t value = warp.value[warp.source[i] % lanes];
            warp.result[i] = mask >> i & 1u ? value : warp.result[i];
        }
        return;
    }
    unsigned votes = 0;
    for (unsigned i = 0; i < lanes; ++i) {
        votes |= unsigned(warp.value[i] & 1u) << i;
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        warp.result[__builtin_ctz(rest)] = votes & mask;
    }
}

// Called when every lane of the mask waits at some shuffle or vote. They complete this one only if they all wait with
// this mask; otherwise a lane still waits at an earlier shuffle with other partners.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE Stack* meet(Stack* stack) {
    Warp& warp = *stack->warp;
    const unsigned mask = stack->mask;
    if (present(warp, mask) != mask) {
        return successor(stack);
    }
    deliver(warp, stack, stack->kind, mask);
    lanes_met(*stack->worker, *stack->in, warp, stack->kind, mask);
    ++stack->worker->progress;
    warp.arrived &= ~mask;
    warp.ready |= mask;
    return stack;
}

[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void not_in_mask(Stack* stack, unsigned source) {
    const bool own = (stack->mask >> stack->lane & 1u) == 0;
    fault("%s (%s:%d): lane %u, %s, is not in mask 0x%08x", name_of(stack->kind), stack->file, stack->line,
          own ? stack->lane : source, own ? "the calling lane" : "from which it reads", stack->mask);
}

// Called when a lane arrives at a shuffle or vote. Returns the thread that runs next: this lane's thread if it was the
// last to arrive.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE Stack* arrive(Kind kind, unsigned mask, uint64_t value, unsigned source,
                                                     const char* file, int line) {
    Stack* stack = self();
    Warp& warp = *stack->warp;
    const unsigned lane = stack->lane, bit = 1u << lane;
    note_place(stack, kind, mask, file, line);
    if (__builtin_expect((mask & bit) == 0 || (mask >> source & 1u) == 0, 0)) {
        not_in_mask(stack, source);
    }
    warp.value[lane] = value;
    warp.source[lane] = source;
    warp.mask[lane] = mask;
    warp.kind[lane] = kind;
    warp.arrived |= bit;
    return (warp.arrived & mask) == mask ? meet(stack) : successor(stack);
}

// Inlined, so that each place in the kernel has its own switch between fibers. Not inlined in the checked build, whose
// hooks would see the runtime's accesses.
#ifdef CUNORM_CPU_CHECKED
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE
#else
__forceinline__
#endif
uint64_t exchange(Kind kind, unsigned mask, uint64_t value, unsigned source, const char* file, int line) {
    Stack* next = arrive(kind, mask, value, source, file, line);
    Stack* stack = self();
    if (next != stack) {
        switch_context(&stack->context, &next->context);
    }
    return stack->warp->result[stack->lane];
}

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

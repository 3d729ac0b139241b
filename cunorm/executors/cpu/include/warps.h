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
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED Stack* arrive(Kind kind, unsigned mask, uint64_t value, unsigned source,
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

#ifdef CUNORM_CPU_CHECKED
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED uint64_t exchange(Kind kind, unsigned mask, uint64_t value, unsigned source,
                                                       const char* file, int line) {
    return exchange_inlined(kind, mask, value, source, file, line);
}
#endif

}  // namespace cunorm_cpu

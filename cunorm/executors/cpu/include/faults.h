// The CPU executor's faults: messages that name the broken rule and the thread, and the switch from a fiber to the
// host.
//
// A place in the kernel is written "@{address}". The host replaces it by file and line if it can find them.

namespace cunorm_cpu {

// Abandons all fibers and ends the launch. The next launch initialises its stacks anew.
[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void abandon(Stack* stack) {
    Worker& worker = *stack->worker;
    worker.status = faulted;
    __atomic_store_n(&worker.launch->stop, 1, __ATOMIC_RELAXED);
    switch_context(&stack->context, &worker.host);
    abort();
}

// Ends the launch with a message about the running thread.
[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED_COLD void fault(const char* format, ...) {
    Stack* stack = self();
    Worker& worker = *stack->worker;
    int used = snprintf(worker.text, size_t(worker.text_size), "kernel %s, block %u: thread %u: ", worker.kernel,
                        stack->block, stack->thread);
    used = used < worker.text_size ? used : worker.text_size - 1;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(worker.text + used, size_t(worker.text_size - used), format, arguments);
    va_end(arguments);
    abandon(stack);
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED_COLD const char* name_of(unsigned kind) {
    static const char* const names[] = {"__syncthreads",  "__syncwarp",     "__shfl_sync",   "__shfl_xor_sync",
                                        "__shfl_up_sync", "__shfl_down_sync", "__ballot_sync", "__any_sync",
                                        "__all_sync",     "a polled word",  "an mbarrier",   "the cluster's barrier"};
    return names[kind];
}

// Lanes of the mask that wait with exactly this mask. A lane may still wait at an earlier shuffle with other partners.
CUNORM_CPU_RUNTIME unsigned present(const Warp& warp, unsigned mask) {
    unsigned there = 0;
    for (unsigned i = 0; i < lanes; ++i) {
        there |= unsigned(warp.mask[i] == mask) << i;
    }
    return there & warp.arrived & mask;
}

// Writes "thread 5 waits at __syncthreads (file.cu:12)" or "thread 5 has ended".
CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void describe(const Worker& worker, const Block& block, unsigned thread, char* text,
                                                 size_t size) {
    const Stack* stack = block.warp[thread / lanes].stack[thread % lanes];
    char whose[40] = "";
    if (worker.slots > 1) {
        snprintf(whose, sizeof whose, " of block %u", block.index);
    }
    if (stack == nullptr) {
        snprintf(text, size, "thread %u%s has ended", thread, whose);
    } else if (stack->kind >= SYNCWARP && stack->kind <= ALL) {
        snprintf(text, size, "thread %u%s waits at %s with mask 0x%08x (%s:%d)", thread, whose, name_of(stack->kind),
                 stack->mask, stack->file, stack->line);
    } else {
        snprintf(text, size, "thread %u%s waits at %s (%s:%d)", thread, whose, name_of(stack->kind), stack->file,
                 stack->line);
    }
}

CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void word(Worker& worker, const char* what, const Block& block, unsigned waiting,
                                             const Block& elsewhere, unsigned other) {
    char first[400], second[400];
    describe(worker, block, waiting, first, sizeof first);
    describe(worker, elsewhere, other, second, sizeof second);
    snprintf(worker.text, size_t(worker.text_size), "kernel %s, block %u: %s: %s, %s", worker.kernel, block.index, what,
             first, second);
}

[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void fault_between(Stack* stack, const char* what, unsigned waiting,
                                                                   unsigned other) {
    word(*stack->worker, what, *stack->in, waiting, *stack->in, other);
    abandon(stack);
}

// Writes the message of a deadlock: a waiting thread, and a thread for which it waits. It prefers a thread at a shuffle
// to one at a barrier, and one at a barrier to one that polls. This order is nearest to the cause: usually the lanes
// that are missing at the shuffle are the ones that wait at the barrier.
CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void word_deadlock(Worker& worker) {
    const unsigned threads = unsigned(worker.launch->threads);
    const Block* found = nullptr;
    unsigned waiting = 0;
    for (unsigned slot = 0; slot < worker.slots; ++slot) {
        const Block& block = worker.block[slot];
        for (unsigned thread = 0; thread < threads && block.live != 0; ++thread) {
            const Warp& warp = block.warp[thread / lanes];
            const Stack* at = warp.stack[thread % lanes];
            if (at == nullptr) {
                continue;
            }
            if (at->kind >= SYNCWARP && at->kind <= ALL) {
                const unsigned missing = at->mask & ~present(warp, at->mask);
                if (missing != 0) {
                    word(worker, "a lane of the mask is missing", block, thread, block,
                         thread / lanes * lanes + unsigned(__builtin_ctz(missing)));
                    return;
                }
            }
            if (found == nullptr ||
                (at->kind == BARRIER && found->warp[waiting / lanes].stack[waiting % lanes]->kind != BARRIER)) {
                found = &block;
                waiting = thread;
            }
        }
    }
    if (found == nullptr) {
        snprintf(worker.text, size_t(worker.text_size), "kernel %s: deadlock", worker.kernel);
        return;
    }
    const Stack* first = found->warp[waiting / lanes].stack[waiting % lanes];
    const Block* elsewhere = found;
    unsigned other = waiting;
    for (unsigned slot = worker.slots; slot-- > 0;) {  // a thread that does not wait where the first one does
        const Block& block = worker.block[slot];
        for (unsigned thread = threads; thread-- > 0;) {
            const Stack* at = block.warp[thread / lanes].stack[thread % lanes];
            if (block.gang == found->gang && (at == nullptr || at->kind != first->kind || at->polled != first->polled)) {
                elsewhere = &block;
                other = thread;
            }
        }
    }
    word(worker, "deadlock", *found, waiting, *elsewhere, other);
}

[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void deadlock(Stack* stack) {
    word_deadlock(*stack->worker);
    abandon(stack);
}

}  // namespace cunorm_cpu

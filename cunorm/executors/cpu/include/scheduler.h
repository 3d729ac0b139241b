// The CPU executor's scheduler: selects the fiber that runs next, and implements the waits.

namespace cunorm_cpu {

// ---- the scheduler's events (defined in memory.h or events.h) -------------------------------------------------------

void leave_block(Worker& worker, Block& block);  // called when the worker switches to another block
void enter_block(Worker& worker, Block& block);
void lanes_met(Worker& worker, Block& block, Warp& warp, Kind kind, unsigned mask);
void block_met(Worker& worker, Block& block);
void warp_ended(Worker& worker, Block& block, Warp& warp);
void thread_ends(Worker& worker, Stack* stack);

// ---- the scheduler --------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME unsigned next_random(uint64_t& state) {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return unsigned((z ^ (z >> 31)) >> 32);
}

// Index of a set bit of a nonzero word, selected by the launch's order.
CUNORM_CPU_RUNTIME unsigned choose(long long order, uint64_t& random, unsigned bits) {
    if (order == ASCENDING) {
        return unsigned(__builtin_ctz(bits));
    }
    if (order == DESCENDING) {
        return 31u - unsigned(__builtin_clz(bits));
    }
    unsigned skip = unsigned((uint64_t(next_random(random)) * unsigned(__builtin_popcount(bits))) >> 32);
    while (skip-- > 0) {
        bits &= bits - 1;
    }
    return unsigned(__builtin_ctz(bits));
}

// A block with a ready thread, preferably not the running block; null if no block has one.
CUNORM_CPU_RUNTIME Block* ready_block(Worker& worker) {
    const unsigned slots = worker.slots, now = worker.running->slot;
    const unsigned skip = worker.order == RANDOM ? next_random(worker.random) % slots : 0;
    for (unsigned i = 1; i <= slots; ++i) {
        const unsigned step = (i + skip) % slots;
        Block& block = worker.block[worker.order == DESCENDING ? (now + slots - step) % slots : (now + step) % slots];
        if (block.live != 0 && block.ready_warps != 0) {
            return &block;
        }
    }
    return nullptr;
}

// Consecutive wake-ups without progress before a launch counts as deadlocked: a thread may read one word several times
// without waiting for it.
constexpr unsigned patience = 10000;

// No thread is ready: makes the polling threads ready, so that they poll again. Returns false if there are none, or if
// all workers are stalled and these threads have polled more than `patience` times since.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE bool wake(Worker& worker) {
    Launch& launch = *worker.launch;
    if (worker.progress != worker.progress_seen) {
        worker.progress_seen = worker.progress;
        if (worker.stalls != 0) {
            __atomic_fetch_sub(&launch.stalled, 1, __ATOMIC_SEQ_CST);
        }
        worker.stalls = 0;
    } else {
        if (worker.stalls == 0) {
            __atomic_fetch_add(&launch.stalled, 1, __ATOMIC_SEQ_CST);
        }
        ++worker.stalls;
        // Blocks on other cores may still write the values for which these blocks wait. A deadlock therefore needs
        // enough failed wake-ups while all workers are stalled.
        const bool all = __atomic_load_n(&launch.stalled, __ATOMIC_SEQ_CST) >=
                         __atomic_load_n(&launch.workers, __ATOMIC_SEQ_CST);
        if (all && worker.stalls > patience) {
            return false;
        }
        if (!all) {
            sched_yield();
            worker.stalls = 1;
        }
    }
    bool any = false;
    for (unsigned slot = 0; slot < worker.slots; ++slot) {
        Block& block = worker.block[slot];
        for (unsigned rest = block.live != 0 ? block.polling_warps : 0; rest != 0; rest &= rest - 1) {
            Warp& warp = block.warp[__builtin_ctz(rest)];
            warp.ready |= warp.polling;
            warp.polling = 0;
            any = true;
        }
        block.ready_warps |= block.polling_warps;
        block.polling_warps = 0;
    }
    return any;
}

// Selects the next ready thread. In a round, every ready lane of a warp runs once. Returns false if no thread is ready.
CUNORM_CPU_RUNTIME bool pick(Worker& worker, unsigned& lane) {
    Block* block = worker.running;
    unsigned turn = block->pending & block->warp[block->current].ready;
    if (turn == 0) {
        const bool random = worker.order == RANDOM;
        if (random || (block->ready_warps >> block->current & 1) == 0) {
            if (block->ready_warps == 0 || block->live == 0 || (random && worker.slots > 1)) {
                Block* next = ready_block(worker);
                if (next == nullptr) {
                    if (!wake(worker)) {
                        return false;
                    }
                    next = ready_block(worker);
                }
                if (next != block) {
                    leave_block(worker, *block);
                    worker.running = next;
                    enter_block(worker, *next);
                    block = next;
                }
            }
            block->current = choose(worker.order, block->random, block->ready_warps);
        }
        turn = block->warp[block->current].ready;
    }
    lane = choose(worker.order, block->random, turn);
    block->pending = turn & ~(1u << lane);
    return true;
}

CUNORM_CPU_RUNTIME void start(Worker& worker, Stack* stack, Warp& warp, unsigned lane) {
    Block& block = *worker.running;
    stack->thread = block.current * lanes + lane;
    stack->block = block.index;
    stack->rank = block.rank;
    stack->id = block.rank * stack->threads + stack->thread;
    stack->arena = block.arena;
    stack->in = &block;
    stack->warp = &warp;
    stack->lane = lane;
    stack->polled = stack->seen = 0;
    stack->loads = stack->granted_bytes = 0;
    stack->copies = stack->stores = 0;
    stack->owes = stack->in_cluster_barrier = false;
    warp.stack[lane] = stack;
}

// The fiber function: runs one CUDA thread after another on its stack, and never returns.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void run_threads() {
    Stack* stack = self();
    Worker& worker = *stack->worker;
    for (;;) {
        worker.call(worker.arguments);

        Block& block = *stack->in;
        const unsigned bit = 1u << stack->lane;
        Warp& ending = *stack->warp;
        thread_ends(worker, stack);
        ++worker.progress;
        ending.stack[stack->lane] = nullptr;
        ending.ready &= ~bit;
        if (ending.ready == 0) {
            block.ready_warps &= ~(1u << block.current);
        }
        if ((ending.live &= ~bit) == 0) {
            warp_ended(worker, block, ending);
        }
        unsigned lane;
        Context* next = &worker.host;
        if (--block.live != 0 || --block.gang->alive != 0) {
            if (!pick(worker, lane)) {
                deadlock(stack);
            }
            Warp& warp = worker.running->warp[worker.running->current];
            if (warp.stack[lane] == nullptr) {  // a thread that has not started: run it on this stack
                start(worker, stack, warp, lane);
                continue;
            }
            next = &warp.stack[lane]->context;
        }
        worker.idle_stack[worker.idle++] = stack;
        switch_context(&stack->context, next);
    }
}

// Returns a stack for a new thread: an idle one, whose fiber resumes in run_threads, or a fresh one, whose fiber starts
// there.
CUNORM_CPU_RUNTIME Stack* take_stack(Worker& worker) {
    if (worker.idle != 0) {
        return worker.idle_stack[--worker.idle];
    }
    char* base = worker.stacks + uintptr_t(worker.fresh++) * stack_bytes;
    Stack* stack = stack_at(reinterpret_cast<uintptr_t>(base));
    stack->threads = unsigned(worker.launch->threads);
    stack->grid = unsigned(worker.launch->grid);
    stack->cluster = unsigned(worker.launch->cluster);
    stack->worker = &worker;
    make_context(&stack->context, base, reinterpret_cast<char*>(stack), run_threads);
    return stack;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE Stack* next_stack(Worker& worker, unsigned lane) {
    Warp& warp = worker.running->warp[worker.running->current];
    if (warp.stack[lane] == nullptr) {
        start(worker, take_stack(worker), warp, lane);
    }
    return warp.stack[lane];
}

bool due(const Watch* watch);

// Called between two turns. Leaves the fibers for good if the launch must stop. Leaves them temporarily if a check for
// signals is due, because signal handlers need the stack of the operating-system thread.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void pause(Stack* stack) {
    Worker& worker = *stack->worker;
    const bool stop = __atomic_load_n(&worker.launch->stop, __ATOMIC_RELAXED) != 0;
    if (stop || due(worker.watch)) {
        worker.status = stop ? stopped : looking;
        worker.paused = stack;
        switch_context(&stack->context, &worker.host);
    }
}

constexpr unsigned turns_between_pauses = 64;

// Selects the next thread by the launch's order; if the warp's round is over, from the next round of any warp.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE Stack* next_turn(Stack* stack) {
    Worker& worker = *stack->worker;
    Block& block = *stack->in;
    if (__builtin_expect(++worker.turns % turns_between_pauses == 0, 0)) {
        pause(stack);
    }
    if (stack->warp->ready == 0) {
        block.ready_warps &= ~(1u << block.current);
    }
    unsigned lane;
    if (!pick(worker, lane)) {
        deadlock(stack);
    }
    return next_stack(worker, lane);
}

// Returns the thread that runs after the running one, which must wait and has called note_place(). It may be the same
// thread, if it polls. In the usual case (the next lane of the round) every call is a tail call, so that no register is
// saved.
__forceinline__ Stack* successor(Stack* stack) {
    Warp& warp = *stack->warp;
    Block& block = *stack->in;
    const unsigned turn = block.pending & (warp.ready &= ~(1u << stack->lane));
    if (__builtin_expect(turn == 0 || stack->worker->order != ASCENDING, 0)) {
        return next_turn(stack);
    }
    block.pending = turn & (turn - 1);
    Stack* next = warp.stack[__builtin_ctz(turn)];
    return __builtin_expect(next != nullptr, 1) ? next : next_stack(*stack->worker, unsigned(__builtin_ctz(turn)));
}

__forceinline__ void note_place(Stack* stack, Kind kind, unsigned mask, const char* file, int line) {
    stack->kind = kind;
    stack->mask = mask;
    stack->file = file;
    stack->line = line;
}

// Switches to another thread. Returns after another thread has made this one ready and the scheduler has selected it.
CUNORM_CPU_RUNTIME void wait(Stack* stack, Kind kind, unsigned mask, const char* file, int line) {
    note_place(stack, kind, mask, file, line);
    Stack* next = successor(stack);
    if (next != stack) {
        switch_context(&stack->context, &next->context);
    }
}

// ---- waits ----------------------------------------------------------------------------------------------------------

// Called by a thread that has read `seen` at `address` and may be spinning on it: all other threads run first. It
// counts as progress only if the value differs from the thread's last one.
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void poll(Kind kind, const volatile void* address, uint64_t seen,
                                               const char* file, int line) {
    Stack* stack = self();
    const uint64_t polled = reinterpret_cast<uintptr_t>(address);
    if (address != nullptr) {
        stack->worker->progress += stack->polled == polled && stack->seen != seen;
        stack->polled = polled;
        stack->seen = seen;
    }
    stack->warp->polling |= 1u << stack->lane;
    stack->in->polling_warps |= 1u << (stack->thread / lanes);
    wait(stack, kind, 0, file, line);
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void barrier(const char* file, int line) {
    Stack* stack = self();
    Block& block = *stack->in;
    if (block.at_barrier == 0) {
        block.barrier_file = file;
        block.barrier_line = line;
        block.barrier_thread = stack->thread;
    } else if (block.barrier_line != line || strcmp(block.barrier_file, file) != 0) {
        stack->kind = BARRIER;
        stack->file = file;
        stack->line = line;
        fault_between(stack, "divergent barrier", stack->thread, block.barrier_thread);
    }
    if (++block.at_barrier < stack->threads) {
        wait(stack, BARRIER, 0, file, line);
        return;
    }
    ++stack->worker->progress;
    block.at_barrier = 0;
    block_met(*stack->worker, block);
    for (unsigned i = 0; i < block.warps; ++i) {
        block.warp[i].ready = ~0u;
    }
    block.ready_warps = ~0u >> (lanes - block.warps);
}

// Returns the number of threads of the block whose predicate is true. There are two counters, because a thread may
// start its next count before a slow thread has read this one.
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED int barrier_count(bool mine, const char* file, int line) {
    Block& block = *self()->in;
    if (block.at_barrier == 0) {
        block.counts[block.counted & 1] = 0;
    }
    const unsigned parity = block.counted & 1;
    block.counts[parity] += mine;
    if (block.at_barrier + 1 == self()->threads) {
        ++block.counted;
    }
    barrier(file, line);
    return int(block.counts[parity]);
}

}  // namespace cunorm_cpu

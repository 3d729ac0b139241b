// The CPU executor's scheduler: which fiber runs next, what a thread waits for, how a block and a launch begin and end.

namespace cunorm_cpu {

// ---- the scheduler --------------------------------------------------------------------------------------------------

inline unsigned next_random(Worker& worker) {  // splitmix64
    uint64_t z = worker.random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return unsigned((z ^ (z >> 31)) >> 32);
}

// One set bit of a word that has some, by the launch's order.
inline unsigned choose(Worker& worker, unsigned bits) {
    if (worker.order == ASCENDING) {
        return unsigned(__builtin_ctz(bits));
    }
    if (worker.order == DESCENDING) {
        return 31u - unsigned(__builtin_clz(bits));
    }
    unsigned skip = unsigned((uint64_t(next_random(worker)) * unsigned(__builtin_popcount(bits))) >> 32);
    while (skip-- > 0) {
        bits &= bits - 1;
    }
    return unsigned(__builtin_ctz(bits));
}

// The next thread that can run: a round gives every ready lane of a warp one turn. False if there is none.
inline bool pick(Worker& worker, unsigned& lane) {
    unsigned turn = worker.pending & worker.warp[worker.current].ready;
    if (turn == 0) {
        if (worker.order == RANDOM || (worker.ready_warps >> worker.current & 1) == 0) {
            if (worker.ready_warps == 0) {
                return false;
            }
            worker.current = choose(worker, worker.ready_warps);
        }
        turn = worker.warp[worker.current].ready;
    }
    lane = choose(worker, turn);
    worker.pending = turn & ~(1u << lane);
    return true;
}

inline void start(Worker& worker, Stack* stack, Warp& warp, unsigned lane) {
    stack->thread = worker.current * lanes + lane;
    stack->block = worker.block;
    stack->warp = &warp;
    stack->lane = lane;
    warp.stack[lane] = stack;
}

// What runs on every stack, for ever: one CUDA thread after another.
inline CUNORM_CPU_NOINLINE void run_threads() {
    Stack* stack = self();
    Worker& worker = *stack->worker;
    for (;;) {
        worker.call(worker.arguments);

        const unsigned bit = 1u << stack->lane;
        Warp& ending = *stack->warp;
        ending.stack[stack->lane] = nullptr;
        ending.ready &= ~bit;
        if (ending.ready == 0) {
            worker.ready_warps &= ~(1u << worker.current);
        }
        unsigned lane;
        Context* next = &worker.host;
        if (--worker.live != 0) {
            if (!pick(worker, lane)) {
                deadlock(stack);
            }
            Warp& warp = worker.warp[worker.current];
            if (warp.stack[lane] == nullptr) {  // a thread that has not started: on this very stack
                start(worker, stack, warp, lane);
                continue;
            }
            next = &warp.stack[lane]->context;
        }
        worker.idle_stack[worker.idle++] = stack;
        switch_context(&stack->context, next);
    }
}

// A stack for a new thread: an idle one, which wakes up in run_threads, or a fresh one, which starts there.
inline Stack* take_stack(Worker& worker) {
    if (worker.idle != 0) {
        return worker.idle_stack[--worker.idle];
    }
    char* base = worker.stacks + uintptr_t(worker.fresh++) * stack_bytes;
    Stack* stack = stack_at(reinterpret_cast<uintptr_t>(base));
    stack->threads = unsigned(worker.launch->threads);
    stack->grid = unsigned(worker.launch->grid);
    stack->arena = worker.arena;
    stack->worker = &worker;
    make_context(&stack->context, base, reinterpret_cast<char*>(stack), run_threads);
    return stack;
}

inline Stack* next_stack(Worker& worker, unsigned lane) {
    Warp& warp = worker.warp[worker.current];
    if (warp.stack[lane] == nullptr) {
        start(worker, take_stack(worker), warp, lane);
    }
    return warp.stack[lane];
}

// The running thread cannot go on: hands over. Returns when somebody has made it ready and its turn has come.
inline void wait(Stack* stack, Kind kind, unsigned mask, const char* file, int line) {
    Worker& worker = *stack->worker;
    stack->kind = kind;
    stack->mask = mask;
    stack->file = file;
    stack->line = line;
    Warp& warp = *stack->warp;
    warp.ready &= ~(1u << stack->lane);
    if (warp.ready == 0) {
        worker.ready_warps &= ~(1u << worker.current);
    }
    unsigned lane;
    if (!pick(worker, lane)) {
        deadlock(stack);
    }
    switch_context(&stack->context, &next_stack(worker, lane)->context);
}

// ---- waits ----------------------------------------------------------------------------------------------------------

// A race detector would start a new epoch of the block's shared memory where the barrier opens.
inline CUNORM_CPU_NOINLINE void barrier(const char* file, int line) {
    Stack* stack = self();
    Worker& worker = *stack->worker;
    if (worker.at_barrier == 0) {
        worker.barrier_file = file;
        worker.barrier_line = line;
        worker.barrier_thread = stack->thread;
    } else if (worker.barrier_line != line || strcmp(worker.barrier_file, file) != 0) {
        stack->kind = BARRIER;
        stack->file = file;
        stack->line = line;
        fault_between(stack, "divergent barrier", stack->thread, worker.barrier_thread);
    }
    if (++worker.at_barrier < stack->threads) {
        wait(stack, BARRIER, 0, file, line);
        return;
    }
    worker.at_barrier = 0;
    for (unsigned i = 0; i < worker.warps; ++i) {
        worker.warp[i].ready = ~0u;
    }
    worker.ready_warps = ~0u >> (lanes - worker.warps);
}

// The last lane of the mask has arrived: gives every lane its result. Done by one lane for all, because a lane may be
// at its next shuffle, with another mask, before its partners read.
inline void deliver(Warp& warp, Stack* stack, Kind kind, unsigned mask) {
    unsigned differs = 0, votes = 0;
    for (unsigned i = 0; i < lanes; ++i) {
        differs |= unsigned(warp.kind[i] != kind) << i;
        votes |= unsigned(warp.value[i] & 1u) << i;
    }
    differs &= mask;
    if (differs != 0) {
        stack->kind = kind;
        fault_between(stack, "lanes of one mask disagree", stack->thread,
                      stack->thread - stack->lane + unsigned(__builtin_ctz(differs)));
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const unsigned i = unsigned(__builtin_ctz(rest));
        warp.result[i] = kind >= BALLOT ? votes & mask : warp.value[warp.source[i]];
    }
}

inline CUNORM_CPU_NOINLINE uint64_t exchange(Kind kind, unsigned mask, uint64_t value, unsigned source,
                                             const char* file, int line) {
    Stack* stack = self();
    Warp& warp = *stack->warp;
    const unsigned lane = stack->lane, bit = 1u << lane;
    if ((mask & bit) == 0 || (mask >> source & 1u) == 0) {
        fault("%s (%s:%d): lane %u, which it %s, is not in mask 0x%08x", name_of(kind), file, line,
              (mask & bit) == 0 ? lane : source, (mask & bit) == 0 ? "is" : "reads from", mask);
    }
    warp.value[lane] = value;
    warp.source[lane] = source;
    warp.mask[lane] = mask;
    warp.kind[lane] = kind;
    warp.arrived |= bit;
    if ((warp.arrived & mask) == mask && present(warp, mask) == mask) {
        stack->mask = mask;
        stack->file = file;
        stack->line = line;
        deliver(warp, stack, kind, mask);
        warp.arrived &= ~mask;
        warp.ready |= mask;
    } else {
        wait(stack, kind, mask, file, line);
    }
    return warp.result[lane];
}

// Lane that a shuffle reads from, by the rules of PTX shfl: out of the segment of `width` lanes means oneself, but an
// xor may reach an earlier segment.
inline unsigned shuffle_source(Kind kind, unsigned lane, unsigned operand, unsigned width) {
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

// ---- memory ---------------------------------------------------------------------------------------------------------

__forceinline__ void* shared_memory() { return self()->arena; }

// A kernel says how much of the arena its arrays take up: the host's formula for the launch must cover it.
inline void claim_shared(long long bytes) {
    if (bytes > self()->worker->launch->shared_bytes) {
        fault("the kernel's arrays take %lld bytes of shared memory, the launch gave %lld", bytes,
              self()->worker->launch->shared_bytes);
    }
}

inline CUNORM_CPU_COLD void misaligned(const void* address, unsigned bytes, bool store) {
    fault("misaligned %u-byte %s at 0x%llx", bytes, store ? "store" : "load",
          static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)));
}

// Every access to global memory comes by here. Bounds, and the counters of bytes and sectors, belong here too, behind a
// word of the Launch that says which of them are wanted.
__forceinline__ void touch(const void* address, unsigned bytes, bool store) {
    if (__builtin_expect(reinterpret_cast<uintptr_t>(address) % bytes != 0, 0)) {
        misaligned(address, bytes, store);
    }
}

// ---- a launch -------------------------------------------------------------------------------------------------------

inline void run_block(Worker& worker, unsigned block) {
    const Launch& launch = *worker.launch;
    const unsigned warps = unsigned(launch.threads) / lanes;
    worker.block = block;
    worker.warps = warps;
    worker.ready_warps = ~0u >> (lanes - warps);
    worker.pending = 0;
    worker.live = unsigned(launch.threads);
    worker.at_barrier = 0;
    worker.random = uint64_t(launch.seed) * 0xd1342543de82ef95u + block;  // not dependent on who runs the block
    for (unsigned i = 0; i < warps; ++i) {
        Warp& warp = worker.warp[i];
        warp.ready = ~0u;
        warp.arrived = 0;
        memset(warp.stack, 0, sizeof warp.stack);
    }
    memset(worker.arena, 0xff, size_t(launch.shared_bytes));  // what shared memory holds at first is nobody's business
    worker.current = choose(worker, worker.ready_warps);
    unsigned lane;
    pick(worker, lane);
    switch_context(&worker.host, &next_stack(worker, lane)->context);
}

// Runs blocks of the launch until none is left. `worker` is memory of this operating-system thread alone.
inline CUNORM_CPU_NOINLINE int run(const char* kernel, void (*call)(const uint64_t*), Launch* launch, Worker* worker,
                                   char* stacks, char* arena, char* text, int text_size) {
    worker->launch = launch;
    worker->arguments = launch->arguments;
    worker->call = call;
    worker->kernel = kernel;
    worker->order = launch->order;
    worker->stacks = stacks;
    worker->arena = arena;
    worker->text = text;
    worker->text_size = text_size;
    worker->status = done;
    worker->fresh = worker->idle = 0;
    while (worker->status == done) {
        const long long block = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED);
        if (block >= launch->last) {
            break;
        }
        run_block(*worker, unsigned(block));
    }
    return int(worker->status);
}

// Kernel parameters from 8-byte slots. Their letters tell the host how to pack them.
template <typename T>
struct Parameter {
    static_assert(sizeof(T) == 0, "kernel parameters are pointers, long long and double only");
};
template <typename T>
struct Parameter<T*> {
    static constexpr char letter = 'P';
};
template <>
struct Parameter<long long> {
    static constexpr char letter = 'q';
};
template <>
struct Parameter<double> {
    static constexpr char letter = 'd';
};

template <typename T>
__forceinline__ T argument(const uint64_t* slot) {
    static_assert(sizeof(T) == sizeof *slot, "64-bit pointers");
    T value;
    memcpy(&value, slot, sizeof value);
    return value;
}

template <int... index>
struct Indices {};
template <int count, int... index>
struct IndicesUpTo : IndicesUpTo<count - 1, count - 1, index...> {};
template <int... index>
struct IndicesUpTo<0, index...> {
    typedef Indices<index...> type;
};

template <typename... T, int... index>
__forceinline__ void call(void (*kernel)(T...), const uint64_t* arguments, Indices<index...>) {
    (void)arguments;  // of a kernel without parameters
    kernel(argument<T>(arguments + index)...);
}
template <typename... T>
__forceinline__ void call(void (*kernel)(T...), const uint64_t* arguments) {
    call(kernel, arguments, typename IndicesUpTo<int(sizeof...(T))>::type{});
}
template <typename... T>
const char* signature(void (*)(T...)) {
    static const char letters[] = {Parameter<T>::letter..., '\0'};
    return letters;
}

struct Index {
    unsigned x;
    static constexpr unsigned y = 0, z = 0;
};
struct Extent {
    unsigned x;
    static constexpr unsigned y = 1, z = 1;
};

}  // namespace cunorm_cpu

// The host writes CUNORM_CPU_ENTRY(name) below the text.
#define CUNORM_CPU_ENTRY(name) \
    static void cunorm_cpu_call_##name(const uint64_t* arguments) { cunorm_cpu::call(&::name, arguments); } \
    extern "C" __attribute__((visibility("default"))) const char* cunorm_cpu_signature() { \
        return cunorm_cpu::signature(&::name); \
    } \
    extern "C" __attribute__((visibility("default"))) long long cunorm_cpu_worker_bytes() { \
        return (long long)sizeof(cunorm_cpu::Worker); \
    } \
    extern "C" __attribute__((visibility("default"))) int cunorm_cpu_run( \
        cunorm_cpu::Launch* launch, cunorm_cpu::Worker* worker, char* stacks, char* arena, char* text, int size) { \
        return cunorm_cpu::run(#name, cunorm_cpu_call_##name, launch, worker, stacks, arena, text, size); \
    }

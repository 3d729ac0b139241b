// The CPU executor's runtime: this file, cpu_scheduler.h and cpu_builtins.h stand, in this order, on top of the CUDA
// text, which a C++17 compiler then takes as it is.
//
// A CUDA thread is a fiber, a block a set of fibers. A thread that must wait (barrier, shuffle, vote) hands over to the
// next thread that can run; if none can, the launch ends with a fault that says who waits for whom. Warps run one after
// another, each as far as it can, so that 32 stacks stay in the first-level cache; in random order the next round of
// lanes goes to any warp that can run.
//
// No state is global. A fiber finds its Stack header, and through it everything else, from its own stack pointer, so
// several operating-system threads run disjoint blocks of one launch at the same time. C headers only: with the C++
// library some compilers take a minute.

// In C++ compilers ask the C library for every extension; those take up names, such as `finite`, that kernels define.
#undef _GNU_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUNORM_CPU 1
#if defined(__x86_64__) && defined(__linux__) && !defined(CUNORM_CPU_UCONTEXT)
#define CUNORM_CPU_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// __shared__ is left undefined: a static would be one address for every block; use shared memory's one door.

#define CUNORM_CPU_NOINLINE __attribute__((noinline))
#define CUNORM_CPU_COLD __attribute__((noinline, cold))

// ---- context switch -------------------------------------------------------------------------------------------------

#ifdef CUNORM_CPU_ASSEMBLY

// Saves the registers that a call preserves (System V) and the stack pointer, takes on the other's. The jump in place
// of a return suits the branch predictor: the return stack never matches across fibers.
extern "C" __attribute__((visibility("hidden"))) void cunorm_cpu_switch(void** from, void* to);
asm(".text\n"
    ".p2align 4\n"
    ".globl cunorm_cpu_switch\n"
    ".hidden cunorm_cpu_switch\n"
    ".type cunorm_cpu_switch, @function\n"
    "cunorm_cpu_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    popq %rcx\n"
    "    jmp *%rcx\n"
    ".size cunorm_cpu_switch, .-cunorm_cpu_switch\n");

namespace cunorm_cpu {
typedef void* Context;
inline void switch_context(Context* from, Context* to) { cunorm_cpu_switch(from, *to); }
inline void make_context(Context* context, char*, char* end, void (*run)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(end) & ~uintptr_t(15));
    *--top = nullptr;  // a return address for run, which never returns; leaves the alignment that a call leaves
    *--top = reinterpret_cast<void*>(run);
    top -= 6;
    memset(top, 0, 6 * sizeof(void*));
    *context = top;
}
}  // namespace cunorm_cpu

#else

namespace cunorm_cpu {
typedef ucontext_t Context;
inline void switch_context(Context* from, Context* to) { swapcontext(from, to); }
inline void make_context(Context* context, char* begin, char* end, void (*run)()) {
    getcontext(context);
    context->uc_stack.ss_sp = begin;
    context->uc_stack.ss_size = size_t(end - begin);
    context->uc_link = nullptr;
    makecontext(context, run, 0);
}
}  // namespace cunorm_cpu
#endif

// ---- what a fiber, a warp and a launch are --------------------------------------------------------------------------

namespace cunorm_cpu {

enum Kind : unsigned { BARRIER, SYNCWARP, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT, ANY, ALL };
enum Order : int { ASCENDING, DESCENDING, RANDOM };

// Filled in by the host (LAUNCH in cunorm/cpu.py); shared by the operating-system threads of the launch.
struct Launch {
    long long grid, threads, shared_bytes;
    long long order, seed;
    long long last;            // blocks up to here
    long long away[8];         // everybody writes `next`: no other line of the cache shall suffer
    long long next;            // the first block that nobody has taken; atomic
    long long from[8];
    uint64_t arguments[1];     // as many as the kernel has
};

constexpr int lanes = 32;
constexpr uintptr_t stack_bytes = 65536;  // the host reserves as much, so aligned, for each thread of a block
constexpr unsigned done = 0, faulted = 1;

struct Warp;
struct Worker;

// Lies at the top of its fiber's stack. Which thread runs on the stack changes only between threads.
struct Stack {
    unsigned thread, block, threads, grid;
    void* arena;
    Worker* worker;
    Warp* warp;
    unsigned lane;
    int line;  // where it waits, and in what
    const char* file;
    unsigned mask;
    Kind kind;
    Context context;
};

struct Warp {
    unsigned ready;           // lanes that can run, the running one included
    unsigned arrived;         // lanes waiting at a shuffle, vote or __syncwarp
    Stack* stack[lanes];      // null: not started, or ended
    uint64_t value[lanes];    // what lanes brought, and from whom they read
    uint64_t result[lanes];   // overwritten at the lane's own next shuffle only, so one wait a shuffle is enough
    unsigned mask[lanes];
    unsigned source[lanes];
    unsigned kind[lanes];
};

// One operating-system thread's share of a launch. Several resident blocks or a cluster would give it an array of what
// stands below `block`.
struct Worker {
    Launch* launch;
    const uint64_t* arguments;
    void (*call)(const uint64_t* arguments);
    const char* kernel;
    long long order;
    char* stacks;
    char* arena;
    char* text;  // of the fault
    int text_size;
    unsigned status;
    Context host;

    unsigned block, warps;
    unsigned ready_warps;     // a bit per warp with a ready lane
    unsigned current;         // warp whose round runs, and the lanes of the round that have not had their turn
    unsigned pending;
    unsigned live;            // threads that have not ended
    unsigned at_barrier;
    const char* barrier_file;
    int barrier_line;
    unsigned barrier_thread;
    unsigned fresh;           // stacks from here on were never used in this launch
    unsigned idle;            // stacks of ended threads
    uint64_t random;
    Stack* idle_stack[1024];
    Warp warp[32];
};

// Neighbouring stacks start at different offsets, or their hot ends would share a few sets of every cache.
inline Stack* stack_at(uintptr_t address) {
    const uintptr_t base = address & ~(stack_bytes - 1);
    const uintptr_t colour = (base / stack_bytes) % 64 * 256;
    return reinterpret_cast<Stack*>(base + stack_bytes - (sizeof(Stack) + 63) / 64 * 64 - colour);
}

#ifdef CUNORM_CPU_ASSEMBLY
// Plain (not volatile) asm: to the compiler a constant, hoisted out of loops, as the thread's identity may be.
__forceinline__ Stack* self() {
    uintptr_t address;
    asm("movq %%rsp, %0" : "=r"(address));
    return stack_at(address);
}
#define CUNORM_CPU_IDENTITY(field) \
    unsigned value; \
    asm("movl %c2(%1), %0" : "=r"(value) : "r"(cunorm_cpu::self()), "i"(offsetof(cunorm_cpu::Stack, field)))
#else
__forceinline__ Stack* self() { return stack_at(reinterpret_cast<uintptr_t>(__builtin_frame_address(0))); }
#define CUNORM_CPU_IDENTITY(field) const unsigned value = cunorm_cpu::self()->field
#endif

// Lanes of the mask that wait here with this very mask; a lane may still be at an earlier shuffle with other partners.
inline unsigned present(const Warp& warp, unsigned mask) {
    unsigned there = 0;
    for (unsigned i = 0; i < lanes; ++i) {
        there |= unsigned(warp.mask[i] == mask) << i;
    }
    return there & warp.arrived & mask;
}

// ---- faults ---------------------------------------------------------------------------------------------------------

// Leaves every fiber of the block where it is and ends the launch; the next launch sets its stacks up anew.
[[noreturn]] inline CUNORM_CPU_COLD void abandon(Stack* stack) {
    Worker& worker = *stack->worker;
    worker.status = faulted;
    __atomic_store_n(&worker.launch->next, worker.launch->last, __ATOMIC_RELAXED);  // the others stop after their block
    switch_context(&stack->context, &worker.host);
    abort();
}

// Ends the launch with a sentence about the running thread.
[[noreturn]] inline CUNORM_CPU_COLD __attribute__((format(printf, 1, 2))) void fault(const char* format, ...) {
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

inline const char* name_of(unsigned kind) {
    static const char* const names[] = {"__syncthreads",  "__syncwarp",       "__shfl_sync",
                                        "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync",
                                        "__ballot_sync",  "__any_sync",       "__all_sync"};
    return names[kind];
}

// "thread 5 waits at __syncthreads (file.cu:12)" or "thread 5 has ended".
inline CUNORM_CPU_COLD int describe(const Worker& worker, unsigned thread, char* text, int size) {
    const Stack* stack = worker.warp[thread / lanes].stack[thread % lanes];
    if (stack == nullptr) {
        return snprintf(text, size_t(size), "thread %u has ended", thread);
    }
    if (stack->kind == BARRIER) {
        return snprintf(text, size_t(size), "thread %u waits at __syncthreads (%s:%d)", thread, stack->file,
                        stack->line);
    }
    return snprintf(text, size_t(size), "thread %u waits at %s with mask 0x%08x (%s:%d)", thread, name_of(stack->kind),
                    stack->mask, stack->file, stack->line);
}

[[noreturn]] inline CUNORM_CPU_COLD void fault_between(Stack* stack, const char* what, unsigned waiting,
                                                       unsigned other) {
    Worker& worker = *stack->worker;
    char first[400], second[400];
    describe(worker, waiting, first, sizeof first);
    describe(worker, other, second, sizeof second);
    snprintf(worker.text, size_t(worker.text_size), "kernel %s, block %u: %s: %s, %s", worker.kernel, worker.block,
             what, first, second);
    abandon(stack);
}

// Nobody can run: names a thread that waits and one that it waits for. A shuffle comes before a barrier, being nearer
// to the cause: the lanes that it misses are mostly the ones at the barrier.
[[noreturn]] inline CUNORM_CPU_COLD void deadlock(Stack* stack) {
    const Worker& worker = *stack->worker;
    const unsigned threads = stack->threads;
    for (unsigned thread = 0; thread < threads; ++thread) {
        const Warp& warp = worker.warp[thread / lanes];
        const Stack* waiting = warp.stack[thread % lanes];
        if (waiting == nullptr || waiting->kind == BARRIER) {
            continue;
        }
        const unsigned missing = waiting->mask & ~present(warp, waiting->mask);
        if (missing != 0) {
            fault_between(stack, "a lane of the mask is missing", thread,
                          thread / lanes * lanes + unsigned(__builtin_ctz(missing)));
        }
    }
    unsigned waiting = threads, other = threads;
    for (unsigned thread = threads; thread-- > 0;) {
        const Stack* at = worker.warp[thread / lanes].stack[thread % lanes];
        (at != nullptr && at->kind == BARRIER ? waiting : other) = thread;
    }
    fault_between(stack, "deadlock", waiting < threads ? waiting : 0, other < threads ? other : 0);
}

}  // namespace cunorm_cpu

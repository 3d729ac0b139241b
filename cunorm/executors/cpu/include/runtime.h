// The CPU executor's runtime: this file and the others of the folder (HEADERS in kernel.py has the order) stand on top of
// the CUDA text, which a C++17 compiler then takes as it is.
//
// A CUDA thread is a fiber, a block a set of fibers. A thread that must wait (barrier, shuffle, vote) hands over to the
// next thread that can run; if none can, the launch ends with a fault that says who waits for whom. Warps run one after
// another, each as far as it can, so that 32 stacks stay in the first-level cache; in random order the next round of
// lanes goes to any warp that can run.
//
// No state is global. A fiber finds its Stack header, and through it everything else, from its own stack pointer, so
// several operating-system threads run disjoint blocks of one launch at the same time. C headers only: with the C++
// library some compilers take a minute.
//
// Two builds. The plain one is for use: it checks alignment and bounds where kernels reach global memory. With
// CUNORM_CPU_CHECKED the compiler calls back at every access to memory as well (hooks.h), and the runtime looks for
// races, counts traffic, and holds stores back that no fence has published.

// In C++ compilers ask the C library for every extension; those take up names, such as `finite`, that kernels define.
#undef _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern "C" int getpid() noexcept;       // <unistd.h> would take up names of kernels
extern "C" int sched_yield() noexcept;  // <sched.h> has it only with extensions
#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
#endif

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
#define __cluster_dims__(...)  // the host tells
#define __align__(bytes) __attribute__((aligned(bytes)))
// A section of its own, which the runtime exchanges where another block goes on: it is one address for all of them.
#define __shared__ static __attribute__((section("cunorm_shared")))

#define CUNORM_CPU_NOINLINE __attribute__((noinline))
#define CUNORM_CPU_COLD __attribute__((noinline, cold))
#ifdef CUNORM_CPU_CHECKED
// The compiler's hooks are for kernels: the runtime's own functions go without.
#define CUNORM_CPU_RUNTIME inline __attribute__((no_sanitize("thread"), no_sanitize("alignment")))
#else
#define CUNORM_CPU_RUNTIME inline
#endif

// ---- context switch -------------------------------------------------------------------------------------------------

#ifdef CUNORM_CPU_ASSEMBLY

namespace cunorm_cpu {
struct Context {
    void* resume;
    void* stack;
    void* frame;
};

#ifdef __AVX512F__
#define CUNORM_CPU_MORE_REGISTERS \
    , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", \
        "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define CUNORM_CPU_MORE_REGISTERS
#endif

// Goes on in another fiber; the compiler keeps in this one's frame what is alive. In line, because the processor
// foresees a return by the calls before it, and after a switch those were another fiber's; a jump of its own at every
// place of a kernel mostly goes where it last went.
__forceinline__ void switch_context(Context* from, Context* to) {
    asm volatile(
        "leaq 1f(%%rip), %%rax\n\t"
        "movq %%rax, (%%rdi)\n\t"
        "movq %%rsp, 8(%%rdi)\n\t"
        "movq %%rbp, 16(%%rdi)\n\t"
        "movq 8(%%rsi), %%rsp\n\t"
        "movq 16(%%rsi), %%rbp\n\t"
        "jmpq *(%%rsi)\n"
        "1:"
        : "+D"(from), "+S"(to)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
          "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
          "xmm15" CUNORM_CPU_MORE_REGISTERS, "cc", "memory");
}

CUNORM_CPU_RUNTIME void make_context(Context* context, char*, char* end, void (*run)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(end) & ~uintptr_t(15));
    *--top = nullptr;  // a return address for run, which never returns; leaves the alignment that a call leaves
    context->resume = reinterpret_cast<void*>(run);
    context->stack = top;
    context->frame = nullptr;
}
}  // namespace cunorm_cpu

#else

namespace cunorm_cpu {
typedef ucontext_t Context;
CUNORM_CPU_RUNTIME void switch_context(Context* from, Context* to) { swapcontext(from, to); }
CUNORM_CPU_RUNTIME void make_context(Context* context, char* begin, char* end, void (*run)()) {
    getcontext(context);
    context->uc_stack.ss_sp = begin;
    context->uc_stack.ss_size = size_t(end - begin);
    context->uc_link = nullptr;
    makecontext(context, run, 0);
}
}  // namespace cunorm_cpu
#endif

// ---- what a launch, a block, a warp and a fiber are -----------------------------------------------------------------

namespace cunorm_cpu {

enum Kind : unsigned {
    BARRIER,
    SYNCWARP,
    SHUFFLE,
    SHUFFLE_XOR,
    SHUFFLE_UP,
    SHUFFLE_DOWN,
    BALLOT,
    ANY,
    ALL,
    POLL,
    MBARRIER,
    CLUSTER
};
enum Order : int { ASCENDING, DESCENDING, RANDOM };
enum Role : long long { TENSOR, PARAMETER, WORKSPACE };

// An array of the launch: what a kernel may touch.
struct Region {
    uint64_t begin, end;
    long long role;
};

struct Counters;

// Filled in by the host (LAUNCH in cunorm/executors/cpu/kernel.py); shared by the operating-system threads of the launch.
struct Launch {
    long long grid, threads, shared_bytes;
    long long order, seed;
    long long last;             // blocks up to here
    long long cluster;          // blocks of a cluster: they start together and see each other's shared memory
    long long resident;         // clusters that a worker keeps alive at a time
    long long poison;           // the byte that shared memory is full of when a block starts
    long long regions;          // how many arrays; 0: unknown, and no bounds are checked
    const Region* region;
    Counters* counters;         // of the checked build
    long long workers;          // operating-system threads that run it, and how many of them wait for the others; atomic
    long long stalled;
    long long stop;             // whether the threads shall end, wherever they are; atomic
    long long missing;          // operating-system threads that the system would not start
    long long away[8];          // everybody writes `next`: no other line of the cache shall suffer
    long long next;             // the first block that nobody has taken; atomic
    long long from[8];
    uint64_t arguments[1];      // as many as the kernel has
};

constexpr int lanes = 32;
constexpr unsigned widest_access = 16;  // of one lane, bytes
constexpr uintptr_t stack_bytes = 65536;  // the host reserves as much, so aligned, for each thread of a block
// How a worker ended. Looking: it has not, and its fibers wait until the calling thread has looked for signals.
constexpr unsigned done = 0, faulted = 1, stopped = 2, forked = 3, looking = 4;

struct Warp;
struct Block;
struct Gang;
struct Watch;
struct Worker;

// Lies at the top of its fiber's stack. Which thread runs on the stack changes only between threads.
struct Stack {
    unsigned thread, block, threads, grid;
    unsigned rank, cluster;      // of the block in its cluster, and how many blocks that has
    unsigned id;                 // of the thread in its cluster
    unsigned lane;
    char* arena;
    Worker* worker;
    Block* in;
    Warp* warp;
    const char* file;            // where it waits, and in what
    int line;
    unsigned mask;
    Kind kind;
    uint64_t polled, seen;       // the address that it polls, and what it last found there
    uint64_t granted;            // the global access that the door has announced (checked build)
    uint64_t loaded;             // the address that it loaded from last, and how often in a row (checked build)
    unsigned loads, granted_bytes;
    unsigned seen_generation;    // of the cluster's barrier, when it arrived there
    unsigned copies, stores;     // groups of asynchronous copies, and of bulk stores, that it has committed
    bool granted_store, owes;    // it has copies or stores that nobody has waited for
    bool in_cluster_barrier;     // it has arrived there, and not yet waited
    Context context;
};

struct Log;

struct Warp {
    unsigned ready;              // lanes that can run, the running one included
    unsigned arrived;            // lanes waiting at a shuffle, vote or __syncwarp
    unsigned polling;            // lanes that look again when nobody else can run
    unsigned live;               // lanes that have not ended
    Stack* stack[lanes];         // null: not started, or ended
    uint64_t value[lanes];       // what lanes brought, and from whom they read
    uint64_t result[lanes];      // overwritten at the lane's own next shuffle only, so one wait a shuffle is enough
    unsigned mask[lanes];
    unsigned source[lanes];
    unsigned kind[lanes];
    Log* log;                    // accesses since its lanes last met (checked build)
};

struct Block {
    unsigned index, rank, slot;
    unsigned warps;
    unsigned ready_warps;        // a bit per warp with a ready lane
    unsigned polling_warps;
    unsigned current;            // warp whose round runs, and the lanes of the round that have not had their turn
    unsigned pending;
    unsigned live;               // threads that have not ended
    unsigned at_barrier;
    const char* barrier_file;
    int barrier_line;
    unsigned barrier_thread;
    unsigned counted, counts[2]; // __syncthreads_count: how many there were, and how many threads said yes
    uint64_t random;
    Gang* gang;
    char* arena;
    char* statics;               // what its __shared__ section holds while another block runs
    Warp warp[lanes];
};

struct Mbarrier;
struct Copy;
struct Clocks;
struct Checks;

// The blocks of a cluster, or the one block where there are none.
struct Gang {
    unsigned alive;              // blocks
    unsigned arrived, generation;  // of the cluster's barrier
    Mbarrier* mbarriers;         // lists
    Copy* copies;
    Copy* latest;                // the last of them
    Clocks* clocks;
};

// One operating-system thread's share of a launch. Behind it lie its blocks, gangs and idle stacks.
struct Worker {
    Launch* launch;
    const uint64_t* arguments;
    void (*call)(const uint64_t* arguments);
    const char* kernel;
    long long order;
    char* stacks;
    char* arenas;
    uint64_t arena_bytes;        // from one block's to the next
    char* text;                  // of the fault
    int text_size;
    unsigned status;
    Context host;
    Watch* watch;                // of the calling thread, where signals may end the launch; else null
    Stack* paused;               // whose fiber goes on after a look
    unsigned turns;

    unsigned slots;              // blocks alive at a time: clusters times blocks of a cluster
    Block* block;
    Gang* gang;
    Block* running;
    uint64_t random;
    uint64_t progress, progress_seen;  // events since the start, and when the polling threads were last woken
    unsigned stalls;             // wakings in a row that found nothing new
    unsigned fresh;              // stacks from here on were never used in this launch
    unsigned idle;               // stacks of ended threads
    Stack** idle_stack;
    const Region* last_region;
    Checks* checks;              // of the checked build
};

constexpr uint64_t rounded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

CUNORM_CPU_RUNTIME long long worker_bytes(long long slots, long long threads) {
    return (long long)(rounded(sizeof(Worker)) + rounded(sizeof(Block)) * uint64_t(slots) +
                       rounded(sizeof(Gang)) * uint64_t(slots) + sizeof(Stack*) * uint64_t(slots * threads));
}

// Neighbouring stacks start at different offsets, or their hot ends would share a few sets of every cache.
__forceinline__ Stack* stack_at(uintptr_t address) {
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

}  // namespace cunorm_cpu

// The CPU executor's runtime. This header and a few others (KERNEL_HEADERS in kernel.py) precede the CUDA text. A C++17
// compiler then compiles the CUDA text unchanged. The runtime's object is compiled from all headers (RUNTIME_HEADERS).
// It is compiled once and linked to every kernel, because it takes longer to compile than many kernels.
//
// A CUDA thread is a fiber; a block is a set of fibers. A thread that must wait (barrier, shuffle, vote) switches to
// the next ready thread. If no thread is ready, the launch ends with a fault that names a waiting thread and a thread
// for which it waits. Warps run one after another, each as far as it can, so that 32 stacks stay in the first-level
// cache. In random order, each round of lanes belongs to a ready warp that is chosen at random.
//
// No state is global, so several operating-system threads run disjoint blocks of one launch at the same time. A fiber
// finds its Stack header from its own stack pointer, and everything else through that header. Only C headers are
// included: with the C++ library some compilers take a minute. The larger ones are in system.h, for the runtime alone.
//
// There are two builds. The plain build is for use: it checks alignment and bounds of accesses to global memory. In the
// checked build (CUNORM_CPU_CHECKED) the compiler also calls the runtime at every memory access (hooks.h). The runtime
// then detects races, counts traffic, and hides stores from other blocks until a fence publishes them.

// C++ compilers define _GNU_SOURCE. The C library's extensions would then declare names, such as `finite`, that kernels
// define.
#undef _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
#define __cluster_dims__(...)  // the host passes the cluster size in struct Launch
#define __align__(bytes) __attribute__((aligned(bytes)))
// A separate section: all blocks share its address, so the runtime swaps its contents when it switches blocks.
#define __shared__ static __attribute__((section("cunorm_shared")))

#define CUNORM_CPU_NOINLINE __attribute__((noinline))
#define CUNORM_CPU_CALLED __attribute__((noinline, used))  // the runtime's object defines it, and kernels call it
#define CUNORM_CPU_COLD __attribute__((noinline, cold))
#define CUNORM_CPU_CALLED_COLD __attribute__((noinline, cold, used))
#ifdef CUNORM_CPU_CHECKED
// The compiler's hooks are for kernels: the runtime's functions are not instrumented.
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

// Switches to another fiber. The compiler saves live registers in this fiber's frame (see the clobber list). Inlined
// for branch prediction: the processor predicts a return from its call stack, which belongs to another fiber after a
// switch, whereas an indirect jump per place in the kernel usually has the same target as the last time.
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
    *--top = nullptr;  // return address for `run`, which never returns; it aligns the stack as a call does
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

// ---- structs: launch, block, warp, fiber ----------------------------------------------------------------------------

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

// An array that the kernel may access.
struct Region {
    uint64_t begin, end;
    long long role;
};

struct Counters;

// The host fills this in (LAUNCH in cunorm/executors/cpu/kernel.py). The operating-system threads of the launch share
// it.
struct Launch {
    long long grid, threads, shared_bytes;
    long long order, seed;
    long long last;             // end of the range of blocks
    long long cluster;          // blocks per cluster: they start together and can access each other's shared memory
    long long resident;         // clusters that are alive at a time in a worker
    long long poison;           // fill byte of shared memory when a block starts
    long long regions;          // number of arrays; 0: unknown, and bounds are not checked
    const Region* region;
    Counters* counters;         // of the checked build, or null
    long long workers;          // operating-system threads that run the launch; atomic
    long long stalled;          // workers whose threads poll without progress; atomic
    long long stop;             // whether all workers must stop; atomic
    long long missing;          // operating-system threads that the system did not start
    long long away[8];          // padding: all workers write `next`, so it needs a cache line of its own
    long long next;             // first block that no worker has taken; atomic
    long long from[8];
    uint64_t arguments[1];      // one per kernel parameter
};

constexpr int lanes = 32;
constexpr unsigned widest_access = 16;  // per lane, in bytes
constexpr uintptr_t stack_bytes = 65536;  // the host reserves this size, with this alignment, per thread
// State of a worker. `looking`: the worker has not ended; its fibers wait while the calling thread checks for signals.
// The other states record how it ended.
constexpr unsigned done = 0, faulted = 1, stopped = 2, forked = 3, looking = 4;

struct Warp;
struct Block;
struct Gang;
struct Watch;
struct Worker;

// Header at the top of a fiber's stack. Several CUDA threads use a stack, one after another; the header describes the
// current one.
struct Stack {
    unsigned thread, block, threads, grid;
    unsigned rank, cluster;      // rank of the block in its cluster, and blocks per cluster
    unsigned id;                 // index of the thread in its cluster
    unsigned lane;
    char* arena;
    Worker* worker;
    Block* in;
    Warp* warp;
    const char* file;            // place where the thread waits; `kind` is the operation
    int line;
    unsigned mask;
    Kind kind;
    uint64_t polled, seen;       // address that the thread polls, and the value that it last read there
    uint64_t granted;            // global access that load or store has announced (checked build)
    uint64_t loaded;             // address of the last load; `loads` counts its repetitions (checked build)
    unsigned loads, granted_bytes;
    unsigned seen_generation;    // generation of the cluster's barrier at the thread's arrival
    unsigned copies, stores;     // groups of asynchronous copies, and of bulk stores, that the thread has committed
    bool granted_store, owes;    // owes: the thread has copies or stores for which it has not waited
    bool in_cluster_barrier;     // the thread has arrived there, but not yet waited
    Context context;
};

struct Log;

struct Warp {
    unsigned ready;              // lanes that can run, including the running one
    unsigned arrived;            // lanes waiting at a shuffle, vote or __syncwarp
    unsigned polling;            // lanes that poll again when no other lane can run
    unsigned live;               // lanes that have not ended
    Stack* stack[lanes];         // null: the lane has not started, or has ended
    uint64_t value[lanes];       // operand of each lane; `source` is the lane from which it reads
    uint64_t result[lanes];      // only the lane's next shuffle overwrites this, so one wait per shuffle is enough
    unsigned mask[lanes];
    unsigned source[lanes];
    unsigned kind[lanes];
    Log* log;                    // accesses since its lanes last synchronised (checked build)
};

struct Block {
    unsigned index, rank, slot;
    unsigned warps;
    unsigned ready_warps;        // one bit per warp with a ready lane
    unsigned polling_warps;      // one bit per warp with a polling lane
    unsigned current;            // warp whose round runs
    unsigned pending;            // lanes that have not run in this round
    unsigned live;               // threads that have not ended
    unsigned at_barrier;
    const char* barrier_file;
    int barrier_line;
    unsigned barrier_thread;
    unsigned phase;              // barriers so far (checked build)
    unsigned counted, counts[2]; // __syncthreads_count: calls so far, and true predicates of the last two
    uint64_t random;
    Gang* gang;
    char* arena;
    char* statics;               // its contents of the __shared__ section while another block runs
    Warp warp[lanes];
};

struct Mbarrier {
    Mbarrier* next;
    uint64_t address;
    unsigned count, pending, phase;
    long long expected, issued;  // bytes of copies in this phase
    uint32_t* row[2];            // clocks that arrivals have published, by parity of the phase (checked build)
};

struct Copy;
struct Clocks;
struct Checks;

// The blocks of a cluster, or a single block in a launch without clusters.
struct Gang {
    unsigned alive;              // blocks that have not ended
    unsigned arrived, generation;  // state of the cluster's barrier
    Mbarrier* mbarriers;         // linked list
    Copy* copies;                // linked list of the copies in flight
    Copy* latest;                // last copy of the list
    Clocks* clocks;
};

// State of one operating-system thread in a launch. Its blocks, gangs and list of idle stacks follow it in memory.
struct Worker {
    Launch* launch;
    const uint64_t* arguments;
    void (*call)(const uint64_t* arguments);
    const char* kernel;
    long long order;
    char* stacks;
    char* arenas;
    uint64_t arena_bytes;        // distance between the arenas of two blocks
    char* text;                  // buffer for the fault message
    int text_size;
    unsigned status;
    Context host;
    Watch* watch;                // in the calling thread, if signals may end the launch; else null
    Stack* paused;               // fiber that continues after the check for signals
    unsigned turns;

    unsigned slots;              // blocks alive at a time: resident clusters times blocks per cluster
    Block* block;
    Gang* gang;
    Block* running;
    uint64_t random;
    uint64_t progress, progress_seen;  // events since the start, now and at the last wake-up of polling threads
    unsigned stalls;             // consecutive wake-ups without progress
    unsigned fresh;              // stacks from this index on have not been used in this launch
    unsigned idle;               // number of stacks of ended threads, in `idle_stack`
    Stack** idle_stack;
    const Region* last_region;
    Checks* checks;              // checked build only
};

constexpr uint64_t rounded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

CUNORM_CPU_RUNTIME long long worker_bytes(long long slots, long long threads) {
    return (long long)(rounded(sizeof(Worker)) + rounded(sizeof(Block)) * uint64_t(slots) +
                       rounded(sizeof(Gang)) * uint64_t(slots) + sizeof(Stack*) * uint64_t(slots * threads));
}

// Neighbouring stacks start at different offsets. Otherwise their hot ends would map to the same few cache sets.
__forceinline__ Stack* stack_at(uintptr_t address) {
    const uintptr_t base = address & ~(stack_bytes - 1);
    const uintptr_t colour = (base / stack_bytes) % 64 * 256;
    return reinterpret_cast<Stack*>(base + stack_bytes - (sizeof(Stack) + 63) / 64 * 64 - colour);
}

#ifdef CUNORM_CPU_ASSEMBLY
// asm without volatile: the compiler may treat the result as a constant and hoist it out of loops. This is correct
// because a thread never changes its stack.
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

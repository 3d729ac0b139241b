// What a kernel's object and the runtime's object share: structs of a launch, and the functions of the runtime's object
// that kernels call. async.cuh and builtins.h say what the functions are for. Some are called by PTX alone, which the
// tests translate (tests/ptx/ptx.h).

namespace cunorm_cpu {

// Functions of Python's C API. The host passes their addresses (cunorm/executors/cpu/kernel.py), because kernels are
// compiled without Python's headers.
struct Interpreter {
    void* (*let_go)();          // PyEval_SaveThread: releases the GIL
    void (*take)(void* state);  // PyEval_RestoreThread: takes the GIL
    int (*check_signals)();     // PyErr_CheckSignals: -1 if a handler raised; the exception propagates after the call
};

// Memory of one operating-system thread of a launch (cunorm/executors/cpu/launch_memory.py).
struct Scratch {
    Worker* worker;
    char* stacks;
    char* arenas;
    char* text;  // buffer for the fault message
};

// The work of a launch, the same for all its operating-system threads.
struct Task {
    const char* kernel;
    void (*call)(const uint64_t* arguments);
    Launch* launch;
    long long arena_bytes;
    int text_size;
};

#pragma GCC visibility push(hidden)

// ---- faults (faults.h, memory.h) ------------------------------------------------------------------------------------

[[noreturn]] CUNORM_CPU_COLD __attribute__((format(printf, 1, 2))) void fault(const char* format, ...);
CUNORM_CPU_COLD const char* name_of(unsigned kind);
[[noreturn]] CUNORM_CPU_COLD void out_of_bounds(uint64_t address, unsigned bytes, bool store, uint64_t site);
CUNORM_CPU_COLD void misaligned_at(const void* pointer, unsigned bytes, bool store, uint32_t site);
CUNORM_CPU_COLD void misaligned(const void* pointer, unsigned bytes, bool store);

// ---- waits (scheduler.h, warps.h) -----------------------------------------------------------------------------------

void poll(Kind kind, const volatile void* address, uint64_t seen, const char* file, int line);
void barrier(const char* file, int line);
int barrier_count(bool mine, const char* file, int line);
Stack* arrive(Kind kind, unsigned mask, uint64_t value, unsigned source, const char* file, int line);

// ---- memory, copies, clusters (memory.h, async.h) -------------------------------------------------------------------

void claim_shared(long long bytes);
void fence();
void copy_async(void* shared, const void* global, unsigned bytes);
void copy_commit();
void copy_wait(unsigned may_be_open);
void bulk_load(void* shared, const void* global, uint64_t bytes, void* at);
void bulk_store(void* global, const void* shared, uint64_t bytes);
void bulk_commit();
void bulk_wait(unsigned may_be_open);
void proxy_fence();
void mbarrier_init(void* barrier, unsigned count);
void mbarrier_arrive(void* at, unsigned bytes);
void mbarrier_wait(void* at, unsigned parity, const char* file, int line);
Mbarrier& mbarrier_at(Stack* stack, const void* barrier, uint32_t site);
bool complete(Stack* stack, Mbarrier& barrier);
void* map_shared(void* address, unsigned rank);
unsigned cluster_arrive();
void cluster_wait(const char* file, int line);

// ---- the checked build (warps.h, checked/hooks.h, checked/reports.h) ------------------------------------------------

#ifdef CUNORM_CPU_CHECKED
uint64_t exchange(Kind kind, unsigned mask, uint64_t value, unsigned source, const char* file, int line);
void touched(const void* pointer, unsigned bytes, bool store);  // all checks and counts of a global access
void note_global(Stack* stack, const void* address, uint64_t bytes, bool store, uint32_t site);
void note_atomic(Stack* stack, const void* address, unsigned bytes, uint32_t site);
void note_acquire(Stack* stack, const uint32_t* row);
void note_fence(Stack* stack);
#endif

// ---- launches (os_threads.h) ----------------------------------------------------------------------------------------

int run(const Task& task, const Scratch* scratches, int count, const Interpreter& interpreter, bool watched);

#pragma GCC visibility pop

}  // namespace cunorm_cpu

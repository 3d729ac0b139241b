// The instrumentation of the checked build: touched(), which the kernels call before global accesses, and the calls
// that the compiler inserts before every memory access (-fsanitize=thread, integer-divide-by-zero and, with clang,
// alignment). The libraries of these sanitisers are not linked.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

// An access of one lane to global memory, through the functions of types.cuh and async.cuh or through an atomic.
CUNORM_CPU_RUNTIME void global_access(Stack* stack, uint64_t address, unsigned bytes, bool store, uint32_t site) {
    Worker& worker = *stack->worker;
    Counters* counters = worker.launch->counters;
    unsigned number = 0;
    if (worker.launch->regions != 0) {
        const Region* region = region_of(worker, address, bytes);
        if (region == nullptr) {
            out_of_bounds(address, bytes, store, site);
        }
        number = unsigned(region - worker.launch->region);
        if (store && region->role == WORKSPACE) {
            hold(stack, address, bytes);
        }
    }
    if (counters != nullptr) {
        Moved& moved = counters->moved[number];
        (store ? moved.stored : moved.loaded) += bytes;
        log_access(stack, address, bytes, store, false, number, site);
    }
}

// Faults on a wait by plain loads. Such a wait does not end on the CPU executor. On a GPU it may not end either,
// because the compiler may load only once.
CUNORM_CPU_RUNTIME void note_spin(Stack* stack, uint64_t address, bool store, uint32_t site) {
    constexpr unsigned spin = 1u << 20;
    stack->loads = !store && address == stack->loaded ? stack->loads + 1 : 0;
    stack->loaded = address;
    if (stack->loads == spin) {
        fault("loads from one address %u times in a row at @{%x}: to wait, use load_acquire, an atomic or a "
              "barrier",
              spin, site);
    }
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void touched(const void* pointer, unsigned bytes, bool store) {
    Stack* stack = self();
    const uint64_t address = reinterpret_cast<uintptr_t>(pointer);
    const uint32_t site = CUNORM_CPU_HERE;
    global_access(stack, address, bytes, store, site);
    note_spin(stack, address, store, site);
    stack->granted = address;
    stack->granted_bytes = bytes;
    stack->granted_store = store;
}

// Faults if the address is not a multiple of the largest power of two that divides the bytes, up to a GPU's widest
// access. No type has a larger alignment. g++ calls a hook for a whole struct, so this finds what its sanitiser of
// alignment finds, except the use of an element of a misaligned struct. That sanitiser would make each compilation much
// longer. clang splits structs before it calls the hooks, so it has the sanitiser.
CUNORM_CPU_RUNTIME void require_multiple(uint64_t address, uint64_t bytes, uint32_t site) {
    constexpr uint64_t widest = 16;
    const uint64_t unit = (bytes | widest) & -(bytes | widest);
    if (address % unit != 0) {
        fault("misaligned access (@{%x}): address 0x%llx is not a multiple of %u bytes", site,
              (unsigned long long)address, unsigned(unit));
    }
}

// An access of the kernel outside its stack.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void hooked_off_stack(Stack* stack, uint64_t address, uint64_t bytes, bool store,
                                                             uint32_t site) {
    Worker& worker = *stack->worker;
#ifndef __clang__
    require_multiple(address, bytes, site);
#endif
    if (is_shared(worker, address)) {
        shared_access(stack, address, unsigned(bytes), !store, store, false, site);
        note_spin(stack, address, store, site);
        return;
    }
    const uint64_t image = address - reinterpret_cast<uintptr_t>(__ehdr_start);
    if (!store && image < uint64_t(__start_cunorm_shared - __ehdr_start)) {
        return;  // constants
    }
    if (image < uint64_t(_end - __ehdr_start)) {
        // The only data of a kernel here is static shared memory. cells_of() faults on any other address.
        cells_of(stack, address, bytes, store, site);
    }
    if (worker.launch->regions == 0) {
        return;
    }
    const Region* region = region_of(worker, address, bytes);
    if (region == nullptr) {
        if (address - reinterpret_cast<uintptr_t>(&worker) <
            uint64_t(worker_bytes(worker.slots, worker.launch->threads))) {
            return;  // an access of the runtime, inlined into the kernel
        }
        out_of_bounds(address, unsigned(bytes), store, site);
    }
    if (worker.launch->counters != nullptr) {
        Moved& moved = worker.launch->counters->moved[region - worker.launch->region];
        (store ? moved.raw_stored : moved.raw_loaded) += bytes;
    }
    if (store != stack->granted_store || address < stack->granted ||
        address + bytes > stack->granted + stack->granted_bytes) {
        fault("%llu-byte %s at @{%x} of #{%d} that bypasses load and store", (unsigned long long)bytes,
              store ? "store" : "load", site, int(region - worker.launch->region));
    }
}

// The compiler calls this for every memory access of the kernel. Most accesses are to the stack. They should not save
// registers for the checks of the others.
__forceinline__ void hooked(const void* pointer, uint64_t bytes, bool store, uint32_t site) {
    Stack* stack = self();
    const uint64_t address = reinterpret_cast<uintptr_t>(pointer);
    const uint64_t base = reinterpret_cast<uintptr_t>(stack) & ~(stack_bytes - 1);
    if (__builtin_expect(address - base >= stack_bytes, 0)) {
        hooked_off_stack(stack, address, bytes, store, site);
    }
}

}  // namespace cunorm_cpu

#define CUNORM_CPU_HOOK extern "C" __attribute__((visibility("hidden"), noinline, used, no_sanitize("thread"), \
                                                  no_sanitize("alignment"))) void
#define CUNORM_CPU_HOOKS(bytes) \
    CUNORM_CPU_HOOK __tsan_read##bytes(void* p) { cunorm_cpu::hooked(p, bytes, false, CUNORM_CPU_HERE); } \
    CUNORM_CPU_HOOK __tsan_write##bytes(void* p) { cunorm_cpu::hooked(p, bytes, true, CUNORM_CPU_HERE); } \
    CUNORM_CPU_HOOK __tsan_volatile_read##bytes(void* p) { cunorm_cpu::hooked(p, bytes, false, CUNORM_CPU_HERE); } \
    CUNORM_CPU_HOOK __tsan_volatile_write##bytes(void* p) { cunorm_cpu::hooked(p, bytes, true, CUNORM_CPU_HERE); }
CUNORM_CPU_HOOKS(1)
CUNORM_CPU_HOOKS(2)
CUNORM_CPU_HOOKS(4)
CUNORM_CPU_HOOKS(8)
CUNORM_CPU_HOOKS(16)
#define CUNORM_CPU_UNALIGNED_HOOKS(bytes) \
    CUNORM_CPU_HOOK __tsan_unaligned_read##bytes(void* p) { cunorm_cpu::hooked(p, bytes, false, CUNORM_CPU_HERE); } \
    CUNORM_CPU_HOOK __tsan_unaligned_write##bytes(void* p) { cunorm_cpu::hooked(p, bytes, true, CUNORM_CPU_HERE); }
CUNORM_CPU_UNALIGNED_HOOKS(2)
CUNORM_CPU_UNALIGNED_HOOKS(4)
CUNORM_CPU_UNALIGNED_HOOKS(8)
CUNORM_CPU_UNALIGNED_HOOKS(16)
CUNORM_CPU_HOOK __tsan_read_range(void* p, unsigned long bytes) { cunorm_cpu::hooked(p, bytes, false, CUNORM_CPU_HERE); }
CUNORM_CPU_HOOK __tsan_write_range(void* p, unsigned long bytes) { cunorm_cpu::hooked(p, bytes, true, CUNORM_CPU_HERE); }
CUNORM_CPU_HOOK __tsan_func_entry(void*) {}
CUNORM_CPU_HOOK __tsan_func_exit() {}
CUNORM_CPU_HOOK __tsan_init() {}
#ifdef __clang__  // other compilers call memcpy and memset of the C library
#define CUNORM_CPU_COPY_HOOK extern "C" __attribute__((visibility("hidden"), noinline, used, no_sanitize("thread"))) void*
CUNORM_CPU_COPY_HOOK __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
    cunorm_cpu::hooked(from, bytes, false, CUNORM_CPU_HERE);
    cunorm_cpu::hooked(to, bytes, true, CUNORM_CPU_HERE);
    return memcpy(to, from, bytes);
}
CUNORM_CPU_COPY_HOOK __tsan_memset(void* to, int byte, unsigned long bytes) {
    cunorm_cpu::hooked(to, bytes, true, CUNORM_CPU_HERE);
    return memset(to, byte, bytes);
}
#endif

// The data that the compilers pass to the handlers: the place in the source and, for a misaligned access, the type.
struct CunormCpuMismatch {
    const char* file;
    uint32_t line, column;
    const void* type;
    unsigned char log_alignment, kind;
};
CUNORM_CPU_HOOK __ubsan_handle_divrem_overflow(void* data, void*, void*) {
    const CunormCpuMismatch& found = *static_cast<const CunormCpuMismatch*>(data);
    cunorm_cpu::fault("division by zero (%s:%u)", found.file, found.line);
}
CUNORM_CPU_HOOK __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
    const CunormCpuMismatch& found = *static_cast<const CunormCpuMismatch*>(data);
    cunorm_cpu::fault("misaligned access (%s:%u): address 0x%llx is not a multiple of %u bytes", found.file,
                      found.line, (unsigned long long)reinterpret_cast<uintptr_t>(pointer),
                      1u << found.log_alignment);
}
#endif

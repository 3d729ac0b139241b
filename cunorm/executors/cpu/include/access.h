// What a kernel inlines for its accesses to memory: the arena of shared memory, the checks of global accesses, and the
// search for the array that contains an address.

namespace cunorm_cpu {

// ---- places in the kernel -------------------------------------------------------------------------------------------

#ifdef CUNORM_CPU_CHECKED
// The place in the kernel of a call with this return address, as an offset in the library that the host can look up.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[];
extern "C" __attribute__((visibility("hidden"))) const char _end[];
CUNORM_CPU_RUNTIME uint32_t site_of(const void* return_address) {
    return uint32_t(reinterpret_cast<uintptr_t>(return_address) - reinterpret_cast<uintptr_t>(__ehdr_start) - 1);
}
#define CUNORM_CPU_HERE cunorm_cpu::site_of(__builtin_return_address(0))
#else
#define CUNORM_CPU_HERE 0u
#endif

// ---- shared memory --------------------------------------------------------------------------------------------------

// The section of static shared memory: an anchor (memory.h) and the arrays of a kernel.
constexpr uintptr_t anchor_bytes = 16;
extern "C" __attribute__((visibility("hidden"))) char __start_cunorm_shared[];
extern "C" __attribute__((visibility("hidden"))) char __stop_cunorm_shared[];

CUNORM_CPU_RUNTIME long long static_bytes() {
    const long long bytes = __stop_cunorm_shared - __start_cunorm_shared;
    return bytes > (long long)anchor_bytes ? bytes : 0;
}

__forceinline__ void* shared_memory() { return self()->arena; }

// Whether an address is in shared memory, of this block or of another one.
CUNORM_CPU_RUNTIME bool is_shared(const Worker& worker, uint64_t address) {
    return address - reinterpret_cast<uintptr_t>(worker.arenas) < worker.arena_bytes * worker.slots ||
           address - reinterpret_cast<uintptr_t>(__start_cunorm_shared) < uint64_t(static_bytes());
}

// ---- global memory --------------------------------------------------------------------------------------------------

// Whether an array contains all of these bytes. Correct for every address, even at the end of memory.
__forceinline__ bool holds(const Region& region, uint64_t address, uint64_t bytes) {
    return address - region.begin < region.end - region.begin && region.end - address >= bytes;
}

// The array that contains all of these bytes, or null.
__forceinline__ const Region* region_of(Worker& worker, uint64_t address, uint64_t bytes) {
    const Region* region = worker.last_region;
    if (__builtin_expect(holds(*region, address, bytes), 1)) {
        return region;
    }
    const Launch& launch = *worker.launch;
    for (long long i = 0; i < launch.regions; ++i) {
        region = launch.region + i;
        if (holds(*region, address, bytes)) {
            worker.last_region = region;
            return region;
        }
    }
    return nullptr;
}

// Checks what a specialised kernel assumes about an array.
__forceinline__ void require_aligned(const void* pointer, unsigned bytes, const char* name) {
    const unsigned long long address = reinterpret_cast<uintptr_t>(pointer);
    if (__builtin_expect(address == 0 || address % bytes != 0, 0)) {
        fault("%s is at 0x%llx, but a specialised kernel expects a multiple of %u bytes", name, address, bytes);
    }
}

#ifdef CUNORM_CPU_CHECKED

__forceinline__ void touch(const void* address, unsigned bytes, bool store) {
    if (__builtin_expect(reinterpret_cast<uintptr_t>(address) % bytes != 0, 0)) {
        misaligned(address, bytes, store);
    }
    touched(address, bytes, store);
}

#else

// Kernels call this before every access to global memory.
__forceinline__ void touch(const void* pointer, unsigned bytes, bool store) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (__builtin_expect(address % bytes != 0, 0)) {
        misaligned(pointer, bytes, store);
    }
    Worker& worker = *self()->worker;
    if (worker.last_region != nullptr && region_of(worker, address, bytes) == nullptr &&
        !is_shared(worker, address)) {
        out_of_bounds(address, bytes, store, 0);
    }
}

#endif

}  // namespace cunorm_cpu

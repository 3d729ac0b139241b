// The CPU executor's memory: the arenas of shared memory, the checks of global accesses, and the search for the array
// that contains an address.

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

// All blocks share the address of static shared memory, so its contents are swapped when the worker switches blocks.
// The anchor ensures that the section exists.
constexpr uintptr_t anchor_bytes = 16;
__attribute__((section("cunorm_shared"), used, aligned(16))) static char shared_anchor[anchor_bytes];
extern "C" __attribute__((visibility("hidden"))) char __start_cunorm_shared[];
extern "C" __attribute__((visibility("hidden"))) char __stop_cunorm_shared[];

CUNORM_CPU_RUNTIME long long static_bytes() {
    const long long bytes = __stop_cunorm_shared - __start_cunorm_shared;
    return bytes > (long long)sizeof shared_anchor ? bytes : 0;
}

CUNORM_CPU_RUNTIME void save_statics(Block& block) {
    if (block.statics != nullptr) {
        memcpy(block.statics, __start_cunorm_shared, size_t(static_bytes()));
    }
}

CUNORM_CPU_RUNTIME void restore_statics(Block& block) {
    if (block.statics != nullptr) {
        memcpy(__start_cunorm_shared, block.statics, size_t(static_bytes()));
    }
}

__forceinline__ void* shared_memory() { return self()->arena; }

// Whether an address is in shared memory, of this block or of another one.
CUNORM_CPU_RUNTIME bool is_shared(const Worker& worker, uint64_t address) {
    return address - reinterpret_cast<uintptr_t>(worker.arenas) < worker.arena_bytes * worker.slots ||
           address - reinterpret_cast<uintptr_t>(__start_cunorm_shared) < uint64_t(static_bytes());
}

// Offset of an address in its block's shared memory. Static arrays follow the dynamic ones.
CUNORM_CPU_RUNTIME uint64_t shared_byte(const Worker& worker, uint64_t address) {
    const uint64_t far = address - reinterpret_cast<uintptr_t>(worker.arenas);
    return far < worker.arena_bytes * worker.slots
               ? far % worker.arena_bytes
               : worker.arena_bytes + (address - reinterpret_cast<uintptr_t>(__start_cunorm_shared));
}

// Called by a kernel with the number of bytes that its arrays occupy. The size that the host computed for the launch
// must cover them.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void claim_shared(long long bytes) {
    if (bytes > self()->worker->launch->shared_bytes) {
        fault("the kernel's arrays need %lld bytes of shared memory at @{%x}, but the launch allocates %lld", bytes,
              CUNORM_CPU_HERE, self()->worker->launch->shared_bytes);
    }
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

// Reports an access outside all arrays of the launch. The host replaces "#{i}" by the name of array i.
[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void out_of_bounds(uint64_t address, unsigned bytes, bool store,
                                                                   uint64_t site) {
    const Launch& launch = *self()->worker->launch;
    long long nearest = 0;
    uint64_t least = ~uint64_t(0);
    for (long long i = 0; i < launch.regions; ++i) {
        const Region& region = launch.region[i];
        const uint64_t away = address < region.begin ? region.begin - address : address - region.begin;
        if (away < least) {
            least = away;
            nearest = i;
        }
    }
    const Region& region = launch.region[nearest];
    const bool before = address < region.begin;
    fault("out-of-bounds %u-byte %s at @{%llx}: it begins %llu bytes %s of #{%lld}, whose size is %llu bytes", bytes,
          store ? "store" : "load", (unsigned long long)site,
          (unsigned long long)(before ? region.begin - address : address - region.begin),
          before ? "before the start" : "after the start", nearest, (unsigned long long)(region.end - region.begin));
}

CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void misaligned_at(const void* pointer, unsigned bytes, bool store, uint32_t site) {
    const unsigned long long address = reinterpret_cast<uintptr_t>(pointer);
    if (site != 0) {
        fault("misaligned %u-byte %s at 0x%llx, at @{%x}", bytes, store ? "store" : "load", address, site);
    }
    fault("misaligned %u-byte %s at 0x%llx", bytes, store ? "store" : "load", address);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void misaligned(const void* pointer, unsigned bytes, bool store) {
    misaligned_at(pointer, bytes, store, CUNORM_CPU_HERE);
}

// Checks what a specialised kernel assumes about an array.
__forceinline__ void require_aligned(const void* pointer, unsigned bytes, const char* name) {
    const unsigned long long address = reinterpret_cast<uintptr_t>(pointer);
    if (__builtin_expect(address == 0 || address % bytes != 0, 0)) {
        fault("%s is at 0x%llx, but a specialised kernel expects a multiple of %u bytes", name, address, bytes);
    }
}

#ifdef CUNORM_CPU_CHECKED

void touched(const void* pointer, unsigned bytes, bool store);  // all checks and counts of a global access (hooks.h)

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

CUNORM_CPU_RUNTIME void leave_block(Worker&, Block& block) { save_statics(block); }
CUNORM_CPU_RUNTIME void enter_block(Worker&, Block& block) { restore_statics(block); }
CUNORM_CPU_RUNTIME void lanes_met(Worker&, Block&, Warp&, Kind, unsigned) {}
CUNORM_CPU_RUNTIME void block_met(Worker&, Block&) {}
CUNORM_CPU_RUNTIME void warp_ended(Worker&, Block&, Warp&) {}
CUNORM_CPU_RUNTIME void begin_checks(Worker&) {}
CUNORM_CPU_RUNTIME void end_checks(Worker&) {}

#endif

}  // namespace cunorm_cpu

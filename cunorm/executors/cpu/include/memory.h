// The CPU executor's memory: the contents of shared memory when a worker switches blocks, and the faults of accesses.

namespace cunorm_cpu {

// ---- shared memory --------------------------------------------------------------------------------------------------

// All blocks share the address of static shared memory, so its contents are swapped when the worker switches blocks.
// The anchor ensures that the section exists. It is not aligned, so that it can follow a kernel's arrays without a gap,
// which would look like shared memory.
__attribute__((section("cunorm_shared"), used, aligned(1))) static char shared_anchor[anchor_bytes];

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

// Offset of an address in its block's shared memory. Static arrays follow the dynamic ones.
CUNORM_CPU_RUNTIME uint64_t shared_byte(const Worker& worker, uint64_t address) {
    const uint64_t far = address - reinterpret_cast<uintptr_t>(worker.arenas);
    return far < worker.arena_bytes * worker.slots
               ? far % worker.arena_bytes
               : worker.arena_bytes + (address - reinterpret_cast<uintptr_t>(__start_cunorm_shared));
}

// Called by a kernel with the number of bytes that its arrays occupy. The size that the host computed for the launch
// must cover them.
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void claim_shared(long long bytes) {
    if (bytes > self()->worker->launch->shared_bytes) {
        fault("the kernel's arrays need %lld bytes of shared memory at @{%x}, but the launch allocates %lld", bytes,
              CUNORM_CPU_HERE, self()->worker->launch->shared_bytes);
    }
}

// ---- global memory --------------------------------------------------------------------------------------------------

// Reports an access outside all arrays of the launch. The host replaces "#{i}" by the name of array i.
[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED_COLD void out_of_bounds(uint64_t address, unsigned bytes, bool store,
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

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED_COLD void misaligned_at(const void* pointer, unsigned bytes, bool store,
                                                             uint32_t site) {
    const unsigned long long address = reinterpret_cast<uintptr_t>(pointer);
    if (site != 0) {
        fault("misaligned %u-byte %s at 0x%llx, at @{%x}", bytes, store ? "store" : "load", address, site);
    }
    fault("misaligned %u-byte %s at 0x%llx", bytes, store ? "store" : "load", address);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED_COLD void misaligned(const void* pointer, unsigned bytes, bool store) {
    misaligned_at(pointer, bytes, store, CUNORM_CPU_HERE);
}

// The scheduler's events, and the reports of copies and barriers, in the builds that do not check them (events.h and
// reports.h are those of the checked build).
#ifndef CUNORM_CPU_CHECKED
CUNORM_CPU_RUNTIME void leave_block(Worker&, Block& block) { save_statics(block); }
CUNORM_CPU_RUNTIME void enter_block(Worker&, Block& block) { restore_statics(block); }
CUNORM_CPU_RUNTIME void lanes_met(Worker&, Block&, Warp&, Kind, unsigned) {}
CUNORM_CPU_RUNTIME void block_met(Worker&, Block&) {}
CUNORM_CPU_RUNTIME void warp_ended(Worker&, Block&, Warp&) {}
CUNORM_CPU_RUNTIME void begin_checks(Worker&) {}
CUNORM_CPU_RUNTIME void end_checks(Worker&) {}
CUNORM_CPU_RUNTIME void note_shared(Stack*, const void*, uint64_t, bool, bool, bool, uint32_t) {}
CUNORM_CPU_RUNTIME void note_landing(Stack*, const void*, uint64_t, uint32_t) {}
CUNORM_CPU_RUNTIME void note_release(Stack*, uint32_t*&) {}
CUNORM_CPU_RUNTIME void note_arrival(Stack*, unsigned) {}
CUNORM_CPU_RUNTIME void note_passage(Stack*, unsigned) {}
CUNORM_CPU_RUNTIME void note_proxy_fence(Stack*) {}
CUNORM_CPU_RUNTIME void check_proxy(Stack*, const void*, uint64_t, bool, uint32_t) {}
CUNORM_CPU_RUNTIME void note_bulk_load(Stack*, const void*, uint64_t, uint32_t) {}
CUNORM_CPU_RUNTIME void begin_gang(Worker&, Gang&) {}
CUNORM_CPU_RUNTIME void end_clocks(Worker&, Gang&, Block*) {}
#endif

}  // namespace cunorm_cpu

// Hooks by which atomics, copies, fences and cluster barriers report to the checked build (checked/reports.h). In the
// other builds they only check the alignment and bounds of global accesses.

#ifndef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

CUNORM_CPU_RUNTIME void note_shared(Stack*, const void*, uint64_t, bool, bool, bool, uint32_t) {}
CUNORM_CPU_RUNTIME void note_global(Stack*, const void* address, uint64_t bytes, bool store, uint32_t) {
    for (uint64_t done_ = 0; done_ < bytes; done_ += widest_access) {
        const uint64_t piece = bytes - done_ < widest_access ? bytes - done_ : widest_access;
        touch(static_cast<const char*>(address) + done_, unsigned(piece), store);
    }
}
CUNORM_CPU_RUNTIME void note_atomic(Stack*, const void* address, unsigned bytes, uint32_t) {
    touch(address, bytes, true);
}
CUNORM_CPU_RUNTIME void note_landing(Stack*, const void*, uint64_t, uint32_t) {}
CUNORM_CPU_RUNTIME void note_release(Stack*, uint32_t*&) {}
CUNORM_CPU_RUNTIME void note_acquire(Stack*, const uint32_t*) {}
CUNORM_CPU_RUNTIME void note_arrival(Stack*, unsigned) {}
CUNORM_CPU_RUNTIME void note_passage(Stack*, unsigned) {}
CUNORM_CPU_RUNTIME void note_fence(Stack*) {}
CUNORM_CPU_RUNTIME void note_proxy_fence(Stack*) {}
CUNORM_CPU_RUNTIME void check_proxy(Stack*, const void*, uint64_t, bool, uint32_t) {}
CUNORM_CPU_RUNTIME void note_bulk_load(Stack*, const void*, uint64_t, uint32_t) {}
CUNORM_CPU_RUNTIME void begin_gang(Worker&, Gang&) {}
CUNORM_CPU_RUNTIME void end_clocks(Worker&, Gang&, Block*) {}

}  // namespace cunorm_cpu
#endif

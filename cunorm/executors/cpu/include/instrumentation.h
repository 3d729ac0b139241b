// Hooks by which atomics and fences of a kernel report to the checked build (checked/reports.h). In the other builds they
// only check the alignment and bounds of global accesses.

#ifndef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

CUNORM_CPU_RUNTIME void note_global(Stack*, const void* address, uint64_t bytes, bool store, uint32_t) {
    for (uint64_t done_ = 0; done_ < bytes; done_ += widest_access) {
        const uint64_t piece = bytes - done_ < widest_access ? bytes - done_ : widest_access;
        touch(static_cast<const char*>(address) + done_, unsigned(piece), store);
    }
}
CUNORM_CPU_RUNTIME void note_atomic(Stack*, const void* address, unsigned bytes, uint32_t) {
    touch(address, bytes, true);
}
CUNORM_CPU_RUNTIME void note_acquire(Stack*, const uint32_t*) {}
CUNORM_CPU_RUNTIME void note_fence(Stack*) {}

}  // namespace cunorm_cpu
#endif

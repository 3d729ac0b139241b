// How atomics, copies, fences and cluster barriers report to the checked build.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

CUNORM_CPU_RUNTIME void note_shared(Stack* stack, const void* address, uint64_t bytes, bool load, bool store,
                                    bool atomic, uint32_t site) {
    shared_access(stack, reinterpret_cast<uintptr_t>(address), unsigned(bytes), load, store, atomic, site);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void note_global(Stack* stack, const void* address, uint64_t bytes, bool store,
                                                      uint32_t site) {
    const unsigned lane = stack->lane;
    for (uint64_t done_ = 0; done_ < bytes; done_ += widest_access) {  // split it into accesses of one lane
        const uint64_t piece = bytes - done_ < widest_access ? bytes - done_ : widest_access;
        const uint64_t at = reinterpret_cast<uintptr_t>(address) + done_;
        // Assign neighbouring pieces of a bulk copy to neighbouring lanes, as if a warp accessed them.
        stack->lane = (lane + unsigned(done_ / widest_access)) % unsigned(lanes);
        global_access(stack, at, unsigned(piece), store, site);
        stack->lane = lane;
        if (stack->worker->launch->counters != nullptr && stack->worker->launch->regions != 0) {
            Moved& moved = stack->worker->launch->counters->moved[stack->worker->last_region -
                                                                  stack->worker->launch->region];
            (store ? moved.raw_stored : moved.raw_loaded) += piece;
        }
    }
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void note_atomic(Stack* stack, const void* address, unsigned bytes,
                                                      uint32_t site) {
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
        misaligned_at(address, bytes, true, site);
    }
    if (is_shared(*stack->worker, reinterpret_cast<uintptr_t>(address))) {
        note_shared(stack, address, bytes, true, true, true, site);
        return;
    }
    Pending& held = stack->worker->checks->held[stack->in->slot];
    const uint64_t before = held.count;
    note_global(stack, address, bytes, true, site);
    held.count = before;  // all blocks see an atomic immediately: do not hide it
}
CUNORM_CPU_RUNTIME void note_landing(Stack* stack, const void* to, uint64_t bytes, uint32_t site) {
    check_cells(stack, cells_of(stack, reinterpret_cast<uintptr_t>(to), bytes, true, site), false, true, false, site);
}
CUNORM_CPU_RUNTIME void note_release(Stack* stack, uint32_t*& row) {
    release(*stack->in->gang->clocks, stack->id, row, stack->worker->checks->tick);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void note_acquire(Stack* stack, const uint32_t* row) {
    acquire(*stack->in->gang->clocks, stack->id, row);
}
CUNORM_CPU_RUNTIME void note_arrival(Stack* stack, unsigned generation) {
    cluster_arrival(*stack->in->gang->clocks, stack->id, generation, stack->worker->checks->tick);
}
CUNORM_CPU_RUNTIME void note_passage(Stack* stack, unsigned generation) {
    cluster_passage(*stack->in->gang->clocks, stack->id, generation);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void note_fence(Stack* stack) { publish(stack); }
CUNORM_CPU_RUNTIME void note_proxy_fence(Stack* stack) {
    stack->in->gang->clocks->fenced[stack->id] = ++stack->worker->checks->tick;
}
// Faults if a bulk copy reads or overwrites bytes whose writer has not executed fence_async() after the write.
CUNORM_CPU_RUNTIME void check_proxy(Stack* stack, const void* address, uint64_t bytes, bool store, uint32_t site) {
    const Cells cells = cells_of(stack, reinterpret_cast<uintptr_t>(address), bytes, false, site);
    for (unsigned i = 0; i < cells.count; ++i) {
        const Cell& cell = cells.first[i];
        if (cell.written >= cells.born && cell.writer < many && (cell.writer & by_copy) == 0 &&
            stack->in->gang->clocks->fenced[cell.writer & ~unsigned(how)] <= cell.written) {
            fault("bulk %s at @{%x} %s byte %llu of shared memory, which thread %u wrote at @{%x} without a "
                  "fence_async after it",
                  store ? "store" : "load", site, store ? "reads" : "overwrites",
                  (unsigned long long)(cells.offset + i * cell_bytes),
                  (cell.writer & ~unsigned(how)) % stack->threads, cell.write_site);
        }
    }
}
// Marks the bytes that a bulk load writes: asynchronous copies may access them without fence_async().
CUNORM_CPU_RUNTIME void note_bulk_load(Stack* stack, const void* address, uint64_t bytes, uint32_t site) {
    const Cells cells = cells_of(stack, reinterpret_cast<uintptr_t>(address), bytes, true, site);
    for (unsigned i = 0; i < cells.count; ++i) {
        cells.first[i].writer |= by_copy;
    }
}

}  // namespace cunorm_cpu
#endif

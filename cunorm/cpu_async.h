// Asynchronous copies, mbarriers, clusters and fences, as async.cuh's twins and cpu_builtins.h need them.
//
// As adverse as a GPU may be: an asynchronous copy poisons its destination when it is issued and lands only at the wait
// that covers it. An mbarrier's state lies beside shared memory, found by its address.

namespace cunorm_cpu {

enum CopyKind : unsigned { TO_SHARED, TO_GLOBAL, BY_MBARRIER };

struct Copy {
    Copy* next;
    CopyKind kind;
    unsigned id, group;  // who issued it, and in which of its groups
    Mbarrier* on;
    char* to;
    const char* from;
    uint64_t bytes;
};

struct Mbarrier {
    Mbarrier* next;
    uint64_t address;
    unsigned count, pending, phase;
    long long expected, issued;  // bytes of copies in this phase
    uint32_t* row[2];            // what arrivals published, by parity of the phase (checked build)
};

// ---- what only the checked build does ---------------------------------------------------------------------------------

#ifdef CUNORM_CPU_CHECKED

CUNORM_CPU_RUNTIME void note_shared(Stack* stack, const void* address, uint64_t bytes, bool load, bool store,
                                    bool atomic, uint32_t site) {
    shared_access(stack, reinterpret_cast<uintptr_t>(address), unsigned(bytes), load, store, atomic, site);
}
CUNORM_CPU_RUNTIME void note_global(Stack* stack, const void* address, uint64_t bytes, bool store, uint32_t site) {
    for (uint64_t done_ = 0; done_ < bytes; done_ += 16) {  // in the pieces that copies come in
        const uint64_t piece = bytes - done_ < 16 ? bytes - done_ : 16;
        const uint64_t at = reinterpret_cast<uintptr_t>(address) + done_;
        global_access(stack, at, unsigned(piece), store, site);
        if (stack->worker->launch->counters != nullptr && stack->worker->launch->regions != 0) {
            Moved& moved = stack->worker->launch->counters->moved[stack->worker->last_region -
                                                                  stack->worker->launch->region];
            (store ? moved.raw_stored : moved.raw_loaded) += piece;
        }
    }
}
CUNORM_CPU_RUNTIME void note_atomic(Stack* stack, const void* address, unsigned bytes, uint32_t site) {
    if (is_shared(*stack->worker, reinterpret_cast<uintptr_t>(address))) {
        note_shared(stack, address, bytes, true, true, true, site);
        return;
    }
    Pending& held = stack->worker->checks->held[stack->in->slot];
    const uint64_t before = held.count;
    note_global(stack, address, bytes, true, site);
    held.count = before;  // everybody sees an atomic at once
}
CUNORM_CPU_RUNTIME void note_release(Stack* stack, uint32_t*& row) {
    release(*stack->in->gang->clocks, stack->id, row, stack->worker->checks->tick);
}
CUNORM_CPU_RUNTIME void note_acquire(Stack* stack, const uint32_t* row) {
    acquire(*stack->in->gang->clocks, stack->id, row);
}
CUNORM_CPU_RUNTIME void note_arrival(Stack* stack, unsigned generation) {
    cluster_arrival(*stack->in->gang->clocks, stack->id, generation, stack->worker->checks->tick);
}
CUNORM_CPU_RUNTIME void note_passage(Stack* stack, unsigned generation) {
    cluster_passage(*stack->in->gang->clocks, stack->id, generation);
}
CUNORM_CPU_RUNTIME void note_fence(Stack* stack) { publish(stack); }
CUNORM_CPU_RUNTIME void note_proxy_fence(Stack* stack) {
    stack->in->gang->clocks->fenced[stack->id] = ++stack->worker->checks->tick;
}
// What a bulk store reads must have been made known to asynchronous copies by whoever wrote it.
CUNORM_CPU_RUNTIME void check_proxy(Stack* stack, const void* address, uint64_t bytes, uint32_t site) {
    const Cells cells = cells_of(stack, reinterpret_cast<uintptr_t>(address), bytes, false, site);
    for (unsigned i = 0; i < cells.count; ++i) {
        const Cell& cell = cells.first[i];
        if (cell.written >= cells.born && cell.writer < many &&
            stack->in->gang->clocks->fenced[cell.writer & ~unsigned(by_atomic)] <= cell.written) {
            fault("bulk store at @{%x} reads byte %llu of shared memory, which thread %u wrote at @{%x} without a "
                  "fence_async behind it",
                  site, (unsigned long long)(cells.offset + i * cell_bytes), unsigned(cell.writer) % stack->threads,
                  cell.write_site);
        }
    }
}

#else

CUNORM_CPU_RUNTIME void note_shared(Stack*, const void*, uint64_t, bool, bool, bool, uint32_t) {}
CUNORM_CPU_RUNTIME void note_global(Stack*, const void* address, uint64_t bytes, bool store, uint32_t) {
    for (uint64_t done_ = 0; done_ < bytes; done_ += 16) {
        touch(static_cast<const char*>(address) + done_, unsigned(bytes - done_ < 16 ? bytes - done_ : 16), store);
    }
}
CUNORM_CPU_RUNTIME void note_atomic(Stack*, const void* address, unsigned bytes, uint32_t) {
    touch(address, bytes, true);
}
CUNORM_CPU_RUNTIME void note_release(Stack*, uint32_t*&) {}
CUNORM_CPU_RUNTIME void note_acquire(Stack*, const uint32_t*) {}
CUNORM_CPU_RUNTIME void note_arrival(Stack*, unsigned) {}
CUNORM_CPU_RUNTIME void note_passage(Stack*, unsigned) {}
CUNORM_CPU_RUNTIME void note_fence(Stack*) {}
CUNORM_CPU_RUNTIME void note_proxy_fence(Stack*) {}
CUNORM_CPU_RUNTIME void check_proxy(Stack*, const void*, uint64_t, uint32_t) {}
CUNORM_CPU_RUNTIME void begin_gang(Worker&, Gang&) {}
CUNORM_CPU_RUNTIME void end_clocks(Worker&, Gang&, Block*) {}

#endif

// ---- copies -----------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void issue(Stack* stack, CopyKind kind, Mbarrier* on, void* to, const void* from, uint64_t bytes,
                              unsigned group) {
    Copy* copy = static_cast<Copy*>(malloc(sizeof(Copy)));
    *copy = Copy{nullptr, kind,  stack->id, group, on, static_cast<char*>(to), static_cast<const char*>(from),
                 bytes};
    Copy** last = &stack->in->gang->copies;  // they land in the order of their issue
    while (*last != nullptr) {
        last = &(*last)->next;
    }
    *last = copy;
    if (kind != TO_GLOBAL) {
        memset(to, int(stack->worker->launch->poison), bytes);
    }
    stack->owes = stack->owes || kind != BY_MBARRIER;
}

// Those of a thread's groups before `group`, or of an mbarrier.
CUNORM_CPU_RUNTIME void land(Stack* stack, CopyKind kind, Mbarrier* on, unsigned group) {
    bool owes = false;
    for (Copy** at = &stack->in->gang->copies; *at != nullptr;) {
        Copy* copy = *at;
        const bool own = copy->kind != BY_MBARRIER && copy->id == stack->id;
        if (copy->kind == kind && (kind == BY_MBARRIER ? copy->on == on : own && copy->group < group)) {
            memcpy(copy->to, copy->from, copy->bytes);
            *at = copy->next;
            free(copy);
        } else {
            owes = owes || own;
            at = &copy->next;
        }
    }
    stack->owes = owes;
}

CUNORM_CPU_RUNTIME void check_aligned(const char* what, const void* shared, const void* global, uint64_t bytes,
                                      uint64_t alignment, uint32_t site) {
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % alignment != 0 ||
        !is_shared(*self()->worker, reinterpret_cast<uintptr_t>(shared))) {
        fault("%s at @{%x} of %llu bytes between %p and %p of shared memory, expected multiples of %llu", what, site,
              (unsigned long long)bytes, global, shared, (unsigned long long)alignment);
    }
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void copy_async(void* shared, const void* global, unsigned bytes) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    check_aligned("asynchronous copy", shared, global, bytes, bytes, site);
    note_global(stack, global, bytes, false, site);
    note_shared(stack, shared, bytes, false, true, false, site);
    issue(stack, TO_SHARED, nullptr, shared, global, bytes, stack->copies);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void copy_commit() { ++self()->copies; }
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void copy_wait(unsigned may_be_open) {
    Stack* stack = self();
    land(stack, TO_SHARED, nullptr, stack->copies > may_be_open ? stack->copies - may_be_open : 0);
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void bulk_store(void* global, const void* shared, uint64_t bytes) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    check_aligned("bulk store", shared, global, bytes, 16, site);
    check_proxy(stack, shared, bytes, site);
    note_shared(stack, shared, bytes, true, false, false, site);
    note_global(stack, global, bytes, true, site);
    issue(stack, TO_GLOBAL, nullptr, global, shared, bytes, stack->stores);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void bulk_commit() { ++self()->stores; }
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void bulk_wait(unsigned may_be_open) {
    Stack* stack = self();
    land(stack, TO_GLOBAL, nullptr, stack->stores > may_be_open ? stack->stores - may_be_open : 0);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void proxy_fence() { note_proxy_fence(self()); }

// ---- mbarriers --------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME Mbarrier* find_mbarrier(Stack* stack, const void* barrier) {
    for (Mbarrier* found = stack->in->gang->mbarriers; found != nullptr; found = found->next) {
        if (found->address == reinterpret_cast<uintptr_t>(barrier)) {
            return found;
        }
    }
    return nullptr;
}

CUNORM_CPU_RUNTIME Mbarrier& mbarrier_at(Stack* stack, const void* barrier, uint32_t site) {
    Mbarrier* found = find_mbarrier(stack, barrier);
    if (found == nullptr) {
        fault("mbarrier at %p used before its initialisation", barrier);
    }
    note_shared(stack, barrier, 8, true, true, true, site);
    return *found;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void mbarrier_init(void* barrier, unsigned count) {
    Stack* stack = self();
    note_shared(stack, barrier, 8, false, true, false, CUNORM_CPU_HERE);
    Mbarrier* found = find_mbarrier(stack, barrier);
    if (found == nullptr) {
        found = static_cast<Mbarrier*>(calloc(1, sizeof(Mbarrier)));
        found->next = stack->in->gang->mbarriers;
        found->address = reinterpret_cast<uintptr_t>(barrier);
        stack->in->gang->mbarriers = found;
    }
    found->count = found->pending = count;
    found->phase = 0;
    found->expected = found->issued = 0;
}

// Whether a phase's arrivals and bytes are all there; then its copies land and the next phase begins.
CUNORM_CPU_RUNTIME bool complete(Stack* stack, Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.expected != barrier.issued) {
        return false;
    }
    land(stack, BY_MBARRIER, &barrier, 0);
    ++barrier.phase;
    barrier.pending = barrier.count;
    barrier.expected = barrier.issued = 0;
    if (barrier.row[barrier.phase & 1] != nullptr) {
        free(barrier.row[barrier.phase & 1]);
        barrier.row[barrier.phase & 1] = nullptr;
    }
    ++stack->worker->progress;
    return true;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void mbarrier_arrive(void* at, unsigned bytes) {
    Stack* stack = self();
    Mbarrier& barrier = mbarrier_at(stack, at, CUNORM_CPU_HERE);
    if (barrier.pending == 0 && !complete(stack, barrier)) {
        fault("mbarrier at %p: more arrivals in a phase than the %u it was initialised with", at, barrier.count);
    }
    barrier.expected += bytes;
    --barrier.pending;
    ++stack->worker->progress;
    note_release(stack, barrier.row[barrier.phase & 1]);
    if (barrier.expected == 0) {  // bytes land at a wait
        complete(stack, barrier);
    }
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void mbarrier_wait(void* at, unsigned parity, const char* file, int line) {
    Stack* stack = self();
    Mbarrier& barrier = mbarrier_at(stack, at, CUNORM_CPU_HERE);
    while ((barrier.phase & 1) == (parity & 1)) {
        if (!complete(stack, barrier)) {
            poll(MBARRIER, at, uint64_t(barrier.phase) << 32 | barrier.pending, file, line);
        }
    }
    note_acquire(stack, barrier.row[parity & 1]);
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void bulk_load(void* shared, const void* global, uint64_t bytes, void* at) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    check_aligned("bulk load", shared, global, bytes, 16, site);
    Mbarrier& barrier = mbarrier_at(stack, at, site);
    note_global(stack, global, bytes, false, site);
    note_shared(stack, shared, bytes, false, true, false, site);
    note_release(stack, barrier.row[barrier.phase & 1]);
    issue(stack, BY_MBARRIER, &barrier, shared, global, bytes, 0);
    barrier.issued += (long long)bytes;
    ++stack->worker->progress;
}

// ---- clusters ---------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void* map_shared(void* address, unsigned rank) {
    Stack* stack = self();
    const uint64_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(stack->arena);
    if (rank >= stack->cluster || offset >= stack->worker->arena_bytes) {
        fault("%p in the cluster's block %u: expected an address in dynamic shared memory and a rank below %u", address,
              rank, stack->cluster);
    }
    return stack->arena + (int64_t(rank) - int64_t(stack->rank)) * int64_t(stack->worker->arena_bytes) + offset;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE unsigned cluster_arrive() {
    Stack* stack = self();
    Gang& gang = *stack->in->gang;
    const unsigned generation = gang.generation;
    note_arrival(stack, generation);
    ++stack->worker->progress;
    if (++gang.arrived == stack->threads * stack->cluster) {
        gang.arrived = 0;
        ++gang.generation;
    }
    stack->seen_generation = generation;
    return generation;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void cluster_wait(const char* file, int line) {
    Stack* stack = self();
    Gang& gang = *stack->in->gang;
    const unsigned generation = stack->seen_generation;
    while (gang.generation == generation) {
        poll(CLUSTER, &gang.generation, gang.generation, file, line);
    }
    note_passage(stack, generation);
}

// ---- fences, and words that blocks tell each other ---------------------------------------------------------------------

CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void fence() {
    note_fence(self());
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <typename T>
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE T load_acquire(const T* address, const char* file, int line) {
    note_global(self(), address, sizeof(T), false, CUNORM_CPU_HERE);
    poll(POLL, address, uint64_t(__atomic_load_n(address, __ATOMIC_ACQUIRE)), file, line);
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <typename T>
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void store_release(T* address, T value) {
    Stack* stack = self();
    note_fence(stack);
    note_atomic(stack, address, sizeof(T), CUNORM_CPU_HERE);
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    ++stack->worker->progress;
}

// ---- ends -------------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void thread_ends(Worker& worker, Stack* stack) {
    const bool last = stack->in->live == 1;
    if (!stack->owes && !(last && stack->in->gang->copies != nullptr)) {
        return;
    }
    for (const Copy* copy = stack->in->gang->copies; copy != nullptr; copy = copy->next) {
        const bool into = copy->kind == BY_MBARRIER && copy->to >= stack->arena &&
                          copy->to < stack->arena + worker.arena_bytes;
        if ((copy->kind != BY_MBARRIER && copy->id == stack->id) || (last && into)) {
            fault("%s ends with a copy of %llu bytes under way that nobody waited for",
                  copy->kind == BY_MBARRIER ? "the block" : "it", (unsigned long long)copy->bytes);
        }
    }
}

CUNORM_CPU_RUNTIME void end_gang(Worker& worker, Gang& gang, Block* blocks) {
    for (Mbarrier* next; gang.mbarriers != nullptr; gang.mbarriers = next) {
        next = gang.mbarriers->next;
        free(gang.mbarriers->row[0]);
        free(gang.mbarriers->row[1]);
        free(gang.mbarriers);
    }
    for (Copy* next; gang.copies != nullptr; gang.copies = next) {
        next = gang.copies->next;
        free(gang.copies);
    }
    end_clocks(worker, gang, blocks);
}

}  // namespace cunorm_cpu

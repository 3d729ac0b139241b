// Asynchronous copies, mbarriers, clusters and fences: the implementation of async.cuh and builtins.h on the CPU.
//
// The timing is the worst that a GPU allows: an asynchronous copy poisons its destination when it is issued, and writes
// the data only at the wait that covers it. The state of an mbarrier is stored outside shared memory and found by
// address.

namespace cunorm_cpu {

enum CopyKind : unsigned { TO_SHARED, TO_GLOBAL, BY_MBARRIER };

struct Copy {
    Copy* next;
    CopyKind kind;
    unsigned id, group;  // thread that issued the copy, and its group of that thread
    Mbarrier* on;
    char* to;
    const char* from;
    uint64_t bytes;
    uint32_t site;
};

#ifdef CUNORM_CPU_CHECKED
// Faults if an ordinary access overlaps an mbarrier.
CUNORM_CPU_RUNTIME void beside_mbarriers(Stack* stack, uint64_t address, unsigned bytes, bool store, uint32_t site) {
    for (const Mbarrier* one = stack->in->gang->mbarriers; one != nullptr; one = one->next) {
        if (address < one->address + 8 && one->address < address + bytes) {
            fault("%s at @{%x} of byte %llu of shared memory, which is part of an mbarrier", store ? "store" : "load",
                  site, (unsigned long long)shared_byte(*stack->worker, address));
        }
    }
}
#endif

// ---- copies ---------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void issue(Stack* stack, CopyKind kind, Mbarrier* on, void* to, const void* from, uint64_t bytes,
                              unsigned group, uint32_t site) {
    Copy* copy = static_cast<Copy*>(malloc(sizeof(Copy)));
    *copy = Copy{nullptr, kind, stack->id, group, on, static_cast<char*>(to), static_cast<const char*>(from), bytes,
                 site};
    Gang& gang = *stack->in->gang;  // copies complete in the order of issue
    (gang.copies == nullptr ? gang.copies : gang.latest->next) = copy;
    gang.latest = copy;
    if (kind != TO_GLOBAL) {
        memset(to, int(stack->worker->launch->poison), bytes);
    }
    stack->owes = stack->owes || kind != BY_MBARRIER;
}

// Completes the copies of a thread's groups before `group`, or the copies on an mbarrier.
CUNORM_CPU_RUNTIME void land(Stack* stack, CopyKind kind, Mbarrier* on, unsigned group) {
    bool owes = false;
    Copy*& latest = stack->in->gang->latest;
    latest = nullptr;
    for (Copy** at = &stack->in->gang->copies; *at != nullptr;) {
        Copy* copy = *at;
        const bool own = copy->kind != BY_MBARRIER && copy->id == stack->id;
        if (copy->kind == kind && (kind == BY_MBARRIER ? copy->on == on : own && copy->group < group)) {
            if (kind == TO_SHARED) {  // another thread's access since the issue, or before a barrier, races
                note_landing(stack, copy->to, copy->bytes, copy->site);
            }
            memcpy(copy->to, copy->from, copy->bytes);
            *at = copy->next;
            free(copy);
        } else {
            owes = owes || own;
            latest = copy;
            at = &copy->next;
        }
    }
    stack->owes = owes;
}

CUNORM_CPU_RUNTIME void check_aligned(const char* what, const void* shared, const void* global, uint64_t bytes,
                                      uint64_t alignment, uint32_t site) {
    const Worker& worker = *self()->worker;
    const uint64_t address = reinterpret_cast<uintptr_t>(shared);
    if (!is_shared(worker, address)) {
        fault("%s at @{%x}: 0x%llx is not in shared memory", what, site, (unsigned long long)address);
    }
    if ((address | reinterpret_cast<uintptr_t>(global) | bytes) % alignment != 0) {
        fault("%s at @{%x} of %llu bytes between byte %llu of shared memory and 0x%llx, expected multiples of %llu",
              what, site, (unsigned long long)bytes, (unsigned long long)shared_byte(worker, address),
              (unsigned long long)reinterpret_cast<uintptr_t>(global), (unsigned long long)alignment);
    }
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void copy_async(void* shared, const void* global, unsigned bytes) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    check_aligned("asynchronous copy", shared, global, bytes, bytes, site);
    note_global(stack, global, bytes, false, site);
    note_shared(stack, shared, bytes, false, true, false, site);
    issue(stack, TO_SHARED, nullptr, shared, global, bytes, stack->copies, site);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void copy_commit() { ++self()->copies; }
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void copy_wait(unsigned may_be_open) {
    Stack* stack = self();
    land(stack, TO_SHARED, nullptr, stack->copies > may_be_open ? stack->copies - may_be_open : 0);
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void bulk_store(void* global, const void* shared, uint64_t bytes) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    check_aligned("bulk store", shared, global, bytes, 16, site);
    check_proxy(stack, shared, bytes, true, site);
    note_shared(stack, shared, bytes, true, false, false, site);
    note_global(stack, global, bytes, true, site);
    issue(stack, TO_GLOBAL, nullptr, global, shared, bytes, stack->stores, site);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void bulk_commit() { ++self()->stores; }
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void bulk_wait(unsigned may_be_open) {
    Stack* stack = self();
    land(stack, TO_GLOBAL, nullptr, stack->stores > may_be_open ? stack->stores - may_be_open : 0);
}
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void proxy_fence() { note_proxy_fence(self()); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME Mbarrier* find_mbarrier(Stack* stack, const void* barrier, uint32_t site) {
    const uint64_t address = reinterpret_cast<uintptr_t>(barrier);
    if (address % 8 != 0 || !is_shared(*stack->worker, address)) {
        fault("mbarrier at 0x%llx, at @{%x}: expected a multiple of 8 bytes in shared memory",
              (unsigned long long)address, site);
    }
    for (Mbarrier* found = stack->in->gang->mbarriers; found != nullptr; found = found->next) {
        if (found->address == reinterpret_cast<uintptr_t>(barrier)) {
            return found;
        }
    }
    return nullptr;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED Mbarrier& mbarrier_at(Stack* stack, const void* barrier, uint32_t site) {
    Mbarrier* found = find_mbarrier(stack, barrier, site);
    if (found == nullptr) {
        fault("mbarrier at byte %llu of shared memory used at @{%x} before its initialisation",
              (unsigned long long)shared_byte(*stack->worker, reinterpret_cast<uintptr_t>(barrier)), site);
    }
    note_shared(stack, barrier, 8, true, true, true, site);
    return *found;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void mbarrier_init(void* barrier, unsigned count) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    Mbarrier* found = find_mbarrier(stack, barrier, site);
    note_shared(stack, barrier, 8, false, true, false, site);
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

// Whether all arrivals and bytes of the phase are present. If so, its copies complete and the next phase begins.
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED bool complete(Stack* stack, Mbarrier& barrier) {
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

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void mbarrier_arrive(void* at, unsigned bytes) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    Mbarrier& barrier = mbarrier_at(stack, at, site);
    if (barrier.pending == 0 && !complete(stack, barrier)) {
        fault("mbarrier at byte %llu of shared memory: more arrivals in a phase, at @{%x}, than the %u it was "
              "initialised with",
              (unsigned long long)shared_byte(*stack->worker, barrier.address), site, barrier.count);
    }
    barrier.expected += bytes;
    --barrier.pending;
    ++stack->worker->progress;
    note_release(stack, barrier.row[barrier.phase & 1]);
    if (barrier.expected == 0) {  // a phase with copies completes at a wait
        complete(stack, barrier);
    }
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void mbarrier_wait(void* at, unsigned parity, const char* file, int line) {
    Stack* stack = self();
    Mbarrier& barrier = mbarrier_at(stack, at, CUNORM_CPU_HERE);
    while ((barrier.phase & 1) == (parity & 1)) {
        if (!complete(stack, barrier)) {
            poll(MBARRIER, at, uint64_t(barrier.phase) << 32 | barrier.pending, file, line);
        }
    }
    note_acquire(stack, barrier.row[parity & 1]);
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void bulk_load(void* shared, const void* global, uint64_t bytes, void* at) {
    Stack* stack = self();
    const uint32_t site = CUNORM_CPU_HERE;
    check_aligned("bulk load", shared, global, bytes, 16, site);
    Mbarrier& barrier = mbarrier_at(stack, at, site);
    note_global(stack, global, bytes, false, site);
    check_proxy(stack, shared, bytes, false, site);
    note_shared(stack, shared, bytes, false, true, false, site);
    note_bulk_load(stack, shared, bytes, site);
    note_release(stack, barrier.row[barrier.phase & 1]);
    issue(stack, BY_MBARRIER, &barrier, shared, global, bytes, 0, site);
    barrier.issued += (long long)bytes;
    ++stack->worker->progress;
}

// ---- clusters -------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void* map_shared(void* address, unsigned rank) {
    Stack* stack = self();
    const uint64_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(stack->arena);
    if (rank >= stack->cluster || offset >= stack->worker->arena_bytes) {
        fault("byte %lld of shared memory in the cluster's block %u, at @{%x}: expected a byte from 0 to below %llu, "
              "and a rank below %u",
              (long long)offset, rank, CUNORM_CPU_HERE, (unsigned long long)stack->worker->arena_bytes, stack->cluster);
    }
    return stack->arena + (int64_t(rank) - int64_t(stack->rank)) * int64_t(stack->worker->arena_bytes) + offset;
}

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED unsigned cluster_arrive() {
    Stack* stack = self();
    Gang& gang = *stack->in->gang;
    if (stack->in_cluster_barrier) {
        fault("it arrives at the cluster's barrier twice, at @{%x}, without a wait between", CUNORM_CPU_HERE);
    }
    stack->in_cluster_barrier = true;
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

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void cluster_wait(const char* file, int line) {
    Stack* stack = self();
    Gang& gang = *stack->in->gang;
    if (!stack->in_cluster_barrier) {
        fault("it waits at the cluster's barrier (%s:%d), where it has not arrived", file, line);
    }
    stack->in_cluster_barrier = false;
    const unsigned generation = stack->seen_generation;
    while (gang.generation == generation) {
        poll(CLUSTER, &gang.generation, gang.generation, file, line);
    }
    note_passage(stack, generation);
}

// ---- fences ---------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED void fence() {
    note_fence(self());
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// ---- the end of threads and clusters --------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void thread_ends(Worker& worker, Stack* stack) {
    const bool last = stack->in->live == 1;
    if (!stack->owes && !(last && stack->in->gang->copies != nullptr)) {
        return;
    }
    for (const Copy* copy = stack->in->gang->copies; copy != nullptr; copy = copy->next) {
        const bool into = copy->kind == BY_MBARRIER && copy->to >= stack->arena &&
                          copy->to < stack->arena + worker.arena_bytes;
        if ((copy->kind != BY_MBARRIER && copy->id == stack->id) || (last && into)) {
            fault("%s ends while a copy of %llu bytes, issued at @{%x}, is in flight: no thread waited for it",
                  copy->kind == BY_MBARRIER ? "the block" : "the thread", (unsigned long long)copy->bytes, copy->site);
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

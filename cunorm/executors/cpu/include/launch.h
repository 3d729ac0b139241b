// The CPU executor's launches: start and end of blocks, and the sizes that the host asks for.

namespace cunorm_cpu {

// ---- a launch -------------------------------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void begin_block(Worker& worker, Gang& gang, Block& block, unsigned index, unsigned rank) {
    const Launch& launch = *worker.launch;
    const unsigned warps = unsigned(launch.threads) / lanes;
    block.index = index;
    block.rank = rank;
    block.warps = warps;
    block.ready_warps = ~0u >> (lanes - warps);
    block.polling_warps = 0;
    block.pending = 0;
    block.live = unsigned(launch.threads);
    block.at_barrier = block.counted = block.phase = 0;
    block.random = uint64_t(launch.seed) * 0xd1342543de82ef95u + index;  // the same for every worker
    block.gang = &gang;
    for (unsigned i = 0; i < warps; ++i) {
        Warp& warp = block.warp[i];
        warp.ready = warp.live = ~0u;
        warp.arrived = warp.polling = 0;
        memset(warp.stack, 0, sizeof warp.stack);
    }
    // Kernels must not depend on the initial contents of shared memory.
    memset(block.arena, int(launch.poison), size_t(launch.shared_bytes));
    if (block.statics != nullptr) {
        memset(block.statics, int(launch.poison), size_t(static_bytes()));
    }
    block.current = choose(worker.order, block.random, block.ready_warps);
    ++worker.progress;
}

// Starts new clusters in place of those that have ended, as long as any remain. Returns false if no cluster is alive.
CUNORM_CPU_RUNTIME bool refill(Worker& worker) {
    Launch& launch = *worker.launch;
    const unsigned cluster = unsigned(launch.cluster);
    bool alive = false;
    for (unsigned i = 0; i < worker.slots / cluster; ++i) {
        Gang& gang = worker.gang[i];
        Block* blocks = worker.block + i * cluster;
        if (gang.alive != 0) {
            alive = true;
            continue;
        }
        if (__atomic_load_n(&launch.stop, __ATOMIC_RELAXED) != 0) {
            continue;
        }
        const long long first = __atomic_fetch_add(&launch.next, cluster, __ATOMIC_RELAXED);
        if (first >= launch.last) {
            continue;
        }
        alive = true;
        gang.alive = cluster;
        gang.arrived = gang.generation = 0;
        begin_gang(worker, gang);
        for (unsigned rank = 0; rank < cluster; ++rank) {
            begin_block(worker, gang, blocks[rank], unsigned(first) + rank, rank);
        }
        if (worker.running == nullptr) {
            worker.running = blocks;
        }
        if (worker.running >= blocks && worker.running < blocks + cluster) {
            enter_block(worker, *worker.running);
        }
    }
    return alive;
}

bool look(Watch* watch, unsigned& status);

// Runs fibers, starting with the one of `stack`, until all have ended or the launch stops. Checks for signals in
// between.
CUNORM_CPU_RUNTIME void run_fibers(Worker& worker, Stack* stack) {
    for (;;) {
        switch_context(&worker.host, &stack->context);
        if (worker.status != looking) {
            return;
        }
        worker.status = done;
        if (!look(worker.watch, worker.status)) {
            return;
        }
        stack = worker.paused;
    }
}

// Runs blocks of the launch until none is left. This operating-system thread has exclusive use of the scratch.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE unsigned work(const Task& task, const Scratch& scratch, Watch* watch) {
    Launch* const launch = task.launch;
    Worker* const worker = scratch.worker;
    char* const arenas = scratch.arenas;
    const long long arena_bytes = task.arena_bytes;
    const unsigned slots = unsigned(launch->cluster * launch->resident);
    char* behind = reinterpret_cast<char*>(worker) + rounded(sizeof(Worker));
    memset(static_cast<void*>(worker), 0, sizeof(Worker));
    worker->launch = launch;
    worker->arguments = launch->arguments;
    worker->call = task.call;
    worker->kernel = task.kernel;
    worker->order = launch->order;
    worker->stacks = scratch.stacks;
    worker->arenas = arenas;
    worker->arena_bytes = uint64_t(arena_bytes);
    worker->text = scratch.text;
    worker->text_size = task.text_size;
    worker->status = done;
    worker->watch = watch;
    worker->slots = slots;
    worker->random = uint64_t(launch->seed);
    worker->last_region = launch->region;
    worker->block = reinterpret_cast<Block*>(behind);
    worker->gang = reinterpret_cast<Gang*>(behind + rounded(sizeof(Block) * slots));
    worker->idle_stack =
        reinterpret_cast<Stack**>(behind + rounded(sizeof(Block) * slots) + rounded(sizeof(Gang) * slots));
    for (unsigned i = 0; i < slots; ++i) {
        Block& block = worker->block[i];
        block.slot = i;
        block.live = 0;
        block.arena = arenas + uint64_t(arena_bytes) * i;
#ifdef __SANITIZE_ADDRESS__
        __asan_poison_memory_region(block.arena + launch->shared_bytes, size_t(arena_bytes - launch->shared_bytes));
#endif
        block.statics = static_bytes() != 0 ? static_cast<char*>(malloc(size_t(static_bytes()))) : nullptr;
        memset(static_cast<void*>(&worker->gang[i]), 0, sizeof(Gang));
    }
    begin_checks(*worker);
    while (refill(*worker)) {
        unsigned lane;
        if (!pick(*worker, lane)) {
            word_deadlock(*worker);
            worker->status = faulted;
            __atomic_store_n(&launch->stop, 1, __ATOMIC_RELAXED);
            break;
        }
        run_fibers(*worker, next_stack(*worker, lane));
        if (worker->status != done || (due(watch) && !look(watch, worker->status))) {
            break;
        }
        for (unsigned i = 0; i < slots / unsigned(launch->cluster); ++i) {
            if (worker->gang[i].alive == 0) {
                end_gang(*worker, worker->gang[i], worker->block + i * unsigned(launch->cluster));
            }
        }
    }
    for (unsigned i = 0; i < slots / unsigned(launch->cluster); ++i) {
        end_gang(*worker, worker->gang[i], worker->block + i * unsigned(launch->cluster));
    }
    end_checks(*worker);
    for (unsigned i = 0; i < slots; ++i) {
        free(worker->block[i].statics);
    }
#ifdef __SANITIZE_ADDRESS__
    // Fibers end inside their frames, so the red zones of these frames would remain poisoned.
    __asan_unpoison_memory_region(worker->stacks, worker->fresh * stack_bytes);
    __asan_unpoison_memory_region(arenas, size_t(arena_bytes) * slots);
#endif
    __atomic_fetch_sub(&launch->workers, 1, __ATOMIC_SEQ_CST);
    if (worker->stalls != 0) {
        __atomic_fetch_sub(&launch->stalled, 1, __ATOMIC_SEQ_CST);
    }
    return worker->status;
}

}  // namespace cunorm_cpu

// Functions of every shared object that the host calls, besides those of entry.h.
CUNORM_CPU_EXPORT long long cunorm_cpu_worker_bytes(long long slots, long long threads) {
    return cunorm_cpu::worker_bytes(slots, threads);
}
CUNORM_CPU_EXPORT long long cunorm_cpu_static_bytes() { return cunorm_cpu::static_bytes(); }
CUNORM_CPU_EXPORT void cunorm_cpu_free(void* memory) { free(memory); }

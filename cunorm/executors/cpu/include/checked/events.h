// The checked build, apart from races: stores to the workspace that other blocks must not see yet, and the handlers of
// the scheduler's events.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

// ---- stores that no fence has published -----------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void exchange_held(Held& held) {
    unsigned char memory[sizeof held.value];
    void* address = reinterpret_cast<void*>(held.address);
    memcpy(memory, address, held.bytes);
    memcpy(address, held.value, held.bytes);
    memcpy(held.value, memory, held.bytes);
}

// Called before a store, to save the old value.
CUNORM_CPU_RUNTIME void hold(Stack* stack, uint64_t address, unsigned bytes) {
    Pending& held = stack->worker->checks->held[stack->in->slot];
    make_room(held.list, held.count, held.capacity);
    Held& entry = held.list[held.count++];
    entry = Held{address, {}, bytes, stack->id, stack->worker->checks->tick};
    memcpy(entry.value, reinterpret_cast<const void*>(address), bytes);
}

CUNORM_CPU_RUNTIME void hide(Pending& held) {
    for (uint64_t i = held.count; i-- > 0;) {
        exchange_held(held.list[i]);
    }
}

CUNORM_CPU_RUNTIME void show(Pending& held) {
    for (uint64_t i = 0; i < held.count; ++i) {
        exchange_held(held.list[i]);
    }
}

// A fence of the running thread publishes its own stores, and those that it knows through a barrier.
CUNORM_CPU_RUNTIME void publish(Stack* stack) {
    Pending& held = stack->worker->checks->held[stack->in->slot];
    const Clocks& clocks = *stack->in->gang->clocks;
    uint64_t kept = 0;
    for (uint64_t i = 0; i < held.count; ++i) {
        const Held& entry = held.list[i];
        if (entry.id != stack->id && knows(clocks, stack->id, entry.id) <= entry.tick) {
            held.list[kept++] = entry;
        }
    }
    held.count = kept;
}

// ---- the scheduler's events -----------------------------------------------------------------------------------------

void flush(Worker& worker, Block& block, Warp& warp);
void count_meeting(Worker& worker, bool of_block);
void begin_recorder(Worker& worker);
void end_recorder(Worker& worker);

CUNORM_CPU_RUNTIME void leave_block(Worker& worker, Block& block) {
    hide(worker.checks->held[block.slot]);
    save_statics(block);
}

CUNORM_CPU_RUNTIME void enter_block(Worker& worker, Block& block) {
    restore_statics(block);
    show(worker.checks->held[block.slot]);
}

CUNORM_CPU_RUNTIME void lanes_met(Worker& worker, Block& block, Warp& warp, Kind kind, unsigned mask) {
    count_meeting(worker, false);
    if (kind == SYNCWARP) {
        const unsigned first = unsigned(&warp - block.warp) * lanes;
        lanes_release(*block.gang->clocks, block.rank * unsigned(worker.launch->threads) + first, mask,
                      worker.checks->tick);
    }
    if (mask == ~0u) {
        flush(worker, block, warp);
    }
}

CUNORM_CPU_RUNTIME void block_met(Worker& worker, Block& block) {
    count_meeting(worker, true);
    block_release(*block.gang->clocks, block.rank, worker.checks->tick);
    for (unsigned i = 0; i < block.warps; ++i) {
        flush(worker, block, block.warp[i]);
    }
    ++block.phase;
}

CUNORM_CPU_RUNTIME void warp_ended(Worker& worker, Block& block, Warp& warp) { flush(worker, block, warp); }

// The clock continues from block to block, so that cells need no reset: entries older than the block are ignored.
CUNORM_CPU_RUNTIME void begin_gang(Worker& worker, Gang& gang) {
    Checks& checks = *worker.checks;
    const unsigned cluster = unsigned(worker.launch->cluster), first = unsigned(&gang - worker.gang) * cluster;
    ++checks.tick;
    for (unsigned i = 0; i < cluster; ++i) {
        checks.born[first + i] = checks.tick;
    }
    gang.clocks = new_clocks(unsigned(worker.launch->threads), cluster, checks.tick);
}

CUNORM_CPU_RUNTIME void end_clocks(Worker& worker, Gang& gang, Block* blocks) {
    Checks& checks = *worker.checks;
    for (unsigned i = 0; i < unsigned(worker.launch->cluster); ++i) {
        Pending& held = checks.held[blocks[i].slot];
        if (worker.running == &blocks[i]) {
            hide(held);
        }
        for (uint64_t k = 0; k < held.count; ++k) {
            make_room(checks.late.list, checks.late.count, checks.late.capacity);
            checks.late.list[checks.late.count++] = held.list[k];
        }
        held.count = 0;
    }
    if (gang.clocks != nullptr) {
        free_clocks(gang.clocks);
        gang.clocks = nullptr;
    }
}

CUNORM_CPU_RUNTIME void begin_checks(Worker& worker) {
    Checks* checks = static_cast<Checks*>(calloc(1, sizeof(Checks)));
    worker.checks = checks;
    checks->cells_of_slot = (worker.arena_bytes + uint64_t(static_bytes())) / cell_bytes + 1;
    checks->cells = static_cast<Cell*>(calloc(checks->cells_of_slot * worker.slots, sizeof(Cell)));
    checks->held = static_cast<Pending*>(calloc(worker.slots, sizeof(Pending)));
    begin_recorder(worker);
}

CUNORM_CPU_RUNTIME void end_checks(Worker& worker) {
    Checks& checks = *worker.checks;
    end_recorder(worker);
    show(checks.late);  // the end of the kernel publishes all stores
    for (unsigned i = 0; i < worker.slots; ++i) {
        free(checks.held[i].list);
    }
    for (uint32_t i = 0; i < checks.readers_count; ++i) {
        free(checks.readers[i].list);
    }
    free(checks.readers);
    free(checks.held);
    free(checks.late.list);
    free(static_cast<void*>(checks.cells));
    free(&checks);
    worker.checks = nullptr;
}

}  // namespace cunorm_cpu
#endif

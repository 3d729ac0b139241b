// What the checked build knows beside the plain one: whose bytes shared memory holds, which stores to the workspace other
// blocks may not see yet, and what the scheduler's events mean for both.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

constexpr unsigned cell_bytes = 2;  // the smallest thing that two threads may own side by side
constexpr uint16_t nobody = 0xffff, many = 0xfffe, by_atomic = 0x8000;

struct Reader {
    uint32_t read;
    unsigned id;
};

// The last write to a cell of shared memory and the reads since.
struct Cell {
    uint32_t written, read;  // ticks; before the block's birth: never
    uint16_t writer, reader;
    uint32_t write_site, read_site;
    uint32_t readers;        // where there are many and ticks of their own matter: a list of them, from 1
};

struct Readers {
    Reader* list;
    unsigned count, capacity;
};

// A store to the workspace that other blocks do not see yet; `value` is what memory holds instead while they run.
struct Held {
    uint64_t address;
    unsigned char value[16];
    uint32_t bytes, id, tick;
};

struct Pending {
    Held* list;
    uint64_t count, capacity;
};

struct Checks {
    uint32_t tick;
    uint32_t born[64 * largest_cluster];  // by slot
    Cell* cells;
    uint64_t cells_of_slot;
    Readers* readers;
    uint32_t readers_count, readers_capacity;
    Pending* held;                        // by slot
    Pending late;                         // of blocks that have ended
    struct Recorder* recorder;
};

template <typename T>
CUNORM_CPU_RUNTIME void make_room(T*& list, uint64_t count, uint64_t& capacity) {
    if (count == capacity) {
        capacity = capacity < 16 ? 16 : 2 * capacity;
        list = static_cast<T*>(realloc(static_cast<void*>(list), capacity * sizeof(T)));
        if (list == nullptr) {
            fault("no memory left for the executor's own records");
        }
    }
}

// ---- shared memory: races, and reads of what nobody wrote ------------------------------------------------------------

void unwritten(Stack* stack, uint64_t offset, uint32_t site);

[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void race(Stack* stack, uint64_t offset, bool store, uint32_t site,
                                                          bool stored, unsigned other, uint32_t other_site) {
    char who[60] = "several threads";
    if (other < many) {
        const unsigned thread = (other & ~unsigned(by_atomic)) % stack->threads;
        snprintf(who, sizeof who, "thread %u", thread);
        if (stack->cluster > 1) {
            snprintf(who, sizeof who, "thread %u of the cluster's block %u", thread,
                     (other & ~unsigned(by_atomic)) / stack->threads);
        }
    }
    fault("shared-memory race at byte %llu: it %s at @{%x} what %s %s at @{%x}, and no barrier orders the two",
          (unsigned long long)offset, store ? "writes" : "reads", site, who, stored ? "wrote" : "read", other_site);
}

CUNORM_CPU_RUNTIME void add_reader(Checks& checks, Cell& cell, unsigned id, uint32_t read) {
    if (cell.readers == 0) {
        uint64_t capacity = checks.readers_capacity;
        make_room(checks.readers, checks.readers_count, capacity);
        checks.readers_capacity = uint32_t(capacity);
        checks.readers[checks.readers_count] = Readers{nullptr, 0, 0};
        cell.readers = ++checks.readers_count;
    }
    Readers& readers = checks.readers[cell.readers - 1];
    for (unsigned i = 0; i < readers.count; ++i) {
        if (readers.list[i].id == id) {
            readers.list[i].read = read;
            return;
        }
    }
    uint64_t capacity = readers.capacity;
    make_room(readers.list, readers.count, capacity);
    readers.capacity = unsigned(capacity);
    readers.list[readers.count++] = Reader{read, id};
}

// The tick before which a thread knows everything that its block did, or the cluster where there is one.
CUNORM_CPU_RUNTIME uint32_t knows_all(const Stack* stack, const Clocks& clocks) {
    const uint32_t block = stack->cluster == 1 ? clocks.block_base[0] : 0;
    return block > clocks.base ? block : clocks.base;
}

CUNORM_CPU_RUNTIME void check_read(Stack* stack, Checks& checks, const Clocks& clocks, Cell& cell, uint32_t born,
                                   uint64_t offset, uint32_t site, bool atomic) {
    const unsigned id = stack->id;
    if (cell.written < born || cell.writer == nobody) {
        unwritten(stack, offset, site);
    } else {
        const unsigned writer = cell.writer & ~unsigned(by_atomic);
        if (writer != id && !(atomic && (cell.writer & by_atomic)) && knows(clocks, id, writer) <= cell.written) {
            race(stack, offset, false, site, true, cell.writer, cell.write_site);
        }
    }
    // Whoever knows of all earlier reads stands for them.
    const bool first = cell.read < born || cell.reader == nobody;
    const bool known = !first && (cell.reader == many ? knows_all(stack, clocks) > cell.read
                                                      : knows(clocks, id, cell.reader) > cell.read);
    if (first || cell.reader == id || known) {
        cell.reader = uint16_t(id);
        if (cell.readers != 0) {
            checks.readers[cell.readers - 1].count = 0;
        }
    } else {
        if (clocks.rows || stack->cluster > 1) {
            if (cell.reader != many) {
                add_reader(checks, cell, cell.reader, cell.read);
            }
            add_reader(checks, cell, id, checks.tick);
        }
        cell.reader = many;
    }
    cell.read = checks.tick;
    cell.read_site = site;
}

CUNORM_CPU_RUNTIME void check_write(Stack* stack, Checks& checks, const Clocks& clocks, Cell& cell, uint32_t born,
                                    uint64_t offset, uint32_t site, bool atomic) {
    const unsigned id = stack->id;
    if (cell.written >= born && cell.writer != nobody) {
        const unsigned writer = cell.writer & ~unsigned(by_atomic);
        if (writer != id && !(atomic && (cell.writer & by_atomic)) && knows(clocks, id, writer) <= cell.written) {
            race(stack, offset, true, site, true, cell.writer, cell.write_site);
        }
    }
    if (cell.read >= born && cell.reader != nobody && cell.reader != id && !(atomic && (cell.writer & by_atomic))) {
        if (cell.reader != many) {
            if (knows(clocks, id, cell.reader) <= cell.read) {
                race(stack, offset, true, site, false, cell.reader, cell.read_site);
            }
        } else if (cell.readers != 0) {
            const Readers& readers = checks.readers[cell.readers - 1];
            for (unsigned i = 0; i < readers.count; ++i) {
                if (readers.list[i].id != id && knows(clocks, id, readers.list[i].id) <= readers.list[i].read) {
                    race(stack, offset, true, site, false, readers.list[i].id, cell.read_site);
                }
            }
        } else if (!clocks.rows && knows_all(stack, clocks) <= cell.read) {
            race(stack, offset, true, site, false, many, cell.read_site);
        }
    }
    if (cell.readers != 0) {
        checks.readers[cell.readers - 1].count = 0;
    }
    cell.reader = nobody;
    cell.writer = uint16_t(atomic ? id | by_atomic : id);
    cell.written = checks.tick;
    cell.write_site = site;
}

void log_access(Stack* stack, uint64_t address, unsigned bytes, bool store, bool shared, unsigned region,
                uint32_t site);

// The cells of a range of shared memory, whosever block's it is; faults where it is nobody's.
struct Cells {
    Cell* first;
    unsigned count;
    uint32_t born;
    uint64_t offset;
};

CUNORM_CPU_RUNTIME Cells cells_of(Stack* stack, uint64_t address, uint64_t bytes, bool store, uint32_t site) {
    Worker& worker = *stack->worker;
    Checks& checks = *worker.checks;
    const uint64_t far = address - reinterpret_cast<uintptr_t>(worker.arenas);
    unsigned slot = stack->in->slot;
    uint64_t offset;
    if (far < worker.arena_bytes * worker.slots) {
        slot = unsigned(far / worker.arena_bytes);
        offset = far % worker.arena_bytes;
        const Block& block = worker.block[slot];
        if (block.gang != stack->in->gang || block.live == 0) {
            fault("%s at @{%x} of shared memory of a block that %s", store ? "store" : "load", site,
                  block.gang != stack->in->gang ? "is not in its cluster" : "has ended");
        }
        if (offset + bytes > uint64_t(worker.launch->shared_bytes)) {
            fault("out-of-bounds %llu-byte %s at @{%x}: byte %llu of shared memory, of which the launch gave %lld",
                  (unsigned long long)bytes, store ? "store" : "load", site, (unsigned long long)offset,
                  worker.launch->shared_bytes);
        }
    } else {
        offset = worker.arena_bytes + (address - reinterpret_cast<uintptr_t>(__start_cunorm_shared));
    }
    const uint64_t first = offset / cell_bytes, last = (offset + bytes - 1) / cell_bytes;
    return Cells{checks.cells + checks.cells_of_slot * slot + first, unsigned(last - first + 1), checks.born[slot],
                 offset};
}

CUNORM_CPU_RUNTIME void shared_access(Stack* stack, uint64_t address, unsigned bytes, bool load, bool store,
                                      bool atomic, uint32_t site) {
    Checks& checks = *stack->worker->checks;
    const Cells cells = cells_of(stack, address, bytes, store, site);
    const Clocks& clocks = *stack->in->gang->clocks;
    for (unsigned i = 0; i < cells.count; ++i) {
        const uint64_t offset = cells.offset + i * cell_bytes;
        if (load) {
            check_read(stack, checks, clocks, cells.first[i], cells.born, offset, site, atomic);
        }
        if (store) {
            check_write(stack, checks, clocks, cells.first[i], cells.born, offset, site, atomic);
        }
    }
    log_access(stack, address, bytes, store, true, 0, site);
}

// ---- stores that no fence has published ------------------------------------------------------------------------------

CUNORM_CPU_RUNTIME void exchange_held(Held& held) {
    unsigned char memory[sizeof held.value];
    void* address = reinterpret_cast<void*>(held.address);
    memcpy(memory, address, held.bytes);
    memcpy(address, held.value, held.bytes);
    memcpy(held.value, memory, held.bytes);
}

// Called before the store, with what memory holds.
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

// A fence of the running thread publishes its own stores, and those that a barrier has made it know of.
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

// ---- the scheduler's events -------------------------------------------------------------------------------------------

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
}

CUNORM_CPU_RUNTIME void warp_ended(Worker& worker, Block& block, Warp& warp) { flush(worker, block, warp); }

// Ticks go on from block to block, so that no cell has to be wiped: what is older than the block is nobody's.
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
    show(checks.late);  // the kernel's end publishes all
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

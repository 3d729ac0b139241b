// Race detection in shared memory (checked build): the last writer and the readers of each cell, and whether their
// accesses are ordered.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

constexpr unsigned cell_bytes = 2;  // size of the smallest elements that different threads may write side by side
constexpr uint16_t nobody = 0xffff, many = 0xfffe, by_atomic = 0x8000, by_copy = 0x4000, how = by_atomic | by_copy;

// Lanes of a warp that read at the same tick; `site` is the place of the first read.
struct Reader {
    uint32_t read, warp, members, site;
};

// The last write to a cell of shared memory and the reads since.
struct Cell {
    uint32_t written, read;  // ticks; a tick before the block's start means never
    uint16_t writer, reader;
    uint32_t write_site, read_site;
    uint32_t readers;        // index of the list of readers, from 1; 0: none was needed yet
};

struct Readers {
    Reader* list;
    unsigned count, capacity;
};

// A store to the workspace that other blocks do not see yet. While the storing block runs, memory contains the new
// value and `value` the old one. While other blocks run, the two are exchanged.
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
    uint32_t born[64 * largest_cluster];  // tick of the block's start, by slot
    Cell* cells;
    uint64_t cells_of_slot;
    Readers* readers;
    uint32_t readers_count, readers_capacity;
    Pending* held;                        // unpublished stores, by slot
    Pending late;                         // unpublished stores of blocks that have ended
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

// ---- shared memory: races, and reads of unwritten cells -------------------------------------------------------------

void unwritten(Stack* stack, uint64_t offset, uint32_t site);

[[noreturn]] CUNORM_CPU_RUNTIME CUNORM_CPU_COLD void race(Stack* stack, uint64_t offset, bool store, uint32_t site,
                                                          bool stored, unsigned other, uint32_t other_site) {
    char who[60];
    const unsigned thread = (other & ~unsigned(how)) % stack->threads;
    snprintf(who, sizeof who, "thread %u", thread);
    if (stack->cluster > 1) {
        snprintf(who, sizeof who, "thread %u of the cluster's block %u", thread,
                 (other & ~unsigned(how)) / stack->threads);
    }
    fault("shared-memory race at byte %llu: it %s at @{%x} what %s %s at @{%x}, and no barrier orders the two",
          (unsigned long long)offset, store ? "writes" : "reads", site, who, stored ? "wrote" : "read", other_site);
}

// Adds a read to a cell's list. A thread's latest read replaces its earlier ones.
CUNORM_CPU_RUNTIME void add_reader(Checks& checks, Cell& cell, unsigned id, uint32_t read, uint32_t site) {
    if (cell.readers == 0) {
        uint64_t capacity = checks.readers_capacity;
        make_room(checks.readers, checks.readers_count, capacity);
        checks.readers_capacity = uint32_t(capacity);
        checks.readers[checks.readers_count] = Readers{nullptr, 0, 0};
        cell.readers = ++checks.readers_count;
    }
    Readers& readers = checks.readers[cell.readers - 1];
    const uint32_t warp = id / lanes, member = 1u << id % lanes;
    Reader* place = nullptr;
    for (unsigned i = 0; i < readers.count; ++i) {
        Reader& reader = readers.list[i];
        if (reader.warp == warp && reader.read == read) {
            reader.members |= member;
            place = &reader;
        } else if (reader.warp == warp) {
            reader.members &= ~member;
        }
    }
    if (place != nullptr) {
        return;
    }
    for (unsigned i = 0; i < readers.count; ++i) {
        if (readers.list[i].members == 0) {
            readers.list[i] = Reader{read, warp, member, site};
            return;
        }
    }
    uint64_t capacity = readers.capacity;
    make_room(readers.list, readers.count, capacity);
    readers.capacity = unsigned(capacity);
    readers.list[readers.count++] = Reader{read, warp, member, site};
}

// The tick before which a thread knows all actions of its block or, in a launch with clusters, of its cluster.
CUNORM_CPU_RUNTIME uint32_t knows_all(const Stack* stack, const Clocks& clocks) {
    const uint32_t block = stack->cluster == 1 ? clocks.block_base[0] : 0;
    return block > clocks.base ? block : clocks.base;
}

// Faults if the writing thread does not know all reads of the list.
CUNORM_CPU_RUNTIME void check_readers(Stack* stack, const Clocks& clocks, const Readers& readers, uint64_t offset,
                                      uint32_t site) {
    const uint32_t all = knows_all(stack, clocks);
    for (unsigned i = 0; i < readers.count; ++i) {
        const Reader& reader = readers.list[i];
        for (uint32_t rest = all > reader.read ? 0 : reader.members; rest != 0; rest &= rest - 1) {
            const unsigned id = reader.warp * lanes + unsigned(__builtin_ctz(rest));
            if (id != stack->id && knows(clocks, stack->id, id) <= reader.read) {
                race(stack, offset, true, site, false, id, reader.site);
            }
        }
    }
}

CUNORM_CPU_RUNTIME void check_read(Stack* stack, Checks& checks, const Clocks& clocks, Cell& cell, uint32_t born,
                                   uint64_t offset, uint32_t site, bool atomic) {
    const unsigned id = stack->id;
    if (cell.written < born || cell.writer == nobody) {
        unwritten(stack, offset, site);
    } else {
        const unsigned writer = cell.writer & ~unsigned(how);
        if (writer != id && !(atomic && (cell.writer & by_atomic)) && knows(clocks, id, writer) <= cell.written) {
            race(stack, offset, false, site, true, cell.writer, cell.write_site);
        }
    }
    // A reader that knows all earlier reads replaces them.
    const bool first = cell.read < born || cell.reader == nobody;
    const bool known = !first && (cell.reader == many ? knows_all(stack, clocks) > cell.read
                                                      : knows(clocks, id, cell.reader) > cell.read);
    if (first || cell.reader == id || known) {
        cell.reader = uint16_t(id);
        if (cell.readers != 0) {
            checks.readers[cell.readers - 1].count = 0;
        }
    } else {
        if (cell.reader != many) {
            add_reader(checks, cell, cell.reader, cell.read, cell.read_site);
        }
        add_reader(checks, cell, id, checks.tick, site);
        cell.reader = many;
    }
    cell.read = checks.tick;
    cell.read_site = site;
}

CUNORM_CPU_RUNTIME void check_write(Stack* stack, Checks& checks, const Clocks& clocks, Cell& cell, uint32_t born,
                                    uint64_t offset, uint32_t site, bool atomic) {
    const unsigned id = stack->id;
    if (cell.written >= born && cell.writer != nobody) {
        const unsigned writer = cell.writer & ~unsigned(how);
        if (writer != id && !(atomic && (cell.writer & by_atomic)) && knows(clocks, id, writer) <= cell.written) {
            race(stack, offset, true, site, true, cell.writer, cell.write_site);
        }
    }
    if (cell.read >= born && cell.reader != nobody && cell.reader != id) {
        if (cell.reader != many) {
            if (knows(clocks, id, cell.reader) <= cell.read) {
                race(stack, offset, true, site, false, cell.reader, cell.read_site);
            }
        } else {
            check_readers(stack, clocks, checks.readers[cell.readers - 1], offset, site);
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

// Whether a thread of the running thread's block has passed the cluster's first barrier.
CUNORM_CPU_RUNTIME bool met_cluster(const Stack* stack, const Clocks& clocks) {
    bool met = clocks.passed != nullptr && clocks.passed[stack->id] != 0;
    for (unsigned i = 0; !met && clocks.passed != nullptr && i < stack->threads; ++i) {
        met = clocks.passed[stack->rank * stack->threads + i] != 0;
    }
    return met;
}

// The cells of a range of shared memory, of any block of the cluster. cells_of() faults if the range is outside them.
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
        offset = shared_byte(worker, address);
        const Block& block = worker.block[slot];
        if (block.gang != stack->in->gang || block.live == 0) {
            fault("%s at @{%x} of shared memory of a block that %s", store ? "store" : "load", site,
                  block.gang != stack->in->gang ? "is not in its cluster" : "has ended");
        }
        if (slot != stack->in->slot && !met_cluster(stack, *stack->in->gang->clocks)) {
            fault("%s at @{%x} of shared memory of another block of the cluster, before the cluster's first barrier: "
                  "that block may not have started",
                  store ? "store" : "load", site);
        }
        if (offset + bytes > uint64_t(worker.launch->shared_bytes)) {
            fault("out-of-bounds %llu-byte %s at @{%x}: byte %llu of shared memory, but the launch allocates %lld",
                  (unsigned long long)bytes, store ? "store" : "load", site, (unsigned long long)offset,
                  worker.launch->shared_bytes);
        }
    } else {
        offset = shared_byte(worker, address);
        const uint64_t first = reinterpret_cast<uintptr_t>(__start_cunorm_shared);
        const uint64_t anchor = reinterpret_cast<uintptr_t>(shared_anchor);
        if (address < first || address + bytes > reinterpret_cast<uintptr_t>(__stop_cunorm_shared) ||
            (address < anchor + anchor_bytes && address + bytes > anchor)) {
            fault("out-of-bounds %llu-byte %s at @{%x}, outside static shared memory", (unsigned long long)bytes,
                  store ? "store" : "load", site);
        }
    }
    const uint64_t first = offset / cell_bytes, last = (offset + bytes - 1) / cell_bytes;
    return Cells{checks.cells + checks.cells_of_slot * slot + first, unsigned(last - first + 1), checks.born[slot],
                 offset};
}

CUNORM_CPU_RUNTIME void check_cells(Stack* stack, const Cells& cells, bool load, bool store, bool atomic,
                                    uint32_t site) {
    Checks& checks = *stack->worker->checks;
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
}

void beside_mbarriers(Stack* stack, uint64_t address, unsigned bytes, bool store, uint32_t site);

CUNORM_CPU_RUNTIME void shared_access(Stack* stack, uint64_t address, unsigned bytes, bool load, bool store,
                                      bool atomic, uint32_t site) {
    check_cells(stack, cells_of(stack, address, bytes, store, site), load, store, atomic, site);
    if (!atomic && stack->in->gang->mbarriers != nullptr) {
        beside_mbarriers(stack, address, bytes, store, site);
    }
    for (unsigned past = 0; past < bytes; past += widest_access) {  // a lane accesses at most 16 bytes at once
        log_access(stack, address + past, bytes - past < widest_access ? bytes - past : widest_access, store, true, 0,
                   site);
    }
}

}  // namespace cunorm_cpu
#endif

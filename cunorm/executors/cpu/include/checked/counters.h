// Traffic of a kernel: bytes, requests, sectors, bank conflicts, and a trace of sectors for reuse distances. Checked
// build only.
//
// A request consists of the accesses of a warp's lanes at one place in the kernel. Accesses belong to one request if
// their lanes have executed the place equally often since all lanes last synchronised. Lanes run one after another
// here, so each warp logs its accesses until its lanes synchronise.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

constexpr unsigned most_regions = 24;
constexpr unsigned sector_bytes = 32, banks = 32, bank_bytes = 4;

// Traffic of one array. raw_*: the bytes that the compiler's hooks counted, in pieces of any size.
struct Moved {
    uint64_t loaded, stored, raw_loaded, raw_stored;
    uint64_t load_requests, store_requests, load_sectors, store_sectors;
    uint64_t wide_bytes, wide_sectors;  // 16-byte accesses, loads and stores
};

struct Trace {
    uint64_t sector;
    uint32_t block;
    uint8_t warp;    // of the block
    uint8_t phase;   // barriers that the block has passed, modulo 256
    uint8_t region;  // its number times two, plus one for a store
    uint8_t bytes;   // distinct bytes of the sector that the request accesses
};
static_assert(sizeof(Trace) == 16 && 2 * most_regions <= 256, "TRACE in checked.py has this layout");

// _Counters in cunorm/executors/cpu/checked.py.
struct Counters {
    uint64_t barriers, meetings;
    uint64_t shared_requests, shared_wavefronts, shared_ideal;
    uint64_t unwritten, unwritten_thread, unwritten_block, unwritten_site, unwritten_byte;
    uint64_t traced;         // whether to record a trace
    Trace* trace;
    uint64_t trace_count, trace_capacity;
    Moved moved[most_regions];
};

struct Entry {
    uint64_t address;
    uint32_t site;
    uint8_t bytes, lane, region;
    bool store : 1, shared : 1;
};

struct Log {
    Entry* entries;
    uint64_t count, capacity;
};

struct Request {
    uint64_t address[lanes];
    uint32_t mask, next;  // the next request of the same place, from 1
    uint8_t bytes, region;
    bool store, shared;
};

// A place in the kernel: its first and last request in this flush, and the latest request of each lane.
struct Site {
    uint64_t key;
    uint32_t round, first, last, at[lanes];
};

constexpr unsigned sites = 8192;

struct Recorder {
    Site site[sites];
    uint32_t round;  // number of this flush
    Request* requests;
    uint64_t count, capacity;
    Log* logs;
};

CUNORM_CPU_RUNTIME void begin_recorder(Worker& worker) {
    Recorder* recorder = static_cast<Recorder*>(calloc(1, sizeof(Recorder)));
    worker.checks->recorder = recorder;
    recorder->logs = static_cast<Log*>(calloc(size_t(worker.slots) * lanes, sizeof(Log)));
    for (unsigned slot = 0; slot < worker.slots; ++slot) {
        for (unsigned i = 0; i < lanes; ++i) {
            worker.block[slot].warp[i].log = &recorder->logs[slot * lanes + i];
        }
    }
}

CUNORM_CPU_RUNTIME void end_recorder(Worker& worker) {
    Recorder* recorder = worker.checks->recorder;
    for (unsigned i = 0; i < worker.slots * lanes; ++i) {
        free(recorder->logs[i].entries);
    }
    free(recorder->logs);
    free(recorder->requests);
    free(recorder);
}

CUNORM_CPU_RUNTIME void log_access(Stack* stack, uint64_t address, unsigned bytes, bool store, bool shared,
                                   unsigned region, uint32_t site) {
    if (stack->worker->launch->counters == nullptr) {
        return;
    }
    Log& log = *stack->warp->log;
    make_room(log.entries, log.count, log.capacity);
    Entry& entry = log.entries[log.count++];
    entry.address = address;
    entry.site = site;
    entry.bytes = uint8_t(bytes);
    entry.lane = uint8_t(stack->lane);
    entry.region = uint8_t(region);
    entry.store = store;
    entry.shared = shared;
}

// ---- a request's sectors and banks ----------------------------------------------------------------------------------

// The sectors of a request, and one bit per byte in them that the request accesses.
CUNORM_CPU_RUNTIME unsigned sectors_of(const Request& request, uint64_t* sectors, uint32_t* asked) {
    unsigned count = 0;
    for (uint32_t rest = request.mask; rest != 0; rest &= rest - 1) {
        const uint64_t address = request.address[__builtin_ctz(rest)];
        for (uint64_t sector = address / sector_bytes; sector <= (address + request.bytes - 1) / sector_bytes; ++sector) {
            unsigned i = count;  // search from the end: usually it is the last sector, or a new one
            while (i > 0 && sectors[i - 1] != sector) {
                --i;
            }
            if (i == 0) {
                asked[count] = 0;
                sectors[count++] = sector;
                i = count;
            }
            const uint64_t base = sector * sector_bytes, end = address + request.bytes;
            const unsigned from = address > base ? unsigned(address - base) : 0;
            const unsigned to = end - base < sector_bytes ? unsigned(end - base) : sector_bytes;
            asked[i - 1] |= (to - from < sector_bytes ? (1u << (to - from)) - 1 : ~0u) << from;
        }
    }
    return count;
}

// Counts the wavefronts of a request to shared memory. Lanes are served together as long as their bytes fill the banks
// at most once. A bank serves one word per wavefront, to all lanes that access this word.
CUNORM_CPU_RUNTIME void count_banks(const Request& request, Counters& counters) {
    const unsigned words = request.bytes > bank_bytes ? request.bytes / bank_bytes : 1;
    const unsigned together = lanes / words;
    for (unsigned first = 0; first < unsigned(lanes); first += together) {
        uint64_t wanted[lanes];
        unsigned count = 0, turns = 0;
        uint8_t of_bank[banks] = {};
        for (unsigned lane = first; lane < first + together && lane < unsigned(lanes); ++lane) {
            if ((request.mask >> lane & 1) == 0) {
                continue;
            }
            for (unsigned i = 0; i < words; ++i) {
                const uint64_t word = request.address[lane] / bank_bytes + i;
                const unsigned bank = unsigned(word % banks);
                unsigned k = of_bank[bank] == 0 ? 0 : count;
                while (k > 0 && wanted[k - 1] != word) {
                    --k;
                }
                if (k == 0) {
                    wanted[count++] = word;
                    turns = ++of_bank[bank] > turns ? of_bank[bank] : turns;
                }
            }
        }
        counters.shared_wavefronts += turns;
        counters.shared_ideal += turns != 0;
    }
    ++counters.shared_requests;
}

CUNORM_CPU_RUNTIME void count_request(Worker& worker, const Block& block, const Warp& warp,
                                       const Request& request) {
    Counters& counters = *worker.launch->counters;
    if (request.shared) {
        count_banks(request, counters);
        return;
    }
    uint64_t sectors[2 * lanes];
    uint32_t asked[2 * lanes];
    const unsigned count = sectors_of(request, sectors, asked);
    Moved& moved = counters.moved[request.region];
    (request.store ? moved.store_requests : moved.load_requests) += 1;
    (request.store ? moved.store_sectors : moved.load_sectors) += count;
    if (request.bytes == widest_access) {
        moved.wide_bytes += widest_access * unsigned(__builtin_popcount(request.mask));
        moved.wide_sectors += count;
    }
    for (unsigned i = 0; i < count && counters.traced != 0; ++i) {
        make_room(counters.trace, counters.trace_count, counters.trace_capacity);
        counters.trace[counters.trace_count++] =
            Trace{sectors[i],
                  block.index,
                  uint8_t(&warp - block.warp),
                  uint8_t(block.phase),
                  uint8_t(request.region * 2u + request.store),
                  uint8_t(__builtin_popcount(asked[i]))};
    }
}

CUNORM_CPU_RUNTIME Site& site_of(Recorder& recorder, const Entry& entry) {
    const uint64_t key = uint64_t(entry.site) << 2 | unsigned(entry.store) << 1 | unsigned(entry.shared);
    unsigned i = unsigned(key * 0x9e3779b97f4a7c15u >> 51) % sites;
    for (unsigned tried = 0; tried < sites; ++tried, i = (i + 1) % sites) {
        Site& site = recorder.site[i];
        if (site.round != recorder.round) {
            memset(static_cast<void*>(&site), 0, sizeof site);
            site.round = recorder.round;
            site.key = key;
            return site;
        }
        if (site.key == key) {
            return site;
        }
    }
    fault("more than %u places in the kernel access memory between two synchronisations of a warp", sites);
}

// Converts a warp's log into requests. Called when its lanes have synchronised, or when the warp has ended.
CUNORM_CPU_RUNTIME CUNORM_CPU_NOINLINE void flush(Worker& worker, Block& block, Warp& warp) {
    Log& log = *warp.log;
    if (log.count == 0) {
        return;
    }
    Recorder& recorder = *worker.checks->recorder;
    ++recorder.round;
    recorder.count = 0;
    for (uint64_t i = 0; i < log.count; ++i) {
        const Entry& entry = log.entries[i];
        Site& site = site_of(recorder, entry);
        uint32_t number = site.at[entry.lane];
        number = number == 0 ? site.first : recorder.requests[number - 1].next;
        if (number == 0) {
            make_room(recorder.requests, recorder.count, recorder.capacity);
            number = uint32_t(++recorder.count);
            Request& fresh = recorder.requests[number - 1];
            fresh.mask = fresh.next = 0;
            fresh.bytes = entry.bytes;
            fresh.region = entry.region;
            fresh.store = entry.store;
            fresh.shared = entry.shared;
            (site.first == 0 ? site.first : recorder.requests[site.last - 1].next) = number;
            site.last = number;
        }
        site.at[entry.lane] = number;
        Request& request = recorder.requests[number - 1];
        request.address[entry.lane] = entry.address;
        request.mask |= 1u << entry.lane;
    }
    for (uint64_t i = 0; i < recorder.count; ++i) {
        count_request(worker, block, warp, recorder.requests[i]);
    }
    log.count = 0;
}

CUNORM_CPU_RUNTIME void count_meeting(Worker& worker, bool of_block) {
    if (worker.launch->counters != nullptr) {
        ++(of_block ? worker.launch->counters->barriers : worker.launch->counters->meetings);
    }
}

CUNORM_CPU_RUNTIME void unwritten(Stack* stack, uint64_t offset, uint32_t site) {
    Counters* counters = stack->worker->launch->counters;
    if (counters != nullptr && counters->unwritten++ == 0) {
        counters->unwritten_thread = stack->thread;
        counters->unwritten_block = stack->block;
        counters->unwritten_site = site;
        counters->unwritten_byte = offset;
    }
}

}  // namespace cunorm_cpu
#endif

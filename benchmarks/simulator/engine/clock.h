// Times a launch: which warp issues when, and what it waits for.
//
// Each multiprocessor has four partitions. A partition issues one instruction per cycle, of a warp whose stall count has
// passed, whose scoreboards are released and whose pipe is free. Memory is a chain of queues: the port of the
// multiprocessor, the L2 cache, the DRAM. An instruction takes effect when it issues; its result is usable later.
//
// Sources. Stall counts and scoreboards: Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
// microbenchmarking", 2018. Rates of pipes: CUDA C++ programming guide, "throughput of native arithmetic instructions",
// compute capability 9.0.

constexpr int PARTITIONS = 4, SCOREBOARDS = 6;
constexpr u32 LINE = 128, HALF_LINE = 64;
// Cycles for which an instruction of a warp occupies its pipe in a partition, by PIPE_*: lanes of a warp over results
// per cycle and partition. FMA has two halves of 16 lanes each, of which FMA_HEAVY is one.
constexpr int INTERVAL[] = {1, 2, 2, 2, 8, 2, 1, 2, 2};
// Instructions that wait in a multiprocessor's queue of memory instructions before partitions have to wait, in cycles.
constexpr double QUEUE = 40;
// Cycles without a change of memory or of a barrier after which a launch hangs.
constexpr u64 PATIENCE = 1u << 22;

// When a warp can issue, and what it has under way.
struct Pace {
    Warp* warp = nullptr;
    struct Partition* home = nullptr;
    u64 ready = 0, last = 0;
    u64 board[SCOREBOARDS] = {};
    bool board_of_memory[SCOREBOARDS] = {};
    u64 loads_done = 0, stores_done = 0;
    u64 group_done = 0;      // of the asynchronous copies that are not committed
    std::deque<u64> groups;  // of the committed ones
    bool after_barrier = false;
};

struct Multiprocessor;

struct Partition {
    Multiprocessor* owner = nullptr;
    std::vector<Pace*> warps;
    double pipe[sizeof INTERVAL / sizeof *INTERVAL] = {};
    double light = 0;  // the second half of FMA
    bool scheduled = false;
    u64 next = 0;
};

struct CacheLine {
    u64 tag = ~0ull, used = 0;
    u32 sectors = 0;     // that are there or under way
    double arrives = 0;  // the latest of them
};

struct Multiprocessor {
    Partition partition[PARTITIONS];
    int blocks = 0, dealt = 0;
    double queue = 0, port = 0;  // when the memory pipe and the port to the L2 cache are free
    std::vector<CacheLine> l1;
};

struct LiveBlock {
    std::vector<std::unique_ptr<Pace>> paces;
    Multiprocessor* home = nullptr;
    u64 start = 0;
    std::map<std::pair<u32, u32>, double> copied;  // (mbarrier, phase): when its bulk copies have arrived
};

struct Clock {
    static constexpr u32 WAYS = 4;
    const Job& job;
    const Facts& facts;
    Machine machine;
    Times& times;
    std::vector<Multiprocessor> multiprocessors;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::map<const Block*, LiveBlock> live;
    u64& traffic;  // bytes that have entered the L2 cache, the clock of its lines
    double& dirty;
    double l2_free = 0, dram_free = 0;
    u64 now = 0, end = 0, lives = 0, changed = 0;  // changed: when memory or a barrier last changed
    int next = 0, finished = 0;

    struct Wake {
        u64 at;
        Partition* partition;
        bool operator<(const Wake& other) const { return at != other.at ? at > other.at : partition > other.partition; }
    };
    std::priority_queue<Wake> wakes;

    Clock(const Job& job, const Facts& facts, Times& times)
        : job(job),
          facts(facts),
          machine(job),
          times(times),
          traffic(times.traffic),
          dirty(times.dirty),
          multiprocessors(static_cast<size_t>(facts.multiprocessors)) {
        for (Multiprocessor& one : multiprocessors) {
            for (Partition& partition : one.partition) partition.owner = &one;
            one.l1.resize(static_cast<size_t>(facts.l1_lines) / WAYS * WAYS);
        }
        next = job.first;
    }

    void run() {
        place();
        while (!wakes.empty()) {
            const Wake wake = wakes.top();
            wakes.pop();
            if (!wake.partition->scheduled || wake.partition->next != wake.at)
                continue;  // it was moved to an earlier time
            wake.partition->scheduled = false;
            now = wake.at;
            if (now > changed + PATIENCE) fail("polls in vain for %llu cycles", now - changed);
            turn(*wake.partition);
        }
        if (finished < job.blocks)
            fail("hangs: %d of %d blocks have ended after %llu cycles", finished, job.blocks, now);
        times.cycles = static_cast<double>(end);
        times.block_cycles = static_cast<double>(lives) / job.blocks;
    }

    // ---- placement of blocks ----------------------------------------------------------------------------------------

    void place() {
        while (next < job.first + job.blocks) {
            std::vector<Multiprocessor*> homes;
            if (!find_homes(homes)) return;
            clusters.push_back(machine.make(next));
            next += job.cluster;
            for (size_t k = 0; k < homes.size(); ++k) settle(*clusters.back()->blocks[k], *homes[k]);
        }
    }
    // The emptiest multiprocessors for a cluster, all in one group.
    bool find_homes(std::vector<Multiprocessor*>& homes) {
        size_t start = 0;
        int most = -1;
        size_t best_start = 0, best_size = 0;
        const bool alone = job.cluster == 1;
        for (const int size : facts.groups) {
            const size_t count = alone ? multiprocessors.size() : static_cast<size_t>(size);
            if (count == 0 || start >= multiprocessors.size()) break;
            int room = 0;
            for (size_t k = start; k < start + count && k < multiprocessors.size(); ++k)
                room += facts.resident - multiprocessors[k].blocks;
            if (room >= job.cluster && room > most) most = room, best_start = start, best_size = count;
            start += count;
        }
        if (most < 0) return false;
        for (int k = 0; k < job.cluster; ++k) {
            Multiprocessor* best = nullptr;
            for (size_t i = best_start; i < best_start + best_size && i < multiprocessors.size(); ++i) {
                if (best == nullptr || multiprocessors[i].blocks < best->blocks) best = &multiprocessors[i];
            }
            ++best->blocks;
            homes.push_back(best);
        }
        return true;
    }
    void settle(Block& block, Multiprocessor& home) {
        LiveBlock& here = live[&block];
        here.home = &home;
        here.start = now;
        const double latency = now == 0 ? facts.launch_latency : facts.block_latency;
        for (auto& warp : block.warps) {
            auto pace = std::make_unique<Pace>();
            pace->warp = warp.get();
            pace->ready = now + static_cast<u64>(latency);
            pace->last = pace->ready;
            pace->home = &home.partition[home.dealt++ % PARTITIONS];
            pace->home->warps.push_back(pace.get());
            wake(*pace->home, pace->ready);
            here.paces.push_back(std::move(pace));
        }
    }
    void leave(Block& block) {
        LiveBlock& here = live[&block];
        for (const auto& pace : here.paces) {
            auto& warps = pace->home->warps;
            warps.erase(std::find(warps.begin(), warps.end(), pace.get()));
        }
        --here.home->blocks;
        ++finished;
        lives += now - here.start;
        end = std::max(end, now);
        live.erase(&block);
        if (Runner::over(*block.cluster)) {
            std::erase_if(clusters, [&](const auto& one) { return one.get() == block.cluster; });
        }
        place();
    }

    // ---- issue ------------------------------------------------------------------------------------------------------

    void wake(Partition& partition, u64 at) {
        at = std::max(at, now);
        if (partition.scheduled && partition.next <= at) return;
        partition.scheduled = true;
        partition.next = at;
        wakes.push(Wake{at, &partition});
    }

    // When the next instruction of a warp can issue, and the reason why not earlier.
    u64 earliest(const Pace& pace, const Instruction& code, int& reason) const {
        u64 at = pace.ready;
        reason = pace.after_barrier ? WAITED_BARRIER : WAITED_FIXED;
        for (int k = 0; k < SCOREBOARDS; ++k) {
            if ((code.wait >> k & 1u) && pace.board[k] > at) {
                at = pace.board[k];
                reason = pace.board_of_memory[k] ? WAITED_MEMORY : WAITED_SHORT;
            }
        }
        return at;
    }
    double pipe_free(const Partition& partition, int pipe) const {
        if (pipe == PIPE_MEMORY) return partition.owner->queue - QUEUE;
        if (pipe == PIPE_FMA) return std::min(partition.light, partition.pipe[PIPE_FMA_HEAVY]);
        return partition.pipe[pipe];
    }
    void occupy(Partition& partition, int pipe) {
        const double interval = INTERVAL[pipe], at = static_cast<double>(now);
        times.pipe_busy[pipe] += interval;
        if (pipe == PIPE_FMA && partition.light <= partition.pipe[PIPE_FMA_HEAVY]) {
            partition.light = std::max(partition.light, at) + interval;
        } else {
            double& free = partition.pipe[pipe == PIPE_FMA ? static_cast<int>(PIPE_FMA_HEAVY) : pipe];
            free = std::max(free, at) + interval;
        }
    }

    // Lets the warp issue that has waited longest, or sleeps until one can.
    void turn(Partition& partition) {
        Pace* best = nullptr;
        int best_reason = WAITED_FIXED;
        u64 soonest = ~0ull;
        for (Pace* pace : partition.warps) {
            Warp& warp = *pace->warp;
            if (warp.state != State::running || !warp.select()) continue;
            const Instruction& code = machine.program[static_cast<size_t>(warp.group().pc)];
            int reason;
            u64 at = earliest(*pace, code, reason);
            const double free = pipe_free(partition, code.pipe);
            if (free > static_cast<double>(at)) {
                at = static_cast<u64>(std::ceil(free));
                if (at > now) reason = WAITED_PIPE;
            }
            if (at > now) {
                soonest = std::min(soonest, at);
            } else if (best == nullptr || pace->last < best->last) {
                best = pace;
                best_reason = at > pace->last + 1 ? reason : WAITED_TURN;
            }
        }
        if (best != nullptr) {
            Partition* const self = &partition;  // the block may end
            issue(*best, best_reason);
            wake(*self, now + 1);
        } else if (soonest != ~0ull) {
            wake(partition, soonest);
        }
    }

    void issue(Pace& pace, int reason) {
        Warp& warp = *pace.warp;
        Block& block = *warp.block;
        Partition& partition = *pace.home;
        const Event event = machine.step(warp);
        const Instruction& code = *event.code;
        if (event.changed) changed = now;
        const u64 idle = now - std::min(now, pace.last + 1);
        machine.job.counters[event.pc].waited += idle;
        times.waited[reason] += static_cast<double>(idle);
        ++times.issued;
        occupy(partition, code.pipe);
        pace.last = now;
        pace.ready = now + std::max<u64>(1, code.stall);
        pace.after_barrier = false;
        double done = static_cast<double>(now) + INTERVAL[code.pipe] + 4, read = done;
        const bool of_memory = effect(pace, event, done, read);
        if (code.write_barrier != 7) raise(pace, code.write_barrier, done, of_memory);
        if (code.read_barrier != 7) raise(pace, code.read_barrier, read, false);
        if (event.released_block) release(block, facts.barrier_latency);
        if (event.released_cluster) {
            for (auto& other : block.cluster->blocks) {
                if (live.count(other.get())) release(*other, facts.cluster_latency);
            }
        }
        if (warp.state == State::done && block.running == 0) leave(block);
    }
    static void raise(Pace& pace, int board, double at, bool of_memory) {
        const u64 when = static_cast<u64>(std::ceil(at));
        if (when < pace.board[board]) return;
        pace.board[board] = when;
        pace.board_of_memory[board] = of_memory;
    }
    void release(Block& block, double latency) {
        for (const auto& pace : live[&block].paces) {
            if (pace->warp->state != State::running) continue;
            const u64 at = now + static_cast<u64>(latency);
            if (pace->ready < at) {
                pace->ready = at;
                pace->after_barrier = true;
            }
            wake(*pace->home, pace->ready);
        }
    }

    // ---- effects of instructions ------------------------------------------------------------------------------------

    // Sets when the result is usable, and when the sources are read. Returns whether memory decides the former.
    bool effect(Pace& pace, const Event& event, double& done, double& read) {
        const double at = static_cast<double>(now);
        Multiprocessor& here = *pace.home->owner;
        switch (event.code->op) {
            case OP_S2R:
                done = at + facts.special_latency;
                return false;
            case OP_LDC:
                done = at + facts.constant_latency;
                return false;
            case OP_SHFL:
                done = through_queue(here, 1) + facts.shuffle_latency;
                return false;
            case OP_LDGDEPBAR:
                pace.groups.push_back(pace.group_done);
                return false;
            case OP_DEPBAR:
                wait_groups(pace, event.code->mode[0]);
                return false;
            case OP_MEMBAR:
                if (event.code->mode[0]) {
                    pace.ready = std::max(
                        {pace.ready, pace.stores_done, pace.loads_done, now + static_cast<u64>(facts.fence_latency)});
                }
                return false;
            case OP_INVALIDATE:
                for (CacheLine& line : here.l1) line = CacheLine();
                return false;
            case OP_MBARRIER_TRY:
                done = waited_for(pace, event);
                return true;
            case OP_BULK_LOAD:
                bulk_load(pace, event);
                return false;
            case OP_BULK_STORE:
                bulk_store(pace, event);
                return false;
            default:
                break;
        }
        if (event.mask == 0 || event.access == Access::none) return false;
        return memory(pace, event, done, read);
    }
    // When an instruction that occupies the multiprocessor's memory pipe for some cycles leaves it.
    double through_queue(Multiprocessor& here, double cycles) {
        here.queue = std::max(here.queue, static_cast<double>(now)) + cycles;
        return here.queue;
    }
    void wait_groups(Pace& pace, int open) {
        while (static_cast<int>(pace.groups.size()) > open) {
            pace.ready = std::max(pace.ready, pace.groups.front());
            pace.groups.pop_front();
        }
    }
    double waited_for(Pace& pace, const Event& event) {
        const double soon = static_cast<double>(now) + facts.shared_latency;
        const auto& copied = live[pace.warp->block].copied;
        const auto known = copied.find({event.barrier, event.phase});
        return event.polled || known == copied.end() ? soon : std::max(soon, known->second);
    }
    bool memory(Pace& pace, const Event& event, double& done, double& read) {
        Multiprocessor& here = *pace.home->owner;
        const double lanes = __builtin_popcount(event.mask);
        const double cycles = std::max(1.0, lanes * event.bytes / LINE);
        switch (event.access) {
            case Access::shared:
                read = through_queue(here, std::max(1, event.wavefronts));
                done = read + facts.shared_latency;
                return false;
            case Access::remote:
                read = through_queue(here, cycles);
                here.port = std::max(here.port, read) + lanes * event.bytes / facts.port_bytes;
                done = here.port + facts.remote_latency;
                return true;
            case Access::local:
                read = through_queue(here, event.bytes / 4);
                done = read + facts.l1_latency;
                return true;
            case Access::atomic:
                read = through_queue(here, 1);
                done = read + facts.atomic_latency;
                pace.stores_done = std::max(pace.stores_done, static_cast<u64>(done));
                return true;
            case Access::global_store:
                read = through_queue(here, cycles);
                pace.stores_done = std::max(pace.stores_done, static_cast<u64>(store(here, event, read)));
                return false;
            default: {
                read = through_queue(here, cycles);
                const bool strong = event.code->mode[0] || event.access == Access::copy;
                done = load(here, event, read, !strong);
                pace.loads_done = std::max(pace.loads_done, static_cast<u64>(done));
                if (event.access == Access::copy) pace.group_done = std::max(pace.group_done, static_cast<u64>(done));
                return true;
            }
        }
    }

    // ---- caches and DRAM --------------------------------------------------------------------------------------------

    // The lines that a warp accesses, with a bit per sector.
    struct Lines {
        u64 line[2 * WARP];
        u32 sectors[2 * WARP];
        int count = 0;

        void add(u64 address, u32 bytes) {
            for (u64 sector = address / SECTOR; sector <= (address + bytes - 1) / SECTOR; ++sector) {
                int k = count - 1;
                while (k >= 0 && line[k] != sector / 4) --k;
                if (k < 0) {
                    k = count++;
                    line[k] = sector / 4;
                    sectors[k] = 0;
                }
                sectors[k] |= 1u << sector % 4;
            }
        }
    };
    static Lines lines_of(const Event& event) {
        Lines found;
        for (int l = 0; l < WARP; ++l) {
            if (event.mask >> l & 1u) found.add(event.address[l], static_cast<u32>(event.bytes));
        }
        return found;
    }

    double load(Multiprocessor& here, const Event& event, double at, bool cached) {
        const Lines lines = lines_of(event);
        double done = at + facts.l1_latency;
        for (int k = 0; k < lines.count; ++k) {
            CacheLine* const kept = cached ? find(here, lines.line[k]) : nullptr;
            if (kept != nullptr && kept->tag != lines.line[k]) *kept = CacheLine{lines.line[k], now};
            const u32 missing = lines.sectors[k] & ~(kept != nullptr ? kept->sectors : 0);
            double arrives = kept != nullptr ? kept->arrives : 0;
            if (missing != 0) arrives = std::max(arrives, fetch(here, lines.line[k], missing, at));
            if (kept != nullptr) {
                kept->sectors |= missing;
                kept->arrives = arrives;
            }
            done = std::max(done, arrives);
        }
        return done;
    }
    // The place of a line in the L1 cache: where it is, or the one used longest ago.
    CacheLine* find(Multiprocessor& here, u64 line) {
        if (here.l1.empty()) return nullptr;
        CacheLine* const set = &here.l1[line % (here.l1.size() / WAYS) * WAYS];
        CacheLine* oldest = set;
        for (u32 k = 0; k < WAYS; ++k) {
            if (set[k].tag == line) {
                set[k].used = now;
                return &set[k];
            }
            if (set[k].used < oldest->used) oldest = &set[k];
        }
        return oldest;
    }
    // Sectors of a line from the L2 cache or the DRAM, which reads half lines.
    double fetch(Multiprocessor& here, u64 line, u32 sectors, double at) {
        double done = at;
        for (u32 half = 0; half < 2; ++half) {
            const int count = __builtin_popcount(sectors >> (2 * half) & 3u);
            if (count) done = std::max(done, half_line(line * 2 + half, count, at));
        }
        here.port = std::max(here.port, at) + __builtin_popcount(sectors) * SECTOR / facts.port_bytes;
        return std::max(done, here.port + facts.l2_latency);
    }
    double half_line(u64 half, int sectors, double at) {
        const Use use = use_of(half);
        if (within(use, facts.l2_capacity)) {
            const double bytes = sectors * SECTOR;
            l2_free = std::max(l2_free, at) + bytes / facts.l2_bytes;
            times.l2_hit += static_cast<u64>(bytes);
            use.set(traffic, use.dirty());
            return l2_free + facts.l2_latency;
        }
        traffic += HALF_LINE;
        use.set(traffic, 0);
        times.dram_read += HALF_LINE;
        return transfer(HALF_LINE, at) + facts.dram_latency;
    }
    double transfer(double bytes, double at) {
        dram_free = std::max(dram_free, at) + bytes / facts.dram_bytes;
        times.dram_busy += bytes / facts.dram_bytes;
        return dram_free;
    }
    // The word of a half line in Region::uses.
    struct Use {
        u64& word;

        u64 at() const { return word >> 2; }
        u32 dirty() const { return word & 3u; }
        void set(u64 at, u32 dirty) const { word = at << 2 | dirty; }
    };
    // Whether less than `bytes` have entered the L2 cache since the use.
    bool within(const Use& use, double bytes) const {
        return use.at() != 0 && static_cast<double>(traffic - use.at()) < bytes;
    }
    Use use_of(u64 half) {
        for (int k = 0; k < job.regions_count; ++k) {
            const u64 first = job.regions[k].start / HALF_LINE,
                      last = (job.regions[k].start + job.regions[k].size - 1) / HALF_LINE;
            if (half >= first && half <= last) return Use{static_cast<u64*>(job.regions[k].uses)[half - first]};
        }
        fail("times an access outside the arrays");
    }
    // A store goes to the L2 cache. What exceeds the dirty bytes that stay there goes on to the DRAM. A sector that is
    // still dirty there is written to the DRAM once, however many stores it takes.
    double store(Multiprocessor& here, const Event& event, double at) {
        const Lines lines = lines_of(event);
        double done = at;
        for (int k = 0; k < lines.count; ++k)
            done = std::max(done, store_line(here, lines.line[k], lines.sectors[k], at));
        return done + facts.l2_latency;
    }
    double store_line(Multiprocessor& here, u64 line, u32 sectors, double at) {
        const double bytes = __builtin_popcount(sectors) * SECTOR;
        here.port = std::max(here.port, at) + bytes / facts.port_bytes;
        l2_free = std::max(l2_free, at) + bytes / facts.l2_bytes;
        double dirtied = 0;
        for (u32 half = 0; half < 2; ++half) {
            const u32 stored = sectors >> (2 * half) & 3u;
            if (stored == 0) continue;
            const Use use = use_of(line * 2 + half);
            const u32 before = within(use, facts.dirty_capacity) ? use.dirty() : 0;
            if (!within(use, facts.l2_capacity)) traffic += HALF_LINE;
            use.set(traffic, before | stored);
            dirtied += __builtin_popcount(stored & ~before) * SECTOR;
        }
        CacheLine* const kept = find(here, line);
        if (kept != nullptr && kept->tag == line) *kept = CacheLine();
        dirty += dirtied;
        double drained = at;
        if (dirtied > 0 && dirty > facts.dirty_capacity) {
            dirty -= dirtied;
            times.dram_written += static_cast<u64>(dirtied);
            drained = transfer(dirtied, at);
        }
        return std::max({here.port, l2_free, drained});
    }
    // Calls `what` with each line of a bulk copy. The latest of the times that it returns.
    template <typename What>
    double bulk_lines(const Event& event, What what) const {
        double done = static_cast<double>(now);
        if (event.access != Access::bulk) return done;
        const u64 end = event.address[0] + static_cast<u64>(event.bytes);
        for (u64 line = event.address[0] / LINE; line * LINE < end; ++line) {
            u32 sectors = 0;
            for (u32 k = 0; k < LINE / SECTOR; ++k) {
                const u64 start = line * LINE + k * SECTOR;
                if (start < end && start + SECTOR > event.address[0]) sectors |= 1u << k;
            }
            done = std::max(done, what(line, sectors));
        }
        return done;
    }
    void bulk_load(Pace& pace, const Event& event) {
        Multiprocessor& here = *pace.home->owner;
        const double at = static_cast<double>(now);
        const double done = bulk_lines(event, [&](u64 line, u32 sectors) { return fetch(here, line, sectors, at); });
        if (event.access != Access::bulk) return;
        double& known = live[pace.warp->block].copied[{event.barrier, event.phase}];
        known = std::max(known, done);
    }
    void bulk_store(Pace& pace, const Event& event) {
        Multiprocessor& here = *pace.home->owner;
        const double at = static_cast<double>(now);
        const double done =
            bulk_lines(event, [&](u64 line, u32 sectors) { return store_line(here, line, sectors, at); });
        pace.group_done = std::max(pace.group_done, static_cast<u64>(done));
        pace.stores_done = std::max(pace.stores_done, static_cast<u64>(done));
    }
};

extern "C" __attribute__((visibility("default"))) int simulator_time(Job* job, const Facts* facts, Times* times) {
    return guarded_call(job, [&] { Clock(*job, *facts, *times).run(); });
}

// Executes one instruction of one warp.

typedef void (*Operation)(Lanewise&);

// The function of an operation that computes each lane by itself, or none.
// clang-format off
static Operation operation_of(int op) {
#define LANEWISE(name) case OP_##name: return do_##name;
    switch (op) {
    LANEWISE(MOV) LANEWISE(SEL) LANEWISE(FSEL) LANEWISE(PRMT) LANEWISE(P2R) LANEWISE(CLEAR) LANEWISE(IADD3)
    LANEWISE(IADD3X) LANEWISE(VIADD) LANEWISE(IMAD) LANEWISE(IMADX) LANEWISE(IMADHI) LANEWISE(IMADWIDE)
    LANEWISE(IABS) LANEWISE(LOP3) LANEWISE(SHIFT_LEFT) LANEWISE(SHIFT_RIGHT) LANEWISE(LEA) LANEWISE(LEAHI)
    LANEWISE(MINMAX) LANEWISE(MINMAX3) LANEWISE(ADDMINMAX) LANEWISE(FLO) LANEWISE(POPC) LANEWISE(BREV) LANEWISE(BMSK)
    LANEWISE(SGXT) LANEWISE(ISETP) LANEWISE(FSETP) LANEWISE(DSETP) LANEWISE(PLOP3) LANEWISE(FCHK) LANEWISE(FADD)
    LANEWISE(FMUL) LANEWISE(FFMA) LANEWISE(FMNMX) LANEWISE(MUFU) LANEWISE(MUFU64H) LANEWISE(HALF_PAIR)
    LANEWISE(HADD2_F32) LANEWISE(DADD) LANEWISE(DMUL) LANEWISE(DFMA) LANEWISE(I2F) LANEWISE(I2F_FROM64)
    LANEWISE(I2F_TO64) LANEWISE(F2I) LANEWISE(F2I64) LANEWISE(F2F_BF16) LANEWISE(F2F_F16) LANEWISE(F2F_32_FROM64)
    LANEWISE(F2F_64_FROM32) LANEWISE(PACK_BF16) LANEWISE(PACK_F16) LANEWISE(BF16_ADD) LANEWISE(BF16_MUL)
    LANEWISE(BF16_FMA)
    default: return nullptr;
    }
#undef LANEWISE
}
// clang-format on

struct Machine {
    const Job& job;
    std::vector<Instruction> program;
    std::vector<Operation> operations;

    explicit Machine(const Job& given) : job(given), program(given.program, given.program + given.instructions) {
        for (Instruction& code : program) {
            for (Operand& one : code.source) {
                if (one.kind == KIND_CONSTANT) resolve(one);
            }
            operations.push_back(operation_of(code.op));
        }
    }

    // Replaces a constant by its value.
    void resolve(Operand& one) const {
        const u32 offset = one.low;
        one.kind = KIND_IMMEDIATE;
        one.low = constant(one.index, offset);
        one.high = offset + 8 <= job.constant_bytes[one.index] ? constant(one.index, offset + 4) : 0;
    }
    u32 constant(u32 bank, u32 offset) const {
        if (bank >= 8 || offset + 4 > job.constant_bytes[bank]) fail("reads byte %u of constant bank %u", offset, bank);
        u32 value;
        memcpy(&value, static_cast<const u8*>(job.constants[bank]) + offset, sizeof value);
        return value;
    }

    // ---- blocks -----------------------------------------------------------------------------------------------------

    int warps_per_block() const { return (job.threads[0] * job.threads[1] * job.threads[2] + WARP - 1) / WARP; }

    std::unique_ptr<Cluster> make(int first) const {
        auto cluster = std::make_unique<Cluster>();
        cluster->size = job.cluster;
        cluster->first = first;
        cluster->warps = job.cluster * warps_per_block();
        for (int rank = 0; rank < job.cluster; ++rank) {
            auto block = std::make_unique<Block>();
            block->number = first + rank;
            block->rank = rank;
            block->cluster = cluster.get();
            block->shared.assign(static_cast<size_t>(job.shared_bytes), 0xff);
            for (int k = 0; k < warps_per_block(); ++k) block->warps.push_back(make_warp(*block, k));
            cluster->blocks.push_back(std::move(block));
        }
        return cluster;
    }
    std::unique_ptr<Warp> make_warp(Block& block, int number) const {
        auto warp = std::make_unique<Warp>();
        warp->block = &block;
        warp->number = number;
        Row poison;  // NaN, so that a register that is read before it is written shows
        for (u32& lane : poison.lane) lane = ~0u;
        warp->rows.assign(static_cast<size_t>(job.registers) + 2, poison);
        const int threads = job.threads[0] * job.threads[1] * job.threads[2] - number * WARP;
        warp->exited = threads >= WARP ? 0 : ALL_LANES << threads;
        warp->groups = {Group{0, warp->alive()}};
        warp->local.assign(static_cast<size_t>(job.local_bytes) * WARP, 0xff);
        return warp;
    }

    // ---- guards and results -----------------------------------------------------------------------------------------

    static u32 guarded(const Warp& warp, const Instruction& code, u32 mask) {
        const Predicate& guard = code.guard;
        u32 bits = ALL_LANES;
        if (guard.index != TRUE_PREDICATE) {
            bits = guard.uniform ? (warp.uniform_predicate[guard.index] ? ALL_LANES : 0) : warp.predicate[guard.index];
        }
        return mask & (guard.negated ? ~bits : bits);
    }
    static u32 read(const Warp& warp, const Predicate& from) {
        u32 bits = ALL_LANES;
        if (from.index != TRUE_PREDICATE) {
            bits = from.uniform ? (warp.uniform_predicate[from.index] ? ALL_LANES : 0) : warp.predicate[from.index];
        }
        return from.negated ? ~bits : bits;
    }
    static void put(Warp& warp, const Predicate& into, u32 bits, u32 mask) {
        if (!into.present || into.index == TRUE_PREDICATE) return;
        if (into.uniform) {
            warp.uniform_predicate[into.index] = bits & 1u;
        } else {
            warp.predicate[into.index] = (warp.predicate[into.index] & ~mask) | (bits & mask);
        }
    }
    static void put(Warp& warp, const Instruction& code, const u32* values, u32 mask, int second = 0) {
        if (code.destination_kind == KIND_UNIFORM) {
            if (code.destination != ZERO_UNIFORM) warp.uniform[code.destination + second] = values[0];
        } else if (code.destination != ZERO) {
            u32* row = warp.rows[static_cast<size_t>(code.destination + second)].lane;
            for (int l = 0; l < WARP; ++l) row[l] = mask >> l & 1u ? values[l] : row[l];
        }
    }
    static u32 scalar(const Warp& warp, const Operand& from, int l, int second = 0) {
        switch (from.kind) {
            case KIND_REGISTER:
                return from.index == ZERO ? 0 : warp.rows[static_cast<size_t>(from.index + second)].lane[l];
            case KIND_UNIFORM:
                return from.index == ZERO_UNIFORM ? 0 : warp.uniform[from.index + second];
            default:
                return second ? from.high : from.low;
        }
    }
    static u64 address_of(const Warp& warp, const Address& from, int l) {
        u64 address = static_cast<u64>(static_cast<long long>(from.offset));
        if (from.uniform >= 0 && from.uniform != ZERO_UNIFORM) {
            address += warp.uniform[from.uniform];
            if (from.wide_uniform) address += static_cast<u64>(warp.uniform[from.uniform + 1]) << 32;
        }
        if (from.base >= 0 && from.base != ZERO) {
            const size_t base = static_cast<size_t>(from.base);
            address += warp.rows[base].lane[l];
            if (from.wide) address += static_cast<u64>(warp.rows[base + 1].lane[l]) << 32;
        }
        return from.wide || from.wide_uniform ? address : static_cast<u32>(address);
    }

    // ---- one instruction --------------------------------------------------------------------------------------------

    // Executes the next instruction of a warp that is running. An event without `code` means that nothing can execute:
    // all groups of the warp wait.
    Event step(Warp& warp) {
        Event event;
        if (!warp.select()) return event;
        const int pc = warp.group().pc;
        if (pc < 0 || pc >= static_cast<int>(program.size())) fail("executes at 0x%x, outside its code", pc * 16);
        const Instruction& code = program[static_cast<size_t>(pc)];
        event.code = &code;
        event.pc = pc;
        event.mask = guarded(warp, code, warp.group().mask);
        try {
            const bool moved = control(warp, code, event);
            if (warp.state == State::at_cluster_barrier) return event;  // counted when the barrier opens
            if (!moved) {
                if (event.mask != 0) execute(warp, code, event);
                ++warp.group().pc;
            }
        } catch (Fault& fault) {
            fault.pc = pc;
            fault.block = warp.block->number;
            fault.warp = warp.number;
            throw;
        }
        Counter& counter = job.counters[pc];
        ++counter.warps;
        counter.lanes += static_cast<u64>(__builtin_popcount(event.mask));
        counter.sectors += static_cast<u64>(event.sectors);
        counter.wavefronts += static_cast<u64>(event.wavefronts);
        return event;
    }

    void execute(Warp& warp, const Instruction& code, Event& event) {
        if (const Operation operation = operations[static_cast<size_t>(event.pc)]) {
            Lanewise on(warp, code);
            operation(on);
            if (on.writes) put(warp, code, on.low.lane, event.mask);
            if (on.pair) put(warp, code, on.high.lane, event.mask, 1);
            for (int k = 0; k < 2; ++k) put(warp, code.out[k], on.out[k], event.mask);
        } else if (!lanes(warp, code, event)) {
            access(warp, code, event);
        }
    }

    // Control flow and barriers. Returns whether the instruction was one of these; it has then moved the group itself.
    bool control(Warp& warp, const Instruction& code, Event& event) {
        const u32 all = warp.group().mask;
        u32 mask = event.mask;
        switch (code.op) {
            case OP_BRA:
                warp.branch(code.given[0].present ? mask & read(warp, code.given[0]) : mask, code.target);
                return true;
            case OP_BRA_ANY:
                warp.branch(mask ? all : 0, code.target);
                return true;
            case OP_BRA_DIV:
                warp.branch(mask && scalar(warp, code.source[0], 0) != all ? all : 0, code.target);
                return true;
            case OP_CALL:
                warp.branch(mask, code.target);
                return true;
            case OP_BRX:
            case OP_RET:
                jump(warp, code, mask, event.pc);
                return true;
            case OP_EXIT:
                if (code.given[0].present) mask &= read(warp, code.given[0]);
                if (mask == 0) {
                    ++warp.group().pc;
                    return true;
                }
                warp.end(mask);
                event.changed = true;
                if (warp.state == State::done) ended(warp, event);
                return true;
            case OP_BREAK:
                ++warp.group().pc;
                warp.leave(code.mode[3], code.given[0].present ? mask & read(warp, code.given[0]) : mask);
                return true;
            case OP_BSYNC:
                if (mask == 0) return false;
                unconditional(all, mask);
                warp.wait_convergence(code.mode[3]);
                return true;
            case OP_WARPSYNC:
                if (mask == 0) return false;
                unconditional(all, mask);
                warp.wait_lanes(code.mode[0] ? ALL_LANES : scalar(warp, code.source[0], __builtin_ctz(all)));
                return true;
            case OP_BAR:
                block_barrier(warp, event);
                return true;
            case OP_CLUSTER_WAIT:
                return cluster_wait(warp);
            default:
                return false;
        }
    }
    static void unconditional(u32 all, u32 mask) {
        if (all != mask) fail("synchronises some lanes of a group: the simulator does not know such a guard");
    }
    // A jump to an address in a register, which differs between lanes: those that go where the first goes are one group.
    void jump(Warp& warp, const Instruction& code, u32 mask, int pc) const {
        if (mask == 0) {
            ++warp.group().pc;
            return;
        }
        const u32 first = scalar(warp, code.source[0], __builtin_ctz(mask));
        u32 same = 0;
        for (int l = 0; l < WARP; ++l) {
            if ((mask >> l & 1u) && scalar(warp, code.source[0], l) == first) same |= 1u << l;
        }
        if (same != warp.group().mask) {  // the others execute this instruction again
            warp.groups.push_back(Group{pc, warp.group().mask & ~same});
            warp.group().mask = same;
        }
        const int to = code.op == OP_RET ? static_cast<int>(first / 16) + code.target
                                         : (static_cast<int>(first) + code.mode[0]) / 16 + pc + 1;
        warp.group().pc = to;
    }

    // ---- barriers ---------------------------------------------------------------------------------------------------

    void block_barrier(Warp& warp, Event& event) const {
        if (event.mask == 0) {
            ++warp.group().pc;
            return;
        }
        unconditional(warp.group().mask, event.mask);
        warp.group().wait = Wait::block;
        if (!warp.whole_at_block_barrier()) return;
        warp.state = State::at_block_barrier;
        ++warp.block->arrived;
        event.changed = true;
        open_block_barrier(*warp.block, event);
    }
    static void open_block_barrier(Block& block, Event& event) {
        if (block.arrived == 0 || block.arrived < block.running()) return;
        block.arrived = 0;
        event.released_block = true;
        for (auto& warp : block.warps) {
            if (warp->state != State::at_block_barrier) continue;
            warp->state = State::running;
            warp->group().wait = Wait::none;
            ++warp->group().pc;
        }
    }
    static void open_cluster_barrier(Cluster& cluster, Event& event) {
        if (cluster.arrived == 0 || cluster.arrived < cluster.warps) return;
        cluster.arrived = 0;
        ++cluster.phase;
        event.released_cluster = true;
        for (auto& block : cluster.blocks) {
            for (auto& warp : block->warps) {
                if (warp->state == State::at_cluster_barrier) warp->state = State::running;
            }
        }
    }
    // A warp that has ended is no longer waited for.
    static void ended(Warp& warp, Event& event) {
        open_block_barrier(*warp.block, event);
        --warp.block->cluster->warps;
        open_cluster_barrier(*warp.block->cluster, event);
    }
    // Returns whether the warp waits. If not, the instruction is an ordinary one.
    static bool cluster_wait(Warp& warp) {
        if (warp.block->cluster->phase != warp.cluster_phase) return false;
        warp.state = State::at_cluster_barrier;
        return true;  // it executes the instruction again when the barrier opens
    }

    // ---- lanes that exchange values, and registers of the warp ------------------------------------------------------

    bool lanes(Warp& warp, const Instruction& code, Event& event) const {
        const u32 mask = event.mask, all = warp.group().mask;
        u32 value[WARP];
        switch (code.op) {
            case OP_NOP:
                return true;
            case OP_OUTSIDE:
                fail("calls a function outside its code, such as that of a failed assertion");
            case OP_YIELD:
                warp.group().gave = warp.groups.size() > 1;
                event.polled = true;
                return true;
            case OP_BSSY:
                warp.join(code.mode[3], all);
                return true;
            case OP_S2R:
                for (int l = 0; l < WARP; ++l) value[l] = special(warp, code.mode[0], l);
                put(warp, code, value, mask);
                return true;
            case OP_R2UR:
                to_uniform(warp, code, mask);
                return true;
            case OP_ELECT:
                put(warp, code.out[0], 1u << __builtin_ctz(mask), mask);
                return true;
            case OP_VOTE:
                vote(warp, code, mask);
                return true;
            case OP_SHFL:
                shuffle(warp, code, event);
                return true;
            case OP_CLUSTER_ARRIVE:
                if (all != warp.alive()) fail("arrives at the cluster's barrier with some lanes of a warp only");
                warp.cluster_phase = warp.block->cluster->phase;
                ++warp.block->cluster->arrived;
                event.changed = true;
                open_cluster_barrier(*warp.block->cluster, event);
                return true;
            case OP_CLUSTER_WAIT:
            case OP_LDGDEPBAR:
            case OP_DEPBAR:
            case OP_MEMBAR:
            case OP_FENCE:
            case OP_INVALIDATE:
                return true;
            default:
                return false;
        }
    }
    u32 special(const Warp& warp, int which, int l) const {
        const int thread = warp.number * WARP + l, *threads = job.threads, *grid = job.grid;
        const int block = warp.block->number;
        switch (which) {
            case 0:
                return static_cast<u32>(thread % threads[0]);
            case 1:
                return static_cast<u32>(thread / threads[0] % threads[1]);
            case 2:
                return static_cast<u32>(thread / threads[0] / threads[1]);
            case 3:
                return static_cast<u32>(block % grid[0]);
            case 4:
                return static_cast<u32>(block / grid[0] % grid[1]);
            case 5:
                return static_cast<u32>(block / grid[0] / grid[1]);
            case 6:
                return static_cast<u32>(l);
            case 7:
                return static_cast<u32>(warp.block->rank);
            case 8:
                return SHARED_WINDOW;
            case 9:
                return (1u << l) - 1;
            default:
                return 0;
        }
    }
    // The value of the first lane. A predicate is set for the lanes that have another one; with .OR (mode 0) it stays true
    // where it was.
    static void to_uniform(Warp& warp, const Instruction& code, u32 mask) {
        const u32 first = scalar(warp, code.source[0], __builtin_ctz(mask));
        u32 differs = code.mode[0] ? read(warp, code.out[0]) : 0;
        for (int l = 0; l < WARP; ++l) differs |= static_cast<u32>(scalar(warp, code.source[0], l) != first) << l;
        put(warp, code.out[0], differs, mask);
        put(warp, code, &first, mask);
    }
    // Whether all (mode 0) or any of the lanes have the predicate; the lanes that have it, as a mask.
    static void vote(Warp& warp, const Instruction& code, u32 mask) {
        const u32 bits = read(warp, code.given[0]) & mask;
        const bool holds = code.mode[0] ? bits != 0 : bits == mask;
        put(warp, code.out[0], holds ? ALL_LANES : 0u, mask);
        u32 value[WARP];
        for (u32& lane : value) lane = bits;
        put(warp, code, value, mask);
    }
    static void shuffle(Warp& warp, const Instruction& code, Event& event) {
        u32 value[WARP] = {}, inside = 0;
        for (int l = 0; l < WARP; ++l) {
            if (!(event.mask >> l & 1u)) continue;
            const int by = static_cast<int>(scalar(warp, code.source[1], l) & 31u);
            const u32 limits = scalar(warp, code.source[2], l);
            const int clamp = limits & 31u, segment = limits >> 8 & 31u;
            const int first = l & segment, last = first | (clamp & ~segment);
            int from;
            bool in;
            switch (code.mode[0]) {
                case 0:
                    from = l ^ by;
                    in = from <= last;
                    break;
                case 1:
                    from = first | (by & ~segment);
                    in = from <= last;
                    break;
                case 2:
                    from = l - by;
                    in = from >= last;
                    break;
                default:
                    from = l + by;
                    in = from <= last;
                    break;
            }
            if (!in) from = l;
            if (!(event.mask >> from & 1u)) fail("lane %d shuffles from lane %d, which does not take part", l, from);
            value[l] = scalar(warp, code.source[0], from);
            inside |= static_cast<u32>(in) << l;
        }
        event.access = Access::shared;
        event.wavefronts = 1;
        put(warp, code, value, event.mask);
        put(warp, code.out[0], inside, event.mask);
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    void access(Warp& warp, const Instruction& code, Event& event) const {
        event.bytes = code.bytes;
        switch (code.op) {
            case OP_LDC:
                load_constant(warp, code, event.mask);
                break;
            case OP_LDG:
            case OP_LD:
            case OP_STG:
            case OP_ST:
            case OP_ATOMG:
            case OP_ATOM_CAS:
            case OP_LDGSTS:
                global(warp, code, event);
                break;
            case OP_LDS:
            case OP_STS:
                shared(warp, code, event);
                break;
            case OP_LDSM:
            case OP_STSM:
                matrices(warp, code, event);
                break;
            case OP_LDL:
            case OP_STL:
                local(warp, code, event);
                break;
            default:
                barrier(warp, code, event);
                break;
        }
    }
    void load_constant(Warp& warp, const Instruction& code, u32 mask) const {
        u32 value[2][WARP] = {};
        const int words = (code.bytes + 3) / 4;
        for (int l = 0; l < WARP; ++l) {
            if (!(mask >> l & 1u) && !code.once) continue;
            const u32 bank = static_cast<u32>(code.mode[0]),
                      offset = static_cast<u32>(address_of(warp, code.address, l));
            for (int k = 0; k < words; ++k) value[k][l] = constant(bank, (offset & ~3u) + 4 * k);
            if (code.bytes < 4) value[0][l] = extended(code, value[0][l] >> 8 * (offset & 3u));
        }
        for (int k = 0; k < words; ++k) put(warp, code, value[k], mask, k);
    }
    // A value of less than 4 bytes, extended by zeros, or by its sign (mode 1).
    static u32 extended(const Instruction& code, u32 value) {
        const int unused = 32 - 8 * code.bytes;
        value <<= unused;
        return code.mode[1] ? static_cast<u32>(static_cast<int>(value) >> unused) : value >> unused;
    }
    // Registers from memory, and back.
    static void load(Warp& warp, const Instruction& code, const u8* from, int l) {
        if (code.destination == ZERO && code.destination_kind == KIND_REGISTER) return;
        for (int k = 0; k < (code.bytes + 3) / 4; ++k) {
            u32 value = 0;
            memcpy(&value, from + 4 * k, code.bytes < 4 ? code.bytes : 4);
            if (code.bytes < 4) value = extended(code, value);
            if (code.destination_kind == KIND_UNIFORM) {
                warp.uniform[code.destination + k] = value;
            } else {
                warp.rows[static_cast<size_t>(code.destination + k)].lane[l] = value;
            }
        }
    }
    static void store(const Warp& warp, const Instruction& code, u8* into, int l) {
        for (int k = 0; k < (code.bytes + 3) / 4; ++k) {
            const u32 value = scalar(warp, code.source[0], l, k);
            memcpy(into + 4 * k, &value, code.bytes < 4 ? code.bytes : 4);
        }
    }
    void global(Warp& warp, const Instruction& code, Event& event) const {
        const bool atomic = code.op == OP_ATOMG || code.op == OP_ATOM_CAS;
        const bool writes = code.op == OP_STG || code.op == OP_ST || atomic;
        event.access = atomic                 ? Access::atomic
                       : code.op == OP_LDGSTS ? Access::copy
                       : writes               ? Access::global_store
                                              : Access::global_load;
        event.changed = writes;
        u32 offsets[WARP] = {};
        for (int l = 0; l < WARP; ++l) {
            if (!(event.mask >> l & 1u)) continue;
            const u64 address = event.address[l] = address_of(warp, code.address, l);
            const bool generic = code.op == OP_LD || code.op == OP_ST;
            aligned(address, code.bytes, "global");
            u8* at;
            if (generic && address >> 32 == SHARED_WINDOW) {
                offsets[l] = static_cast<u32>(address);
                const bool own = offsets[l] >> RANK_SHIFT == static_cast<u32>(warp.block->rank);
                event.access = own && event.access != Access::remote ? Access::shared : Access::remote;
                at = shared_bytes(*warp.block, offsets[l], code.bytes);
            } else if (generic && address >> 32 == LOCAL_WINDOW) {
                if (event.access != Access::shared && event.access != Access::remote) event.access = Access::local;
                at = local_bytes(warp, static_cast<u32>(address), code.bytes, l);
            } else {
                at = global_bytes(job, address, code.bytes, writes);
            }
            if (atomic) {
                replace(warp, code, at, l);
            } else if (code.op == OP_LDGSTS) {
                const u32 to = static_cast<u32>(address_of(warp, code.shared, l));
                aligned(to, code.bytes, "shared");
                memcpy(shared_bytes(*warp.block, to, code.bytes), at, code.bytes);
            } else if (writes) {
                store(warp, code, at, l);
            } else {
                load(warp, code, at, l);
            }
        }
        if (event.access == Access::shared) {
            event.wavefronts = wavefronts_of(offsets, event.mask, code.bytes);
        } else if (event.access != Access::remote && event.access != Access::local) {
            event.sectors = sectors_of(event);
        }
    }
    // Adds an integer or a float (mode 2), or replaces a value that is equal to the first operand.
    static void replace(Warp& warp, const Instruction& code, u8* at, int l) {
        u32 before;
        memcpy(&before, at, sizeof before);
        const u32 given = scalar(warp, code.source[0], l);
        u32 after = before + given;
        if (code.op == OP_ATOM_CAS) after = before == given ? scalar(warp, code.source[1], l) : before;
        if (code.mode[2]) after = settled(as_float(before) + as_float(given), true, false);
        memcpy(at, &after, sizeof after);
        if (code.destination != ZERO) warp.rows[code.destination].lane[l] = before;
    }
    static void shared(Warp& warp, const Instruction& code, Event& event) {
        u32 address[WARP] = {};
        event.access = Access::shared;
        event.changed = code.op == OP_STS;
        for (int l = 0; l < WARP; ++l) {
            if (!(event.mask >> l & 1u)) continue;
            address[l] = static_cast<u32>(address_of(warp, code.address, l));
            aligned(address[l], code.bytes, "shared");
            u8* at = shared_bytes(*warp.block, address[l], code.bytes);
            if (code.op == OP_STS) {
                store(warp, code, at, l);
            } else {
                load(warp, code, at, l);
            }
        }
        event.wavefronts = wavefronts_of(address, event.mask, code.bytes);
    }
    // Matrices of 8 rows of 8 values of 2 bytes. The lanes hold the addresses of the rows, 8 lanes those of a matrix. A
    // lane loads two neighbouring values of each matrix, in the order of the lanes.
    static void matrices(Warp& warp, const Instruction& code, Event& event) {
        const int count = code.mode[1];
        const u32 used = count == 4 ? ALL_LANES : (1u << 8 * count) - 1;
        const bool stores = code.op == OP_STSM;
        u32 address[WARP] = {};
        u8* row[WARP] = {};
        if (event.mask != ALL_LANES) fail("moves matrices with some lanes of a warp only");
        for (int l = 0; l < 8 * count; ++l) {
            address[l] = static_cast<u32>(address_of(warp, code.address, l));
            aligned(address[l], 16, "shared");
            row[l] = shared_bytes(*warp.block, address[l], 16);
        }
        for (int k = 0; k < count; ++k) {
            for (int l = 0; l < WARP; ++l) {
                u32 both = stores ? scalar(warp, code.source[0], l, k) : 0;
                for (int half = 0; half < 2; ++half) {
                    const int i = l / 4, j = l % 4 * 2 + half;
                    u8* at = code.mode[0] ? row[8 * k + j] + 2 * i : row[8 * k + i] + 2 * j;
                    u8* value = reinterpret_cast<u8*>(&both) + 2 * half;
                    memcpy(stores ? at : value, stores ? value : at, 2);
                }
                if (!stores && code.destination != ZERO)
                    warp.rows[static_cast<size_t>(code.destination + k)].lane[l] = both;
            }
        }
        event.access = Access::shared;
        event.changed = stores;
        event.wavefronts = wavefronts_of(address, used, 16);
    }
    u8* local_bytes(Warp& warp, u32 address, u32 bytes, int l) const {
        const u32 size = static_cast<u32>(job.local_bytes);
        if (address > size || bytes > size - address) fail("accesses byte %u of local memory", address);
        return warp.local.data() + static_cast<size_t>(size) * static_cast<size_t>(l) + address;
    }
    void local(Warp& warp, const Instruction& code, Event& event) const {
        event.access = Access::local;
        for (int l = 0; l < WARP; ++l) {
            if (!(event.mask >> l & 1u)) continue;
            const u32 address = static_cast<u32>(address_of(warp, code.address, l));
            u8* at = local_bytes(warp, address, code.bytes, l);
            if (code.op == OP_STL) {
                store(warp, code, at, l);
            } else {
                load(warp, code, at, l);
            }
        }
    }

    // ---- mbarriers and bulk copies ----------------------------------------------------------------------------------

    void barrier(Warp& warp, const Instruction& code, Event& event) const {
        Block& block = *warp.block;
        const int first = __builtin_ctz(event.mask);
        event.changed = code.op != OP_MBARRIER_TRY;
        if (code.op == OP_BULK_LOAD) return bulk_load(warp, code, event);
        if (code.op == OP_BULK_STORE) return bulk_store(warp, code, event);
        const u32 at = static_cast<u32>(address_of(warp, code.address, first));
        aligned(at, 8, "shared");
        shared_bytes(block, at, 8);
        event.access = Access::shared;
        event.wavefronts = 1;
        if (code.op == OP_MBARRIER_INIT) {
            MemoryBarrier fresh;  // the word holds minus twice the count of arrivals
            fresh.expected = fresh.pending = static_cast<int>(0x100000u - (scalar(warp, code.source[0], 0) >> 1));
            block.barriers[at] = fresh;
            return;
        }
        const auto known = block.barriers.find(at);
        if (known == block.barriers.end()) fail("uses an mbarrier that was not initialised");
        MemoryBarrier& barrier = known->second;
        if (code.op == OP_MBARRIER_ARRIVE) {
            for (int l = 0; l < WARP; ++l) {
                if (!(event.mask >> l & 1u)) continue;
                barrier.bytes += scalar(warp, code.source[0], l);
                if (--barrier.pending < 0) fail("arrives at an mbarrier more often than it expects");
            }
            barrier.settle();
        } else {
            event.barrier = at;
            const u32 parity = scalar(warp, code.source[0], first) != 0;
            const bool complete = (barrier.phase & 1u) != parity;
            event.polled = !complete;
            event.phase = barrier.phase - 1;
            put(warp, code.out[0], complete ? ALL_LANES : 0u, event.mask);
        }
    }
    static u64 scalar64(const Warp& warp, const Operand& from) {
        return static_cast<u64>(scalar(warp, from, 0, 1)) << 32 | scalar(warp, from, 0);
    }
    void bulk_store(Warp& warp, const Instruction& code, Event& event) const {
        const u64 to = scalar64(warp, code.source[0]);
        const u32 from = scalar(warp, code.source[1], 0), bytes = (scalar(warp, code.source[2], 0) & 0xffffu) * 16;
        aligned(from, 16, "shared");
        aligned(to, 16, "global");
        memcpy(global_bytes(job, to, bytes, true), shared_bytes(*warp.block, from, bytes), bytes);
        event.access = Access::bulk;
        event.bytes = static_cast<int>(bytes);
        event.address[0] = to;
    }
    void bulk_load(Warp& warp, const Instruction& code, Event& event) const {
        const u32 to = scalar(warp, code.source[0], 0), at = scalar(warp, code.source[0], 0, 1);
        const u64 from = scalar64(warp, code.source[1]);
        const u32 bytes = (scalar(warp, code.source[2], 0) & 0xffffu) * 16;
        aligned(to, 16, "shared");
        aligned(from, 16, "global");
        memcpy(shared_bytes(*warp.block, to, bytes), global_bytes(job, from, bytes, false), bytes);
        const auto known = warp.block->barriers.find(at);
        if (known == warp.block->barriers.end()) fail("copies with an mbarrier that was not initialised");
        event.phase = known->second.phase;
        known->second.bytes -= bytes;
        known->second.settle();
        event.access = Access::bulk;
        event.bytes = static_cast<int>(bytes);
        event.address[0] = from;
        event.barrier = at;
    }
};

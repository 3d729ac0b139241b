// Executes one instruction of one warp.

typedef void (*Operation)(Lanewise&);

// The function of an operation that computes each lane by itself, or none.
// clang-format off
static Operation operation_of(int op) {
#define LANEWISE(name) case OP_##name: return do_##name;
    switch (op) {
    LANEWISE(MOV) LANEWISE(SEL) LANEWISE(FSEL) LANEWISE(PRMT) LANEWISE(P2R) LANEWISE(CLEAR) LANEWISE(IADD3)
    LANEWISE(IADD3X) LANEWISE(IADD3WIDE) LANEWISE(VIADD) LANEWISE(IMAD) LANEWISE(IMADX) LANEWISE(IMADHI)
    LANEWISE(IMADWIDE) LANEWISE(IABS) LANEWISE(LOP3) LANEWISE(SHIFT_LEFT) LANEWISE(SHIFT_RIGHT) LANEWISE(LEA) LANEWISE(LEAHI)
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

struct Machine : Accesses {
    std::vector<Instruction> program;
    std::vector<Operation> operations;

    explicit Machine(const Job& given) : Accesses(given), program(given.program, given.program + given.instructions) {
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
    // ---- blocks -----------------------------------------------------------------------------------------------------

    int warps_per_block() const { return (job.threads[0] * job.threads[1] * job.threads[2] + WARP - 1) / WARP; }

    std::unique_ptr<Cluster> make(int first) const {
        auto cluster = std::make_unique<Cluster>();
        cluster->size = job.cluster;
        cluster->warps = job.cluster * warps_per_block();
        for (int rank = 0; rank < job.cluster; ++rank) {
            auto block = std::make_unique<Block>();
            block->number = first + rank;
            block->rank = rank;
            block->cluster = cluster.get();
            block->shared.assign(static_cast<size_t>(job.shared_bytes), 0xff);
            block->running = warps_per_block();
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
            case OP_BRA_ALL:  // all lanes jump, or none
                if (code.given[0].present) mask &= read(warp, code.given[0]);
                warp.branch(code.op == OP_BRA || mask == all ? mask : 0, code.target);
                return true;
            case OP_BRA_ANY:
                warp.branch(mask ? all : 0, code.target);
                return true;
            case OP_BRA_DIV:
                warp.branch(mask && scalar(warp, code.source[0], 0) != all ? all : 0, code.target);
                return true;
            case OP_BRA_CONV:  // the opposite of BRA.DIV: if the threads of the mask are all here
                warp.branch(mask && scalar(warp, code.source[0], 0) == all ? all : 0, code.target);
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
        if (block.arrived == 0 || block.arrived < block.running) return;
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
        --warp.block->running;
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
            case OP_R2P:
                to_predicates(warp, code, mask);
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
    // Bits 0 to 6 of the first source to the predicates P0 to P6, where the second source has ones.
    static void to_predicates(Warp& warp, const Instruction& code, u32 mask) {
        for (int k = 0; k < 7; ++k) {
            u32 bits = 0, chosen = 0;
            for (int l = 0; l < WARP; ++l) {
                bits |= (scalar(warp, code.source[0], l) >> k & 1u) << l;
                chosen |= (scalar(warp, code.source[1], l) >> k & 1u) << l;
            }
            warp.predicate[k] = (warp.predicate[k] & ~(mask & chosen)) | (bits & mask & chosen);
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
};

// Accesses to memory: constants, global, shared and local memory, matrices, mbarriers and bulk copies.

struct Accesses {
    const Job& job;

    explicit Accesses(const Job& job) : job(job) {}

    u32 constant(u32 bank, u32 offset) const {
        if (bank >= 8 || offset + 4 > job.constant_bytes[bank]) fail("reads byte %u of constant bank %u", offset, bank);
        u32 value;
        memcpy(&value, static_cast<const u8*>(job.constants[bank]) + offset, sizeof value);
        return value;
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

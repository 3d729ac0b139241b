// Warps: registers, predicates, and the groups of lanes that execute together.
//
// Lanes of a warp that have diverged form groups. A group executes until it ends, or waits at a convergence barrier
// (BSYNC) or for other lanes (WARPSYNC, BAR). Groups merge only there, as on a GPU since Volta.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int BARRIERS = 16;  // convergence barriers of a warp

// A fault of the kernel. Python adds the source line of `pc`, and the names of arrays for #{number}.
struct Fault {
    std::string text;
    int pc = -1, block = -1, warp = -1;
};

[[noreturn]] static void fail(const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    throw Fault{text};
}

// One register of all lanes.
struct alignas(64) Row {
    u32 lane[WARP];
};

enum class Wait { none, convergence, lanes, block };

struct Group {
    int pc;
    u32 mask;
    Wait wait = Wait::none;
    int barrier = 0;    // of Wait::convergence
    u32 wanted = 0;     // of Wait::lanes: the lanes that must arrive
    bool gave = false;  // it has polled or jumped back: other groups execute first
};

enum class State { running, at_block_barrier, at_cluster_barrier, done };

struct Block;

struct Warp {
    Block* block = nullptr;
    int number = 0;
    State state = State::running;
    std::vector<Row> rows;
    u32 uniform[64] = {};
    u32 predicate[8] = {};  // a bit per lane
    bool uniform_predicate[8] = {};
    u32 joined[BARRIERS][WARP] = {};  // convergence barriers: the lanes that take part, as each lane knows them
    u32 exited = 0;
    unsigned cluster_phase = 0;  // phase of the cluster's barrier at the last arrival
    std::vector<Group> groups;
    size_t current = 0;
    std::vector<u8> local;  // local memory, one lane after another

    u32 alive() const { return ~exited; }
    Group& group() { return groups[current]; }

    // Selects the group that executes next: the current one as long as it can, then the one with the lowest address.
    // Returns false if all groups wait or have ended.
    bool select() {
        if (current < groups.size() && groups[current].wait == Wait::none && !groups[current].gave) return true;
        for (int pass = 0; pass < 2; ++pass) {
            size_t best = groups.size();
            for (size_t k = 0; k < groups.size(); ++k) {
                const Group& one = groups[k];
                if (one.wait == Wait::none && !one.gave && (best == groups.size() || one.pc < groups[best].pc))
                    best = k;
            }
            if (best < groups.size()) {
                current = best;
                return true;
            }
            for (Group& one : groups) one.gave = false;
        }
        return false;
    }

    // Whether every group waits for other lanes.
    bool waits() const {
        for (const Group& one : groups) {
            if (one.wait == Wait::none) return false;
        }
        return true;
    }

    // The lanes of `taken` go to `target`, the others of the group to the next instruction.
    void branch(u32 taken, int target) {
        Group& now = group();
        const bool back = target <= now.pc;
        taken &= now.mask;
        if (taken == now.mask) {
            now.pc = target;
            now.gave = back && groups.size() > 1;
        } else if (taken != 0) {
            const Group other{target, taken};
            now.mask &= ~taken;
            ++now.pc;
            groups.push_back(other);
            if (target < groups[current].pc) current = groups.size() - 1;
            group().gave = back;
        } else {
            ++now.pc;
        }
    }

    // Lanes end. Groups that waited for them go on.
    void end(u32 mask) {
        Group& now = group();
        exited |= mask;
        now.mask &= ~mask;
        ++now.pc;
        if (now.mask == 0) groups.erase(groups.begin() + static_cast<long>(current));
        release();
        if (exited == ALL_LANES) state = State::done;
    }

    void join(int barrier, u32 mask) {
        for (int l = 0; l < WARP; ++l) {
            if (mask >> l & 1u) joined[barrier][l] = mask;
        }
    }
    // Lanes leave a convergence barrier.
    void leave(int barrier, u32 mask) {
        for (u32& known : joined[barrier]) known &= ~mask;
        release();
    }
    void wait_convergence(int barrier) {
        group().wait = Wait::convergence;
        group().barrier = barrier;
        release();
    }
    void wait_lanes(u32 wanted) {
        group().wait = Wait::lanes;
        group().wanted = wanted;
        release();
    }

    // The lanes that a waiting group waits for, itself included.
    u32 wanted(const Group& one) const {
        const u32 asked = one.wait == Wait::convergence ? joined[one.barrier][__builtin_ctz(one.mask)] : one.wanted;
        return (asked | one.mask) & alive();
    }

    // Merges the groups of convergence barriers and of WARPSYNC whose lanes have all arrived.
    void release() {
        for (size_t k = 0; k < groups.size(); ++k) {
            const Group one = groups[k];
            if (one.wait != Wait::convergence && one.wait != Wait::lanes) continue;
            const u32 all = wanted(one);
            u32 arrived = 0;
            for (const Group& other : groups) {
                const bool same = other.wait == one.wait && other.pc == one.pc && other.barrier == one.barrier;
                if (same) arrived |= other.mask;
            }
            if ((arrived & all) == all) {
                merge(one, all);
                k = static_cast<size_t>(-1);
            }
        }
    }

    // The groups that wait as `one` does become one group, which goes on behind its instruction.
    void merge(const Group one, u32 lanes) {
        std::vector<Group> left;
        for (const Group& other : groups) {
            const bool same = other.wait == one.wait && other.pc == one.pc && other.barrier == one.barrier;
            if (!same || (other.mask & lanes) == 0) left.push_back(other);
        }
        left.push_back(Group{one.pc + 1, lanes});
        groups = left;
        current = groups.size();  // none: the next one is selected anew
    }

    // Whether all lanes wait at the barrier of the block; the groups become one.
    bool whole_at_block_barrier() {
        u32 waiting = 0;
        for (const Group& one : groups) {
            if (one.wait == Wait::block && one.pc == group().pc) waiting |= one.mask;
        }
        if (waiting != alive()) return false;
        groups = {Group{group().pc, waiting, Wait::block}};
        current = 0;
        return true;
    }
};

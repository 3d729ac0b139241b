// Memory: arrays of the simulated GPU, shared memory of blocks and clusters, and what an access costs.

// The window of shared memory: a block's bytes begin at 0x400; bits 24 and up hold the rank in the cluster. A generic
// address of shared memory has SHARED_WINDOW as its upper half, one of local memory LOCAL_WINDOW.
constexpr u32 SHARED_START = 0x400, RANK_SHIFT = 24, SHARED_WINDOW = 0x7e00;
constexpr u32 SECTOR = 32, BANK_WORDS = 32;

struct MemoryBarrier {
    int expected = 1, pending = 1;
    long long bytes = 0;  // that copies still have to deliver
    u32 phase = 0;        // phases that are complete

    void settle() {
        if (pending == 0 && bytes == 0) {
            ++phase;
            pending = expected;
        }
    }
};

struct Cluster {
    int size = 1, warps = 0, arrived = 0;
    unsigned phase = 0;
    std::vector<std::unique_ptr<Block>> blocks;
};

struct Block {
    int number = 0, rank = 0, arrived = 0;
    int running = 0;  // warps that have not ended
    Cluster* cluster = nullptr;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<u8> shared;
    std::map<u32, MemoryBarrier> barriers;
};

// What one instruction did, for the counters and the clock.
enum class Access { none, global_load, global_store, atomic, shared, remote, copy, bulk, local };

struct Event {
    const Instruction* code = nullptr;
    int pc = 0;
    u32 mask = 0;  // lanes whose guard was true
    Access access = Access::none;
    bool polled = false;   // a wait that was in vain
    bool changed = false;  // memory or a barrier changed, so that another warp may go on
    bool released_block = false, released_cluster = false;
    int wavefronts = 0, sectors = 0, bytes = 0;  // bytes: of one lane, or of a bulk copy
    u64 address[WARP];                           // of global accesses, by lane
    u32 barrier = 0, phase = 0;                  // of bulk copies and of waits for them
};

// ---- global memory --------------------------------------------------------------------------------------------------

// Bytes between an address and an array; 0 if it is inside.
static u64 distance(const Region& region, u64 address) {
    if (address < region.start) return region.start - address;
    return address < region.start + region.size ? 0 : address - (region.start + region.size) + 1;
}

static u8* global_bytes(const Job& job, u64 address, u32 bytes, bool writes) {
    for (int k = 0; k < job.regions_count; ++k) {
        const Region& region = job.regions[k];
        if (address - region.start < region.size && address - region.start + bytes <= region.size) {
            return static_cast<u8*>(region.bytes) + (address - region.start);
        }
    }
    int nearest = 0;
    for (int k = 1; k < job.regions_count; ++k) {
        if (distance(job.regions[k], address) < distance(job.regions[nearest], address)) nearest = k;
    }
    const Region& region = job.regions[nearest];
    fail("%s %u bytes at byte %lld of #{%d}, which has %llu", writes ? "writes" : "reads", bytes,
         static_cast<long long>(address - region.start), nearest, region.size);
}

static void aligned(u64 address, u32 bytes, const char* where) {
    if (address % bytes) fail("accesses %u bytes of %s memory at the misaligned address 0x%llx", bytes, where, address);
}

// The number of different 32-byte sectors that the lanes access.
static int sectors_of(const Event& event) {
    u64 seen[WARP * 2];
    int count = 0;
    for (int l = 0; l < WARP; ++l) {
        if (!(event.mask >> l & 1u)) continue;
        const u64 sector = event.address[l] / SECTOR;
        int k = count - 1;  // neighbours often share a sector: search from the latest
        while (k >= 0 && seen[k] != sector) --k;
        if (k < 0) seen[count++] = sector;
    }
    return count;
}

// ---- shared memory --------------------------------------------------------------------------------------------------

static u8* shared_bytes(Block& block, u32 address, u32 bytes) {
    const u32 rank = address >> RANK_SHIFT, offset = address & ((1u << RANK_SHIFT) - 1);
    if (rank >= static_cast<u32>(block.cluster->size))
        fail("accesses shared memory of rank %u of %d", rank, block.cluster->size);
    Block& owner = rank == 0 && block.cluster->size == 1 ? block : *block.cluster->blocks[rank];
    if (offset < SHARED_START || offset - SHARED_START + bytes > owner.shared.size()) {
        fail("accesses %u bytes at byte %d of shared memory, which has %zu", bytes,
             static_cast<int>(offset) - static_cast<int>(SHARED_START), owner.shared.size());
    }
    if (owner.running == 0) fail("accesses shared memory of rank %u, which has ended", rank);
    return owner.shared.data() + (offset - SHARED_START);
}

// Wavefronts of an access: the most different words of one bank. Accesses of 8 bytes go by half warps, of 16 bytes by
// quarter warps.
static int wavefronts_of(const u32* address, u32 mask, u32 bytes) {
    const int together = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    int total = 0;
    for (int start = 0; start < WARP; start += together) {
        u32 words[BANK_WORDS][WARP];
        int depth[BANK_WORDS] = {}, deepest = 0;
        for (int l = start; l < start + together; ++l) {
            if (!(mask >> l & 1u)) continue;
            for (u32 word = address[l] / 4; word <= (address[l] + bytes - 1) / 4; ++word) {
                const u32 bank = word % BANK_WORDS;
                int k = 0;
                while (k < depth[bank] && words[bank][k] != word) ++k;
                if (k == depth[bank]) words[bank][depth[bank]++] = word;
                deepest = depth[bank] > deepest ? depth[bank] : deepest;
            }
        }
        total += deepest;
    }
    return total;
}

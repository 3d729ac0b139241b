// Reuse distances of a trace of 32-byte sectors: the number of other sectors that are accessed between two accesses to
// the same sector. Includes only C headers, as the runtime does.
//
// The stack distance is counted on a time line with one bit per access. A set bit marks the latest access to a sector,
// and the number of marks after a sector's own mark is the distance (Bennett and Kruskal, "LRU stack processing", IBM J.
// Res. Dev. 19, 1975). A Fenwick tree over words of 64 bits counts the marks; it is small enough for a cache. When the
// time line is full, the marks are moved together, so memory grows with the number of sectors, not of accesses.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr uint64_t word_bits = 64, least_times = 1u << 20;

// Same layout as struct Trace in counters.h.
struct Access {
    uint64_t sector;
    uint32_t block;
    uint8_t warp, phase, region, bytes;
};

struct Reuse {
    // Sectors are numbered from 1. `table` is an open-addressing hash table of these numbers.
    uint64_t slots, sectors, capacity;
    uint32_t* table;
    uint64_t* sector;    // sector by number
    uint32_t* last;      // time of its mark by number; 0: none
    uint64_t* taker[2];  // by number: the launch and block that last loaded, and that last stored, the sector

    uint64_t times, now, live, turn;
    uint64_t* marks;
    uint32_t* counts;  // Fenwick tree over the words of `marks`, from index 1
    uint32_t* owner;   // number of the sector of each mark
};

template <typename T>
bool grow(T*& list, uint64_t count) {
    T* const larger = static_cast<T*>(realloc(static_cast<void*>(list), count * sizeof(T)));
    list = larger == nullptr ? list : larger;
    return larger != nullptr;
}

uint64_t place_of(const Reuse& reuse, uint64_t sector) {
    uint64_t at = sector * 0x9e3779b97f4a7c15u >> 20 & (reuse.slots - 1);
    while (reuse.table[at] != 0 && reuse.sector[reuse.table[at]] != sector) {
        at = (at + 1) & (reuse.slots - 1);
    }
    return at;
}

bool rehash(Reuse& reuse, uint64_t slots) {
    free(reuse.table);
    reuse.slots = slots;
    reuse.table = static_cast<uint32_t*>(calloc(slots, sizeof(uint32_t)));
    for (uint64_t number = 1; reuse.table != nullptr && number <= reuse.sectors; ++number) {
        reuse.table[place_of(reuse, reuse.sector[number])] = uint32_t(number);
    }
    return reuse.table != nullptr;
}

// The number of a sector; a new sector gets a new number. 0: out of memory.
uint32_t number_of(Reuse& reuse, uint64_t sector) {
    uint64_t at = place_of(reuse, sector);
    if (reuse.table[at] != 0) {
        return reuse.table[at];
    }
    if (reuse.sectors + 2 > reuse.capacity) {
        const uint64_t more = 2 * reuse.capacity;
        if (more > UINT32_MAX || !grow(reuse.sector, more) || !grow(reuse.last, more) || !grow(reuse.taker[0], more) ||
            !grow(reuse.taker[1], more)) {
            return 0;
        }
        reuse.capacity = more;
    }
    if (2 * (reuse.sectors + 1) > reuse.slots) {
        if (!rehash(reuse, 2 * reuse.slots)) {
            return 0;
        }
        at = place_of(reuse, sector);
    }
    const uint32_t number = uint32_t(++reuse.sectors);
    reuse.sector[number] = sector;
    reuse.last[number] = 0;
    reuse.taker[0][number] = reuse.taker[1][number] = 0;
    reuse.table[at] = number;
    return number;
}

// ---- the time line --------------------------------------------------------------------------------------------------

void change(Reuse& reuse, uint64_t time, uint32_t by) {
    reuse.marks[time / word_bits] ^= uint64_t(1) << time % word_bits;
    for (uint64_t i = time / word_bits + 1; i <= reuse.times / word_bits; i += i & -i) {
        reuse.counts[i] += by;
    }
}

// The number of marks up to and including that time.
uint64_t marks_to(const Reuse& reuse, uint64_t time) {
    const uint64_t word = time / word_bits;
    uint64_t found = uint64_t(__builtin_popcountll(reuse.marks[word] << (word_bits - 1 - time % word_bits)));
    for (uint64_t i = word; i > 0; i -= i & -i) {
        found += reuse.counts[i];
    }
    return found;
}

// Moves the marks together, from time 1, and makes the time line at least four times as long as the marks.
bool compact(Reuse& reuse) {
    uint64_t kept = 0;
    for (uint64_t time = 1; time < reuse.now; ++time) {
        if (reuse.marks[time / word_bits] >> time % word_bits & 1) {
            const uint32_t number = reuse.owner[time];
            reuse.last[number] = uint32_t(++kept);
            reuse.owner[kept] = number;
        }
    }
    uint64_t times = least_times;
    while (times < 4 * kept) {
        times *= 2;
    }
    if (times > UINT32_MAX || !grow(reuse.owner, times) || !grow(reuse.marks, times / word_bits) ||
        !grow(reuse.counts, times / word_bits + 1)) {
        return false;
    }
    reuse.times = times;
    reuse.now = kept + 1;
    memset(reuse.marks, 0, times / 8);
    memset(reuse.counts, 0, (times / word_bits + 1) * sizeof(uint32_t));
    for (uint64_t time = 1; time <= kept; ++time) {
        change(reuse, time, 1);
    }
    return true;
}

// Marks an access. Returns the number of other sectors since the last access to this sector, -1 for the first access, or
// -2 if out of memory.
int64_t touch(Reuse& reuse, uint32_t number) {
    if (reuse.now >= reuse.times && !compact(reuse)) {
        return -2;
    }
    int64_t distance = -1;
    if (reuse.last[number] != 0) {
        distance = int64_t(reuse.live - marks_to(reuse, reuse.last[number]));
        change(reuse, reuse.last[number], uint32_t(-1));
        --reuse.live;
    }
    reuse.last[number] = uint32_t(reuse.now);
    reuse.owner[reuse.now] = number;
    change(reuse, reuse.now++, 1);
    ++reuse.live;
    return distance;
}

}  // namespace

#define CUNORM_EXPORT extern "C" __attribute__((visibility("default")))

CUNORM_EXPORT void cunorm_reuse_free(void* state) {
    Reuse* const reuse = static_cast<Reuse*>(state);
    if (reuse != nullptr) {
        free(reuse->table);
        free(reuse->sector);
        free(reuse->last);
        free(reuse->taker[0]);
        free(reuse->taker[1]);
        free(reuse->marks);
        free(reuse->counts);
        free(reuse->owner);
        free(reuse);
    }
}

// Returns null if out of memory.
CUNORM_EXPORT void* cunorm_reuse_new() {
    Reuse* const reuse = static_cast<Reuse*>(calloc(1, sizeof(Reuse)));
    if (reuse == nullptr) {
        return nullptr;
    }
    reuse->capacity = 1u << 16;
    reuse->now = 1;
    if (!grow(reuse->sector, reuse->capacity) || !grow(reuse->last, reuse->capacity) ||
        !grow(reuse->taker[0], reuse->capacity) || !grow(reuse->taker[1], reuse->capacity) ||
        !rehash(*reuse, 1u << 17) || !compact(*reuse)) {
        cunorm_reuse_free(reuse);
        return nullptr;
    }
    return reuse;
}

// Replays a launch after the previous launches. The accesses of a block are in order; `resident` blocks advance by one
// access in turn, and the next block replaces a block that ends.
//
//   fetched   adds, by region, the sectors that blocks access, each counted once per block
//   asked     adds, by region, the bytes that requests ask for, each counted once per request
//   wanted    by region: whether its distances are recorded
//   distances receives the distances, in sectors, of loads of sectors that were accessed before; space for `count`
//
// Returns the number of distances, or -1 if out of memory.
CUNORM_EXPORT int64_t cunorm_reuse_launch(void* state, const Access* trace, uint64_t count, uint64_t blocks,
                                          uint64_t resident, uint64_t* fetched, uint64_t* asked, const uint8_t* wanted,
                                          uint32_t* distances) {
    Reuse& reuse = *static_cast<Reuse*>(state);
    uint64_t* const next = static_cast<uint64_t*>(calloc(blocks + 1, sizeof(uint64_t)));
    uint64_t* const end = static_cast<uint64_t*>(calloc(blocks + 1, sizeof(uint64_t)));
    uint64_t* const order = static_cast<uint64_t*>(malloc((count + 1) * sizeof(uint64_t)));
    uint32_t* const turns = static_cast<uint32_t*>(malloc((resident + 1) * sizeof(uint32_t)));
    int64_t found = next == nullptr || end == nullptr || order == nullptr || turns == nullptr ? -1 : 0;
    if (found == 0) {
        for (uint64_t i = 0; i < count; ++i) {
            ++end[trace[i].block];
        }
        for (uint64_t block = 0, before = 0; block < blocks; ++block) {
            next[block] = before;
            before += end[block];
            end[block] = next[block];
        }
        for (uint64_t i = 0; i < count; ++i) {
            order[end[trace[i].block]++] = i;
        }
    }
    // Block by block: number the sectors, and count the sectors that each block accesses.
    for (uint64_t i = 0; i < count && found == 0; ++i) {
        const Access& access = trace[order[i]];
        const uint32_t number = number_of(reuse, access.sector);
        const uint64_t taker = (reuse.turn << 32 | access.block) + 1;
        if (number == 0) {
            found = -1;
        } else if (reuse.taker[access.region % 2][number] != taker) {
            reuse.taker[access.region % 2][number] = taker;
            ++fetched[access.region];
        }
        asked[access.region] += access.bytes;
        order[i] = uint64_t(access.region) << 32 | number;
    }
    ++reuse.turn;
    uint64_t live = 0, started = 0;
    while (found >= 0) {
        while (live < resident && started < blocks) {  // at the start; skips blocks without accesses
            turns[live] = uint32_t(started++);
            live += next[turns[live]] < end[turns[live]];
        }
        if (live == 0) {
            break;
        }
        for (uint64_t i = 0; i < live && found >= 0;) {
            const uint32_t block = turns[i];
            const uint32_t number = uint32_t(order[next[block]]), region = uint32_t(order[next[block]] >> 32);
            ++next[block];
            const int64_t distance = touch(reuse, number);
            if (distance == -2) {
                found = -1;
            } else if (distance >= 0 && region % 2 == 0 && wanted[region]) {
                distances[found++] = uint32_t(distance);
            }
            if (next[block] < end[block]) {
                ++i;
                continue;
            }
            while (started < blocks && next[started] == end[started]) {
                ++started;
            }
            if (started < blocks) {
                turns[i++] = uint32_t(started++);
            } else {
                memmove(turns + i, turns + i + 1, (--live - i) * sizeof(uint32_t));
            }
        }
    }
    free(next);
    free(end);
    free(order);
    free(turns);
    return found;
}

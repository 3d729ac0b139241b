// A work queue: persistent blocks draw tickets in order, and each ticket is a work item. A tile is the share of the
// tensors that a block processes at a time. A slab is some channels of one sample (sweep.cuh). The sums of its tiles
// are folded together. A tile has two work items: its sums, and its outputs. The outputs follow when the sums of the
// slab have been folded, while the data that the sums have read is still in the L2 cache.
//
// The order of tickets: first the sums of the first slab and of `prefetch_tiles` more tiles; then rounds. Each round is
// the outputs of one slab, and then the sums of as many tiles as a slab has. The sums are therefore `prefetch_tiles`
// tiles ahead of the last slab whose outputs may begin. Between the last sums of a slab and its first outputs, the
// blocks draw at least 2 * prefetch_tiles tickets. If there are more resident blocks than that, some of these sums may
// be unfinished, and blocks wait. The outputs of a slab are in descending order, so that the data read last is read
// again first. (Outputs and sums in turn would keep all tiles equally long in the cache, but longer on average.)
//
// A block draws its next ticket at the start of its present tile, so that the atomic is in flight during the tile. Only
// a block that must wait before its tile draws later, after the wait: a ticket that it held meanwhile would be a tile
// that no other block can process, and sums for which other blocks would wait in turn.
//
// A block waits only for tiles whose tickets were drawn before its own, by blocks that are running or have ended.
// Therefore no number of resident blocks is too small, and no cooperative launch is needed. The order in which blocks
// arrive determines which block folds a slab's sums, but not which values are folded, nor in which order.
#include "common/async.cuh"

constexpr unsigned ticket_words = 32;  // the ticket counter occupies an L2 cache line of its own

// The sums or the outputs of one tile.
struct WorkItem {
    unsigned slab, tile;
    bool output;  // true: the outputs; false: the sums
    bool live;    // false: the ticket is past the last sums, and is a no-op
};

struct WorkQueue {
    // words[0] is the next ticket. words[ticket_words + slab] counts the tiles of the slab whose sums are stored. It is
    // tiles + 1 once they are folded.
    unsigned* words;
    unsigned tiles;  // tiles of a slab
    unsigned slabs;
    unsigned prefetch_tiles;  // the host ensures that 32 bits count all tickets

    __device__ __forceinline__ unsigned ahead() const {
        return tiles + prefetch_tiles < tiles * slabs ? tiles + prefetch_tiles : tiles * slabs;
    }
    __device__ __forceinline__ unsigned end() const { return ahead() + 2 * tiles * slabs - tiles; }
    __device__ __forceinline__ WorkItem of(unsigned ticket) const {
        unsigned sum = ticket;
        if (ticket >= ahead()) {
            const unsigned past = ticket - ahead();
            const unsigned round = past / (2 * tiles), step = past - round * 2 * tiles;
            if (step < tiles) {
                return WorkItem{round, tiles - 1 - step, true, true};
            }
            sum = ahead() + round * tiles + step - tiles;
        }
        const unsigned slab = sum / tiles;
        return WorkItem{slab, sum - slab * tiles, false, slab < slabs};
    }
};

constexpr int drawn_words = 3;  // of a block: two tickets in turn, and whether its signal completed a slab

// Processes a block's work items. sums(slab, tile) stores to the workspace. fold(slab) combines the sums of all the
// slab's tiles. output(slab, tile) may read the values that fold stored. `drawn` is in shared memory,
// drawn_words long. The whole block calls. Each of the three callbacks begins after a barrier.
template <typename Sums, typename Fold, typename Output>
__device__ __forceinline__ void take_work(const WorkQueue& queue, unsigned* drawn, Sums sums, Fold fold,
                                          Output output) {
    const bool first = threadIdx.x == 0;
    unsigned* const complete = drawn + 2;
    unsigned next = first ? draw_ticket(queue.words) : 0u;
    for (int slot = 0;; slot = 1 - slot) {
        if (first) {
            drawn[slot] = next;
        }
        __syncthreads();
        const unsigned ticket = drawn[slot];  // the next uses the other slot: a thread may still be reading this one
        if (ticket >= queue.end()) {
            return;
        }
        const WorkItem item = queue.of(ticket);
        unsigned* const word = queue.words + ticket_words + item.slab;
        if (first) {
            if (item.output) {
                wait_above(word, queue.tiles);
            }
            next = draw_ticket(queue.words);  // after the wait; the atomic is in flight during the work item
        }
        if (!item.live) {
            continue;
        }
        if (item.output) {
            __syncthreads();
            output(item.slab, item.tile);
            continue;
        }
        sums(item.slab, item.tile);
        __syncthreads();  // after the stores of every thread: they are published here for the block that folds
        if (first) {
            *complete = add_release_acquire(word, 1u) + 1 == queue.tiles;
        }
        __syncthreads();
        if (*complete) {
            fold(item.slab);
            __syncthreads();
            if (first) {
                store_release(word, queue.tiles + 1);
            }
        }
    }
}

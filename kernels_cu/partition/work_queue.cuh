// A work queue: persistent blocks draw tickets in order, and a ticket is a work item. A tile is a block's share of the
// tensors; a team is the tiles whose sums are folded into one (sweep.cuh). A tile has two work items: its sums, and its
// outputs once the sums of its team are folded, while what the sums read is still in the L2 cache.
//
// The order of tickets: the sums of the first team and of `lead` tiles more; then rounds, each with the outputs of a team
// and the sums of as many tiles as a team has. So the sums run `lead` tiles ahead of the last team whose outputs may begin:
// the more tiles blocks hold (one each, and the ticket of the next), the more lead keeps them from waiting. Outputs go
// backwards: what was read last is read first.
//
// A block waits only for tiles whose tickets were drawn before its own, by blocks that run or have ended: no number of
// resident blocks is too small, and no cooperative launch is needed. Who folds a team's sums is up to the order in which
// blocks arrive; what is folded, and in which order, is not.
#include "common/async.cuh"

constexpr unsigned ticket_words = 32;  // the tickets have a line of the L2 cache to themselves

// The sums or the outputs of one tile.
struct WorkItem {
    unsigned team, tile;
    bool output;  // or its sums
    bool live;    // false: the ticket is past the last sums, and there is nothing to do
};

struct WorkQueue {
    unsigned* words;  // the next ticket; from ticket_words a word a team: tiles whose sums are stored, then one more
    unsigned tiles;   // of a team
    unsigned teams;
    unsigned lead;  // the host sees to it that 32 bits count all tickets

    __device__ __forceinline__ unsigned ahead() const {
        return tiles + lead < tiles * teams ? tiles + lead : tiles * teams;
    }
    __device__ __forceinline__ unsigned end() const { return ahead() + 2 * tiles * teams - tiles; }
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
        const unsigned team = sum / tiles;
        return WorkItem{team, sum - team * tiles, false, team < teams};
    }
};

// Does a block's work items: sums(team, tile) stores to the workspace, fold(team) puts together what the sums of all the
// team's tiles stored, output(team, tile) may read what fold stored. `drawn` is shared, three words. The whole block
// calls; each of the three begins behind a barrier.
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
        const unsigned ticket = drawn[slot];  // the other slot takes the next one: a thread may still be reading here
        if (ticket >= queue.end()) {
            return;
        }
        next = first ? draw_ticket(queue.words) : 0u;  // whose answer is on its way during the work item
        const WorkItem item = queue.of(ticket);
        if (!item.live) {
            continue;
        }
        unsigned* const word = queue.words + ticket_words + item.team;
        if (item.output) {
            if (first) {
                wait_above(word, queue.tiles);
            }
            __syncthreads();
            output(item.team, item.tile);
            continue;
        }
        sums(item.team, item.tile);
        __syncthreads();  // behind every thread's stores, which are published here, and seen by who folds
        if (first) {
            *complete = add_release_acquire(word, 1u) + 1 == queue.tiles;
        }
        __syncthreads();
        if (*complete) {
            fold(item.team);
            __syncthreads();
            if (first) {
                store_release(word, queue.tiles + 1);
            }
        }
    }
}

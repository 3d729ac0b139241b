// Items whose data a block keeps on chip between their sums and their outputs, in strategy `grid`. An item is a part of
// the tensors. The outputs need the sums of all items.
//
// A block draws an item by ordered ticket, stores its sums, signals that they are stored, and draws again. When no item
// is left, the block waits for the sums of all items. Their blocks are running or have ended. So any number of resident
// blocks suffices, and no cooperative launch is needed. With as many blocks as items, each block processes one item.
// With fewer blocks, a block reads every item but its last one a second time. The order in which
// blocks arrive decides which block folds the sums. It does not affect the values that are folded, nor the order of the
// additions.
#include "partition/work_queue.cuh"

// The ticket and the signals of all blocks, and the words that the threads of a block share: the items that the block
// has drawn, and whether its signal was the last one.
//
// words[0] is the next ticket. words[ticket_words] counts the items whose sums are stored. After the fold it is items +
// 1.
struct DrawnItems {
    unsigned* words;     // global, all 0 at launch
    unsigned items;      // number of items
    unsigned* drawn;     // shared, items + 1 entries
    unsigned* complete;  // shared

    __device__ __forceinline__ DrawnItems(unsigned* words_, int items_, int& offset)
        : words(words_),
          items(items_),
          drawn(shared_array<unsigned>(offset, items_ + 1)),
          complete(shared_array<unsigned>(offset, 1)) {}
};

// Processes items until none is left. sums(item, signal) stores to the workspace, calls signal(), and may then continue
// with work for which no other block waits. fold() folds the sums of all items. output(item, latest) may read the
// values that fold stored. If `latest`, it finds shared memory as the block's last call of sums left it. The whole
// block calls. A barrier precedes each call of the three functions.
template <typename Sums, typename Fold, typename Output>
__device__ __forceinline__ void take_items(const DrawnItems& of, Sums sums, Fold fold, Output output) {
    const bool first = threadIdx.x == 0;
    unsigned* const signalled = of.words + ticket_words;
    unsigned next = first ? draw_ticket(of.words) : 0u;
    int taken = 0;
    for (;; ++taken) {
        if (first) {
            of.drawn[taken] = next;
        }
        __syncthreads();
        if (of.drawn[taken] >= of.items) {
            break;
        }
        sums(of.drawn[taken], [&] {
            __syncthreads();  // all threads have stored; add_release_acquire publishes that to the block that folds
            if (first) {
                next = draw_ticket(of.words);  // not earlier: a block that starts later would find no item
                *of.complete = add_release_acquire(signalled, 1u) + 1 == of.items;
            }
            __syncthreads();
            if (*of.complete) {
                fold();
                __syncthreads();
                if (first) {
                    store_release(signalled, of.items + 1);
                }
            }
        });
    }
    if (taken == 0) {
        return;
    }
    if (first) {
        wait_above(signalled, of.items);
    }
    for (int slot = taken - 1; slot >= 0; --slot) {
        __syncthreads();
        output(of.drawn[slot], slot == taken - 1);
    }
}

// Items whose data a block keeps on chip between their sums and their outputs, in strategy `grid`. An item is a part of
// the tensors. The outputs need the sums of all items.
//
// A block draws an item by ordered ticket, stores its sums, signals that they are stored, and draws again. When no item
// is left, the block waits for the sums of all items. Their blocks are running or have ended. So any number of resident
// blocks suffices, and no cooperative launch is needed. With as many blocks as items, each block processes one item.
// With fewer blocks, a block reads every item but its last one a second time. If one block folds the sums of all items,
// the order in which blocks arrive decides which one. It does not affect the values that are folded, nor the order of
// the additions.
#include "partition/work_queue.cuh"

// The ticket and the signals of all blocks, and the items that the block has drawn.
//
// words[0] is the next ticket. words[ticket_words] counts the items whose sums are stored.
struct DrawnItems {
    unsigned* words;  // global, all 0 at launch
    unsigned items;   // number of items
    unsigned* drawn;  // shared, items + 1 entries

    __device__ __forceinline__ DrawnItems(unsigned* words_, int items_, int& offset)
        : words(words_), items(items_), drawn(shared_array<unsigned>(offset, items_ + 1)) {}
    __device__ __forceinline__ unsigned* count() const { return words + ticket_words; }
};

// Processes items until none is left. sums(item, signal) stores to the workspace, calls signal(), and may then continue
// with work for which no other block waits. stored() publishes what the block has stored. When the count is `awaited`,
// the outputs begin. output(item, latest) may read what was published before. If `latest`, it finds shared memory as
// the block's last call of sums left it. The whole block calls. A barrier precedes each call of the three functions.
template <typename Sums, typename Stored, typename Output>
__device__ __forceinline__ void take_items_until(const DrawnItems& of, unsigned awaited, Sums sums, Stored stored,
                                                 Output output) {
    const bool first = threadIdx.x == 0;
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
            __syncthreads();
            if (first) {
                next = draw_ticket(of.words);  // not earlier: a block that starts later would find no item
            }
            stored();
        });
    }
    if (taken == 0) {
        return;
    }
    if (first) {
        wait_above(of.count(), awaited - 1);
    }
    for (int slot = taken - 1; slot >= 0; --slot) {
        __syncthreads();
        output(of.drawn[slot], slot == taken - 1);
    }
}

// Processes items as above. The outputs read what sums stored for all items.
template <typename Sums, typename Output>
__device__ __forceinline__ void take_items(const DrawnItems& of, Sums sums, Output output) {
    const auto stored = [&] {
        if (threadIdx.x == 0) {
            add_release_acquire(of.count(), 1u);
        }
    };
    take_items_until(of, of.items, sums, stored, output);
}

// Processes items as above. The last block to store its sums calls fold(), after a barrier. The outputs read what fold
// stored. `complete` is a word in shared memory: whether the block was the last one. The fold counts as an item.
template <typename Sums, typename Fold, typename Output>
__device__ __forceinline__ void take_items(const DrawnItems& of, unsigned* complete, Sums sums, Fold fold,
                                           Output output) {
    const bool first = threadIdx.x == 0;
    const auto stored = [&] {
        if (first) {
            *complete = add_release_acquire(of.count(), 1u) + 1 == of.items;
        }
        __syncthreads();
        if (*complete) {
            fold();
            __syncthreads();
            if (first) {
                store_release(of.count(), of.items + 1);
            }
        }
    };
    take_items_until(of, of.items + 1, sums, stored, output);
}

// How the blocks of a sweep (sweep.cuh) divide the tensor of a whole batch.
//
// Channels-first, the tensor is N samples of C planes. Channels-last, it is one sample of rows of C channels. If a row
// of C elements is not a whole number of sectors, k consecutive rows form one wide row of k * C columns. k is the
// smallest number of rows that make whole sectors. Then every access is 16 bytes, and blocks with few columns do not
// share a sector. The channel of a column is column % C. Fewer than k rows are left over. They are read one element per
// thread. The host computes the cut.
//
// A block gets few columns where that helps. Threads of a warp that share channels then load the values of these
// channels once. A block with more rows also produces fewer rows of partial results.
//
// A workspace of partial results has one row per chunk of planes or of wide rows, followed by one row per row left
// over. [chunks, k * C] is [chunks * k, C] in memory, so the kernel that folds it does not depend on k.
#include "partition/sweep.cuh"

struct Batch {
    Chunking cut;      // cut.C: columns, of a wide row if there are wide rows
    long long C;       // channels
    long long left;    // elements of the rows left over
    long long sweeps;  // items that sweep; the items after them process the rows left over
    long long items;

    // Elements that precede the rows left over, in a tensor and in a workspace.
    __device__ __forceinline__ long long swept() const { return cut.N * cut.HxW * cut.C; }
    __device__ __forceinline__ long long swept_parts() const { return cut.N * cut.chunks * cut.C; }
};

// Calls use(slot, channel) for the channels of a thread in a sweep. Costs one division, then comparisons. If C is a
// multiple of the slots, the channels are neighbours, and the compiler joins the loads of their values.
template <typename Use>
__device__ __forceinline__ void each_channel(const sweep_t& sweep, long long C, Use use) {
    long long channel = sweep.channel_of(0) % C;
    if (C % sweep_t::slots == 0) {
        if (sweep.live()) {
#pragma unroll
            for (int slot = 0; slot < sweep_t::slots; ++slot) {
                use(slot, channel + slot);
            }
        }
        return;
    }
#pragma unroll
    for (int slot = 0; slot < sweep_t::slots; ++slot) {
        if (sweep.has(slot)) {
            use(slot, channel);
        }
        channel = channel + 1 == C ? 0 : channel + 1;
    }
}

// Calls use(at, channel) for this thread's element of the rows left over, if there is one in this item.
template <typename Use>
__device__ __forceinline__ void left_over(const Batch& batch, long long item, Use use) {
    const long long at = (item - batch.sweeps) * Tile::threads + threadIdx.x;
    if (at < batch.left) {
        use(at, at % batch.C);
    }
}

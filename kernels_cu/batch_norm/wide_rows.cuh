// How the blocks of a sweep (sweep.cuh) share out the tensor of a whole batch.
//
// Channels-first it is N samples of C planes. Channels-last it is one sample of rows of C channels. Where C elements are no
// whole sectors, as many rows as are whole sectors, k, are looked at as one wide row of k * C columns, so that every access
// is 16 bytes, and blocks of few columns share no sector; the channel of a column is column % C. The rows left over, fewer
// than k, are read an element a thread. The host computes the cut. A block takes few columns where that helps: threads of a warp that share channels
// ask for what belongs to these once, and more rows of a block make fewer rows of partial results.
//
// A workspace of partial results has a row for each chunk of planes or of wide rows, and behind them one for each row
// left over: [chunks, k * C] is [chunks * k, C] in memory, so what folds it knows nothing of wide rows.
#include "partition/sweep.cuh"

struct Batch {
    Chunking cut;      // its C are the columns: of a wide row, where there are any
    long long C;       // channels
    long long left;    // elements of the rows left over
    long long sweeps;  // items that sweep; those behind them have the rows left over
    long long items;

    // Elements before the rows left over, in a tensor and in a workspace.
    __device__ __forceinline__ long long swept() const { return cut.N * cut.HxW * cut.C; }
    __device__ __forceinline__ long long swept_parts() const { return cut.N * cut.chunks * cut.C; }
};

// Calls use(slot, channel) for the channels that a thread meets in a sweep: one division, then comparisons.
template <typename Use>
__device__ __forceinline__ void each_channel(const sweep_t& sweep, long long C, Use use) {
    long long channel = sweep.channel_of(0) % C;
#pragma unroll
    for (int slot = 0; slot < sweep_t::slots; ++slot) {
        if (sweep.has(slot)) {
            use(slot, channel);
        }
        channel = channel + 1 == C ? 0 : channel + 1;
    }
}

// Calls use(at, channel) for this thread's element of the rows left over, if the item has one for it.
template <typename Use>
__device__ __forceinline__ void left_over(const Batch& batch, long long item, Use use) {
    const long long at = (item - batch.sweeps) * Tile::threads + threadIdx.x;
    if (at < batch.left) {
        use(at, at % batch.C);
    }
}

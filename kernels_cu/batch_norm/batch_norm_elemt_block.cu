// BatchNorm forward, strategy `block`: one block per run of consecutive elements. The statistics are inputs.
//
//   x, y: (N, C, HxW), `elements` elements. mean, invstd, gamma, beta: (C). gamma and beta may be null.
//   Grid: the blocks take the runs of `chunk` elements in turn. The last run may be shorter. A block writes y of its
//   runs.
//   Shared memory: mean, scale and offset for each plane that a run touches.
//
// Accesses are 16 bytes for any HxW. The kernel runs from the tensor's end: if a kernel has just computed the
// statistics, it read those elements last, and they are still in the L2 cache. An element of y is written by the thread
// that has read the same element of x. So y may be the same array as x.
#include "batch_norm/channel_affine.cuh"
#include "batch_norm/flat_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_elemt_block(const data_t* x, const stat_t* mean, const stat_t* invstd, const gamma_t* gamma,
                           const beta_t* beta, y_t* y, long long elements, long long C, long long HxW,
                           long long chunk) {
    const ChannelAffine channels = {mean, invstd, gamma, beta};
    const long long runs = (elements + chunk - 1) / chunk;
    for (long long item = blockIdx.x; item < runs; item += gridDim.x) {
        const FlatRun run(x, elements, HxW, chunk, runs - 1 - item);
        int offset = 0;
        Affine* known = shared_array<Affine>(offset, run.planes());
        stage_channels(run, C, known, [&](long long channel) { return channels.of(channel); });
        const data_t* const from[1] = {x};
        stream(run, from, y, known, [](const acc_t(&v)[1], const Affine& k) { return normalised(v[0], k); });
        __syncthreads();  // the next run reuses the shared memory
    }
}

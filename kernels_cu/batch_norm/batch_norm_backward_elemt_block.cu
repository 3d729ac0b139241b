// BatchNorm input gradient, strategy `block`: one block per run of consecutive elements. The sums are inputs.
//
//   dy, x, dx: (N, C, HxW), `elements` elements. mean, invstd, gamma, sum_dy, sum_dy_xmu: (C). gamma may be null.
//   counts: (ranks) elements per channel of each rank, counts_stride apart; or null, then `count` is their total.
//   Grid: the blocks take the runs of `chunk` elements in turn. The last run may be shorter. A block writes dx of its
//   runs.
//   Shared memory: a ChannelGradient for each plane that a run touches.
//
// Accesses are 16 bytes for any HxW. The kernel runs from the tensor's end: the kernel that computed the sums read
// those elements last, and they are still in the L2 cache. An element of dx is written by the thread that has read the
// same elements of dy and x. So dx may be the same array as dy.
#include "batch_norm/channel_coefficients.cuh"
#include "batch_norm/flat_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_backward_elemt_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                    const gamma_t* gamma, const sum_t* sum_dy, const sum_t* sum_dy_xmu, data_t* dx,
                                    long long elements, long long C, long long HxW, long long chunk, double count,
                                    const count_t* counts, long long ranks, long long counts_stride) {
    const acc_t inverse = acc_t(1) / acc_t(total_count(counts, ranks, counts_stride, count));
    const ChannelCoefficients channels = {mean, invstd, gamma, sum_dy, sum_dy_xmu, inverse};
    const long long runs = (elements + chunk - 1) / chunk;
    for (long long item = blockIdx.x; item < runs; item += gridDim.x) {
        const FlatRun run(dy, elements, HxW, chunk, runs - 1 - item);
        int offset = 0;
        ChannelGradient* known = shared_array<ChannelGradient>(offset, run.planes());
        stage_channels(run, C, known, [&](long long channel) { return channels.of(channel); });
        const data_t* const from[2] = {dy, x};
        stream(run, from, dx, known, [](const acc_t(&v)[2], const ChannelGradient& k) { return k.input(v[0], v[1]); });
        __syncthreads();  // the next run reuses the shared memory
    }
}

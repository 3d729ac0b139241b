// BatchNorm input gradient with given sums, strategy `block`: a block per run of consecutive elements.
//
//   dy, x, dx (N, C, HxW), `elements` of them; mean, invstd, gamma (may be null), sum_dy, sum_dy_xmu (C)
//   count: elements of a channel in the whole batch
//   grid: runs of `chunk` elements, the last of which may be shorter
//   shared memory: five coefficients for each plane that a run touches
//
// Accesses are 16 bytes whatever HxW is. Runs are taken from the tensor's end: what the kernel that computed the sums
// read last is still in the L2 cache. An element of dx is written by the thread that has read the same elements of dy
// and x: dx may be dy.
#include "batch_norm/channel_coefficients.cuh"
#include "batch_norm/flat_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_backward_elemt_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                    const gamma_t* gamma, const sum_t* sum_dy, const sum_t* sum_dy_xmu, data_t* dx,
                                    long long elements, long long C, long long HxW, long long chunk, double count) {
    const ChannelCoefficients channels = {mean, invstd, gamma, sum_dy, sum_dy_xmu, count};
    const long long runs = (elements + chunk - 1) / chunk;
    for (long long item = blockIdx.x; item < runs; item += gridDim.x) {
        const FlatRun run(dy, elements, HxW, chunk, runs - 1 - item);
        int offset = 0;
        Coefficients* known = shared_array<Coefficients>(offset, run.planes());
        stage_channels(run, C, known, [&](long long channel) { return channels.of(channel); });
        const data_t* const from[2] = {dy, x};
        stream(run, from, [&](const PackSpan& where, Pack<data_t>(&held)[2]) {
            Pack<data_t> out = {};
            run.each(
                where, [&](int plane) { return known[plane]; },
                [&](int i, const Coefficients& k) {
                    out.set(i, narrow<data_t>(input_gradient(widen(held[0].get(i)), widen(held[1].get(i)), k)));
                },
                held[0], held[1], out);
            store_pack(dx + where.row, where.first, where.length, out);
        });
        __syncthreads();  // the next run takes over the shared memory
    }
}

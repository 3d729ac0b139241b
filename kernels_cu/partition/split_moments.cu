// Two kernels of the `split` forward of GroupNorm and LayerNorm: mean and rstd of groups or rows that several blocks
// sweep. Any size, any layout.
//
//   x (N, C, HxW) or (N, HxW, C); mean, rstd (N, groups). A row of LayerNorm is a sample with one channel.
//   workspace: [N * chunks, C] moments (moments.cuh), each of one channel over one chunk of one sample
//
//   split_moments       reads x, writes the workspace
//   split_moments_fold  one block per (n, group) merges the parts of the group, writes mean and rstd
//
// A thread computes moments about a moving centre (sweep_moments.cuh). Those of the threads of a warp or block are
// merged at once. In the fold, a thread merges its parts of a group by Chan's formula. Every order is fixed.
#include "partition/sweep_moments.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    split_moments(const data_t* x, Pair* workspace, long long N, long long C, long long HxW, long long chunk,
                  long long chunks, long long items) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    int offset = 0;
    Moments* partials = shared_array<Moments>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        store_sweep_moments(sweep_t(x, cut, item), x, cut, partials, workspace);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    split_moments_fold(const Pair* workspace, acc_t* mean, acc_t* rstd, long long N, long long C, long long HxW,
                       long long groups, long long chunk, long long chunks, double eps) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    const long long channels = C / groups;
    int offset = 0;
    Moments* scratch = shared_array<Moments>(offset, block_warps);
    for (long long item = blockIdx.x; item < N * groups; item += gridDim.x) {
        const long long n = item / groups, group = item - n * groups;
        Moments found = {};
        each_part(chunks, channels, [&](long long row, long long channel) {
            found = merge(found, load_moments(workspace, cut.part(n, row, group * channels + channel)));
        });
        found = block_fold(found, scratch, [](Moments value) { return warp_merge(value); });
        if (threadIdx.x == 0) {
            const Statistics of = found.statistics(acc_t(eps));
            store(mean, item, of.mean);
            store(rstd, item, of.rstd);
        }
        __syncthreads();  // the next group reuses scratch
    }
}

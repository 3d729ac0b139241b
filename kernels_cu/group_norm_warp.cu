// GroupNorm forward, strategy `warp`: a run of `lanes` lanes of a warp per group, held in registers.
//
//   x, y (N, C, HxW), also (N, 1, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   a team of Tile::lanes lanes holds Tile::packs packs a lane: a group has at most lanes * packs * pack_size elements
//   grid: N * groups groups, dealt out to teams; a team writes its group of y and its mean and rstd
//
// Every byte of x is read once, and before the team writes y, so y may be x. No barrier and no shared memory. Wins for
// groups up to about two thousand elements.
#include "activation.cuh"
#include "parameters.cuh"
#include "team.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_warp(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                    long long N, long long C, long long HxW, long long groups, double eps) {
    const int channels = static_cast<int>(C / groups);
    const int length = channels * static_cast<int>(HxW);
    Team<Tile::lanes> team = {nullptr};
    for (long long first = static_cast<long long>(blockIdx.x) * team.count; first < N * groups;
         first += static_cast<long long>(gridDim.x) * team.count) {
        const long long item = first + team.index();
        const Run<Tile::lanes> run(x, item, length, item < N * groups, true);
        Pack<data_t> held[Tile::packs];
        run.load_from(x, held);
        const Statistics found = run_statistics(team, run, run.centre(x), held, length, acc_t(eps));
        if (run.length == 0) {
            continue;
        }
        if (team.lane() == 0) {
            store(mean, item, found.mean);
            store(rstd, item, found.rstd);
        }
        const long long first_channel = item % groups * channels;
#pragma unroll
        for (int k = 0; k < Tile::packs; ++k) {
            Pack<data_t> out = {};
            run.each(
                k, static_cast<int>(HxW),
                [&](int channel) { return affine_of(gamma, beta, first_channel + channel, found.mean, found.rstd); },
                [&](int i, const Affine& affine) {
                    out.set(i, narrow<data_t>(activation_t::apply(normalised(widen(held[k].get(i)), affine))));
                });
            store_pack(y + run.start, run.first(k), run.length, out);
        }
    }
}

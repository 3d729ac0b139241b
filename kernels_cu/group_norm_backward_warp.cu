// GroupNorm backward, strategy `warp`: a run of `lanes` lanes of a warp per group, held in registers.
//
//   dy, x, dx (N, C, HxW), also (N, 1, C); mean, rstd (N, groups); gamma, beta (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   a team of Tile::lanes lanes holds Tile::packs packs a lane of dy and of x
//   parameter gradients: only where a channel is one element (HxW = 1: each lane keeps its channels' sums over
//   Tile::samples samples in registers) or the whole group (C = groups: they are the group's sums, Tile::samples = 1)
//   sums: workspace row n / samples of [ceil(N / samples), C] pairs (dbeta, dgamma), or, for one row, the results
//   grid: groups of blocks of samples, dealt out to teams; a team writes its groups of dx and its part of a row
//
// Every byte of dy and x is read once, and before the team writes dx, so dx may be dy or x. No barrier and no shared
// memory. Wins for groups up to about two thousand elements.
#include "activation.cuh"
#include "parameters.cuh"
#include "team.cuh"

// What an element needs of its channel.
struct WeighedChannel {
    acc_t gamma;
    Through through;
};

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                             gamma_t* dbeta, long long N, long long C, long long HxW, long long groups) {
    const int channels = static_cast<int>(C / groups);
    const int length = channels * static_cast<int>(HxW);
    const ParameterGradients parameters = {workspace, dgamma, dbeta, C};
    const long long items = (N + Tile::samples - 1) / Tile::samples * groups;
    // A lane keeps its channels over several samples only if every sample is covered from the same place.
    const bool may_shift = Tile::samples == 1 || C * HxW % pack_size == 0;
    Team<Tile::lanes> team = {nullptr};
    for (long long first = static_cast<long long>(blockIdx.x) * team.count; first < items;
         first += static_cast<long long>(gridDim.x) * team.count) {
        const long long item = first + team.index();
        const long long row = item / groups, group = item - row * groups;
        const long long first_channel = group * channels;
        Pair kept[Tile::packs][pack_size] = {};  // not there at all where Tile::samples is 1
        int kept_shift = 0;
#pragma unroll 1
        for (int sample = 0; sample < Tile::samples; ++sample) {
            const long long n = row * Tile::samples + sample;
            const Run<Tile::lanes> run(dy, n * groups + group, length, item < items && n < N, may_shift);
            Pack<data_t> held_dy[Tile::packs], held_x[Tile::packs];
            run.load_both(dy, x, held_dy, held_x);
            Coefficients of_group = {};
            if (run.length > 0) {
                of_group.mean = widen(load(mean, n * groups + group));
                of_group.rstd = widen(load(rstd, n * groups + group));
                kept_shift = run.shift;
            }
            const auto in_front = [&](int channel, acc_t gamma_c) {
                return Through{Affine{of_group.mean, of_group.rstd * gamma_c,
                                      is_identity ? acc_t(0) : parameter(beta, first_channel + channel, acc_t(0))}};
            };
            // With one channel a group, its sums without gamma are dbeta and dgamma; gamma joins them below.
            const auto weight = [&](int channel) {
                const bool alone = channels == 1;
                const acc_t gamma_c =
                    alone && is_identity ? acc_t(1) : parameter(gamma, first_channel + channel, acc_t(1));
                return WeighedChannel{alone ? acc_t(1) : gamma_c, in_front(channel, gamma_c)};
            };
            Pair sums = {};
#pragma unroll
            for (int k = 0; k < Tile::packs; ++k) {
                Pair of_pack = {};
                run.each(k, static_cast<int>(HxW), weight, [&](int i, const WeighedChannel& of) {
                    const acc_t value = widen(held_x[k].get(i));
                    const acc_t gradient = of.through(widen(held_dy[k].get(i)), value);
                    const acc_t product = x == nullptr ? acc_t(0) : gradient * (value - of_group.mean);
                    of_pack = of_pack + Pair{of.gamma * gradient, of.gamma * product};
                    const Pair of_channel = {gradient, product * of_group.rstd};
                    if (Tile::samples > 1) {
                        kept[k][i] = kept[k][i] + of_channel;
                    } else if (HxW == 1 && parameters.wanted()) {
                        parameters.give(row, first_channel + run.first(k) + i, of_channel);
                    }
                });
                sums = sums + of_pack;
            }
            sums = team.sum(sums);
            forget(held_dy);
            forget(held_x);
            sums.second *= of_group.rstd;
            if (run.length == 0) {
                continue;
            }
            if (channels == 1) {
                if (parameters.wanted() && team.lane() == 0 && HxW > 1) {
                    parameters.give(row, group, sums);
                }
                const acc_t gamma_c = parameter(gamma, group, acc_t(1));
                sums = Pair{gamma_c * sums.first, gamma_c * sums.second};
            }
            if (dx == nullptr) {
                continue;
            }
            of_group.a = sums.first / acc_t(length);
            of_group.b = sums.second / acc_t(length);
#pragma unroll
            for (int k = 0; k < Tile::packs; ++k) {
                Pack<data_t> out = {};
                run.each(
                    k, static_cast<int>(HxW),
                    [&](int channel) {
                        const acc_t gamma_c = parameter(gamma, first_channel + channel, acc_t(1));
                        return WeighedChannel{gamma_c, in_front(channel, gamma_c)};
                    },
                    [&](int i, const WeighedChannel& of) {
                        Coefficients coefficients = of_group;
                        coefficients.gamma = of.gamma;
                        const acc_t value = widen(held_x[k].get(i));
                        const acc_t gradient = of.through(widen(held_dy[k].get(i)), value);
                        out.set(i, narrow<data_t>(input_gradient(gradient, value, coefficients)));
                    });
                store_pack(dx + run.start, run.first(k), run.length, out);
            }
        }
        if (Tile::samples > 1 && parameters.wanted() && item < items) {
#pragma unroll
            for (int k = 0; k < Tile::packs; ++k) {
                const int at = (k * Tile::lanes + team.lane()) * pack_size - kept_shift;
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    if (at + i >= 0 && at + i < channels) {
                        parameters.give(row, first_channel + at + i, kept[k][i]);
                    }
                }
            }
        }
    }
}

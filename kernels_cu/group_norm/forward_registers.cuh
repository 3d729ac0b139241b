// GroupNorm forward of groups that a team holds in registers. Shared by the strategies `warp` (several teams per block),
// `block` (one team per block) and `cluster` (one team per cluster).
// x, y: (N, C, HxW). gamma, beta: (C) or null. mean, rstd: (N, groups).
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "common/text.cuh"
#include "partition/team.cuh"

constexpr bool stores_last = are_few_packs(Tile::packs_per_thread * (is_wide<y_t> ? 2 : 1));

template <bool second, typename A, typename B>
__device__ __forceinline__ auto& first_or_second(A& a, B& b) {
    if constexpr (second) {
        return b;
    } else {
        return a;
    }
}

// Every byte of x is read once, before the team writes y. So y may be the same array as x.
// `blocks` is the number of blocks of a team's cluster, 1 if there is no cluster.
template <int lanes, int blocks = 1>
__device__ __forceinline__ void normalise_groups(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y,
                                                 acc_t* mean, acc_t* rstd, long long N, long long C, long long HxW,
                                                 long long groups, acc_t eps) {
    const int channels = static_cast<int>(C / groups);
    const int length = channels * static_cast<int>(HxW);
    int offset = 0;
    Team<lanes, blocks> team = {Team<lanes, blocks>::shared_scratch(offset)};
    const ChannelStride stride = Run<lanes>::stride(static_cast<int>(HxW));
    for (long long first = static_cast<long long>(blockIdx.x / blocks) * team.count; first < N * groups;
         first += static_cast<long long>(gridDim.x / blocks) * team.count) {
        const long long item = first + team.index();
        Run<lanes, blocks> run(x, item, length, item < N * groups, true);
        Pack<data_t> held[Tile::packs_per_thread];
        run.load_from(x, held);
        const long long first_channel = item % groups * channels;  // 64-bit division, overlaps with the loads above
        // The sums of the generic text leave no registers for these pointers.
        const gamma_t* own_gamma = is_specialised ? from_index(gamma, first_channel) : nullptr;
        const beta_t* own_beta = is_specialised ? from_index(beta, first_channel) : nullptr;
        const Statistics found = run_statistics(team, run, run.centre(x), held, length, eps);
        if (run.length == 0) {
            continue;
        }
        if (team.rank() == 0 && team.lane() == 0) {
            store(mean, item, found.mean);
            store(rstd, item, found.rstd);
        }
        if (!is_specialised) {
            own_gamma = from_index(gamma, first_channel);
            own_beta = from_index(beta, first_channel);
        }
        if (HxW == 1 && blocks == 1) {  // neighbouring elements are channels, and their parameters are contiguous
            const auto packs_of = [&](const auto* array, int k, acc_t absent) {
                return parameters_of(array, run.first(k), run.length, absent);
            };
            make_opaque(run.shift);  // its elements' predicates and parameters do not fit in registers together
            write_run(
                y, run, held, found, [&](int k) { return packs_of(own_gamma, k, acc_t(1)); },
                [&](int k) { return packs_of(own_beta, k, acc_t(0)); },
                [](acc_t value) { return activation_t::apply(value); });
            continue;
        }
        Outputs<y_t> apart[stores_last && is_wide<y_t> ? Tile::packs_per_thread : 1];
        auto& kept = first_or_second<is_wide<y_t>>(held, apart);
        ChannelWalk walk(run.from + run.first(0), static_cast<int>(HxW));
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            const Outputs<y_t> out = outputs_in_channels<y_t>(
                PackSpan{run.start, run.first(k), run.length}, walk, static_cast<int>(HxW),
                [&](int channel, bool there) {
                    return affine_of(own_gamma, own_beta, channel, found.mean, found.rstd, there);
                },
                [&](int i, const Affine& affine) {
                    return activation_t::apply(normalised(widen(held[k].get(i)), affine));
                },
                held[k]);
            if constexpr (stores_last) {
                kept[k] = out;
            } else {
                store_pack_of(y, run.start, run.first(k), run.length, out, run.is_plain(y));
            }
            stride.advance(walk, static_cast<int>(HxW));
        }
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread && stores_last; ++k) {
            store_pack_of(y, run.start, run.first(k), run.length, kept[k], run.is_plain(y));
        }
    }
    team.leave();
}

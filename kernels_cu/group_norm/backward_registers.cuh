// GroupNorm backward of groups that a team holds in registers. Shared by the strategies `warp` (several teams per
// block) and `block` (one team per block).
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "partition/team.cuh"

// Values of a channel that each of its elements uses.
struct WeighedChannel {
    acc_t gamma;
    ActivationGrad activation_grad;
};

// Partial sums of a team's channels, in shared memory: one part for each pack and each channel in it. From one part of
// the run to the next, the pack index j or the channel index c increases, and neither decreases. Index j + c is
// therefore unique to a part, and the parts of a channel are contiguous.
template <int lanes>
struct ChannelParts {
    Pair* parts;  // size(channels) entries; null if the launch needs no parts
    int HxW;

    static __device__ __forceinline__ int size(int channels) { return lanes * Tile::packs_per_thread + channels - 1; }
    __device__ __forceinline__ void keep(int k, int channel, Pair part) const {
        if (parts != nullptr) {
            parts[k * lanes + Team<lanes>::lane() + channel] = part;
        }
    }
    // Calls emit(channel, sums) in one lane per channel of the run. The whole warp calls. A barrier or a __syncwarp
    // that makes the team's parts visible to the warp must precede.
    template <typename Emit>
    __device__ __forceinline__ void each_sum(const Run<lanes>& run, int channels, Emit emit) const {
        constexpr int unit = Tile::channel_lanes;
        const int lane = Team<lanes>::lane() % unit;
        for (int base = 0; base < channels; base += lanes / unit) {
            const int channel = base + Team<lanes>::lane() / unit;
            const bool live = run.length > 0 && channel < channels;  // the other lanes take part in the shuffles only
            const int begin = run.shift + channel * HxW, last = begin + HxW - 1;
            Pair sums = {};
            if (live) {
                for (int j = begin / pack_size + lane; j <= last / pack_size; j += unit) {
                    sums = sums + parts[j + channel];
                }
            }
            sums = lanes_sum(sums, unit);
            if (live && lane == 0) {
                emit(channel, sums);
            }
        }
    }
};

// Arrays and sizes of a launch. Every byte of dy and x is read once, before the team writes dx. So dx may be the same
// array as dy or x.
struct GroupRuns {
    const data_t* dy;
    const data_t* x;
    const stat_t* mean;
    const stat_t* rstd;
    const gamma_t* gamma;
    const beta_t* beta;
    data_t* dx;
    ParameterGradients parameters;
    long long N, C, groups;
    int HxW;

    __device__ __forceinline__ int channels() const { return static_cast<int>(C / groups); }
    // Functor that computes the gradient with respect to a channel's normalised values from dy and x.
    __device__ __forceinline__ ActivationGrad activation_grad_of(long long channel, bool there, acc_t gamma_c,
                                                                 const Coefficients& k) const {
        const acc_t beta_c = is_identity ? acc_t(0) : parameter(beta, channel, acc_t(0), there);
        return ActivationGrad{Affine{k.mean, k.rstd * gamma_c, beta_c}};
    }

    template <int lanes>
    __device__ __forceinline__ void run() const {
        const int channels = this->channels(), length = channels * HxW;
        const long long items = N * groups;
        // With one channel per group, the group's sums without gamma are dbeta and dgamma. gamma is multiplied in after
        // the team has summed.
        const bool alone = channels == 1;
        // Otherwise no parts are needed: a channel of one element lies in one lane, and the sums of a group's only
        // channel are the sums of the group.
        const bool parted = parameters.wanted() && HxW > 1 && !alone;
        int offset = 0;
        Team<lanes> team = {Team<lanes>::shared_scratch(offset)};
        const ChannelStride stride = Run<lanes>::stride(HxW);
        ChannelParts<lanes> parts = {nullptr, HxW};
        if (parted) {
            parts.parts =
                shared_array<Pair>(offset, team.count * parts.size(channels)) + team.index() * parts.size(channels);
        }
        for (long long first = static_cast<long long>(blockIdx.x) * team.count; first < items;
             first += static_cast<long long>(gridDim.x) * team.count) {
            const long long item = first + team.index();
            const Run<lanes> run(dy, item, length, item < items, true);
            Pack<data_t> held_dy[Tile::packs_per_thread], held_x[Tile::packs_per_thread];
            run.load_both(dy, x, held_dy, held_x);
            const long long row = item / groups, group = item - row * groups;  // overlaps with the loads above
            const long long first_channel = group * channels;
            Coefficients of_group = {};
            if (run.length > 0) {
                of_group.mean = widen(load(mean, item));
                of_group.rstd = widen(load(rstd, item));
            }
            Pair sums = {};
            ChannelWalk walk = run.walk(HxW);
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                make_opaque(walk.left);
                run.each_sum(
                    k, walk, HxW,
                    [&](int channel, bool there) {
                        const bool asked = there && !(alone && is_identity);
                        const acc_t gamma_c = parameter(gamma, first_channel + channel, acc_t(1), asked);
                        return WeighedChannel{alone ? acc_t(1) : gamma_c,
                                              activation_grad_of(first_channel + channel, there, gamma_c, of_group)};
                    },
                    [&](int i, const WeighedChannel& of, Pair sums) {
                        const acc_t value = widen(held_x[k].get(i));
                        const acc_t gradient = of.activation_grad(widen(held_dy[k].get(i)), value);
                        return with_product(sums, gradient, value - of_group.mean);
                    },
                    [&](int channel, const WeighedChannel& of, Pair part) {  // add gamma * part to the group's sums
                        parts.keep(k, channel, part);
                        sums = sums + Pair{of.gamma * part.first, of.gamma * part.second};
                        if (HxW == 1 && parameters.wanted()) {
                            parameters.store_channel(row, first_channel + channel,
                                                     Pair{part.first, part.second * of_group.rstd});
                        }
                    },
                    held_dy[k], held_x[k]);
                stride.advance(walk, HxW);
            }
            const acc_t gamma_alone = alone && run.length > 0 ? parameter(gamma, group, acc_t(1)) : acc_t(1);
            sums = team.sum(sums);
            make_opaque(held_dy);
            make_opaque(held_x);
            sums.second *= of_group.rstd;
            if (alone && run.length > 0) {
                if (parameters.wanted() && team.lane() == 0 && HxW > 1) {
                    parameters.store_channel(row, group, sums);
                }
                sums = Pair{gamma_alone * sums.first, gamma_alone * sums.second};
            }
            if (dx != nullptr) {
                of_group.a = sums.first / acc_t(length);
                of_group.b = sums.second / acc_t(length);
                write(run, held_dy, held_x, first_channel, of_group);
            }
            if (parted) {  // after dx, which does not need these sums
                if (!team.of_block) {
                    __syncwarp();  // if of_block, team.sum() contains a barrier
                }
                parts.each_sum(run, channels, [&](int channel, Pair of_channel) {
                    of_channel.second *= of_group.rstd;
                    parameters.store_channel(row, first_channel + channel, of_channel);
                });
                team.meet();
            }
        }
    }

private:
    template <int lanes>
    __device__ __forceinline__ void write(const Run<lanes>& run, Pack<data_t> (&held_dy)[Tile::packs_per_thread],
                                          Pack<data_t> (&held_x)[Tile::packs_per_thread], long long first_channel,
                                          const Coefficients& of_group) const {
        int positions = HxW;
        make_opaque(positions);  // divide again: the first sweep's positions would stay in registers across the sum
        const ChannelStride stride = run.stride(positions);
        ChannelWalk walk = run.walk(positions);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            Pack<data_t> out = {};
            make_opaque(walk.left);
            run.each(
                k, walk, HxW,
                [&](int channel, bool there) {
                    const acc_t gamma_c = parameter(gamma, first_channel + channel, acc_t(1), there);
                    return WeighedChannel{gamma_c,
                                          activation_grad_of(first_channel + channel, there, gamma_c, of_group)};
                },
                [&](int i, const WeighedChannel& of) {
                    Coefficients coefficients = of_group;
                    coefficients.gamma = of.gamma;
                    const acc_t value = widen(held_x[k].get(i));
                    const acc_t gradient = of.activation_grad(widen(held_dy[k].get(i)), value);
                    out.set(i, narrow<data_t>(input_gradient(gradient, value, coefficients)));
                },
                held_dy[k], held_x[k], out);
            store_pack(dx + run.start, run.first(k), run.length, out);
            stride.advance(walk, HxW);
        }
    }
};

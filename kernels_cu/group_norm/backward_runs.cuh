// GroupNorm backward of groups that a team holds in registers: what the strategies `warp` (several teams a block) and
// `block` (one) share.
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "partition/team.cuh"

// What an element needs of its channel.
struct WeighedChannel {
    acc_t gamma;
    ActivationGrad activation_grad;
};

// The sums of a team's channels, in shared memory: what each pack has of each of its channels. Neither goes back from
// pack to pack, so the part of pack j in channel c has place j + c for itself, and a channel's parts are neighbours.
template <int lanes>
struct ChannelParts {
    Pair* parts;  // size(channels) of them, or null: nobody wants them
    int HxW;

    static __device__ __forceinline__ int size(int channels) { return lanes * Tile::packs_per_thread + channels - 1; }
    __device__ __forceinline__ void keep(int k, int channel, Pair part) const {
        if (parts != nullptr) {
            parts[k * lanes + Team<lanes>::lane() + channel] = part;
        }
    }
    // Calls emit(channel, sums) in one lane for each of the run's channels. The whole warp calls, behind a barrier or a
    // __syncwarp that makes the team's parts known to it.
    template <typename Emit>
    __device__ __forceinline__ void each_sum(const Run<lanes>& run, int channels, Emit emit) const {
        constexpr int unit = Tile::channel_lanes;
        const int lane = Team<lanes>::lane() % unit;
        for (int base = 0; base < channels; base += lanes / unit) {
            const int channel = base + Team<lanes>::lane() / unit;
            const bool live = run.length > 0 && channel < channels;  // the others come along for the shuffles
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

// The arrays and sizes of a launch. Every byte of dy and x is read once, and before the team writes dx, so dx may be dy
// or x.
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
    // How dy becomes the gradient with respect to a channel's normalised values.
    __device__ __forceinline__ ActivationGrad activation_grad_of(long long channel, bool there, acc_t gamma_c,
                                                                 const Coefficients& k) const {
        const acc_t beta_c = is_identity ? acc_t(0) : parameter(beta, channel, acc_t(0), there);
        return ActivationGrad{Affine{k.mean, k.rstd * gamma_c, beta_c}};
    }

    template <int lanes>
    __device__ __forceinline__ void run() const {
        const int channels = this->channels(), length = channels * HxW;
        const long long items = N * groups;
        // Then the sums of a group, without gamma, are dbeta and dgamma, and gamma joins them behind.
        const bool alone = channels == 1;
        // Channels of one element lie in one lane, and with one channel a group its sums are the group's.
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
            const long long row = item / groups, group = item - row * groups;  // while the data is on its way
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
                    [&](int i, const WeighedChannel& of) {
                        const acc_t value = widen(held_x[k].get(i));
                        const acc_t gradient = of.activation_grad(widen(held_dy[k].get(i)), value);
                        return Pair{gradient, gradient * (value - of_group.mean)};
                    },
                    [&](int channel, const WeighedChannel& of, Pair part) {  // with gamma they join the group's
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
            if (parted) {  // dx does not wait for these
                if (!team.of_block) {
                    __syncwarp();  // the sum of a block had a barrier
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
        make_opaque(positions);  // divided by again: the places of the first sweep would take registers through the sum
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

// GroupNorm backward of groups that a team holds in registers. Shared by the strategies `warp` (several teams per
// block), `block` (one team per block) and `cluster` (one team per cluster).
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "partition/team.cuh"

// Values of a channel that each of its elements uses.
struct WeighedChannel {
    acc_t scale;  // rstd * gamma
    ActivationGrad activation_grad;
};

// Without an activation, the gradient with respect to a normalised value is the element of dy. With one, the first pass
// computes it. A thread of few packs keeps it, so that the exponential is not computed again for dx.
constexpr bool stores_last = are_few_packs(Tile::packs_per_thread);
constexpr bool keeps_gradients = !is_identity && are_few_packs(Tile::packs_per_thread);

// The kept gradients of a pack. Empty if none are kept.
struct KeptGradients {
    static constexpr int size = keeps_gradients ? pack_size : 1;
    acc_t values[size];

    __device__ __forceinline__ void rotate() {
        const acc_t first = values[0];
#pragma unroll
        for (int i = 0; i < size; ++i) {
            values[i] = i + 1 < size ? values[i + 1] : first;
        }
    }
};

// Partial sums of a team's channels, in shared memory: one part for each pack and each channel in it. From one part of
// the run to the next, the pack index j or the channel index c increases, and neither decreases. Index j + c is
// therefore unique to a part, and the parts of a channel are contiguous. In a cluster, each block has the parts of its
// slice.
template <int lanes, int blocks>
struct ChannelParts {
    Pair* parts;  // size(channels) entries; null if the launch needs no parts
    int HxW;

    static __device__ __forceinline__ int size(int channels) { return lanes * Tile::packs_per_thread + channels - 1; }
    // The first channel of the slice.
    __device__ __forceinline__ int first_of(const Run<lanes, blocks>& run) const {
        return blocks == 1 ? 0 : run.from / HxW;
    }
    __device__ __forceinline__ void keep(const Run<lanes, blocks>& run, int k, int channel, Pair part) const {
        if (parts != nullptr) {
            parts[k * lanes + Team<lanes>::lane() + channel - first_of(run)] = part;
        }
    }
    // Calls emit(channel, sums) in one lane per channel of the slice. The whole warp calls. A barrier or a __syncwarp that
    // makes the team's parts visible to the warp must precede.
    template <typename Emit>
    __device__ __forceinline__ void each_sum(const Run<lanes, blocks>& run, int channels, Emit emit) const {
        constexpr int unit = Tile::channel_lanes;
        const int lane = Team<lanes>::lane() % unit, first = first_of(run);
        const int past = blocks == 1 ? channels : (run.from + run.columns - 1) / HxW + 1;
        for (int base = first; base < past; base += lanes / unit) {
            const int channel = base + Team<lanes>::lane() / unit;
            const bool live = run.length > 0 && channel < past;  // the other lanes take part in the shuffles only
            int begin = channel * HxW - run.from, end = begin + HxW;
            begin = (begin < 0 ? 0 : begin) + run.shift;
            end = (end < run.columns ? end : run.columns) + run.shift;
            Pair sums = {};
            if (live) {
                for (int j = begin / pack_size + lane; j <= (end - 1) / pack_size; j += unit) {
                    sums = sums + parts[j + channel - first];
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
    __device__ __forceinline__ WeighedChannel weighed(long long channel, bool there, const Statistics& found) const {
        const acc_t scale = found.rstd * parameter(gamma, channel, acc_t(1), there);
        const acc_t beta_c = is_identity ? acc_t(0) : parameter(beta, channel, acc_t(0), there);
        return WeighedChannel{scale, ActivationGrad{Affine{found.mean, scale, beta_c}}};
    }

    // `blocks` is the number of blocks that share a group. If `samples` is greater than 1, it is N: a cluster has the
    // blocks of all samples of a group, and adds up their parameter gradients.
    template <int lanes, int blocks = 1, int samples = 1>
    __device__ __forceinline__ void run() const {
        constexpr int cluster = blocks * samples;
        constexpr bool clustered = cluster > 1;
        const int channels = this->channels(), length = channels * HxW;
        const int rank = slice_rank<cluster>();
        const long long items = samples > 1 ? groups : N * groups;
        const long long sample = rank / blocks * groups;  // of the items of this block, the first
        // With one channel per group, the group's sums without scale are dbeta and dgamma. The scale is multiplied in
        // after the team has summed.
        const bool alone = channels == 1;
        // Otherwise no parts are needed: a channel of one element lies in one lane, and the sums of a group's only
        // channel are the sums of the group.
        const bool parted = parameters.wanted() && HxW > 1 && !alone;
        int offset = 0;
        Team<lanes, blocks> team = {Team<lanes, blocks>::shared_scratch(offset)};
        const ChannelStride stride = Run<lanes>::stride(HxW);
        ChannelParts<lanes, blocks> parts = {nullptr, HxW};
        Pair* slices = nullptr;  // [cluster, channels]: sums of the channels that this block of a cluster adds up
        if (parted) {
            parts.parts =
                shared_array<Pair>(offset, team.count * parts.size(channels)) + team.index() * parts.size(channels);
            if (clustered) {
                slices = shared_array<Pair>(offset, cluster * channels);
            }
        }
        for (long long first = static_cast<long long>(blockIdx.x / cluster) * team.count; first < items;
             first += static_cast<long long>(gridDim.x / cluster) * team.count) {
            if (samples > 1 && blocks == 1) {
                cluster_arrive_relaxed();  // this block has started, and has read the slices of its last item
            }
            const long long item = (samples > 1 ? sample : 0) + first + team.index();
            const bool live = team.count == 1 || item < items;
            const Run<lanes, blocks> run(dy, item, length, live, true);
            Pack<data_t> held_dy[Tile::packs_per_thread], held_x[Tile::packs_per_thread];
            KeptGradients kept[Tile::packs_per_thread];
            run.load_both(dy, x, held_dy, held_x);
            const long long row = item / groups, group = item - row * groups;  // overlaps with the loads above
            const long long first_channel = group * channels;
            Statistics found = {};
            if (run.length > 0) {
                found = Statistics{widen(load(mean, item)), widen(load(rstd, item))};
            }
            Pair sums = {};
            ChannelWalk walk(run.from + run.first(0), HxW);
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                if (HxW % pack_size != 0) {  // otherwise no element has a predicate
                    make_opaque(walk.left);
                }
                run.each_sum(
                    k, walk, HxW,
                    [&](int channel, bool there) {
                        return weighed(first_channel + channel, there && !(alone && is_identity), found);
                    },
                    [&](int i, const WeighedChannel& of, Pair sums) {
                        const acc_t value = widen(held_x[k].get(i));
                        const acc_t gradient = of.activation_grad(widen(held_dy[k].get(i)), value);
                        if (keeps_gradients) {
                            kept[k].values[i % KeptGradients::size] = gradient;
                        }
                        return with_product(sums, gradient, value - found.mean);
                    },
                    [&](int channel, const WeighedChannel& of, Pair part) {  // add scale * part to the group's sums
                        parts.keep(run, k, channel, part);
                        const acc_t scale = alone ? acc_t(1) : of.scale;
                        sums = Pair{multiply_add(scale, part.first, sums.first),
                                    multiply_add(scale, part.second, sums.second)};
                        if (HxW == 1 && parameters.wanted()) {
                            parameters.store_channel(row, first_channel + channel,
                                                     Pair{part.first, part.second * found.rstd});
                        }
                    },
                    held_dy[k], held_x[k], kept[k]);
                stride.advance(walk, HxW);
            }
            const acc_t scale_alone = alone ? weighed(group, run.length > 0, found).scale : acc_t(1);
            sums = team.sum(sums);
            make_opaque(held_dy);
            make_opaque(held_x);
            if (alone && run.length > 0) {
                if (parameters.wanted() && team.rank() == 0 && team.lane() == 0 && HxW > 1) {
                    parameters.store_channel(row, group, Pair{sums.first, sums.second * found.rstd});
                }
                sums = Pair{scale_alone * sums.first, scale_alone * sums.second};
            }
            if (samples > 1 && blocks == 1) {
                cluster_wait();  // otherwise the sum over the team contains a barrier of the cluster
            }
            if (parted && clustered) {
                if (!team.of_block) {
                    __syncwarp();  // if of_block, team.sum() contains a barrier
                }
                parts.each_sum(run, channels, [&](int channel, Pair of_slice) {
                    of_slice.second *= found.rstd;
                    *cluster_map(slices + rank * channels + channel, channel % cluster) = of_slice;
                });
                cluster_fence();
            }
            if (clustered) {
                cluster_arrive_relaxed();  // the sums of this slice are written, and those of the group are read
            }
            if (dx != nullptr) {
                // `sums` contains rstd * A and B: rstd is multiplied into both, so that it is loaded before the pass.
                const acc_t slope = -(sums.second / acc_t(length)) * found.rstd * found.rstd;
                const LinearGradient linear = {found.mean, acc_t(0), slope, -(sums.first / acc_t(length))};
                write(run, held_dy, held_x, kept, first_channel, found, linear);
            }
            if (clustered) {
                cluster_wait();
            }
            if (parted && clustered) {
                for (int channel = rank + cluster * team.lane(); channel < channels; channel += cluster * lanes) {
                    parameters.store_channel(row, first_channel + channel,
                                             of_slices<lanes, blocks, samples>(slices, run, group, channel));
                }
                team.meet();
            } else if (parted) {  // after dx, which does not need these sums
                if (!team.of_block) {
                    __syncwarp();  // if of_block, team.sum() contains a barrier
                }
                parts.each_sum(run, channels, [&](int channel, Pair of_channel) {
                    of_channel.second *= found.rstd;
                    parameters.store_channel(row, first_channel + channel, of_channel);
                });
                team.meet();
            }
        }
    }

private:
    // The sum of slices[rank, channel] over the slices of all samples of the cluster that have elements of the channel.
    // The positions of a sample's slices depend on the alignment of its group.
    template <int lanes, int blocks, int samples>
    __device__ __forceinline__ Pair of_slices(const Pair* slices, const Run<lanes, blocks>& run, long long group,
                                              int channel) const {
        const int channels = this->channels(), length = channels * HxW;
        Pair sums = {};
        for (int n = 0; n < samples; ++n) {
            const int ahead =
                samples == 1 ? run.ahead : Run<lanes, blocks>(dy, n * groups + group, length, true, true).ahead;
            const int span = run.slice(length + ahead), begin = channel * HxW + ahead;
            const int first = blocks == 1 ? 0 : begin / span, last = blocks == 1 ? 0 : (begin + HxW - 1) / span;
            for (int slice = first; slice <= last; ++slice) {
                sums = sums + slices[(n * blocks + slice) * channels + channel];
            }
        }
        return sums;
    }
    // Writes dx. The scale of `linear` is each channel's own.
    template <int lanes, int blocks>
    __device__ __forceinline__ void write(const Run<lanes, blocks>& run,
                                          Pack<data_t> (&held_dy)[Tile::packs_per_thread],
                                          Pack<data_t> (&held_x)[Tile::packs_per_thread],
                                          KeptGradients (&kept)[Tile::packs_per_thread], long long first_channel,
                                          const Statistics& found, const LinearGradient& linear) const {
        int positions = HxW;
        if (HxW % pack_size != 0) {
            make_opaque(positions);  // divide again: the first sweep's positions would stay in registers across the sum
        }
        const ChannelStride stride = run.stride(positions);
        ChannelWalk walk(run.from + run.first(0), positions);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (HxW % pack_size != 0) {
                make_opaque(walk.left);
            }
            const auto of = [&](int channel, bool there) { return weighed(first_channel + channel, there, found); };
            const auto element = [&](int i, const WeighedChannel& of) {
                const acc_t value = widen(held_x[k].get(i));
                const acc_t gradient = keeps_gradients ? kept[k].values[i % KeptGradients::size]
                                                       : of.activation_grad(widen(held_dy[k].get(i)), value);
                LinearGradient of_channel = linear;
                of_channel.scale = of.scale;
                return input_gradient(gradient, value, of_channel);
            };
            const Pack<data_t> out = outputs_in_channels<data_t>(PackSpan{run.start, run.first(k), run.length}, walk,
                                                                 HxW, of, element, held_dy[k], held_x[k], kept[k]);
            if (stores_last) {
                held_x[k] = out;
            } else {
                store_pack_of(dx, run.start, run.first(k), run.length, out, run.is_plain(dx));
            }
            stride.advance(walk, HxW);
        }
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread && stores_last; ++k) {
            store_pack_of(dx, run.start, run.first(k), run.length, held_x[k], run.is_plain(dx));
        }
    }
};

// GroupNorm backward with a slab of whole groups on chip. In strategy `block` one block holds the slab. In strategy
// `cluster` each block of a cluster holds a piece of it. Every byte of dy and x is read once, before any dx of the slab
// is written. So dx may be the same array as dy or x.
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "common/text.cuh"
#include "partition/stage.cuh"

// thread_channels: channels that a thread processes at a time. slab_threads: resident threads per multiprocessor that
// the launch bound requires. With an activation, a thread that recomputes z for eight channels needs more registers, so
// the bound is lower, as in backward_sweep.cuh.
template <typename Layout>
constexpr int thread_channels = 1;
template <>
constexpr int thread_channels<ChannelsLast> = pack_size;
constexpr int slab_threads = is_identity || thread_channels<layout_t> < 8 ? 512 : 384;

// Values of a channel and of a group of the slab, in shared memory. Aligned so that a float32 struct is one access.
struct alignas(16) SlabChannel {
    acc_t gamma;
    acc_t beta;
    int group;
};
struct alignas(16) SlabGroup {
    acc_t mean;
    acc_t rstd;
    acc_t a;
    acc_t b;
};

__device__ __forceinline__ ActivationGrad activation_grad_of(const SlabChannel& c, const SlabGroup& g) {
    return ActivationGrad{Affine{g.mean, g.rstd * c.gamma, c.beta}};
}

// Values of a channel that its sums use.
struct SummedChannel {
    acc_t mean;
    ActivationGrad activation_grad;
};

struct GradientTerms {
    const Pack<data_t>* dy;
    const Pack<data_t>* x;
    ChannelArray<SlabChannel> channels;
    const SlabGroup* groups;

    __device__ __forceinline__ SummedChannel of(int channel) const {
        const SlabChannel k = channels[channel];
        const SlabGroup g = groups[k.group];
        return SummedChannel{g.mean, activation_grad_of(k, g)};
    }
    __device__ __forceinline__ Pack<data_t> value(int j) const { return x == nullptr ? Pack<data_t>{} : x[j]; }
    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        const SummedChannel k = of(channel);
        const Pack<data_t> held_dy = dy[j], held_x = value(j);  // one 16-byte access each
        return gradient_sums(held_dy, held_x, k.mean, use, k.activation_grad);
    }
    __device__ __forceinline__ void add(int j, const SummedChannel (&known)[pack_size], Pair (&sums)[pack_size]) const {
        const Pack<data_t> held_dy = dy[j], held_x = value(j);
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const acc_t v = widen(held_x.get(i)), gradient = known[i].activation_grad(widen(held_dy.get(i)), v);
            sums[i] = with_product(sums[i], gradient, v - known[i].mean);
        }
    }
};

// Values of a channel that its dx uses.
struct WrittenChannel {
    LinearGradient k;
    ActivationGrad activation_grad;
};

struct HeldPacks {
    Pack<data_t> dy;
    Pack<data_t> x;

    __device__ __forceinline__ void rotate() {
        dy.rotate();
        x.rotate();
    }
};

// Arrays and sizes of a launch.
struct GroupSlabs {
    const data_t* dy;
    const data_t* x;
    const stat_t* mean;
    const stat_t* rstd;
    const gamma_t* gamma;
    const beta_t* beta;
    data_t* dx;
    ParameterGradients parameters;
    long long N, C, HxW, groups, slab_groups;
    long long piece_packs;  // packs of the largest piece

    // Processes slabs, with `pieces` blocks for each. If `samples` is greater than 1, it is N: a cluster has the blocks
    // of all samples of a slab, and adds up their parameter gradients.
    template <int pieces, int samples = 1>
    __device__ __forceinline__ void run() const {
        const int group_channels = static_cast<int>(C / groups), own_groups = static_cast<int>(slab_groups);
        const int channels = own_groups * group_channels;
        const acc_t length = acc_t(group_channels) * acc_t(HxW);
        const long long slabs = groups / slab_groups;
        constexpr int cluster = pieces * samples;
        constexpr bool clustered = cluster > 1;
        const int rank = slice_rank<cluster>(), piece = rank % pieces;
        int offset = 0;
        mbarrier_t* const barriers = StagedSlab<2>::shared_barriers(offset);
        const ChannelArray<Pair> totals = channel_array<Pair>(offset, channels);
        const ChannelArray<Pair> whole = clustered ? channel_array<Pair>(offset, channels) : totals;
        const ChannelArray<SlabChannel> of_channel = channel_array<SlabChannel>(offset, channels);
        SlabGroup* const of_group = shared_array<SlabGroup>(offset, own_groups);
        Pack<data_t>* const staged_dy = shared_array<Pack<data_t>>(offset, static_cast<int>(piece_packs));
        Pack<data_t>* const staged_x =
            x == nullptr ? nullptr : shared_array<Pack<data_t>>(offset, static_cast<int>(piece_packs));
        Pair* const partials = shared_array<Pair>(offset, Tile::partial_sums);
        __syncthreads();  // the mbarriers are initialised
        unsigned parity = 0;
        for (long long item = blockIdx.x / cluster; item < N / samples * slabs; item += gridDim.x / cluster) {
            int opaque = 0;
            if (!is_specialised) {
                opaque = threadIdx.x;
                make_opaque(opaque);  // otherwise positions are computed before the loop over slabs, and take registers
            }
            const auto thread = [&]() { return is_specialised ? threadIdx.x : static_cast<unsigned>(opaque); };
            const long long n = samples > 1 ? rank / pieces : item / slabs;
            const long long first_group = (samples > 1 ? item : item - n * slabs) * slab_groups;
            const long long first_channel = first_group * group_channels;
            const slab_t slab(dy, n, C, first_channel, channels, static_cast<int>(HxW), piece,
                              pieces > 1 ? static_cast<int>(piece_packs) : 0);
            const StagedSlab<2> copies = {{dy, x}, {staged_dy, staged_x}, barriers, parity};
            copies.issue(slab);
            parity ^= 1;
            for (int channel = thread(); channel < channels; channel += Tile::threads) {
                of_channel[channel] =
                    SlabChannel{parameter(gamma, first_channel + channel, acc_t(1)),
                                parameter(beta, first_channel + channel, acc_t(0)), channel / group_channels};
                totals[channel] = Pair{};
            }
            for (int group = thread(); group < own_groups; group += Tile::threads) {
                const long long at = n * groups + first_group + group;
                of_group[group] = SlabGroup{widen(load(mean, at)), widen(load(rstd, at)), acc_t(0), acc_t(0)};
            }
            const GradientTerms terms = {staged_dy, staged_x, of_channel, of_group};
            each_stage(copies, slab, [&](int begin, int end) {
                slab.add_sums<Tile::partial_sums>(begin, end, partials, totals, terms);
            });

            if (clustered) {
                cluster_arrive();
            }
            if (pieces > 1) {
                cluster_wait();  // the totals of every block are complete
            } else {
                __syncthreads();
            }
            const auto of_pieces = [&](int first, int channel) {  // `first` is the rank of the sample's first block
                Pair sums = {};
                for (int k = 0; k < pieces; ++k) {
                    sums = sums + *cluster_map(&totals[channel], first + k);
                }
                return sums;
            };
            for (int channel = thread(); channel < channels; channel += Tile::threads) {
                const SlabChannel k = of_channel[channel];
                Pair sums = pieces > 1 ? of_pieces(rank - piece, channel) : totals[channel];
                sums.second *= of_group[k.group].rstd;
                if (samples == 1 && piece == 0) {
                    parameters.store_channel(n, first_channel + channel, sums);
                }
                whole[channel] = Pair{k.gamma * sums.first, k.gamma * sums.second};
            }
            if (clustered && samples == 1) {
                cluster_arrive();  // this block has read the other blocks' totals
            }
            if (dx != nullptr) {
                __syncthreads();
                group_sums(whole, own_groups, group_channels, [&](int group, Pair sums) {
                    if (threadIdx.x % warp_size == 0) {
                        of_group[group].a = sums.first / length;
                        of_group[group].b = sums.second / length;
                    }
                });
                __syncthreads();
                const auto coefficients = [&](int channel) {
                    const SlabChannel c = of_channel[channel];
                    const SlabGroup g = of_group[c.group];
                    return WrittenChannel{linear_gradient(Coefficients{c.gamma, g.mean, g.rstd, g.a, g.b}),
                                          activation_grad_of(c, g)};
                };
                slab.write(
                    dx, [&](int j) { return HeldPacks{staged_dy[j], staged_x[j]}; }, coefficients,
                    [](const HeldPacks& held, int i, const WrittenChannel& of) {
                        const acc_t v = widen(held.x.get(i));
                        return input_gradient(of.activation_grad(widen(held.dy.get(i)), v), v, of.k);
                    });
            }
            if (samples > 1) {
                if (pieces == 1) {
                    cluster_wait();  // the totals of every block are complete
                }
                for (int channel = rank + cluster * thread(); channel < channels; channel += cluster * Tile::threads) {
                    Pair sums = {};
                    for (int k = 0; k < samples; ++k) {
                        Pair of_sample = of_pieces(k * pieces, channel);
                        of_sample.second *= widen(load(rstd, k * groups + first_group + of_channel[channel].group));
                        sums = sums + of_sample;
                    }
                    parameters.store_channel(0, first_channel + channel, sums);
                }
                cluster_arrive_relaxed();  // this block has read the other blocks' totals
            }
            if (clustered) {
                cluster_wait();  // the other blocks have read this block's totals
            }
            staged_is_free();
        }
    }
};

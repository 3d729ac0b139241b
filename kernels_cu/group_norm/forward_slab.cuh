// GroupNorm forward with a slab of whole groups on chip. In strategy `block` one block holds the slab. In strategy
// `cluster` each block of a cluster holds a piece of it. Every byte of x is read once, before any y of the slab is
// written. So y may be the same array as x.
#include "common/activation.cuh"
#include "common/moments.cuh"
#include "common/parameters.cuh"
#include "partition/stage.cuh"

// Terms of the sums of d = x - centre and of d^2. The channels of a group have the same centre.
struct Deviations {
    const Pack<data_t>* x;
    ChannelArray<Affine> known;  // per channel of the slab; before the statistics are known, its mean is the centre

    __device__ __forceinline__ acc_t of(int channel) const { return known[channel].mean; }
    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        const Pack<data_t> held = x[j];  // one 16-byte access
        return deviations(held, of(channel), use);
    }
    __device__ __forceinline__ void add(int j, const acc_t (&centre)[pack_size], Pair (&sums)[pack_size]) const {
        const Pack<data_t> held = x[j];
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const acc_t d = acc_t(widen(held.get(i))) - centre[i];
            sums[i] = with_product(sums[i], d, d);
        }
    }
};

// Arrays and sizes of a launch.
struct GroupSlabs {
    const data_t* x;
    const gamma_t* gamma;
    const beta_t* beta;
    y_t* y;
    acc_t* mean;
    acc_t* rstd;
    long long N, C, HxW, groups, slab_groups;
    long long piece_packs;  // packs of the largest piece
    acc_t eps;

    // Processes slabs, with the `pieces` blocks of a cluster for each. `pieces` is 1 if there is no cluster.
    template <int pieces>
    __device__ __forceinline__ void run() const {
        const int group_channels = static_cast<int>(C / groups), own_groups = static_cast<int>(slab_groups);
        const int channels = own_groups * group_channels, lane = threadIdx.x % warp_size;
        const long long slabs = groups / slab_groups;
        constexpr bool clustered = pieces > 1;
        const int rank = clustered ? static_cast<int>(cluster_rank()) : 0;
        int offset = 0;
        mbarrier_t* const barriers = StagedSlab<1>::shared_barriers(offset);
        const ChannelArray<Pair> totals = channel_array<Pair>(offset, channels);
        const ChannelArray<Affine> affine = channel_array<Affine>(offset, channels);
        Moments* const found = shared_array<Moments>(offset, own_groups);
        Pack<data_t>* const staged = shared_array<Pack<data_t>>(offset, static_cast<int>(piece_packs));
        Pair* const partials = shared_array<Pair>(offset, Tile::partial_sums);
        unsigned parity = 0;
        for (long long item = blockIdx.x / pieces; item < N * slabs; item += gridDim.x / pieces) {
            const long long n = item / slabs, first_group = (item - n * slabs) * slab_groups;
            int own_piece = rank;
            if (clustered && sizeof(acc_t) > sizeof(float)) {
                make_opaque(own_piece);  // otherwise positions are computed before the loop, and take registers
            }
            const slab_t slab(x, n, C, first_group * group_channels, channels, static_cast<int>(HxW), own_piece,
                              clustered ? static_cast<int>(piece_packs) : 0);
            const StagedSlab<1> copies = {{x}, {staged}, barriers, parity};
            copies.issue(slab);
            parity ^= 1;
            const auto count_of = [&](int group) { return slab.held(group, group_channels); };
            const auto each_channel_of = [&](int group, auto use) {
                for (int c = group * group_channels + lane; c < (group + 1) * group_channels; c += warp_size) {
                    use(c);
                }
            };
            // The first centre of a group is the first of its elements in this piece.
            for (int group = threadIdx.x; group < own_groups; group += Tile::threads) {
                const long long first = slab.first_held(group, group_channels);
                const acc_t shift = count_of(group) > 0 ? usable_shift(widen(load(x, first))) : acc_t(0);
                found[group] = Moments{acc_t(count_of(group)), shift, acc_t(0), acc_t(0)};
            }
            __syncthreads();
            for (int channel = threadIdx.x; channel < channels; channel += Tile::threads) {
                affine[channel].mean = found[channel / group_channels].mean;
                totals[channel] = Pair{};
            }
            const Deviations terms = {staged, affine};
            each_stage(copies, slab, [&](int begin, int end) {
                slab.add_sums<Tile::partial_sums>(begin, end, partials, totals, terms);
            });
            __syncthreads();
            group_sums(totals, own_groups, group_channels, [&](int group, Pair sums) {
                const acc_t inverse = acc_t(1) / acc_t(count_of(group));
                const acc_t centre = second_centre(affine[group * group_channels].mean, sums, inverse, 1);
                __syncwarp();  // every lane has read the first centre
                each_channel_of(group, [&](int c) {
                    affine[c].mean = centre;
                    totals[c] = Pair{};
                });
            });
            __syncthreads();
            slab.add_sums<Tile::partial_sums>(0, slab.packs(), partials, totals, terms);
            __syncthreads();
            group_sums(totals, own_groups, group_channels, [&](int group, Pair sums) {
                if (lane == 0) {
                    const acc_t count = acc_t(count_of(group));
                    found[group] = moments_about(count, acc_t(1) / count, affine[group * group_channels].mean, sums);
                }
            });
            if (clustered) {
                cluster_arrive();
                cluster_wait();  // the moments of every block are complete
            } else {
                __syncthreads();
            }
            for (int group = threadIdx.x / warp_size; group < own_groups; group += block_warps) {
                Moments all = {};
                for (int piece = 0; piece < pieces; ++piece) {
                    all = merge(all, clustered ? *cluster_map(found + group, piece) : found[group]);
                }
                const Statistics of = all.statistics(eps);
                each_channel_of(group, [&](int c) {
                    affine[c] = affine_of(gamma, beta, first_group * group_channels + c, of.mean, of.rstd);
                });
                if (lane == 0 && rank == 0) {
                    store(mean, n * groups + first_group + group, of.mean);
                    store(rstd, n * groups + first_group + group, of.rstd);
                }
            }
            if (clustered) {
                cluster_arrive();  // this block has read the other blocks' moments
            }
            __syncthreads();
            slab.write(
                y, [&](int j) { return staged[j]; }, [&](int channel) { return affine[channel]; },
                [](const Pack<data_t>& held, int i, const Affine& k) {
                    return activation_t::apply(normalised(widen(held.get(i)), k));
                });
            if (clustered) {
                cluster_wait();  // the other blocks have read this block's moments
            }
            staged_is_free();
        }
    }
};

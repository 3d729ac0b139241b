// GroupNorm backward of channels-last slabs in registers. dy, x, dx: (N, HxW, C). mean, rstd: (N, groups). gamma, beta:
// (C) or null.
#include "common/activation.cuh"
#include "group_norm/slab_columns.cuh"

// Resident threads per multiprocessor that the launch bound requires. The generic text keeps its sizes in registers, and
// would spill.
constexpr int column_threads = is_specialised ? 512 : 384;

// Sums of the slab's channels over the rows of the block's piece, in shared memory: parts[slot][thread] is the sum over
// the rows of one thread, for the channel in a slot of its column.
struct PieceSums {
    Pair* parts;  // size entries; null if the gradients of the parameters are not wanted
    static constexpr int size = pack_size * Tile::threads;

    __device__ __forceinline__ void keep(int slot, Pair part) const {
        parts[slot * Tile::threads + threadIdx.x] = part;
    }
    // Calls emit(channel, sums) in one thread per channel of the slab. Several threads add up the parts of a channel,
    // so that no thread adds many. Lanes of a warp read neighbouring columns. The whole block calls, after a barrier.
    template <typename Emit>
    __device__ __forceinline__ void each_sum(const SlabColumn& column, Emit emit) const {
        const int channels = column.channels, parts_here = column.parts;
        const int adders = parts_here > pack_size ? parts_here / pack_size : 1;
        int thread = threadIdx.x;
        make_opaque(thread);  // otherwise positions are computed before the loop over slabs, and take registers
        for (int at = thread; at < adders * channels; at += Tile::threads) {
            const int adder = at / channels, sum = at - adder * channels;
            Pair* const first = of_channel(column, sum);
            Pair sums = {};
            for (int part = adder; part < parts_here; part += adders) {
                sums = sums + first[part * column.columns];
            }
            first[adder * column.columns] = sums;  // no other thread reads the part that was here
        }
        __syncthreads();
        for (int sum = thread; sum < channels; sum += Tile::threads) {
            const Pair* const first = of_channel(column, sum);
            Pair sums = {};
            for (int adder = 0; adder < adders; ++adder) {
                sums = sums + first[adder * column.columns];
            }
            const int slot = sum / column.columns;
            emit((sum - slot * column.columns) * pack_size + slot, sums);
        }
    }

private:
    // The first part of the channel in slot sum / columns of column sum % columns.
    __device__ __forceinline__ Pair* of_channel(const SlabColumn& column, int sum) const {
        const int slot = sum / column.columns;
        return parts + slot * Tile::threads + (sum - slot * column.columns);
    }
};

// The packs of dy and x that a thread holds, and what it knows of their channels.
struct HeldGradients {
    SlabColumn at;
    ColumnStatistics found;
    ParameterPack<gamma_t> gamma;
    ParameterPack<beta_t> beta;
    Pack<data_t> dy[Tile::packs_per_thread];
    Pack<data_t> x[Tile::packs_per_thread];

    __device__ __forceinline__ Statistics statistics(int slot) const {
        return at.own.of_slot(slot, found.first, found.second);
    }
    // Gradient with respect to the normalised value of an element.
    __device__ __forceinline__ acc_t gradient(int k, int slot) const {
        const Statistics of = statistics(slot);
        const ActivationGrad activation_grad = {Affine{of.mean, of.rstd * gamma.of(slot), beta.of(slot)}};
        return activation_grad(widen(dy[k].get(slot)), widen(x[k].get(slot)));
    }
    // The sums of g and of g * (x - mean) of the column's channels, for the gradients g of the thread's elements.
    __device__ __forceinline__ void sums(Pair (&slots)[pack_size]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (at.has(k)) {
#pragma unroll
                for (int slot = 0; slot < pack_size; ++slot) {
                    const acc_t distance = acc_t(widen(x[k].get(slot))) - statistics(slot).mean;
                    slots[slot] = with_product(slots[slot], gradient(k, slot), distance);
                }
            }
        }
    }
    // Sums of the slab's groups, weighed with gamma, from the sums of the column's channels.
    __device__ __forceinline__ SlabSums weighed(const Pair (&slots)[pack_size]) const {
        Pair scaled[pack_size];
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            scaled[slot] = Pair{gamma.of(slot) * slots[slot].first, gamma.of(slot) * slots[slot].second};
        }
        return at.own.sums_of(scaled);
    }
};

// dx of a group with sums A and B / rstd, but for the scale, which is each channel's own. inverse = 1 / the number of
// elements of a group.
__device__ __forceinline__ LinearGradient linear_gradient(const Statistics& found, Pair sums, acc_t inverse) {
    return linear_gradient(
        Coefficients{acc_t(0), found.mean, found.rstd, sums.first * inverse, sums.second * inverse * found.rstd});
}

// Arrays and sizes of a launch. Every byte of dy and x is read once, and a thread writes dx of the elements that it has
// read. So dx may be the same array as dy or x.
struct GroupColumns {
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

    // `pieces` is the number of blocks that share a slab. If `samples` is greater than 1, it is N: a cluster has the
    // blocks of all samples of a slab, and adds up their parameter gradients.
    template <int pieces = 1, int samples = 1>
    __device__ __forceinline__ void run() const {
        typedef Team<Tile::threads, pieces, SlabSums> team_t;
        constexpr int cluster = pieces * samples;
        constexpr bool clustered = cluster > 1;
        const int group_channels = static_cast<int>(C / groups), rank = slice_rank<cluster>();
        int offset = 0;
        team_t team = {team_t::shared_scratch(offset)};
        const SlabColumn column(group_channels, HxW, pieces, team.rank());
        const int channels = column.channels;
        const bool parted = parameters.wanted();
        PieceSums piece = {nullptr};
        Pair* slices = nullptr;  // [cluster, channels]: sums of the channels that this block of a cluster adds up
        if (parted) {
            piece.parts = shared_array<Pair>(offset, PieceSums::size);
            if (clustered) {
                slices = shared_array<Pair>(offset, cluster * channels);
            }
        }
        const long long slabs = groups / Tile::slab_groups;
        for (long long item = blockIdx.x / cluster; item < N / samples * slabs; item += gridDim.x / cluster) {
            if (samples > 1 && pieces == 1) {
                cluster_arrive_relaxed();  // this block has started, and has read the slices of its last item
            }
            const long long n = samples > 1 ? rank / pieces : item / slabs;
            const long long slab = samples > 1 ? item : item - n * slabs, first_channel = slab * channels;
            const long long start = (n * HxW + column.begin + column.part) * C + first_channel;
            const long long group = n * groups + slab * Tile::slab_groups;
            HeldGradients held = {column};
            if (!is_specialised) {
                make_opaque(held.at.parts);  // otherwise the offsets of rows are computed before the loop
            }
            load_packs(held, start);
            held.found.first = statistics(group + column.own.first);
            held.found.second = statistics(group + column.own.second());
            held.gamma = parameters_of(from_index(gamma, first_channel), column.from, channels, acc_t(1));
            if (!is_identity) {
                held.beta = parameters_of(from_index(beta, first_channel), column.from, channels, acc_t(0));
            }
            Pair slots[pack_size] = {};
            held.sums(slots);
            if (parted) {
#pragma unroll
                for (int slot = 0; slot < pack_size; ++slot) {
                    piece.keep(slot, Pair{slots[slot].first, slots[slot].second * held.statistics(slot).rstd});
                }
            }
            const SlabSums all = team.sum(column.live() ? held.weighed(slots) : SlabSums{});
            between_passes(held.dy);
            between_passes(held.x);
            if (samples > 1 && pieces == 1) {
                cluster_wait();  // otherwise the sum over the team contains a barrier of the cluster
            }
            if (parted && !team.of_block) {
                __syncwarp();  // if of_block, team.sum() contains a barrier
            }
            if (parted && clustered) {
                piece.each_sum(column, [&](int channel, Pair of_piece) {
                    *cluster_map(slices + rank * channels + channel, channel % cluster) = of_piece;
                });
                cluster_fence();
            } else if (parted) {
                piece.each_sum(column, [&](int channel, Pair of_channel) {
                    parameters.store_channel(n, first_channel + channel, of_channel);
                });
            }
            if (clustered) {
                cluster_arrive_relaxed();  // the sums of this piece are written, and those of the slab are read
            }
            if (dx != nullptr) {
                write(held, all, start);
            }
            if (clustered) {
                cluster_wait();
            }
            if (parted && clustered) {
                for (int channel = rank + cluster * threadIdx.x; channel < channels;
                     channel += cluster * Tile::threads) {
                    Pair sums = {};
                    for (int from = 0; from < cluster; ++from) {
                        sums = sums + slices[from * channels + channel];
                    }
                    parameters.store_channel(n, first_channel + channel, sums);
                }
            }
            if (parted) {
                team.meet();
            }
        }
    }

private:
    __device__ __forceinline__ Statistics statistics(long long group) const {
        return Statistics{widen(load(mean, group)), widen(load(rstd, group))};
    }
    // Loads both tensors pack by pack. A null x reads as zeros.
    __device__ __forceinline__ void load_packs(HeldGradients& held, long long start) const {
        const SlabColumn& at = held.at;
        const bool plain_dy = in_whole_packs(dy, at.channels), plain_x = in_whole_packs(x, at.channels);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            const bool there = at.live() && at.has(k);
            const long long row = start + at.step(k, C);
            held.dy[k] = there ? load_pack_of(dy, row, at.from, at.channels, plain_dy) : Pack<data_t>{};
            held.x[k] = there && x != nullptr ? load_pack_of(x, row, at.from, at.channels, plain_x) : Pack<data_t>{};
        }
    }
    // Writes dx. `sums` are those of the slab's groups.
    __device__ __forceinline__ void write(const HeldGradients& held, const SlabSums& sums, long long start) const {
        const SlabColumn& at = held.at;
        const acc_t inverse = acc_t(1) / (acc_t(at.channels / Tile::slab_groups) * acc_t(HxW));
        const LinearGradient of_first = linear_gradient(held.found.first, sums.group(at.own.first), inverse);
        const LinearGradient of_second = linear_gradient(held.found.second, sums.group(at.own.second()), inverse);
        LinearGradient of_channel[pack_size];  // before the packs: what one pack computes is not known in the next
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            of_channel[slot] = at.own.of_slot(slot, of_first, of_second);
            of_channel[slot].scale = held.statistics(slot).rstd * held.gamma.of(slot);
        }
        const bool plain = in_whole_packs(dx, at.channels);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (at.live() && at.has(k)) {
                acc_t out[pack_size];
#pragma unroll
                for (int slot = 0; slot < pack_size; ++slot) {
                    out[slot] = input_gradient(held.gradient(k, slot), widen(held.x[k].get(slot)), of_channel[slot]);
                }
                store_pack_of(dx, start + at.step(k, C), at.from, at.channels, narrow_pack<data_t>(out), plain);
            }
        }
    }
};

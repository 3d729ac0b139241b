// GroupNorm forward over a sweep's part of the tensor: the moments of its channels, and its y. `split` has a kernel for
// each, `grid` one for both.
#include "activation.cuh"
#include "parameters.cuh"
#include "sweep_moments.cuh"

// The arrays of a call, and how it is cut.
struct GroupMoments {
    const data_t* x;
    const gamma_t* gamma;
    const beta_t* beta;
    Chunking cut;
    long long groups;

    __device__ __forceinline__ long long group_channels() const { return cut.C / groups; }
    __device__ __forceinline__ acc_t element(long long n, long long channel, long long position) const {
        return widen(load(x, sweep_t::element(cut, n, channel, position)));
    }
    // What the moments of a group are relative to: the median of its first, middle and last element.
    __device__ __forceinline__ acc_t shift(long long n, long long group) const {
        const long long first = group * group_channels(), last = first + group_channels() - 1;
        return median_shift(element(n, first, 0), element(n, first + group_channels() / 2, cut.HxW / 2),
                            element(n, last, cut.HxW - 1));
    }

    // Stores mean and sum of squared deviations of the sweep's channels, relative to the group's shift, where they stand
    // in a workspace [N * chunks, C]. `partials` is shared, pack_size moments a thread where a thread has several
    // channels. The whole block calls.
    __device__ __forceinline__ void moments(const sweep_t& sweep, Moments* partials, Pair* workspace) const {
        acc_t shift_of[sweep_t::slots] = {};
        long long shifted_group = -1;
        acc_t shift_of_group = acc_t(0);
        each_slot(sweep, group_channels(), [&](int slot, long long, long long group) {
            if (group != shifted_group) {
                shift_of_group = shift(sweep.n, group);
                shifted_group = group;
            }
            shift_of[slot] = shift_of_group;
        });
        acc_t count = acc_t(0);           // the same for all the thread's channels
        Pair found[sweep_t::slots] = {};  // mean and m2
        sweep_moments(sweep, x, shift_of, count, found);
        gather_moments(sweep, partials, count, found, [&](long long channel, Moments whole) {
            store(workspace, cut.part(sweep.n, sweep.chunk, channel), Pair{whole.mean, whole.m2});
        });
    }

    // What `moments` has stored of one chunk of a channel.
    __device__ __forceinline__ Moments part(const Pair* workspace, long long n, long long row,
                                            long long channel) const {
        const Pair stored = load(workspace, cut.part(n, row, channel));
        const long long left = cut.HxW - row * cut.chunk;
        return Moments{acc_t(left < cut.chunk ? left : cut.chunk), stored.first, stored.second};
    }

    // Writes the sweep's y.
    __device__ __forceinline__ void apply(const sweep_t& sweep, const acc_t* mean, const acc_t* rstd, data_t* y) const {
        Affine of[sweep_t::slots] = {};
        each_slot(sweep, group_channels(), [&](int slot, long long channel, long long group) {
            const long long at = sweep.n * groups + group;
            of[slot] = Affine{load(mean, at), load(rstd, at) * parameter(gamma, channel, acc_t(1)),
                              parameter(beta, channel, acc_t(0))};
        });
        const data_t* const from[1] = {x};
        sweep_write(sweep, from, y,
                    [&](int slot, const acc_t(&v)[1]) { return activation_t::apply(normalised(v[0], of[slot])); });
    }

    __device__ __forceinline__ void give_statistics(acc_t* mean, acc_t* rstd, long long n, long long group,
                                                    Moments found, acc_t eps) const {
        store(mean, n * groups + group, found.mean + shift(n, group));
        store(rstd, n * groups + group, reciprocal_deviation(found.m2 / found.count, eps));
    }
};

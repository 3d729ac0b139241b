// GroupNorm forward over the part of the tensor that a sweep covers: its y, for the strategies `split` and `grid`.
// store_sweep_moments in sweep_moments.cuh computes the moments of its channels.
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "partition/sweep_moments.cuh"

// Arrays of a launch, and how the tensor is cut into chunks.
struct GroupMoments {
    const data_t* x;
    const gamma_t* gamma;
    const beta_t* beta;
    Chunking cut;
    long long groups;

    __device__ __forceinline__ long long group_channels() const { return cut.C / groups; }

    // Writes y of the sweep's elements.
    __device__ __forceinline__ void apply(const sweep_t& sweep, const acc_t* mean, const acc_t* rstd, y_t* y) const {
        Affine of[sweep_t::slots] = {};
        const auto of_group = [&](long long group) {
            const long long at = sweep.n * groups + group;
            return Statistics{load(mean, at), load(rstd, at)};
        };
        each_slot(sweep, group_channels(), of_group, [&](int slot, long long channel, Statistics found) {
            of[slot] = affine_of(gamma, beta, channel, found.mean, found.rstd);
        });
        const data_t* const from[1] = {x};
        sweep_write(sweep, from, y,
                    [&](int slot, const acc_t(&v)[1]) { return activation_t::apply(normalised(v[0], of[slot])); });
    }

    __device__ __forceinline__ void give_statistics(acc_t* mean, acc_t* rstd, long long n, long long group,
                                                    Moments found, acc_t eps) const {
        const Statistics of = found.statistics(eps);
        store(mean, n * groups + group, of.mean);
        store(rstd, n * groups + group, of.rstd);
    }
};

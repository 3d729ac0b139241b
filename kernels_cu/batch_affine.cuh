// BatchNorm's forward, given statistics: what y = (x - mean) * invstd * gamma + beta needs of a channel.
#include "parameters.cuh"

struct ChannelAffine {
    const stat_t* mean;
    const stat_t* invstd;
    const gamma_t* gamma;
    const beta_t* beta;

    __device__ __forceinline__ Affine of(long long channel) const {
        const acc_t scale = acc_t(widen(load(invstd, channel))) * parameter(gamma, channel, acc_t(1));
        return Affine{widen(load(mean, channel)), scale, parameter(beta, channel, acc_t(0))};
    }
};

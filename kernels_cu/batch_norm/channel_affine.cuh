// BatchNorm's forward: the values of a channel for y = (x - mean) * invstd * gamma + beta. The statistics are inputs.
#include "batch_norm/unjoined.cuh"

struct ChannelAffine {
    const stat_t* mean;
    const stat_t* invstd;
    const gamma_t* gamma;
    const beta_t* beta;

    __device__ __forceinline__ Affine of(long long channel) const {
        return affine_of(gamma, beta, unjoined(channel), widen(load(mean, channel)), widen(load(invstd, channel)));
    }
};

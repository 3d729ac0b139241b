// BatchNorm's input gradient: the values of a channel. The sums are inputs.
//
//   dx = (dy - sum_dy / count - (x - mean) * invstd^2 * sum_dy_xmu / count) * invstd * gamma
//      = (dy + ((x - mean) * slope + offset)) * scale
//
// dy is not multiplied by `scale` alone, as in LinearGradient (norm.cuh): if invstd is infinite, the terms of dx would
// be infinities of both signs, and dx NaN.
#include "batch_norm/counts.cuh"
#include "batch_norm/unjoined.cuh"

struct alignas(16) ChannelGradient {  // one access to shared memory for float, two for double
    acc_t mean;
    acc_t slope;
    acc_t offset;
    acc_t scale;

    __device__ __forceinline__ acc_t input(acc_t dy, acc_t x) const {
        return (dy + multiply_add(x - mean, slope, offset)) * scale;
    }
};

struct ChannelCoefficients {
    const stat_t* mean;
    const stat_t* invstd;
    const gamma_t* gamma;
    const sum_t* sum_dy;
    const sum_t* sum_dy_xmu;
    acc_t inverse;  // 1 / count: a division per channel would be a branch between the loads of the channels

    __device__ __forceinline__ ChannelGradient of(long long channel) const {
        const acc_t weight = parameter(gamma, unjoined(channel), acc_t(1)), rstd = widen(load(invstd, channel));
        const acc_t of_dy = acc_t(widen(load(sum_dy, channel))) * inverse;
        const acc_t of_xmu = acc_t(widen(load(sum_dy_xmu, channel))) * inverse;
        return ChannelGradient{widen(load(mean, channel)), -(of_xmu * rstd) * rstd, -of_dy, rstd * weight};
    }
};

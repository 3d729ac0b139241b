// BatchNorm's input gradient: the values of a channel for input_gradient (norm.cuh). The sums are inputs.
//
//   dx = (dy - sum_dy / count - (x - mean) * invstd^2 * sum_dy_xmu / count) * invstd * gamma
//      = invstd * (gamma * dy - a - (x - mean) * invstd * b)
//   a = gamma * sum_dy / count, b = gamma * invstd * sum_dy_xmu / count
#include "common/parameters.cuh"

struct ChannelCoefficients {
    const stat_t* mean;
    const stat_t* invstd;
    const gamma_t* gamma;
    const sum_t* sum_dy;
    const sum_t* sum_dy_xmu;
    double count;

    __device__ __forceinline__ LinearGradient of(long long channel) const {
        const acc_t scale = parameter(gamma, channel, acc_t(1)), rstd = widen(load(invstd, channel));
        const acc_t a = acc_t(widen(load(sum_dy, channel))) / acc_t(count);
        const acc_t b = acc_t(widen(load(sum_dy_xmu, channel))) / acc_t(count);
        return linear_gradient(Coefficients{scale, widen(load(mean, channel)), rstd, scale * a, scale * rstd * b});
    }
};

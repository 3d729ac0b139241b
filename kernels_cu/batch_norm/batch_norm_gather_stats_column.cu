// BatchNorm statistics of several ranks merged into one, strategy `column`: one thread per channel.
//
//   means, invstds: (world, C), the statistics of each rank. counts: (world), each rank's elements per channel. A row of
//   each starts its own stride after the row before: they may be columns of one gathered buffer.
//   mean, invstd: (C). running_mean, running_var: (C) or null, read and written.
//   eps: the value with which the ranks computed invstds. momentum: the weight of the new statistics in the running
//   statistics.
//
// Chan's formula in float64, rank after rank. A rank with a count that is not above 0 is ignored, whatever its
// statistics are. If all ranks are ignored, mean and invstd are NaN and the running statistics do not change.
#include "batch_norm/counts.cuh"

// Rounds float64 to float32 on the way to 16 bits. If the conversion is inexact, the last bit of the result is set
// (round to odd). The second rounding then sees on which side of a midpoint the value is, so that the two roundings are
// equal to a single one.
__device__ __forceinline__ float round_to_odd(double value) {
    const float near = static_cast<float>(value);
    const double whole = value < 0 ? -value : value;
    const double kept = value < 0 ? -static_cast<double>(near) : near;  // the sign is that of value: near may be -0
    unsigned bits;
    memcpy(&bits, &near, sizeof bits);
    if (bits % 2 == 0 && (whole < kept || whole > kept)) {
        bits = whole < kept ? bits - 1 : bits + 1;
    }
    float odd;
    memcpy(&odd, &bits, sizeof odd);
    return odd;
}

template <typename T>
struct Rounded {
    static __device__ __forceinline__ T of(double value) { return narrow<T>(acc_t(round_to_odd(value))); }
};
template <>
struct Rounded<float> {
    static __device__ __forceinline__ float of(double value) { return static_cast<float>(value); }
};
template <>
struct Rounded<double> {
    static __device__ __forceinline__ double of(double value) { return value; }
};

// running = (1 - momentum) * running + momentum * found, unless running is null.
template <typename T>
__device__ __forceinline__ void follow(T* running, long long channel, double found, double momentum) {
    if (running != nullptr) {
        const double old = widen(load(running, channel));
        store(running, channel, Rounded<T>::of((1.0 - momentum) * old + momentum * found));
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads)
    batch_norm_gather_stats_column(const data_t* means, const data_t* invstds, const count_t* counts, acc_t* mean,
                                   acc_t* invstd, running_mean_t* running_mean, running_var_t* running_var,
                                   long long world, long long C, double eps, double momentum, long long means_stride,
                                   long long invstds_stride, long long counts_stride) {
    for (long long channel = static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x; channel < C;
         channel += static_cast<long long>(gridDim.x) * Tile::threads) {
        double total = 0.0, centre = 0.0, m2 = 0.0;
#pragma unroll 2
        for (long long rank = 0; rank < world; ++rank) {
            const double count = as_double(load(counts, rank * counts_stride));
            const double of_rank = widen(load(means, rank * means_stride + channel));
            const double reciprocal = widen(load(invstds, rank * invstds_stride + channel));
            if (count > 0.0) {
                const double variance = 1.0 / (reciprocal * reciprocal) - eps;
                const double share = count / (total + count), delta = of_rank - centre;
                // An infinite mean stays infinite. centre + delta * share would subtract infinities, and give NaN.
                centre = delta - delta == 0.0 ? centre + delta * share : centre + of_rank;
                m2 += (variance < 0.0 ? 0.0 : variance) * count + delta * total * share * delta;
                total += count;
            }
        }
        const double nothing = centre - centre;  // 0, or NaN if the mean is not finite: then there is no variance
        const double variance = m2 / total + nothing;
        store(mean, channel, acc_t(total > 0.0 ? centre : variance));
        store(invstd, channel, acc_t(1.0 / sqrt(variance + eps)));
        if (total > 0.0) {
            follow(running_mean, channel, centre, momentum);
            follow(running_var, channel, total > 1.0 ? variance * (total / (total - 1.0)) : variance, momentum);
        }
    }
}

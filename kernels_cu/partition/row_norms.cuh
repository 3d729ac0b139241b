// The two norms of a row: with a mean (LayerNorm, GroupNorm) and without one (RMSNorm). Without a mean, rstd is the
// reciprocal of the root of the mean square, and xhat is x * rstd:
//
//   rstd = 1 / sqrt(sum x^2 / L + eps),  y = weight * xhat,  weight = gamma + gamma_offset
//   dgamma = sum over rows of dy * xhat,  B = sum_row weight * dy * xhat,  dx = rstd * (weight * dy - xhat * B / L)
//
// These are the formulas of norm.cuh with a mean of 0, without the sum A, and without beta.
#include "common/parameters.cuh"

// h = x + residual. The sum is rounded once: acc_t has more than twice the digits of a 16-bit data_t, so that rounding to
// acc_t before changes nothing (Figueroa, When is double rounding innocuous?, 1995).
__device__ __forceinline__ data_t joined(data_t x, data_t residual) {
    return narrow<data_t>(acc_t(widen(x)) + acc_t(widen(residual)));
}
__device__ __forceinline__ Pack<data_t> joined(const Pack<data_t>& x, const Pack<data_t>& residual) {
    acc_t sums[pack_size];
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        sums[i] = acc_t(widen(x.get(i))) + acc_t(widen(residual.get(i)));
    }
    return narrow_pack<data_t>(sums);
}

// A Pair of which only the second sum is computed. The first one is the constant 0, so that the same code serves both.
struct Single {
    static constexpr acc_t first = 0;
    acc_t second;
};

__device__ __forceinline__ Single operator+(Single a, Single b) { return Single{a.second + b.second}; }

__device__ __forceinline__ Single shuffle_xor(Single value, int distance) {
    return Single{shuffle_xor(value.second, distance)};
}

__device__ __forceinline__ Single with_product(Single sums, acc_t term, acc_t factor) {
    return Single{multiply_add(term, factor, sums.second)};
}

// lanes_sum with a constant number of lanes. Its loop becomes a loop at run time for some single sums. For a pair, the
// compiler unrolls it unless there are two lanes.
template <int lanes>
__device__ __forceinline__ Pair sum_of_lanes(Pair value) {
    return lanes_sum(value, lanes);
}
template <int lanes>
__device__ __forceinline__ Single sum_of_lanes(Single value) {
    if constexpr (lanes > 1) {
        return sum_of_lanes<lanes / 2>(value + shuffle_xor(value, lanes / 2));
    } else {
        return value;
    }
}

// The destination of dgamma of a channel: a row of the workspace [rows, C], which a second kernel sums, or the result
// itself if there is only one row (`workspace` is null). See ParameterGradients.
struct GammaGradient {
    Single* workspace;
    gamma_t* dgamma;
    long long C;

    __device__ __forceinline__ bool wanted() const { return workspace != nullptr || dgamma != nullptr; }
    __device__ __forceinline__ void store_channel(long long row, long long channel, Single sums) const {
        if (workspace != nullptr) {
            store(workspace, row * C + channel, sums);
        } else {
            store(dgamma, channel, narrow<gamma_t>(sums.second));
        }
    }
};

// The sum of the squares of a thread's elements. Elements outside a row are zeros.
template <int count>
__device__ __forceinline__ Single sums_of_squares(const Pack<data_t> (&held)[count]) {
    Single sums = {};
#pragma unroll
    for (int k = 0; k < count; ++k) {
        sums = sums + Single{deviations(held[k], acc_t(0), [](int) { return true; }).second};
    }
    return sums;
}

struct WithMean {
    static constexpr bool has_mean = true;
    typedef Pair sums_t;  // of the gradients, and of their products with xhat: of a row or of a column
    typedef ParameterGradients results_t;
    static __device__ __forceinline__ Pair terms(acc_t first, acc_t second) { return Pair{first, second}; }
    // The factor of xhat in y.
    static __device__ __forceinline__ acc_t weight(acc_t gamma, acc_t) { return gamma; }
};

struct WithoutMean {
    static constexpr bool has_mean = false;
    typedef Single sums_t;
    typedef GammaGradient results_t;
    static __device__ __forceinline__ Single terms(acc_t, acc_t second) { return Single{second}; }
    static __device__ __forceinline__ acc_t weight(acc_t gamma, acc_t gamma_offset) { return gamma + gamma_offset; }
};

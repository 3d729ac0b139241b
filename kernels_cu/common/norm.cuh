// The mathematics of normalisation. c is a channel with parameters gamma and beta, g is its group, and a group has L
// elements:
//
//   mean = sum x / L,  rstd = 1 / sqrt(sum (x - mean)^2 / L + eps),  xhat = (x - mean) * rstd,  y = gamma * xhat + beta
//   dbeta = sum dy,    dgamma = sum dy * xhat,   A = sum_group gamma * dy,   B = sum_group gamma * dy * xhat
//   dx = rstd * (gamma * dy - A / L - xhat * B / L)
//
// With dx folded per channel, dx = scale * dy + ((x - mean) * slope + offset):
//
//   scale = rstd * gamma,  slope = -(B / L) * rstd^2,  offset = -(A / L) * rstd
//
// Elements are centred before they are multiplied: sum dy * (x - mean), never sum dy * x - mean * sum dy. The latter
// loses every digit if |mean| is large compared with the spread. For the same reason, never compute a variance as
// E[x^2] - E[x]^2.
#include "common/reduce.cuh"

__device__ __forceinline__ bool finite(acc_t value) { return value - value == acc_t(0); }

__device__ __forceinline__ acc_t square_root(acc_t value) {
    return sizeof(acc_t) == sizeof(double) ? acc_t(sqrt(double(value))) : acc_t(sqrtf(float(value)));
}

// ---- statistics ---------------------------------------------------------------------------------------------------

struct Statistics {
    acc_t mean;
    acc_t rstd;
};

// The shift of a first sum: an element of the slice, or 0 if that element is not finite. Relative to one of its
// elements, a constant slice has exact sums. An infinite shift would turn the mean into NaN.
__device__ __forceinline__ acc_t usable_shift(acc_t element) { return finite(element) ? element : acc_t(0); }

// A centre for the second pass: `centre` rounded to a multiple of the last place, in acc_t, of `grid_spreads` times the
// spread of the elements. Then x - centre is exact for all but the largest x. With a finer centre, x - centre would
// round to the same side for every x of one binade, and so would every sum of 16-bit x. The errors would add up, and
// the mean of a million elements would be no more accurate than that of a hundred. A spread of 0 (all elements are
// equal) leaves the centre unchanged.
//
// The multiple is the last place, in data_t, of 4 times the spread: acc_t has 13 binary digits more than float16. For
// bfloat16, which has fewer digits than float16, the multiple is smaller.
constexpr int extra_digits = sizeof(data_t) < sizeof(acc_t) ? 13 : 0;
constexpr int grid_spreads = 4 << extra_digits;
__device__ __forceinline__ acc_t on_grid(acc_t centre, acc_t spread) {
    const acc_t large = acc_t(grid_spreads) * spread;
    return finite(large) ? (centre + large) - large : centre;
}

// The terms of a first pass about a shift, for second_centre: a sum of d = x - shift, and the square of that sum.
__device__ __forceinline__ Pair with_square(acc_t sum) { return Pair{sum, sum * sum}; }

// The centre of the second pass. `sums` contains sums over all elements: the sum of d, and the sum of the squares of d
// or of partial sums of `terms` d each. inverse = 1 / the number of elements. The spread is computed about the mean of
// d and not about the shift: the shift is a single element, and if it is an outlier, d measures only the distance of
// the outlier. Partial sums of fewer than `terms` d, at the ends of a run, make the spread smaller, which does no harm.
__device__ __forceinline__ acc_t second_centre(acc_t shift, Pair sums, acc_t inverse, int terms) {
    const acc_t step = sums.first * inverse;
    const acc_t variance = multiply_add(acc_t(-terms) * step, step, sums.second * inverse);
    return on_grid(shift + step, variance > acc_t(0) ? square_root(variance) : acc_t(0));
}

// 1 / sqrt(variance + eps). If the variance overflowed, the result is NaN: 1 / infinity is 0, and with it y would be a
// plausible beta.
__device__ __forceinline__ acc_t reciprocal_deviation(acc_t variance, acc_t eps) {
    const acc_t radicand = (variance < acc_t(0) ? acc_t(0) : variance) + eps;
    return acc_t(1) / square_root(finite(radicand) ? radicand : radicand - radicand);
}

// Statistics from the sums of d = x - centre and of d^2, where the centre is the mean except for rounding (the
// corrected two-pass algorithm, Chan, Golub and LeVeque 1983). The error of the centre, `missed`, is known. Neither a
// distant first element nor a rounded mean therefore costs digits.
__device__ __forceinline__ Statistics corrected_statistics(acc_t centre, Pair sums, acc_t length, acc_t eps) {
    if (!finite(centre)) {
        return Statistics{centre, centre - centre};  // infinite or NaN data, or an overflowed sum: rstd is NaN
    }
    const acc_t missed = sums.first / length;
    const acc_t variance = multiply_add(-missed, missed, sums.second / length);
    return Statistics{centre + missed, reciprocal_deviation(variance, eps)};
}

// Adds `term` to the first of two sums, and term * factor to the second.
__device__ __forceinline__ Pair with_product(Pair sums, acc_t term, acc_t factor) {
    return Pair{sums.first + term, multiply_add(term, factor, sums.second)};
}

// The sums of d = x - centre and of d^2 over the elements i of a pack for which use(i) holds. Like gradient_sums below,
// it starts from zero: the depth of the whole summation therefore grows with the number of packs, not of elements.
template <typename Use>
__device__ __forceinline__ Pair deviations(const Pack<data_t>& x, acc_t centre, Use use) {
    const auto& values = selectable(x);
    Pair sums = {};
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        const acc_t d = use(i) ? acc_t(widen(values.get(i))) - centre : acc_t(0);
        sums = with_product(sums, d, d);
    }
    return sums;
}

// y of one channel: (x - mean) * scale + offset, with scale = rstd * gamma and offset = beta.
struct alignas(16) Affine {  // one access to shared memory for float, two for double
    acc_t mean;
    acc_t scale;
    acc_t offset;
};

__device__ __forceinline__ acc_t normalised(acc_t x, const Affine& k) {
    return multiply_add(x - k.mean, k.scale, k.offset);
}

// ---- gradients ----------------------------------------------------------------------------------------------------

// The values that dx needs per channel: gamma, the statistics of x, and a = A / L, b = B / L of the channel's group.
struct Coefficients {
    acc_t gamma;
    acc_t mean;
    acc_t rstd;
    acc_t a;
    acc_t b;
};

// The same values folded: dx as a linear function of dy and x - mean.
struct alignas(16) LinearGradient {  // one access to shared memory for float, two for double
    acc_t mean;
    acc_t scale;
    acc_t slope;
    acc_t offset;
};

__device__ __forceinline__ LinearGradient linear_gradient(const Coefficients& k) {
    return LinearGradient{k.mean, k.rstd * k.gamma, -(k.b * k.rstd) * k.rstd, -(k.a * k.rstd)};
}

__device__ __forceinline__ acc_t input_gradient(acc_t dy, acc_t x, const LinearGradient& k) {
    return multiply_add(k.scale, dy, multiply_add(x - k.mean, k.slope, k.offset));
}
__device__ __forceinline__ acc_t input_gradient(acc_t dy, acc_t x, const Coefficients& k) {
    return input_gradient(dy, x, linear_gradient(k));
}

// The gradient with respect to the normalised values if there is no activation: dy itself.
struct NoActivationGrad {
    __device__ __forceinline__ acc_t operator()(acc_t dy, acc_t) const { return dy; }
};

// sum g and sum g * (x - mean) over the elements i of a pack for which use(i) holds, with g = activation_grad(dy, x).
template <typename Use, typename Grad = NoActivationGrad>
__device__ __forceinline__ Pair gradient_sums(const Pack<data_t>& dy, const Pack<data_t>& x, acc_t mean, Use use,
                                              const Grad& activation_grad = Grad()) {
    const auto& gradients = selectable(dy);
    const auto& values = selectable(x);
    Pair sums = {};
#pragma unroll
    for (int i = 0; i < pack_size; ++i) {
        const acc_t gradient = use(i) ? activation_grad(widen(gradients.get(i)), widen(values.get(i))) : acc_t(0);
        const acc_t deviation = use(i) ? acc_t(widen(values.get(i))) - mean : acc_t(0);
        sums = with_product(sums, gradient, deviation);
    }
    return sums;
}

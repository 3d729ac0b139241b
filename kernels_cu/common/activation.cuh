// Activations that are fused after a normalisation: y = apply(z). A backward needs their gradient, which is
// gradient(z, dy) = apply'(z) * dy.
//
// The host chooses activation_t. z is not stored: a backward recomputes it from x, the statistics and the parameters.
#include "common/norm.cuh"

__device__ __forceinline__ acc_t exponential(acc_t value) {
    return sizeof(acc_t) == sizeof(double) ? acc_t(exp(double(value))) : acc_t(expf(float(value)));
}

// 1 / value for 1 <= value <= infinity. It is an approximation with one Newton step, and almost always rounded as a
// division would be. A division would contain a slow path for all other values: a call in the code of every element.
__device__ __forceinline__ float reciprocal(float value) {
#ifdef CUNORM_CPU
    return 1.0f / value;
#else
    constexpr float largest = 0x1p126f;  // the largest value whose reciprocal is not denormal
    float found;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(value));
    return value < largest ? fmaf(found, fmaf(-value, found, 1.0f), found) : found;
#endif
}
__device__ __forceinline__ double reciprocal(double value) { return 1.0 / value; }

// 1 / (1 + exp(-z)). The approximations of the GPU have relative errors of some |z| units of float. They are multiplied
// by the slope of the sigmoid, which falls faster than |z| grows. For 16-bit data that is accurate enough, and takes
// a third of the instructions: z * sigmoid(z) is off by at most 5 float units of |z|, little for y in float32 too.
__device__ __forceinline__ acc_t sigmoid(acc_t z) {
#ifndef CUNORM_CPU
    if constexpr (sizeof(data_t) < sizeof(float)) {
        constexpr float log2_of_e = 1.4426950408889634f;
        float power, found;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(float(-log2_of_e * z)));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(1.0f + power));
        return found;
    }
#endif
    return reciprocal(acc_t(1) + exponential(-z));
}

struct Identity {
    static constexpr bool identity = true;
    static __device__ __forceinline__ acc_t apply(acc_t z) { return z; }
    static __device__ __forceinline__ acc_t gradient(acc_t, acc_t dy) { return dy; }
};

// silu(z) = z * s with s = 1 / (1 + exp(-z)); silu'(z) = s * (1 + z * (1 - s)).
struct Silu {
    static constexpr bool identity = false;
    static __device__ __forceinline__ acc_t apply(acc_t z) { return z * sigmoid(z); }
    static __device__ __forceinline__ acc_t gradient(acc_t z, acc_t dy) {
        const acc_t s = sigmoid(z);
        return dy * (s * multiply_add(z, acc_t(1) - s, acc_t(1)));
    }
};

constexpr bool is_identity = activation_t::identity;  // z is then not needed

// The gradient with respect to a channel's normalised values: dy times the slope of the activation. It is passed to
// gradient_sums (norm.cuh) as `activation_grad`.
struct ActivationGrad {
    Affine z;

    __device__ __forceinline__ acc_t operator()(acc_t dy, acc_t x) const {
        return activation_t::gradient(normalised(x, z), dy);
    }
};

// Statistics in parts: the moments of sets of elements, merged by Chan's formula.
//
// Moments are relative to a shift, an element of the set, so that neither a mean far from zero nor a constant costs
// digits. Each thread takes what it has read first; two sets are merged by the difference of their shifts, which is exact
// where they lie close to each other. So nobody reads an element a second time for a common shift.
#include "norm.cuh"

// How many elements, an element or 0, the mean of x - shift and the sum of squared deviations from it.
struct alignas(4 * sizeof(acc_t) < 16 ? 4 * sizeof(acc_t) : 16) Moments {  // one or two accesses to shared memory
    acc_t count;
    acc_t shift;
    acc_t mean;
    acc_t m2;

    // Of the elements themselves.
    __device__ __forceinline__ Statistics statistics(acc_t eps) const {
        return Statistics{shift + mean, reciprocal_deviation(m2 / count, eps)};
    }
};

// Chan's merge of sets with one shift, with share = b.count / (a.count + b.count). The order of a and b matters in the
// last bit: callers fix it.
__device__ __forceinline__ Moments merge(Moments a, Moments b, acc_t share) {
    const acc_t delta = b.mean - a.mean;
    const acc_t mean = finite(delta) ? a.mean + delta * share : a.mean + b.mean;  // infinities stay what they are
    return Moments{a.count + b.count, a.shift, mean, a.m2 + b.m2 + delta * (delta * (a.count * share))};
}

// The merge of sets with any shifts; either may be empty. It keeps the shift that lies closer to the mean of both, so that
// no outlier stays what everything is relative to, whether it came first to a thread or is a set of its own.
__device__ __forceinline__ Moments merge(Moments a, Moments b) {
    if (b.count == acc_t(0)) {
        return a;
    }
    if (a.count == acc_t(0)) {
        return b;
    }
    const acc_t apart = b.shift - a.shift, sum = a.count * a.mean + b.count * (b.mean + apart);  // from a's shift
    if (fabs(sum - (a.count + b.count) * apart) < fabs(sum)) {
        const Moments further = a;
        a = b;
        b = further;
    }
    b.mean += b.shift - a.shift;
    return merge(a, b, b.count / (a.count + b.count));
}

// Moments over `lanes` consecutive lanes, right in the first of them.
__device__ __forceinline__ Moments lanes_merge(Moments value, int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) {
        const Moments other = {shuffle_xor(value.count, distance), shuffle_xor(value.shift, distance),
                               shuffle_xor(value.mean, distance), shuffle_xor(value.m2, distance)};
        value = merge(value, other);
    }
    return value;
}

// From the sums of d = x - shift - centre and of d^2 over `count` values, as corrected_statistics. inverse = 1 / count.
__device__ __forceinline__ Moments corrected_moments(acc_t count, acc_t inverse, acc_t shift, acc_t centre, Pair sums) {
    if (!finite(centre)) {
        return Moments{count, shift, centre, centre - centre};
    }
    const acc_t missed = sums.first * inverse;
    return Moments{count, shift, centre + missed, sums.second - missed * sums.first};
}

// The same where the sums are of d = x - centre: the centre is what they are relative to.
__device__ __forceinline__ Moments moments_about(acc_t count, acc_t inverse, acc_t centre, Pair sums) {
    const acc_t shift = usable_shift(centre);
    return corrected_moments(count, inverse, shift, centre - shift, sums);
}

// Moments of the `count` values shift + value(i) for which use(i) holds, i in [0, size), all in registers: two passes,
// the second corrected as above.
template <int size, typename Value, typename Use>
__device__ __forceinline__ Moments register_moments(acc_t count, acc_t inverse, acc_t shift, Value value, Use use) {
    acc_t sum = acc_t(0);
#pragma unroll
    for (int i = 0; i < size; ++i) {
        sum += use(i) ? value(i) : acc_t(0);
    }
    const acc_t centre = sum * inverse;
    Pair sums = {};
#pragma unroll
    for (int i = 0; i < size; ++i) {
        const acc_t d = use(i) ? value(i) - centre : acc_t(0);
        sums = sums + Pair{d, d * d};
    }
    return corrected_moments(count, inverse, shift, centre, sums);
}

// Moments in a workspace: two pairs.
__device__ __forceinline__ Moments load_moments(const Pair* workspace, long long part) {
    const Pair a = load(workspace, 2 * part), b = load(workspace, 2 * part + 1);
    return Moments{a.first, a.second, b.first, b.second};
}

__device__ __forceinline__ void store_moments(Pair* workspace, long long part, Moments found) {
    store(workspace, 2 * part, Pair{found.count, found.shift});
    store(workspace, 2 * part + 1, Pair{found.mean, found.m2});
}

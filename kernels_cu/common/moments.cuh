// Statistics in parts: the moments of sets of elements, merged by Chan's formula (Chan, Golub and LeVeque 1983).
//
// A mean is the unevaluated sum of two numbers, mean + rest, with about twice the digits of one. So a merge loses no
// digits of a mean that is far from zero, and no element has to serve as a shift that all others are relative to: an
// outlier costs digits only in the sums that it is a term of.
#include "common/norm.cuh"

// mean is finite; where the mean of the set is not, rest is infinite or NaN. m2: the sum of squared deviations.
struct alignas(4 * sizeof(acc_t) < 16 ? 4 * sizeof(acc_t) : 16) Moments {  // one or two accesses to shared memory
    acc_t count;
    acc_t mean;
    acc_t rest;
    acc_t m2;

    __device__ __forceinline__ Statistics statistics(acc_t eps) const {
        return Statistics{mean + rest, reciprocal_deviation(m2 / count, eps)};
    }
};

// The set of `count` elements with mean `mean` + step and that m2. The sum is Knuth's TwoSum (The Art of Computer
// Programming 2, 4.2.2, theorem B), exact whichever of the two is larger.
__device__ __forceinline__ Moments moved_by(acc_t count, acc_t mean, acc_t step, acc_t m2) {
    const acc_t sum = mean + step, of_step = sum - mean, of_mean = sum - of_step;
    const bool kept = !finite(sum);
    return Moments{count, kept ? mean : sum, kept ? step : (mean - of_mean) + (step - of_step), m2};
}

// The set and the elements that join it, from the sums of d = x - set.mean and of d^2 over those; `count` of all, and
// its inverse. Exact enough where the set has about as many elements as join it, or its mean is near theirs: then
// what is subtracted from the sum of d^2 is a part of the result's own m2.
__device__ __forceinline__ Moments joined(Moments set, Pair sums, acc_t count, acc_t inverse) {
    const acc_t rests = set.count * set.rest;  // the sum of d over the set itself
    const acc_t sum = rests + sums.first, step = sum * inverse;
    return moved_by(count, set.mean, step, set.m2 + (sums.second + rests * set.rest - step * sum));
}

// The moments of `count` elements from the sums of d = x - centre and of d^2, the centre being their mean but for
// rounding. inverse = 1 / count.
__device__ __forceinline__ Moments moments_about(acc_t count, acc_t inverse, acc_t centre, Pair sums) {
    if (!finite(centre)) {
        return Moments{count, acc_t(0), centre, centre - centre};
    }
    return joined(Moments{acc_t(0), centre, acc_t(0), acc_t(0)}, sums, count, inverse);
}

// Chan's merge; either set may be empty. The mean moves from that of the larger set, by at most half of the distance: a
// step from a small set that is far away would round as the whole distance does. The order of a and b matters in the
// last bit: callers fix it.
__device__ __forceinline__ Moments merge(Moments a, Moments b) {
    if (b.count == acc_t(0)) {
        return a;
    }
    if (a.count == acc_t(0)) {
        return b;
    }
    if (a.count < b.count) {
        const Moments larger = b;
        b = a;
        a = larger;
    }
    const acc_t count = a.count + b.count, share = b.count / count;
    const acc_t delta = (b.mean - a.mean) + (b.rest - a.rest);
    const acc_t rest = finite(delta) ? a.rest + delta * share : a.rest + b.rest;  // infinities stay what they are
    return moved_by(count, a.mean, rest, a.m2 + b.m2 + delta * (delta * (a.count * share)));
}

// Moments over `lanes` consecutive lanes, right in the first of them.
__device__ __forceinline__ Moments lanes_merge(Moments value, int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) {
        const Moments other = {shuffle_xor(value.count, distance), shuffle_xor(value.mean, distance),
                               shuffle_xor(value.rest, distance), shuffle_xor(value.m2, distance)};
        value = merge(value, other);
    }
    return value;
}

// Moments in a workspace: two pairs.
__device__ __forceinline__ Moments load_moments(const Pair* workspace, long long part) {
    const Pair a = load(workspace, 2 * part), b = load(workspace, 2 * part + 1);
    return Moments{a.first, a.second, b.first, b.second};
}

__device__ __forceinline__ void store_moments(Pair* workspace, long long part, Moments found) {
    store(workspace, 2 * part, Pair{found.count, found.mean});
    store(workspace, 2 * part + 1, Pair{found.rest, found.m2});
}

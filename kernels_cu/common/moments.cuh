// Statistics in parts: the moments of sets of elements, merged in pairs by Chan's formula (Chan, Golub and LeVeque
// 1983), or many at once.
//
// A mean is the unevaluated sum of two numbers, mean + rest, with about twice the digits of one number. A merge
// therefore loses no digits of a mean that is far from zero, and no element has to serve as a shift for all other
// elements. An outlier costs digits only in the sums that contain it.
#include "common/norm.cuh"

// `mean` is finite. If the mean of the set is not finite, `rest` is infinite or NaN. `m2` is the sum of squared
// deviations.
struct alignas(4 * sizeof(acc_t) < 16 ? 4 * sizeof(acc_t) : 16) Moments {  // one or two accesses to shared memory
    acc_t count;
    acc_t mean;
    acc_t rest;
    acc_t m2;

    __device__ __forceinline__ Statistics statistics(acc_t eps) const {
        return Statistics{mean + rest, reciprocal_deviation(m2 / count, eps)};
    }
};

// The moments of a set of `count` elements with mean `mean` + `step` and sum of squared deviations `m2`. The sum is
// Knuth's TwoSum (The Art of Computer Programming 2, 4.2.2, theorem B), which is exact whichever of the two terms is
// larger.
__device__ __forceinline__ Moments moved_by(acc_t count, acc_t mean, acc_t step, acc_t m2) {
    const acc_t sum = mean + step, of_step = sum - mean, of_mean = sum - of_step;
    const bool kept = !finite(sum);
    return Moments{count, kept ? mean : sum, kept ? step : (mean - of_mean) + (step - of_step), m2};
}

// The moments of `set` together with the elements that join it. `sums` contains the sums of d = x - set.mean and of d^2
// over the joining elements, `count` is the number of all elements, and `inverse` is 1 / count. The result is accurate
// enough if the set has about as many elements as join it, or if its mean is near theirs. In both cases the term that
// is subtracted from the sum of d^2 is comparable to a part of the result's own m2.
__device__ __forceinline__ Moments joined(Moments set, Pair sums, acc_t count, acc_t inverse) {
    const acc_t rests = set.count * set.rest;  // sum of d over the elements of the set itself
    const acc_t sum = rests + sums.first, step = sum * inverse;
    const acc_t squares = multiply_add(-step, sum, multiply_add(rests, set.rest, sums.second));
    return moved_by(count, set.mean, step, set.m2 + squares);
}

// The moments of `count` elements from the sums of d = x - centre and of d^2. The centre is the mean of the elements
// except for rounding. inverse = 1 / count.
__device__ __forceinline__ Moments moments_about(acc_t count, acc_t inverse, acc_t centre, Pair sums) {
    if (!finite(centre)) {
        return Moments{count, acc_t(0), centre, centre - centre};
    }
    return joined(Moments{acc_t(0), centre, acc_t(0), acc_t(0)}, sums, count, inverse);
}

// Chan's merge. Either set may be empty. The merged mean is computed from the mean of the larger set, from which it
// differs by at most half of the distance between the means. A step from the mean of a distant, smaller set would have
// the rounding error of the whole distance. The order of a and b affects the last bit: callers fix it.
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
    const acc_t rest =
        finite(delta) ? multiply_add(delta, share, a.rest) : a.rest + b.rest;  // an infinite mean stays infinite
    return moved_by(count, a.mean, rest, multiply_add(delta, delta * (a.count * share), a.m2 + b.m2));
}

__device__ __forceinline__ Moments shuffle_xor(Moments value, int distance) {
    return Moments{shuffle_xor(value.count, distance), shuffle_xor(value.mean, distance),
                   shuffle_xor(value.rest, distance), shuffle_xor(value.m2, distance)};
}

// The data_t value next to a mean. With it as the centre, sums of 16-bit elements stay exact for long. With more
// digits, all of them would round to the same side (on_grid in norm.cuh).
__device__ __forceinline__ acc_t next_to(acc_t mean) { return widen(narrow<data_t>(mean)); }

// Adds a term to a sum of which `lost` is the rounding error (Kahan 1965). Behind an outlier, small terms that are
// alike would otherwise all round to the same side.
__device__ __forceinline__ void add_compensated(acc_t& sum, acc_t& lost, acc_t term) {
    const acc_t whole = term - lost, next = sum + whole;
    lost = (next - sum) - whole;
    sum = next;
}

// The moments of `count` elements, from those of sets of them that lanes of a warp hold: each_set(use) calls use(set)
// for the sets of a lane. Lanes whose indices are equal modulo `width`, a power of two, hold sets of the same elements.
// The result is valid in all of them. The whole warp calls. An empty set is Moments{}.
//
// The sets are added up as sums about a common centre, of which there are two, as in second_centre: first about `near`,
// the mean of one set, then about the mean of all. Merges in pairs would take several times as many instructions, with
// a division each. The weights sum to 1, so that a mean does not overflow before its elements' distances do.
template <typename EachSet>
__device__ __forceinline__ Moments merge_sets(acc_t count, acc_t near, int width, EachSet each_set) {
    const acc_t inverse = acc_t(1) / count;
    const auto over_lanes = [&](auto value) {
#pragma unroll
        for (int distance = warp_size / 2; distance > 0; distance /= 2) {
            if (distance >= width) {
                value = value + shuffle_xor(value, distance);
            }
        }
        return value;
    };
    acc_t step = acc_t(0);
    each_set([&](const Moments& set) { step = step + set.count * inverse * ((set.mean - near) + set.rest); });
    const acc_t mean = near + over_lanes(step), centre = finite(mean) ? next_to(mean) : mean;
    Pair sums = {}, lost = {};
    each_set([&](const Moments& set) {
        const acc_t d = (set.mean - centre) + set.rest;
        add_compensated(sums.first, lost.first, set.count * inverse * d);
        add_compensated(sums.second, lost.second, multiply_add(set.count * d, d, set.m2));
    });
    sums = over_lanes(sums);
    return moments_about(count, inverse, centre, Pair{count * sums.first, sums.second});
}

// Merges the moments of the lanes of a warp, and returns the result to all of them. The first lane is empty only if all
// are. Only the count of an empty set has a meaning.
__device__ __forceinline__ Moments warp_merge(Moments value) {
    const Moments own = value.count == acc_t(0) ? Moments{} : value;
    const acc_t near = __shfl_sync(whole_warp, own.mean, 0);
    return merge_sets(warp_sum(own.count), near, 1, [&](auto use) { use(own); });
}

// A workspace stores moments as two pairs.
__device__ __forceinline__ Moments load_moments(const Pair* workspace, long long part) {
    const Pair a = load(workspace, 2 * part), b = load(workspace, 2 * part + 1);
    return Moments{a.first, a.second, b.first, b.second};
}

__device__ __forceinline__ void store_moments(Pair* workspace, long long part, Moments found) {
    store(workspace, 2 * part, Pair{found.count, found.mean});
    store(workspace, 2 * part + 1, Pair{found.rest, found.m2});
}

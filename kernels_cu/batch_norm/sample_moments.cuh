// The moments of the channels of a block's columns of packs (sample_columns.cuh), for BatchNorm's statistics.
//
// A thread adds up d = x - centre and d^2 for each element of its pack over the samples. The first centre is the mean
// of the first batch of rows: they are in registers and are summed twice. The centre moves when the sums contain a chain
// of rows. It is therefore always the mean of at least an eighth as many elements as are summed about it, and the error
// that an outlier causes is in proportion to the amount that the outlier adds to m2.
#include "batch_norm/sample_columns.cuh"
#include "common/moments.cuh"

// The data_t value next to a mean. With more digits, the errors of d would all round to the same side (on_grid in
// norm.cuh).
__device__ __forceinline__ acc_t next_to(acc_t mean) { return widen(narrow<data_t>(mean)); }

// The moments of the elements of a thread's pack. All of them have the same count.
struct ColumnMoments {
    acc_t count;
    Pair mean[pack_size];  // the centre, and the rest of the mean
    acc_t m2[pack_size];

    __device__ __forceinline__ Moments at(int slot) const {
        return Moments{count, mean[slot].first, mean[slot].second, m2[slot]};
    }
    // Adds sums about the centres, over `more` rows, and moves the centres.
    __device__ __forceinline__ void join(Pair (&sums)[pack_size], int more) {
        const acc_t joint = count + acc_t(more), inverse = acc_t(1) / joint;
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            const Moments total = joined(at(slot), sums[slot], joint, inverse);
            const acc_t centre = next_to(total.mean);
            mean[slot] = Pair{centre, (total.mean - centre) + total.rest};
            m2[slot] = total.m2;
            sums[slot] = Pair{};
        }
        count = joint;
    }
};

// Centres for the first batch of rows: for each slot the value next to the mean, or 0 if the mean is not finite. The mean
// is computed relative to the first element, so that the mean of equal elements is equal to each of them.
template <typename Batch>
__device__ __forceinline__ void first_centres(const Batch& batch, ColumnMoments& found) {
    const acc_t inverse = acc_t(1) / acc_t(batch.live);
#pragma unroll
    for (int slot = 0; slot < pack_size; ++slot) {
        const acc_t first = usable_shift(widen(batch.packs[0][0].get(slot)));
        acc_t sum = acc_t(0);
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            sum = sum + (k < batch.live ? acc_t(widen(batch.packs[0][k].get(slot))) - first : acc_t(0));
        }
        found.mean[slot].first = next_to(usable_shift(multiply_add(sum, inverse, first)));
    }
}

// Calls use(batch) for the packs of a thread. If they are whole packs at 16-byte boundaries, twice as many loads are in
// flight as in sweep_packs (sweep.cuh): one tensor is read, and not two.
template <typename Use>
__device__ __forceinline__ void each_batch(const SampleColumn& path, const data_t* x, Use use) {
    constexpr int many = 2 * loads_in_flight, few = loads_in_flight;
    const data_t* const from[1] = {x};
    const PackSpan where = path.span_of(0);
    const int steps = path.steps();
    int base = 0;
    if (where.whole() && sweeps_aligned(path, from)) {
        for (long long at = where.row + where.first; base < steps; base += many) {
            use(load_plain<many>(from, at, path.stride(), steps - base < many ? steps - base : many));
            at += many * path.stride();
        }
        return;
    }
    for (; base < steps; base += few) {
        use(load_ragged<few>(from, path, base, steps - base < few ? steps - base : few));
    }
}

__device__ __forceinline__ ColumnMoments column_moments(const SampleColumn& path, const data_t* x) {
    ColumnMoments found = {};
    Pair latest[pack_size] = {};  // sums since the last move of the centres
    int rows = 0;                 // rows that `latest` contains
    bool first = true;
    each_batch(path, x, [&](const auto& batch) {
        if (first) {
            first_centres(batch, found);
            first = false;
        }
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            if (k < batch.live) {
#pragma unroll
                for (int slot = 0; slot < pack_size; ++slot) {
                    const acc_t d = acc_t(widen(batch.packs[0][k].get(slot))) - found.mean[slot].first;
                    latest[slot] = with_product(latest[slot], d, d);
                }
            }
        }
        rows += batch.live;
        if (rows >= chain) {
            found.join(latest, rows);
            rows = 0;
        }
    });
    if (rows > 0) {
        found.join(latest, rows);
    }
    return found;
}

// Adds a term to a sum of which `lost` is the rounding error (Kahan 1965). Behind an outlier, small terms that are alike
// would otherwise all round to the same side.
__device__ __forceinline__ void add_compensated(acc_t& sum, acc_t& lost, acc_t term) {
    const acc_t whole = term - lost, next = sum + whole;
    lost = (next - sum) - whole;
    sum = next;
}

// Merges the moments of the elements of a channel in the block's columns into totals[channel]. `here` is the first of
// these columns. `partials` is in shared memory, pack_size moments per thread. One warp merges a channel: as sums about
// a common centre, of which there are two, as in second_centre. A merge in pairs would take several times as many
// instructions. The whole block calls. Ends with a barrier.
__device__ __forceinline__ void merge_into_totals(const SampleColumn& path, int here, int HxW, int own,
                                                  Moments* partials, const ColumnMoments& found, Moments* totals) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const int of_slot = path.parts * path.columns;
    if (path.part < path.parts) {
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            partials[slot * of_slot + threadIdx.x] = found.at(slot);
        }
    }
    __syncthreads();
    const int from = here * pack_size, to = from + path.columns * pack_size;  // elements from the start of column 0
    for (int channel = warp; channel < own; channel += block_warps) {
        const int start = path.shift + channel * HxW, past = start + HxW;
        const int begin = start < from ? from : start, end = past < to ? past : to;
        if (begin >= end) {
            continue;
        }
        const acc_t count = acc_t(static_cast<long long>(end - begin) * path.rows), inverse = acc_t(1) / count;
        const auto of_element = [&](int at) { return partials + at % pack_size * of_slot + (at - from) / pack_size; };
        const auto each_set = [&](auto use) {
            for (int at = begin + lane; at < end; at += warp_size) {
                const Moments* const of_parts = of_element(at);
                for (int part = 0; part < path.parts; ++part) {
                    use(of_parts[part * path.columns]);
                }
            }
        };
        acc_t centre = of_element(begin)->mean, sum = acc_t(0);
        each_set([&](const Moments& set) { sum = sum + set.count * ((set.mean - centre) + set.rest); });
        const acc_t mean = multiply_add(warp_sum(sum), inverse, centre);
        centre = finite(mean) ? next_to(mean) : mean;
        Pair sums = {}, lost = {};
        each_set([&](const Moments& set) {
            const acc_t d = (set.mean - centre) + set.rest, of_set = set.count * d;
            add_compensated(sums.first, lost.first, of_set);
            add_compensated(sums.second, lost.second, multiply_add(of_set, d, set.m2));
        });
        sums = warp_sum(sums);
        if (lane == 0) {
            totals[channel] = merge(totals[channel], moments_about(count, inverse, centre, sums));
        }
    }
    __syncthreads();
}

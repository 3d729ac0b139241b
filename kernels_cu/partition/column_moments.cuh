// The moments of a column of packs, for a forward: a thread owns one pack of every parts-th row, and sums each element
// of the pack on its own. For any `Path` of sweep.cuh with pack_size slots.
//
// A thread adds up d = x - centre and d^2 for each element of its pack over the rows. The centre moves to the mean of
// all rows so far after 1, 3 and 7 chains of rows, and then every 4 chains. It is therefore the mean of at least half
// as many elements as are summed about it, and the error that an outlier causes is in proportion to the amount that the
// outlier adds to m2. Moves are few, because each rounds m2, which contains the outlier. No elements precede the first
// chain. Its centre is the median of three of its elements, and not a mean of a few, which an outlier would move far
// from all the others.
//
// The mean is right if the sum of |d| over 4 chains does not overflow.
#include "common/moments.cuh"
#include "partition/sweep.cuh"

// The moments of the elements of a thread's pack. All of them have the same count.
struct ColumnMoments {
    acc_t count;
    Pair mean[pack_size];  // the centre, and the rest of the mean
    acc_t m2[pack_size];

    __device__ __forceinline__ Moments at(int slot) const {
        return Moments{count, mean[slot].first, mean[slot].second, m2[slot]};
    }
    // The moments of the elements of slots [begin, end) together; empty if there are none.
    __device__ __forceinline__ Moments over(int begin, int end) const {
        if (begin >= end || count == acc_t(0)) {
            return Moments{};
        }
        // As in merge_sets: first about the mean of one slot, then about the mean of all. The terms are weighted before
        // they are added up, so that a mean does not overflow.
        const acc_t slots = acc_t(end - begin), share = acc_t(1) / slots;
        acc_t near = acc_t(0), step = acc_t(0);
#pragma unroll
        for (int i = pack_size - 1; i >= 0; --i) {
            near = i >= begin ? mean[i].first : near;
        }
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            step = i >= begin && i < end ? step + share * ((mean[i].first - near) + mean[i].second) : step;
        }
        const acc_t all = near + step, centre = finite(all) ? next_to(all) : all;
        Pair sums = {};
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const acc_t d = (mean[i].first - centre) + mean[i].second;
            const Pair more = {sums.first + share * d, sums.second + multiply_add(count * d, d, m2[i])};
            sums = i >= begin && i < end ? more : sums;
        }
        const acc_t elements = count * slots;
        return moments_about(elements, acc_t(1) / elements, centre, Pair{elements * sums.first, sums.second});
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

// A centre for the first rows: the median of the first three elements of a slot, or the first if there are fewer. It is
// not an outlier unless two of the three are. Equal elements are all equal to it.
template <typename Batch>
__device__ __forceinline__ acc_t first_centre(const Batch& batch, int slot) {
    static_assert(Batch::loads >= 3, "three rows");
    const auto of_row = [&](int k) { return acc_t(widen(batch.packs[0][k].get(slot))); };
    const acc_t a = of_row(0), b = of_row(1), c = of_row(2);
    const acc_t low = a < b ? a : b, high = a < b ? b : a, below = high < c ? high : c;
    return usable_shift(batch.live < 3 ? a : (low < below ? below : low));
}

constexpr int longest_chain = 4 * chain;

template <typename Path>
__device__ __forceinline__ ColumnMoments column_moments(const Path& path, const data_t* x) {
    ColumnMoments found = {};
    Pair latest[pack_size] = {};  // sums since the last move of the centres
    int rows = 0;                 // rows that `latest` contains
    int most = chain;             // rows after which the centres move
    const data_t* const from[1] = {x};
    sweep_packs(path, from, sweeps_aligned(path, from), [&](const auto& batch) {
        if (rows == 0 && found.count == acc_t(0)) {
#pragma unroll
            for (int slot = 0; slot < pack_size; ++slot) {
                found.mean[slot].first = first_centre(batch, slot);
            }
        }
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            Pair sums = {};  // from zero: rounding errors are smaller in a short chain of additions
#pragma unroll
            for (int k = 0; k < batch.loads; ++k) {
                const auto& values = selectable(batch.packs[0][k]);
                const acc_t d = k < batch.live ? acc_t(widen(values.get(slot))) - found.mean[slot].first : acc_t(0);
                sums = with_product(sums, d, d);
            }
            latest[slot] = latest[slot] + sums;
        }
        rows += batch.live;
        if (rows >= most) {
            found.join(latest, rows);
            rows = 0;
            most = most < longest_chain ? 2 * most : longest_chain;
        }
    });
    if (rows > 0) {
        found.join(latest, rows);
    }
    return found;
}

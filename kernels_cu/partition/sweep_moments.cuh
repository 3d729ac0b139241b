// The moments of the channels of a sweep (sweep.cuh), for a forward.
//
// A thread adds up d = x - centre and d^2 over batches of packs. The centre is the mean of the elements that it has
// read before. The centre moves after 1, 2, 4, ... and then every `chain` batches. It is therefore always the mean of
// at least about as many elements as are summed about it, and the error that an outlier causes is in proportion to the
// amount that the outlier adds to m2. No elements precede the first batch, so its own mean is the centre: its packs are
// in registers and are summed twice.
#include "common/moments.cuh"
#include "partition/sweep.cuh"

// The data_t value next to a mean. With it as the centre, sums of 16-bit elements stay exact for long. With more
// digits, all of them would round to the same side (on_grid in norm.cuh).
__device__ __forceinline__ acc_t centre_near(acc_t mean) { return widen(narrow<data_t>(mean)); }

// The moments of a thread's channels. All channels have the same count.
struct SweepMoments {
    acc_t count;
    Pair mean[sweep_t::slots];  // the centre, and the rest of the mean
    acc_t m2[sweep_t::slots];

    __device__ __forceinline__ Moments at(int slot) const {
        return Moments{count, mean[slot].first, mean[slot].second, m2[slot]};
    }
};

// The packs of x of a batch in a thread's registers.
template <typename Batch>
struct MomentsBatch {
    Batch batch;  // a reference

    // Number of elements that count for each slot.
    __device__ __forceinline__ int weight() const {
        int found = 0;
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            found += k < batch.live ? sweep_t::weight(batch.spans[k]) : 0;
        }
        return found;
    }
    __device__ __forceinline__ bool full() const {
        bool found = true;
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            found = found && k < batch.live && sweep_t::full(batch.spans[k]);
        }
        return found;
    }
    // The sums of d = x - centre and of d^2 over the elements of a slot for which use(k, i) holds.
    template <typename Use>
    __device__ __forceinline__ Pair deviations_of(int slot, acc_t centre, Use use) const {
        Pair sums = {};
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            if (sweep_t::slots == 1) {
                sums = sums + deviations(batch.packs[0][k], centre, [&](int i) { return use(k, i); });
            } else {
                const acc_t d = use(k, slot) ? acc_t(widen(batch.packs[0][k].get(slot))) - centre : acc_t(0);
                sums = with_product(sums, d, d);
            }
        }
        return sums;
    }
    __device__ __forceinline__ Pair deviations_of(int slot, acc_t centre) const {
        return deviations_of(slot, centre,
                             [&](int k, int i) { return k < batch.live && sweep_t::uses(batch.spans[k], i); });
    }
    // The mean of a slot's elements, or 0 if the mean is not finite. It is computed relative to the first element, so
    // that the mean of equal elements is bitwise equal to each of them.
    __device__ __forceinline__ acc_t mean(int slot, acc_t inverse) const {
        acc_t first = widen(batch.packs[0][0].get(slot));
        if (sweep_t::slots == 1) {  // the thread's first pack may begin before its run
#pragma unroll
            for (int i = pack_size - 1; i >= 0; --i) {
                first = batch.spans[0].holds(i) ? acc_t(widen(batch.packs[0][0].get(i))) : first;
            }
        }
        first = usable_shift(first);
        return usable_shift(multiply_add(deviations_of(slot, first).first, inverse, first));
    }
};

__device__ __forceinline__ SweepMoments sweep_moments(const sweep_t& sweep, const data_t* x) {
    const data_t* const from[1] = {x};
    SweepMoments found = {};
    Pair latest[sweep_t::slots] = {};  // sums since the last move of the centre, found.mean[slot].first
    acc_t latest_count = acc_t(0);
    const auto join = [&] {
        const acc_t count = found.count + latest_count, inverse = acc_t(1) / count;
#pragma unroll
        for (int slot = 0; slot < sweep_t::slots; ++slot) {
            const Moments total = joined(found.at(slot), latest[slot], count, inverse);
            const acc_t centre = centre_near(total.mean);
            found.mean[slot] = Pair{centre, (total.mean - centre) + total.rest};
            found.m2[slot] = total.m2;
            latest[slot] = Pair{};
        }
        found.count = count;
        latest_count = acc_t(0);
    };
    int batches = 0;
    sweep_packs(sweep, from, sweeps_aligned(sweep, from), [&](const auto& held) {
        const MomentsBatch<decltype(held)> batch = {held};
        const acc_t more = acc_t(batch.weight());
        if (batches == 0) {
            const acc_t inverse = acc_t(1) / more;
#pragma unroll
            for (int slot = 0; slot < sweep_t::slots; ++slot) {
                found.mean[slot].first = centre_near(batch.mean(slot, inverse));
            }
        }
        if (batch.full()) {
#pragma unroll
            for (int slot = 0; slot < sweep_t::slots; ++slot) {
                latest[slot] =
                    latest[slot] + batch.deviations_of(slot, found.mean[slot].first, [](int, int) { return true; });
            }
        } else {
#pragma unroll
            for (int slot = 0; slot < sweep_t::slots; ++slot) {
                latest[slot] = latest[slot] + batch.deviations_of(slot, found.mean[slot].first);
            }
        }
        latest_count += more;
        ++batches;
        if ((batches & (batches - 1)) == 0 || batches % chain == 0) {
            join();
        }
    });
    if (latest_count > acc_t(0)) {
        join();
    }
    return found;
}

// Calls emit(channel, moments of the whole block or warp) in one thread per channel.
template <typename Emit>
__device__ __forceinline__ void gather_moments(const sweep_t& sweep, Moments* partials, const SweepMoments& found,
                                               Emit emit) {
    sweep.gather(
        partials, [&](int slot) { return found.at(slot); }, [](Moments value) { return lanes_merge(value, warp_size); },
        [](Moments a, Moments b) { return merge(a, b); }, emit);
}

// Stores the moments of the sweep's channels in a workspace [N * chunks, C]. `partials` is in shared memory, pack_size
// moments per thread if a thread has several channels. The whole block calls.
__device__ __forceinline__ void store_sweep_moments(const sweep_t& sweep, const data_t* x, const Chunking& cut,
                                                    Moments* partials, Pair* workspace) {
    gather_moments(sweep, partials, sweep_moments(sweep, x), [&](long long channel, Moments whole) {
        store_moments(workspace, cut.part(sweep.n, sweep.chunk, channel), whole);
    });
}

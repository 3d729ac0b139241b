// The moments of the channels of a sweep (sweep.cuh), for a forward.
//
// Channels-last, a thread sweeps a column of packs (column_moments.cuh). Channels-first, it sweeps packs of one
// channel. It then adds up d = x - centre and d^2 over batches of packs. The centre is the mean of the elements that it
// has read before. The centre moves after 1, 2, 4, ... and then every `chain` batches. It is therefore always the mean
// of at least about as many elements as are summed about it, and the error that an outlier causes is in proportion to
// the amount that the outlier adds to m2. No elements precede the first batch, so its own mean is the centre: its packs
// are in registers and are summed twice.
#include "partition/column_moments.cuh"

// The packs of x of a batch in a thread's registers.
template <typename Batch>
struct RunBatch {
    const Batch& batch;

    // Number of elements of the run.
    __device__ __forceinline__ int count() const {
        int found = 0;
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            found += k < batch.live ? batch.spans[k].count() : 0;
        }
        return found;
    }
    // The sums of d = x - centre and of d^2 over the elements for which use(k, i) holds.
    template <typename Use>
    __device__ __forceinline__ Pair deviations_from(acc_t centre, Use use) const {
        Pair sums = {};
#pragma unroll
        for (int k = 0; k < batch.loads; ++k) {
            sums = sums + deviations(batch.packs[0][k], centre, [&](int i) { return use(k, i); });
        }
        return sums;
    }
    __device__ __forceinline__ Pair deviations_from(acc_t centre) const {
        return deviations_from(centre, [&](int k, int i) { return k < batch.live && batch.spans[k].holds(i); });
    }
    // The mean, or 0 if it is not finite. It is computed relative to the first element, so that the mean of equal
    // elements is bitwise equal to each of them.
    __device__ __forceinline__ acc_t mean(acc_t inverse) const {
        const auto& values = selectable(batch.packs[0][0]);
        acc_t first = widen(values.get(0));
#pragma unroll
        for (int i = pack_size - 1; i >= 0; --i) {  // the thread's first pack may begin before its run
            first = batch.spans[0].holds(i) ? acc_t(widen(values.get(i))) : first;
        }
        first = usable_shift(first);
        return usable_shift(multiply_add(deviations_from(first).first, inverse, first));
    }
};

template <typename Path>
__device__ __forceinline__ Moments run_moments(const Path& sweep, const data_t* x) {
    const data_t* const from[1] = {x};
    Moments found = {};  // found.mean is the centre
    Pair latest = {};    // sums since the last move of the centre
    acc_t more = acc_t(0);
    const auto join = [&] {
        const acc_t count = found.count + more;
        const Moments total = joined(found, latest, count, acc_t(1) / count);
        const acc_t centre = next_to(total.mean);
        found = Moments{count, centre, (total.mean - centre) + total.rest, total.m2};
        latest = Pair{};
        more = acc_t(0);
    };
    int batches = 0;
    sweep_packs(sweep, from, sweeps_aligned(sweep, from), [&](const auto& held) {
        const RunBatch<decltype(held)> batch = {held};
        const int here = batch.count();
        if (batches == 0) {
            found.mean = next_to(batch.mean(acc_t(1) / acc_t(here)));
        }
        const acc_t centre = found.mean;
        latest = latest + (here == held.loads * pack_size ? batch.deviations_from(centre, [](int, int) { return true; })
                                                          : batch.deviations_from(centre));
        more += acc_t(here);
        ++batches;
        if ((batches & (batches - 1)) == 0 || batches % chain == 0) {
            join();
        }
    });
    if (more > acc_t(0)) {
        join();
    }
    return found;
}

// Calls emit(channel, moments of the whole block or warp) in one thread per channel. `partials` is in shared memory,
// pack_size moments per thread if a thread has several channels. The whole block calls.
template <typename Path, typename Emit>
__device__ __forceinline__ void gather_moments(const Path& sweep, const data_t* x, Moments* partials, Emit emit) {
    if constexpr (Path::slots == 1) {
        const Moments found = run_moments(sweep, x);
        sweep.gather(
            partials, [&](int) { return found; }, [](Moments value) { return warp_merge(value); },
            [](Moments a, Moments b) { return merge(a, b); }, emit);
    } else {
        const ColumnMoments found = column_moments(sweep, x);
        const acc_t count = acc_t(sweep.rows);
        sweep.gather_sets(
            partials, [&](int slot) { return found.at(slot); },
            [&](int width, const Moments& one, auto each_set) { return merge_sets(count, one.mean, width, each_set); },
            emit);
    }
}

// Stores the moments of the sweep's channels in a workspace [N * chunks, C].
__device__ __forceinline__ void store_sweep_moments(const sweep_t& sweep, const data_t* x, const Chunking& cut,
                                                    Moments* partials, Pair* workspace) {
    gather_moments(sweep, x, partials, [&](long long channel, Moments whole) {
        store_moments(workspace, cut.part(sweep.n, sweep.chunk, channel), whole);
    });
}

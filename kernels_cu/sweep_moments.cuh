// What a sweep (sweep.cuh) finds of a forward: the moments of its channels.
#include "moments.cuh"
#include "sweep.cuh"

// What the moments of a thread's channel are relative to: the first element of it in the thread's first batch.
template <int loads>
__device__ __forceinline__ acc_t first_element(const Pack<data_t> (&batch)[loads], const Place (&places)[loads],
                                               int slot) {
    acc_t found = widen(batch[0].get(slot));
    if (sweep_t::slots == 1) {  // the thread's first pack may begin before its run
#pragma unroll
        for (int i = pack_size - 1; i >= 0; --i) {
            found = places[0].holds(i) ? acc_t(widen(batch[0].get(i))) : found;
        }
    }
    return usable_shift(found);
}

// The moments of a thread's channels: all have one count.
struct SweepMoments {
    acc_t count;
    acc_t shift[sweep_t::slots];
    Pair of[sweep_t::slots];  // mean and m2

    __device__ __forceinline__ Moments at(int slot) const {
        return Moments{count, shift[slot], of[slot].first, of[slot].second};
    }
};

__device__ __forceinline__ SweepMoments sweep_moments(const sweep_t& sweep, const data_t* x) {
    constexpr int loads = sweep_loads<1>;
    // A slot's values lie along the packs (channels-last) or everywhere (channels-first).
    constexpr int items_per_pack = pack_size / sweep_t::slots, values = loads * items_per_pack;
    const data_t* const from[1] = {x};
    SweepMoments found = {};
    Pair latest[sweep_t::slots] = {};
    acc_t latest_count = acc_t(0);
    const auto join = [&] {
        const acc_t share = latest_count / (found.count + latest_count);
#pragma unroll
        for (int slot = 0; slot < sweep_t::slots; ++slot) {
            const Moments total =
                merge(found.at(slot), Moments{latest_count, acc_t(0), latest[slot].first, latest[slot].second}, share);
            found.of[slot] = Pair{total.mean, total.m2};
            latest[slot] = Pair{};
        }
        found.count += latest_count;
        latest_count = acc_t(0);
    };
    int batches = 0;
    sweep_packs(sweep, from, [&](const Pack<data_t>(&batch)[1][loads], const Place(&places)[loads]) {
        if (batches == 0) {
#pragma unroll
            for (int slot = 0; slot < sweep_t::slots; ++slot) {
                found.shift[slot] = first_element(batch[0], places, slot);
            }
        }
        int weight = 0;
        bool full = true;
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            weight += sweep_t::weight(places[k]);
            full = full && sweep_t::full(places[k]);
        }
        const acc_t more = acc_t(weight), inverse = acc_t(1) / more;
        const acc_t share = more / (latest_count + more);
        const auto add_batch = [&](auto use) {
#pragma unroll
            for (int slot = 0; slot < sweep_t::slots; ++slot) {
                const acc_t shift = found.shift[slot];
                const auto value = [&](int v) {
                    return acc_t(widen(batch[0][v / items_per_pack].get(v % items_per_pack + slot))) - shift;
                };
                const Moments of_batch = register_moments<values>(more, inverse, acc_t(0), value, use);
                const Moments total =
                    merge(Moments{latest_count, acc_t(0), latest[slot].first, latest[slot].second}, of_batch, share);
                latest[slot] = Pair{total.mean, total.m2};
            }
        };
        if (full) {
            add_batch(Always());
        } else {
            add_batch([&](int v) { return sweep_t::uses(places[v / items_per_pack], v % items_per_pack); });
        }
        latest_count += more;
        if (++batches % chain == 0) {
            join();
        }
    });
    if (latest_count > acc_t(0)) {
        join();
    }
    return found;
}

// give(channel, moments of the whole block or warp), in one thread a channel.
template <typename Give>
__device__ __forceinline__ void gather_moments(const sweep_t& sweep, Moments* partials, const SweepMoments& found,
                                               Give give) {
    sweep.gather(
        partials, [&](int slot) { return found.at(slot); }, [](Moments value) { return lanes_merge(value, warp_size); },
        [](Moments a, Moments b) { return merge(a, b); }, give);
}

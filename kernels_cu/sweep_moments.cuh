// What a sweep (sweep.cuh) finds of a forward: moments of its channels, relative to a shift.
#include "sweep.cuh"

// Count, mean and m2 of x - shift[slot] over the thread's packs: found[slot] is {mean, m2}, and all its channels have
// one count.
__device__ __forceinline__ void sweep_moments(const sweep_t& sweep, const data_t* x,
                                              const acc_t (&shift)[sweep_t::slots], acc_t& count,
                                              Pair (&found)[sweep_t::slots]) {
    constexpr int loads = sweep_loads<1>;
    // A slot's values lie along the packs (channels-last) or everywhere (channels-first).
    constexpr int items_per_pack = pack_size / sweep_t::slots, values = loads * items_per_pack;
    const data_t* const from[1] = {x};
    Pair latest[sweep_t::slots] = {};
    acc_t latest_count = acc_t(0);
    const auto join = [&] {
        const acc_t share = latest_count / (count + latest_count);
#pragma unroll
        for (int slot = 0; slot < sweep_t::slots; ++slot) {
            const Moments total = merge(Moments{count, found[slot].first, found[slot].second},
                                        Moments{latest_count, latest[slot].first, latest[slot].second}, share);
            found[slot] = Pair{total.mean, total.m2};
            latest[slot] = Pair{};
        }
        count += latest_count;
        latest_count = acc_t(0);
    };
    int batches = 0;
    sweep_packs(sweep, from, [&](const Pack<data_t>(&batch)[1][loads], const Place(&places)[loads]) {
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
                const auto value = [&](int v) {
                    return acc_t(widen(batch[0][v / items_per_pack].item[v % items_per_pack + slot])) - shift[slot];
                };
                const Moments of_batch = register_moments<values>(more, inverse, value, use);
                const Moments total =
                    merge(Moments{latest_count, latest[slot].first, latest[slot].second}, of_batch, share);
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
}

// give(channel, moments of the whole block or warp), in one thread a channel.
template <typename Give>
__device__ __forceinline__ void gather_moments(const sweep_t& sweep, Moments* partials, acc_t count,
                                               const Pair (&found)[sweep_t::slots], Give give) {
    sweep.gather(
        partials, [&](int slot) { return Moments{count, found[slot].first, found[slot].second}; },
        [](Moments value) { return lanes_merge(value, warp_size); }, [](Moments a, Moments b) { return merge(a, b); },
        give);
}

// The sweep of a piece whose packs stay in shared memory, for GroupNorm's strategy `grid` with keep=shared. For
// channels-last tensors.
//
// A thread copies the packs of its column to shared memory. Many of its copies are in flight while it uses the packs
// that have arrived. It reads only packs that it has copied, so that no barrier is needed.
#include "common/async.cuh"
#include "common/text.cuh"
#include "partition/sweep.cuh"

template <int tensors>
struct KeptSweep : sweep_t {
    // Packs of each tensor that a thread loads from shared memory at a time. The sizes of a problem occupy registers in
    // the generic text: with two packs of two tensors, the compiler would spill some of them.
    static constexpr int at_once = tensors == 1 ? 3 : is_specialised ? 2 : 1;
    // Batches whose copies are in flight. Fewer packs would not hide the latency of memory if a block has 256 threads.
    static constexpr int ahead = (tensors == 1 ? 24 : 16) / at_once;
    static constexpr int loads(int) { return at_once; }
    Pack<data_t>* own;  // the thread's first pack in shared memory [tensors, rows of a piece, columns]
    int tensor_packs;   // packs of a piece
    int step_packs;     // packs between two packs of the thread
    bool copied;        // whether asynchronous copies are possible

    // `kept` is in shared memory.
    __device__ __forceinline__ KeptSweep(const sweep_t& sweep, Pack<data_t>* kept, int tensor_packs_,
                                         const data_t* const (&from)[tensors])
        : sweep_t(sweep),
          own(kept + part * columns + column),
          tensor_packs(tensor_packs_),
          step_packs(parts * columns),
          copied(even() && sweeps_aligned(sweep, from)) {}
    __device__ __forceinline__ Pack<data_t>& pack(int tensor, int step) const {
        return own[tensor * tensor_packs + step * step_packs];
    }

    // Begins to copy a batch.
    __device__ __forceinline__ void copy_batch(const data_t* const (&from)[tensors], int first) const {
        const int live = copied ? steps() - first : 0;
        const long long at = span_of(first).row;
#pragma unroll
        for (int k = 0; k < loads(tensors); ++k) {
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                if (k < live) {
                    copy_async(&pack(t, first) + k * step_packs, from[t] + at + k * stride());
                }
            }
        }
        copy_async_commit();
    }

    // Begins to copy the first packs. Packs that cannot be copied are loaded and stored, all of them.
    __device__ __forceinline__ void fetch(const data_t* const (&from)[tensors]) const {
#pragma unroll 1
        for (int batch = 0; batch < ahead; ++batch) {
            copy_batch(from, batch * loads(tensors));
        }
        const int loaded = copied ? 0 : steps();
        for (int first = 0; first < loaded; first += loads(tensors)) {
            const auto batch = load_ragged<loads(tensors)>(from, *this, first, loaded - first);
#pragma unroll
            for (int k = 0; k < batch.loads; ++k) {
#pragma unroll
                for (int t = 0; t < tensors; ++t) {
                    if (k < batch.live) {
                        pack(t, first + k) = batch.packs[t][k];
                    }
                }
            }
        }
    }

    // Stores pack_elements of the thread's packs in `to`, as sweep_write does. The packs are in shared memory if `kept`;
    // else they are read again.
    template <typename T, typename Element>
    __device__ __forceinline__ void write(bool kept, const data_t* const (&from)[tensors], T* to,
                                          Element element) const {
        if (!kept) {
            sweep_write(*this, from, to, element);
            return;
        }
        for (int step = 0; step < steps(); ++step) {
            Pack<data_t> packs[tensors];
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                packs[t] = pack(t, step);
            }
            const PackSpan where = span_of(step);
            store_pack(to + where.row, where.first, where.length, pack_elements<T>(packs, element));
        }
    }
};

// A chain has as many packs in both texts, so that both give the same bits.
template <>
constexpr int batches_of_chain<KeptSweep<2>> = 2 * chain / KeptSweep<2>::at_once;

// Calls use(batch) for the thread's packs, after fetch. column_moments and sweep_gradient_sums find this overload if their
// path is a KeptSweep itself, not a type derived from it.
template <int tensors, typename Use>
__device__ __forceinline__ void sweep_packs(const KeptSweep<tensors>& sweep, const data_t* const (&from)[tensors], bool,
                                            Use use) {
    constexpr int loads = KeptSweep<tensors>::loads(tensors), ahead = KeptSweep<tensors>::ahead;
    const int steps = sweep.steps();
    SweepBatch<tensors, loads, WholeSpan> batch = {};
#pragma unroll 1
    for (int base = 0; base < steps; base += loads) {
        copy_async_wait<ahead - 1>();
        batch.live = steps - base < loads ? steps - base : loads;
#pragma unroll
        for (int k = 0; k < loads; ++k) {
#pragma unroll
            for (int t = 0; t < tensors; ++t) {
                if (k < batch.live) {
                    batch.packs[t][k] = sweep.pack(t, base + k);
                }
            }
        }
        sweep.copy_batch(from, base + ahead * loads);
        use(batch);
    }
}

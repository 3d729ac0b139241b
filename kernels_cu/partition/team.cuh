// A team is `lanes` consecutive threads that own one contiguous run. Each lane holds Tile::packs_per_thread packs of it
// in registers. A team is a part of a warp, a warp, or several warps of a block, up to all of them. A team of a cluster
// is such warps in each of its blocks, and each block owns a slice of the run.
#include "common/async.cuh"
#include "partition/row_norms.cuh"
#include "partition/slab.cuh"

// Whether rows of `length` elements that follow each other from `array` on are whole packs at multiples of 16 bytes.
// This is a constant if the length is, and if the array is known to start at such a multiple. It is computed from the
// start of the array: the compiler cannot derive it from the address of a pack in a loop.
template <typename T>
__device__ __forceinline__ bool in_whole_packs(const T* array, int length) {
    return length % Pack<T>::size == 0 && misalignment(array) == 0;
}

// load_pack and store_pack, where `plain` is the result of in_whole_packs, and `first` is the start of a pack.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack_of(const T* array, long long row, int first, int length, bool plain) {
    if (plain) {
        return first < length ? load_whole(array + row + first) : Pack<T>{};
    }
    return load_pack(array, row, first, length);
}

template <typename T>
__device__ __forceinline__ void store_pack_of(T* array, long long row, int first, int length, const Pack<T>& pack,
                                              bool plain) {
    if (!plain) {
        store_pack(array, row, first, length, pack);
    } else if (first < length) {
        store_whole(array + row + first, pack);
    }
}

template <typename T>
__device__ __forceinline__ void store_pack_of(T* array, long long row, int first, int length, const TwoPacks<T>& packs,
                                              bool plain) {
    store_pack_of(array, row, first, length, packs.half[0], plain);
    store_pack_of(array, row, first + packs.size, length, packs.half[1], plain);
}

// Sums over a team, returned to all its lanes. Teams within a warp sum by shuffles, and the whole warp calls. Teams of
// several warps sum through shared memory, and the whole block calls. Two rows of block_warps sums alternate: the
// barrier of one row separates two uses of the other, so that a sum costs one barrier. The blocks of a cluster read
// each other's sums in the same manner, in the order of their ranks.
template <int lanes, int blocks = 1, typename Sums = Pair>
struct Team {
    static_assert((lanes >= 1 && lanes <= warp_size && (lanes & (lanes - 1)) == 0) ||
                      (lanes % warp_size == 0 && Tile::threads % lanes == 0),
                  "a team is 1, 2, 4, 8, 16 or 32 lanes, or an even part of the block");
    static_assert(blocks == 1 || (lanes >= warp_size && blocks <= warp_size), "a cluster's teams are of whole warps");
    static constexpr int count = Tile::threads / lanes;  // teams in a block
    static constexpr int warps = lanes > warp_size ? lanes / warp_size : 1;
    static constexpr int scratch_size = lanes > warp_size || blocks > 1 ? 2 * (block_warps + count * (blocks > 1)) : 0;
    static constexpr bool of_block = scratch_size > 0;
    Sums* scratch;  // in shared memory, scratch_size long; null unless of_block
    int slot = 0;   // the row of scratch that the latest sum used: 0 or 1

    static __device__ __forceinline__ int index() { return threadIdx.x / lanes; }
    static __device__ __forceinline__ int lane() {
        const int lane = threadIdx.x % lanes;
        assume(lane >= 0 && lane < lanes);  // the compiler drops the remainder if lanes is the size of the block
        return lane;
    }
    static __device__ __forceinline__ int rank() { return slice_rank<blocks>(); }
    static __device__ __forceinline__ Sums* shared_scratch(int& offset) {
        return of_block ? shared_array<Sums>(offset, scratch_size) : nullptr;
    }
    // A barrier of the block (or of the warp, for teams within a warp). After it, a team may overwrite the shared
    // memory that its lanes have read before.
    static __device__ __forceinline__ void meet() {
        if (of_block) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }
    __device__ __forceinline__ Sums sum(Sums value) {
        if (!of_block) {
            return sum_of_lanes<lanes>(value);
        }
        slot = 1 - slot;
        value = block_sum<warps>(value, scratch + slot * block_warps);
        if (blocks == 1) {
            return value;
        }
        Sums* const published = scratch + 2 * block_warps + slot * count + index();
        if (lane() == 0) {
            *published = value;
            cluster_fence();  // only by the thread that publishes: the others need not wait for their stores
        }
        cluster_arrive_relaxed();
        cluster_wait();
        const int other = threadIdx.x % warp_size;                    // each lane reads the sum of one block
        const int first = static_cast<int>(cluster_rank()) - rank();  // a cluster may have several teams' blocks
        return warp_sum(other < blocks ? *cluster_map(published, first + other) : Sums{});
    }
    // Returns the value of the team's first lane to all its lanes, for teams within a warp. The whole warp calls.
    static __device__ __forceinline__ acc_t of_first_lane(acc_t value) {
        return lanes == 1 ? value : __shfl_sync(whole_warp, value, 0, lanes);
    }
    // Called after the last sum: the other blocks may still be reading this block's sums.
    __device__ __forceinline__ void leave() const {
        if (blocks > 1) {
            cluster_arrive_relaxed();
            cluster_wait();
        }
    }
};

// The `index`-th run of elements of a tensor, or an empty one: a team without work still takes part in the shuffles of
// its warp. The run is covered from the 16-byte boundary at or before it, if the registers have room for that. The
// blocks of a cluster also cut it at such boundaries: the members describe this block's slice.
template <int lanes, int blocks = 1>
struct Run {
    static constexpr int capacity = lanes * Tile::packs_per_thread * pack_size;  // elements of a block
    static constexpr int sector_packs = 2;
    long long head;   // start of the run
    long long start;  // start of the slice
    int from;         // elements from the start of the run to the start of the slice
    int columns;      // elements of the slice
    int length;       // the same, or 0 for an empty run
    int shift;        // elements of the slice's first pack that precede the slice
    int ahead;        // elements of the run's first pack that precede the run
    int whole;        // elements of a run
    bool live;

    __device__ __forceinline__ Run(const data_t* tensor, long long index, int whole_, bool live_, bool may_shift)
        : head(live_ ? index * whole_ : 0), whole(whole_), live(live_) {
        const int past = misalignment(tensor, head);
        ahead = may_shift && past + whole <= blocks * capacity ? past : 0;
        if (blocks == 1) {
            from = 0;
            columns = whole;
            shift = ahead;
        } else {
            const int rank = slice_rank<blocks>(), span = slice(whole + ahead);
            from = rank == 0 ? 0 : rank * span - ahead;
            const int end = (rank + 1) * span - ahead < whole ? (rank + 1) * span - ahead : whole;
            // The host ensures that each block has at least one. Of equal slices the compiler knows the length.
            columns = ahead == 0 && blocks * span == whole ? span : end - from;
            shift = rank == 0 ? ahead : 0;
        }
        start = head + from;
        length = live ? columns : 0;
    }
    // The run that begins `step` elements after this one and is covered from the same position in its packs.
    __device__ __forceinline__ Run behind(long long step, bool live_) const {
        Run next = *this;
        next.head += step;
        next.start += step;
        next.live = live_;
        next.length = live_ ? columns : 0;
        return next;
    }
    // Elements per block if `covered` elements are cut into equal parts of whole sectors.
    static __device__ __forceinline__ int slice(int covered) {
        return ceil_div(ceil_div(covered, blocks), sector_packs * pack_size) * sector_packs * pack_size;
    }
    // Index in the slice of the first element of this lane's k-th pack. Neighbouring lanes hold neighbouring packs.
    __device__ __forceinline__ int first(int k) const { return (k * lanes + Team<lanes>::lane()) * pack_size - shift; }
    // Whether all packs of the slice are whole. This is a constant if the length is.
    __device__ __forceinline__ bool in_packs() const { return whole % pack_size == 0 && ahead == 0; }
    // Whether the packs of a tensor's runs are whole, at multiples of 16 bytes.
    template <typename T>
    __device__ __forceinline__ bool is_plain(const T* tensor) const {
        return ahead == 0 && in_whole_packs(tensor, whole);
    }
    // Whether an element of the k-th pack is in the slice, even if the run is empty. One comparison decides for all
    // elements of a pack if all packs are whole.
    __device__ __forceinline__ auto inside(int k) const {
        const int at = first(k), end = columns;
        const bool in_whole = in_packs();
        return [=](int i) { return within(in_whole ? at : at + i, end); };
    }
    // Optimisation barrier: the compiler computes the predicates of the elements again where they are used again,
    // instead of keeping them in registers. Whole packs have no such predicates.
    __device__ __forceinline__ void recompute() {
        if (!in_packs()) {
            make_opaque(shift);
        }
    }
    // Leaves `held` as it is if the run is empty.
    __device__ __forceinline__ void load_from(const data_t* x, Pack<data_t> (&held)[Tile::packs_per_thread]) const {
        if (!live) {
            return;
        }
        const bool plain = is_plain(x);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held[k] = load_pack_of(x, start, first(k), columns, plain);
        }
    }
    // Loads two tensors, pack by pack: one tensor after the other would keep more addresses in registers. A null x
    // reads as zeros. Leaves the packs as they are if the run is empty.
    __device__ __forceinline__ void load_both(const data_t* dy, const data_t* x,
                                              Pack<data_t> (&held_dy)[Tile::packs_per_thread],
                                              Pack<data_t> (&held_x)[Tile::packs_per_thread]) const {
        if (!live) {
            return;
        }
        const bool plain_dy = is_plain(dy), plain_x = is_plain(x);
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held_dy[k] = load_pack_of(dy, start, first(k), columns, plain_dy);
            held_x[k] = x == nullptr ? Pack<data_t>{} : load_pack_of(x, start, first(k), columns, plain_x);
        }
    }
    // The shift of the run's first sums, for teams of several warps: the first element of the run. It is returned in
    // its storage type, so that no thread waits for the load here. A team within a warp uses an element in its
    // registers instead (one_of). For a run of a single element a zero suffices.
    __device__ __forceinline__ data_t centre(const data_t* x) const {
        const bool alone = blocks == 1 && columns == 1;
        return Team<lanes, blocks>::of_block && live && !alone ? load(x, head) : data_t{};
    }
    // The shift for a team within a warp: the run's last element in its first pack, wherever the run begins in that
    // pack.
    __device__ __forceinline__ acc_t one_of(const Pack<data_t> (&held)[Tile::packs_per_thread]) const {
        const auto& values = selectable(held[0]);
        acc_t last = widen(values.get(pack_size - 1));
        if (shift + columns < pack_size) {
#pragma unroll
            for (int i = 0; i + 1 < pack_size; ++i) {
                last = i < shift + columns ? acc_t(widen(values.get(i))) : last;
            }
        }
        return Team<lanes, blocks>::of_first_lane(last);
    }

    // The channel in which the lane's first pack begins. A `stride` moves from one pack of the lane to the next.
    __device__ __forceinline__ ChannelWalk walk(int HxW) const { return ChannelWalk(first(0), HxW); }
    static __device__ __forceinline__ ChannelStride stride(int HxW) { return ChannelStride(lanes * pack_size, HxW); }
    // Calls use(i, known) for the elements of the k-th pack, with known = of(channel).
    template <typename Of, typename Use, typename... Packs>
    __device__ __forceinline__ void each(int k, const ChannelWalk& from, int HxW, Of of, Use use,
                                         Packs&... packs) const {
        each_in_channels(PackSpan{start, first(k), length}, from, HxW, of, use, packs...);
    }
    // Calls emit(channel, known, sums of terms(i, known)) for the channels of the k-th pack.
    template <typename Of, typename Terms, typename Emit, typename... Packs>
    __device__ __forceinline__ void each_sum(int k, const ChannelWalk& from, int HxW, Of of, Terms terms, Emit emit,
                                             Packs&... packs) const {
        sums_in_channels(PackSpan{start, first(k), length}, from, HxW, of, terms, emit, packs...);
    }
};

// Between two passes over the packs of a lane. Few packs stay widened in registers: each pass but the first saves a
// conversion per element. Many packs stay in their storage type, which needs half as many registers.
constexpr int most_widened_packs = 2;
__device__ __forceinline__ void between_passes(Pack<data_t> (&held)[Tile::packs_per_thread]) {
    if (Tile::packs_per_thread > most_widened_packs) {
        make_opaque(held);
    }
}

// Mean and rstd of a run that its team holds in registers. The first sum is relative to one element of the run: `read`
// for teams of several warps (Run::centre), an element in registers for the others. The corrected second pass follows.
// `length` is the length of every run of this kind, also of an empty one.
template <int lanes, int blocks>
__device__ __forceinline__ Statistics run_statistics(Team<lanes, blocks>& team, const Run<lanes, blocks>& run,
                                                     data_t read, Pack<data_t> (&held)[Tile::packs_per_thread],
                                                     int length, acc_t eps) {
    const acc_t shift = usable_shift(team.of_block ? acc_t(widen(read)) : run.one_of(held));
    Pair sums = {};
#pragma unroll
    for (int k = 0; k < Tile::packs_per_thread; ++k) {
        sums = sums + with_square(deviations(held[k], shift, run.inside(k)).first);
    }
    const acc_t centre = second_centre(shift, team.sum(sums), acc_t(1) / acc_t(length), pack_size);
    between_passes(held);
    sums = Pair{};
#pragma unroll
    for (int k = 0; k < Tile::packs_per_thread; ++k) {
        sums = sums + deviations(held[k], centre, run.inside(k));
    }
    sums = team.sum(sums);
    between_passes(held);
    return corrected_statistics(centre, sums, acc_t(length), eps);
}

// rstd of a run without a mean, which its team holds in registers. Elements outside the run are zeros.
template <int lanes, int blocks>
__device__ __forceinline__ Statistics run_statistics(Team<lanes, blocks, Single>& team,
                                                     Pack<data_t> (&held)[Tile::packs_per_thread], int length,
                                                     acc_t eps) {
    const acc_t squares = team.sum(sums_of_squares(held)).second;
    between_passes(held);
    return Statistics{acc_t(0), reciprocal_deviation(squares / acc_t(length), eps)};
}

// Stores y of the run in `held`, which is not empty. Each element of the run has its own gamma and beta: a row of
// LayerNorm, or a group with HxW = 1. scale_of(k) and offset_of(k) return the packs of parameters of the k-th pack's
// elements. The parameters of the next pack are loaded before the current pack is stored, because the compiler moves no
// load across a store.
template <int lanes, int blocks, typename T, typename ScaleOf, typename OffsetOf, typename Activation>
__device__ __forceinline__ void write_run(T* y, const Run<lanes, blocks>& run,
                                          const Pack<data_t> (&held)[Tile::packs_per_thread], const Statistics& found,
                                          ScaleOf scale_of, OffsetOf offset_of, Activation activation) {
    const bool plain = run.is_plain(y);
    auto next_scale = scale_of(0);
    auto next_offset = offset_of(0);
#pragma unroll
    for (int k = 0; k < Tile::packs_per_thread; ++k) {
        const auto scale = next_scale;
        const auto offset = next_offset;
        if (k + 1 < Tile::packs_per_thread) {
            next_scale = scale_of(k + 1);
            next_offset = offset_of(k + 1);
        }
        acc_t out[pack_size];
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const Affine affine = {found.mean, found.rstd * scale.of(i), offset.of(i)};
            out[i] = activation(normalised(widen(held[k].get(i)), affine));
        }
        store_pack_of(y, run.start, run.first(k), run.columns, narrow_pack<T>(out), plain);
    }
}

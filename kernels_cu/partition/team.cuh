// A team is `lanes` consecutive threads that own one contiguous run. Each lane holds Tile::packs_per_thread packs of it
// in registers. A team is a part of a warp, a warp, or several warps of a block, up to all of them. A team of a cluster
// is such warps in each of its blocks, and each block owns a slice of the run.
#include "common/async.cuh"
#include "partition/slab.cuh"

// Sums over a team, returned to all its lanes. Teams within a warp sum by shuffles, and the whole warp calls. Teams of
// several warps sum through shared memory, and the whole block calls. Two rows of block_warps sums alternate: the
// barrier of one row separates two uses of the other, so that a sum costs one barrier. The blocks of a cluster read
// each other's sums in the same manner, in the order of their ranks.
template <int lanes, int blocks = 1>
struct Team {
    static_assert((lanes >= 1 && lanes <= warp_size && (lanes & (lanes - 1)) == 0) ||
                      (lanes % warp_size == 0 && Tile::threads % lanes == 0),
                  "a team is 1, 2, 4, 8, 16 or 32 lanes, or an even part of the block");
    static_assert(blocks == 1 || (lanes >= warp_size && blocks <= warp_size), "a cluster's teams are of whole warps");
    static constexpr int count = Tile::threads / lanes;  // teams in a block
    static constexpr int warps = lanes > warp_size ? lanes / warp_size : 1;
    static constexpr int scratch_size = lanes > warp_size || blocks > 1 ? 2 * (block_warps + count * (blocks > 1)) : 0;
    static constexpr bool of_block = scratch_size > 0;
    Pair* scratch;  // in shared memory, scratch_size long; null unless of_block
    int slot = 0;   // the row of scratch that the latest sum used: 0 or 1

    static __device__ __forceinline__ int index() { return threadIdx.x / lanes; }
    static __device__ __forceinline__ int lane() {
        const int lane = threadIdx.x % lanes;
        assume(lane >= 0 && lane < lanes);  // the compiler drops the remainder if lanes is the size of the block
        return lane;
    }
    static __device__ __forceinline__ int rank() { return blocks > 1 ? static_cast<int>(cluster_rank()) : 0; }
    static __device__ __forceinline__ Pair* shared_scratch(int& offset) {
        return of_block ? shared_array<Pair>(offset, scratch_size) : nullptr;
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
    __device__ __forceinline__ Pair sum(Pair value) {
        if (!of_block) {
            return lanes_sum(value, lanes);
        }
        slot = 1 - slot;
        value = block_sum<warps>(value, scratch + slot * block_warps);
        if (blocks == 1) {
            return value;
        }
        Pair* const published = scratch + 2 * block_warps + slot * count + index();
        if (lane() == 0) {
            *published = value;
            cluster_fence();  // only by the thread that publishes: the others need not wait for their stores
        }
        cluster_arrive_relaxed();
        cluster_wait();
        const int other = threadIdx.x % warp_size;  // each lane reads the sum of one block
        return warp_sum(other < blocks ? *cluster_map(published, other) : Pair{});
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
    bool live;

    __device__ __forceinline__ Run(const data_t* tensor, long long index, int whole, bool live_, bool may_shift)
        : head(live_ ? index * whole : 0), live(live_) {
        const int past = misalignment(tensor, head);
        ahead = may_shift && past + whole <= blocks * capacity ? past : 0;
        if (blocks == 1) {
            from = 0;
            columns = whole;
            shift = ahead;
        } else {
            const int rank = static_cast<int>(cluster_rank()), span = slice(whole + ahead);
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
    __device__ __forceinline__ auto held(int k) const {
        const PackSpan where = {start, first(k), length};
        return [where](int i) { return where.holds(i); };
    }
    __device__ __forceinline__ void load_from(const data_t* x, Pack<data_t> (&held)[Tile::packs_per_thread]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held[k] = load_pack(x, start, first(k), length);
        }
    }
    // Loads two tensors, pack by pack: one tensor after the other would keep more addresses in registers. A null x
    // reads as zeros.
    __device__ __forceinline__ void load_both(const data_t* dy, const data_t* x,
                                              Pack<data_t> (&held_dy)[Tile::packs_per_thread],
                                              Pack<data_t> (&held_x)[Tile::packs_per_thread]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held_dy[k] = load_pack(dy, start, first(k), length);
            held_x[k] = load_pack(x, start, first(k), x == nullptr ? 0 : length);
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
        acc_t last = widen(held[0].get(pack_size - 1));
        if (shift + columns < pack_size) {
#pragma unroll
            for (int i = 0; i + 1 < pack_size; ++i) {
                last = i < shift + columns ? acc_t(widen(held[0].get(i))) : last;
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

// Mean and rstd of a run that its team holds in registers. The first sum is relative to one element of the run: `read`
// for teams of several warps (Run::centre), an element in registers for the others. The corrected second pass follows.
// `length` is the length of every run of this kind, also of an empty one. Between the passes, the packs stay in their
// storage type.
template <int lanes, int blocks>
__device__ __forceinline__ Statistics run_statistics(Team<lanes, blocks>& team, const Run<lanes, blocks>& run,
                                                     data_t read, Pack<data_t> (&held)[Tile::packs_per_thread],
                                                     int length, acc_t eps) {
    const acc_t shift = usable_shift(team.of_block ? acc_t(widen(read)) : run.one_of(held));
    Pair sums = {};
#pragma unroll
    for (int k = 0; k < Tile::packs_per_thread; ++k) {
        sums = sums + with_square(deviations(held[k], shift, run.held(k)).first);
    }
    const acc_t centre = second_centre(shift, team.sum(sums), acc_t(1) / acc_t(length), pack_size);
    make_opaque(held);
    sums = Pair{};
#pragma unroll
    for (int k = 0; k < Tile::packs_per_thread; ++k) {
        sums = sums + deviations(held[k], centre, run.held(k));
    }
    sums = team.sum(sums);
    make_opaque(held);
    return corrected_statistics(centre, sums, acc_t(length), eps);
}

// Stores y of the run in `held`. Each element of the run has its own gamma and beta: a row of LayerNorm, or a group
// with HxW = 1. scale_of(k) and offset_of(k) return the packs of parameters of the k-th pack's elements. The parameters
// of the next pack are loaded before the current pack is stored, because the compiler moves no load across a store.
template <int lanes, int blocks, typename ScaleOf, typename OffsetOf, typename Activation>
__device__ __forceinline__ void write_run(data_t* y, const Run<lanes, blocks>& run,
                                          const Pack<data_t> (&held)[Tile::packs_per_thread], const Statistics& found,
                                          ScaleOf scale_of, OffsetOf offset_of, Activation activation) {
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
        Pack<data_t> out = {};
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const Affine affine = {found.mean, found.rstd * scale.of(i), offset.of(i)};
            out.set(i, narrow<data_t>(activation(normalised(widen(held[k].get(i)), affine))));
        }
        store_pack(y, run.start, run.first(k), run.length, out);
    }
}

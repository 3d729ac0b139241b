// A team: `lanes` consecutive threads that own one contiguous run, Tile::packs packs a lane in registers. A team is part
// of a warp, a warp, several warps of a block up to all of it, or such warps of all blocks of a cluster, which have a
// slice of the run each.
#include "common/async.cuh"
#include "partition/slab.cuh"

// Sums over a team, given to all its lanes. A warp's teams sum by shuffles, and the whole warp calls. Teams of several
// warps sum by way of shared memory, and the whole block calls: two rows of block_warps alternate, and between two uses
// of one row lies the barrier of the other, so a sum costs one barrier. A cluster's blocks read each other's sums in the
// same manner, in rank order.
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
    Pair* scratch;  // shared, scratch_size; null for teams in a warp
    int slot = 0;   // the row of scratch that the latest sum used: 0 or 1

    static __device__ __forceinline__ int index() { return threadIdx.x / lanes; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % lanes; }
    static __device__ __forceinline__ int rank() { return blocks > 1 ? static_cast<int>(cluster_rank()) : 0; }
    static __device__ __forceinline__ Pair* shared_scratch(int& offset) {
        return of_block ? shared_array<Pair>(offset, scratch_size) : nullptr;
    }
    // Behind it a block's team, or the teams of a warp, may write over what its lanes read in shared memory before.
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
            cluster_fence();  // by the one thread that publishes: the others need not wait for their stores
        }
        cluster_arrive_relaxed();
        cluster_wait();
        const int other = threadIdx.x % warp_size;  // a lane reads a block's
        return warp_sum(other < blocks ? *cluster_map(published, other) : Pair{});
    }
    // What the first lane of a team within a warp has, given to all of the team. The whole warp calls.
    static __device__ __forceinline__ acc_t of_first_lane(acc_t value) {
        return lanes == 1 ? value : __shfl_sync(whole_warp, value, 0, lanes);
    }
    // Behind the last sum: the others may still read this block's.
    __device__ __forceinline__ void leave() const {
        if (blocks > 1) {
            cluster_arrive_relaxed();
            cluster_wait();
        }
    }
};

// A run of elements, the `index`-th of its kind, or an empty one: a team without work still takes part in the shuffles of
// its warp. It is covered from the 16-byte boundary before it, where the registers have room for that. A cluster's blocks
// cut it on such boundaries too: this is the block's slice.
template <int lanes, int blocks = 1>
struct Run {
    static constexpr int capacity = lanes * Tile::packs * pack_size;  // of a block
    static constexpr int sector_packs = 2;
    long long head;   // where the run begins
    long long start;  // where the slice does,
    int from;         // so many elements behind it
    int columns;      // elements of the slice
    int length;       // the same, or none
    int shift;        // elements of its first pack that lie before it
    bool live;

    __device__ __forceinline__ Run(const data_t* tensor, long long index, int whole, bool live_, bool may_shift)
        : head(live_ ? index * whole : 0), live(live_) {
        const int past = misalignment(tensor + head);
        const int ahead = may_shift && past + whole <= blocks * capacity ? past : 0;
        if (blocks == 1) {
            from = 0;
            columns = whole;
            shift = ahead;
        } else {
            const int rank = static_cast<int>(cluster_rank()), span = slice(whole + ahead);
            from = rank == 0 ? 0 : rank * span - ahead;
            const int end = (rank + 1) * span - ahead < whole ? (rank + 1) * span - ahead : whole;
            columns = end - from;  // the host sees to it that each block has some
            shift = rank == 0 ? ahead : 0;
        }
        start = head + from;
        length = live ? columns : 0;
    }
    // The run that begins `step` elements behind this one, and is covered from the same place in its packs.
    __device__ __forceinline__ Run behind(long long step, bool live_) const {
        Run next = *this;
        next.head += step;
        next.start += step;
        next.live = live_;
        next.length = live_ ? columns : 0;
        return next;
    }
    // Elements that a block covers of so many: even parts, of whole sectors.
    static __device__ __forceinline__ int slice(int covered) {
        return ceil_div(ceil_div(covered, blocks), sector_packs * pack_size) * sector_packs * pack_size;
    }
    // First element of this lane's k-th pack, counted from the slice's; neighbouring lanes hold neighbouring packs.
    __device__ __forceinline__ int first(int k) const { return (k * lanes + Team<lanes>::lane()) * pack_size - shift; }
    __device__ __forceinline__ auto held(int k) const {
        const PackSpan where = {start, first(k), length};
        return [where](int i) { return where.holds(i); };
    }
    __device__ __forceinline__ void load_from(const data_t* x, Pack<data_t> (&held)[Tile::packs]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs; ++k) {
            held[k] = load_pack(x + start, first(k), length);
        }
    }
    // Two tensors, pack by pack: one after the other would keep more addresses in registers. A null x reads as zeros.
    __device__ __forceinline__ void load_both(const data_t* dy, const data_t* x, Pack<data_t> (&held_dy)[Tile::packs],
                                              Pack<data_t> (&held_x)[Tile::packs]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs; ++k) {
            held_dy[k] = load_pack(dy + start, first(k), length);
            held_x[k] = load_pack(x + start, first(k), x == nullptr ? 0 : length);
        }
    }
    // What the run's sums are relative to at first, one of its elements: here its first, as it is stored, so that nobody
    // waits for it. A team within a warp has another in its registers, and of one alone a zero does.
    __device__ __forceinline__ data_t centre(const data_t* x) const {
        const bool alone = blocks == 1 && columns == 1;
        return Team<lanes, blocks>::of_block && live && !alone ? load(x, head) : data_t{};
    }
    // The same of a team within a warp: the last element of the run's first pack, wherever the run begins in it.
    __device__ __forceinline__ acc_t one_of(const Pack<data_t> (&held)[Tile::packs]) const {
        acc_t last = widen(held[0].get(pack_size - 1));
        if (shift + columns < pack_size) {
#pragma unroll
            for (int i = 0; i + 1 < pack_size; ++i) {
                last = i < shift + columns ? acc_t(widen(held[0].get(i))) : last;
            }
        }
        return Team<lanes, blocks>::of_first_lane(last);
    }

    // The channel that the first pack begins in; a `stride` leads from a pack to the next.
    __device__ __forceinline__ ChannelWalk walk(int HxW) const { return ChannelWalk(first(0), HxW); }
    static __device__ __forceinline__ ChannelStride stride(int HxW) { return ChannelStride(lanes * pack_size, HxW); }
    // Calls use(i, known) for the elements of the k-th pack, known = of(channel).
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

// Mean and rstd of a run in the registers of its team: the sum relative to one of its elements, which is `read` for teams
// of several warps (Run::centre), then the corrected second pass. `length` is that of all runs of this kind: an empty one has it too. The packs stay as narrow as
// they are stored between the passes.
template <int lanes, int blocks>
__device__ __forceinline__ Statistics run_statistics(Team<lanes, blocks>& team, const Run<lanes, blocks>& run,
                                                     data_t read, Pack<data_t> (&held)[Tile::packs], int length,
                                                     acc_t eps) {
    const acc_t shift = usable_shift(team.of_block ? acc_t(widen(read)) : run.one_of(held));
    Pair sums = {};
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        sums = sums + with_square(deviations(held[k], shift, run.held(k)).first);
    }
    const acc_t centre = second_centre(shift, team.sum(sums), acc_t(1) / acc_t(length), pack_size);
    make_opaque(held);
    sums = Pair{};
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        sums = sums + deviations(held[k], centre, run.held(k));
    }
    sums = team.sum(sums);
    make_opaque(held);
    return corrected_statistics(centre, sums, acc_t(length), eps);
}

// What a forward writes of a run whose elements have a gamma and a beta each: a row of LayerNorm, a group with HxW = 1.
// y of the run in `held`. scale_of(k) and offset_of(k) are the parameters of the k-th pack's elements: packs of them, and
// those of the next pack are asked for before this one's store, which no load passes.
template <int lanes, int blocks, typename ScaleOf, typename OffsetOf, typename Activation>
__device__ __forceinline__ void write_run(data_t* y, const Run<lanes, blocks>& run,
                                          const Pack<data_t> (&held)[Tile::packs], const Statistics& found,
                                          ScaleOf scale_of, OffsetOf offset_of, Activation activation) {
    auto next_scale = scale_of(0);
    auto next_offset = offset_of(0);
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        const auto scale = next_scale;
        const auto offset = next_offset;
        if (k + 1 < Tile::packs) {
            next_scale = scale_of(k + 1);
            next_offset = offset_of(k + 1);
        }
        Pack<data_t> out = {};
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const Affine affine = {found.mean, found.rstd * scale.of(i), offset.of(i)};
            out.set(i, narrow<data_t>(activation(normalised(widen(held[k].get(i)), affine))));
        }
        store_pack(y + run.start, run.first(k), run.length, out);
    }
}

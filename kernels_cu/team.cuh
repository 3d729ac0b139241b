// A team: `lanes` consecutive threads that own one contiguous run, Tile::packs packs a lane in registers. A team is part
// of a warp, a warp, or the whole block.
#include "slab.cuh"

// Sums over a team, given to all its lanes. A warp's teams sum by shuffles, and the whole warp calls. A block's team
// sums by way of shared memory, two rows of block_warps that take turns: between two uses of one row lies the barrier of
// the other, so a sum costs one barrier.
template <int lanes>
struct Team {
    static_assert((lanes >= 1 && lanes <= warp_size && (lanes & (lanes - 1)) == 0) || lanes == Tile::threads,
                  "a team is 1, 2, 4, 8, 16 or 32 lanes, or the block");
    static constexpr int count = Tile::threads / lanes;  // teams in a block
    Pair* scratch;                                       // shared, 2 * block_warps; null for teams in a warp
    int turn = 0;

    static __device__ __forceinline__ int index() { return threadIdx.x / lanes; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % lanes; }
    static __device__ __forceinline__ Pair* shared_scratch(int& offset) {
        return lanes > warp_size ? shared_array<Pair>(offset, 2 * block_warps) : nullptr;
    }
    __device__ __forceinline__ Pair sum(Pair value) {
        if (lanes <= warp_size) {
            return lanes_sum(value, lanes);
        }
        turn = 1 - turn;
        return block_sum(value, scratch + turn * block_warps);
    }
};

// A run of `length` elements, the `index`-th of its kind, or an empty one: a team without work still takes part in the
// shuffles of its warp. It is covered from the 16-byte boundary before it, where the registers have room for that.
template <int lanes>
struct Run {
    long long start;
    int length;
    int shift;

    __device__ __forceinline__ Run(const data_t* tensor, long long index, int length_, bool live, bool may_shift)
        : start(live ? index * length_ : 0), length(live ? length_ : 0) {
        const int past = misalignment(tensor + start);
        shift = may_shift && past + length_ <= lanes * Tile::packs * pack_size ? past : 0;
    }
    // First element of this lane's k-th pack; neighbouring lanes hold neighbouring packs.
    __device__ __forceinline__ int first(int k) const { return (k * lanes + Team<lanes>::lane()) * pack_size - shift; }
    __device__ __forceinline__ auto held(int k) const {
        const Place where = {start, first(k), length};
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
            held_x[k] = x == nullptr ? Pack<data_t>{} : load_pack(x + start, first(k), length);
        }
    }

    // Calls use(i, value) for the elements of the k-th pack, value = of(channel).
    template <typename Of, typename Use>
    __device__ __forceinline__ void each(int k, int HxW, Of of, Use use) const {
        each_in_channels(Place{start, first(k), length}, HxW, of, use);
    }
};

// Mean and rstd of a run of x in the registers of its team: the sum relative to the run's first element, then the
// corrected second pass. `length` is that of all runs of this kind: an empty one has it too.
template <int lanes>
__device__ __forceinline__ Statistics run_statistics(Team<lanes>& team, const Run<lanes>& run, const data_t* x,
                                                     const Pack<data_t> (&held)[Tile::packs], int length, acc_t eps) {
    const acc_t shift = run.length > 0 ? usable_shift(widen(load(x, run.start))) : acc_t(0);
    Pair sums = {};
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        sums.first += deviations(held[k], shift, run.held(k)).first;
    }
    const acc_t centre = shift + team.sum(sums).first / acc_t(length);
    sums = Pair{};
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        sums = sums + deviations(held[k], centre, run.held(k));
    }
    return corrected_statistics(centre, team.sum(sums), acc_t(length), eps);
}

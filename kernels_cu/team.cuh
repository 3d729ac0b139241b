// A team: Tile::lanes consecutive lanes of a warp that own one contiguous run, Tile::packs packs a lane in registers.
#include "slab.cuh"

static_assert(Tile::lanes >= 1 && Tile::lanes <= warp_size && (Tile::lanes & (Tile::lanes - 1)) == 0,
              "a team is 1, 2, 4, 8, 16 or 32 lanes");

constexpr int teams = Tile::threads / Tile::lanes;  // in a block

__device__ __forceinline__ int team_index() { return threadIdx.x / Tile::lanes; }
__device__ __forceinline__ int team_lane() { return threadIdx.x % Tile::lanes; }

// A run of `length` elements, the `index`-th of its kind, or an empty one: a team without work still takes part in the
// shuffles of its warp. It is covered from the 16-byte boundary before it, where the registers have room for that.
struct Run {
    long long start;
    int length;
    int shift;

    __device__ __forceinline__ Run(const data_t* tensor, long long index, int length_, bool live, bool may_shift)
        : start(live ? index * length_ : 0), length(live ? length_ : 0) {
        const int past = misalignment(tensor + start);
        shift = may_shift && past + length_ <= Tile::lanes * Tile::packs * pack_size ? past : 0;
    }
    // First element of this lane's k-th pack; neighbouring lanes hold neighbouring packs.
    __device__ __forceinline__ int first(int k) const { return (k * Tile::lanes + team_lane()) * pack_size - shift; }
    __device__ __forceinline__ auto held(int k) const {
        const Place where = {start, first(k), length};
        return [where](int i) { return where.holds(i); };
    }

    // Calls use(i, value) for the elements of the k-th pack, value = of(channel).
    template <typename Of, typename Use>
    __device__ __forceinline__ void each(int k, int HxW, Of of, Use use) const {
        each_in_channels(Place{start, first(k), length}, HxW, of, use);
    }
};

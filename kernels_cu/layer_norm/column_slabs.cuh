// LayerNorm's strategy `grid`: a few long rows, cut into slabs. Here a slab is a range of columns of all rows. One
// block owns a slab. It loads the slab's gamma and beta once, and no other block contributes to the slab's dgamma and
// dbeta. The sums of whole rows are folded from the sums of all slabs. Until they are complete, the elements that a
// block has read stay in its shared memory, as far as they fit.
//
// The slabs are the items of kept_items.cuh. With as many blocks as slabs, each block processes one slab. With fewer
// blocks, a block reads every slab but its last one a second time, with its gamma and beta.
#include "common/parameters.cuh"
#include "partition/kept_items.cuh"
#include "partition/slab.cuh"

// How rows are cut into slabs.
struct RowSlabs {
    long long rows, length, columns;  // columns: of a slab, whole sectors
    int slabs;

    // Index of a row's part in a slab, in a workspace [rows, slabs].
    __device__ __forceinline__ long long part(long long row, long long slab) const { return row * slabs + slab; }
};

// Parts of a row that a lane folds, one of every warp_size slabs. The host limits the slabs to warp_size * lane_parts.
constexpr int lane_parts = 8;

// Calls fold(row, parts) in one warp per row. Each lane holds the parts of every warp_size-th slab: parts[i] = of(row,
// slab), or T{} if there is no such slab. If registers suffice, the parts of the warp's next row are loaded before the
// fold of the current one. The whole block calls.
template <typename T, typename Of, typename Fold>
__device__ __forceinline__ void fold_rows_of_slabs(const RowSlabs& cut, Of of, Fold fold) {
    const auto fetch = [&](int row, T(&parts)[lane_parts]) {
#pragma unroll
        for (int i = 0; i < lane_parts; ++i) {
            const int slab = i * warp_size + static_cast<int>(threadIdx.x % warp_size);
            parts[i] = row < cut.rows && slab < cut.slabs ? of(row, slab) : T{};
        }
    };
    constexpr bool ahead = sizeof(T) <= 16;  // parts of two rows of a larger T do not fit in registers
    T parts[lane_parts], next[ahead ? lane_parts : 1];
    int row = threadIdx.x / warp_size;
    fetch(row, parts);
#pragma unroll 1
    for (; row < cut.rows; row += block_warps) {
        if constexpr (ahead) {
            fetch(row + block_warps, next);
        }
        fold(row, parts);
        if constexpr (ahead) {
#pragma unroll
            for (int i = 0; i < lane_parts; ++i) {
                parts[i] = next[i];
            }
        } else {
            fetch(row + block_warps, parts);
        }
    }
}

// A team's part of a slab. The `lanes` threads of a team own every teams-th row, and each lane holds
// Tile::packs_per_thread packs of a row. A lane's columns are the same in all rows. If `capacity` allows, the team
// covers its rows from the 16-byte boundary at or before the slab in its first row, otherwise from the slab's start. In
// a row with another alignment, the packs are loaded and stored element by element. With the host's default tiles there
// are no such rows.
struct TeamSlab {
    static constexpr int lanes = Tile::lanes, teams = Tile::threads / lanes, warps = lanes / warp_size;
    static constexpr int capacity = lanes * Tile::packs_per_thread * pack_size;
    static_assert(lanes % warp_size == 0 && Tile::threads % lanes == 0,
                  "teams of whole warps, an even part of the block");
    RowSlabs cut;
    long long column;  // first column of the slab
    int columns;       // columns of the slab
    int shift;         // elements of the team's first pack that precede the slab

    __device__ __forceinline__ TeamSlab(const data_t* tensor, const RowSlabs& cut_, long long slab)
        : cut(cut_), column(slab * cut_.columns) {
        const long long left = cut.length - column;
        columns = static_cast<int>(left < cut.columns ? left : cut.columns);
        const int past = misalignment(tensor + team() * cut.length + column);
        shift = past + columns <= capacity ? past : 0;
    }
    static __device__ __forceinline__ int team() { return threadIdx.x / lanes; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % lanes; }
    // Index of this warp in its team.
    static __device__ __forceinline__ int warp() { return lane() / warp_size; }
    // Number of rounds. In a round each team processes one row. In the last round row(round) may be past the last row.
    static __device__ __forceinline__ int rounds_of(long long rows) {
        return static_cast<int>((rows + teams - 1) / teams);
    }
    __device__ __forceinline__ int rounds() const { return rounds_of(cut.rows); }
    __device__ __forceinline__ long long row(int round) const { return static_cast<long long>(round) * teams + team(); }
    // First element of this lane's k-th pack, counted from the slab's first column. Neighbouring lanes hold
    // neighbouring packs.
    __device__ __forceinline__ int first(int k) const { return (k * lanes + lane()) * pack_size - shift; }
    __device__ __forceinline__ bool holds(int k, int i) const { return PackSpan{0, first(k), columns}.holds(i); }
    // Index in the tensor of the slab's first element in a row.
    __device__ __forceinline__ long long start(long long row) const { return row * cut.length + column; }
    // Whether the slab contains the lane's whole k-th pack.
    __device__ __forceinline__ bool whole(int k) const { return PackSpan{0, first(k), columns}.whole(); }
    // Elements of a row that this warp holds.
    __device__ __forceinline__ int warp_elements() const {
        const int begin = first(0) - (lane() % warp_size) * pack_size;  // first element of the warp's first lane
        int found = 0;
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            const int from = begin + k * lanes * pack_size, past = from + warp_size * pack_size;
            const int left = (past < columns ? past : columns) - (from > 0 ? from : 0);
            found += left > 0 ? left : 0;
        }
        return found;
    }
};

// A parameter of a slab's columns. The block loads it into shared memory once, because all teams have the same columns.
// Each lane then keeps the values of its columns in registers.
template <typename T>
struct SlabParameter {
    const T* array;  // all columns, or null
    Pack<T>* shared;
    acc_t absent;
    ParameterPack<T> held[Tile::packs_per_thread];

    __device__ __forceinline__ SlabParameter(const T* array_, const RowSlabs& cut, acc_t absent_, int& offset)
        : array(array_),
          shared(shared_array<Pack<T>>(offset,
                                       array_ == nullptr ? 0 : ceil_div(static_cast<int>(cut.columns), Pack<T>::size))),
          absent(absent_) {}
    // The whole block calls. A barrier must follow before keep().
    __device__ __forceinline__ void share(const TeamSlab& slab) const {
        const int packs = array == nullptr ? 0 : ceil_div(slab.columns, Pack<T>::size);
        for (int j = threadIdx.x; j < packs; j += Tile::threads) {
            shared[j] = load_pack(array + slab.column, j * Pack<T>::size, slab.columns);
        }
    }
    __device__ __forceinline__ void keep(const TeamSlab& slab) {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (array == nullptr) {
                held[k].load_from(array, slab.first(k), slab.columns, absent);
            } else {
                held[k].load_from(shared, slab.first(k), slab.columns);
            }
        }
    }
};

// Slots of shared memory for the packs of a team's rounds. A thread reads only the packs that it copied, so no barrier
// is needed between a copy and its use. The first rounds have one slot each and stay there: they are resident. The
// later rounds share the last `ahead` slots as a ring. While one of them is processed, the copies of the next ones are
// in flight.
template <int tensors>
struct RoundSlots {
    static constexpr int ahead = Tile::ahead;
    typedef Pack<data_t> held_t[tensors][Tile::packs_per_thread];
    const data_t* from[tensors];
    Pack<data_t>* packs;  // shared
    int resident_rounds;  // rounds with a slot of their own: all, or `ahead` fewer than there are slots

    __device__ __forceinline__ RoundSlots(const data_t* const (&from_)[tensors], const RowSlabs& cut,
                                          long long resident_rounds_, int& offset)
        : resident_rounds(static_cast<int>(resident_rounds_)) {
        const int rounds = TeamSlab::rounds_of(cut.rows),
                  slots = resident_rounds < rounds ? resident_rounds + ahead : rounds;
        packs = shared_array<Pack<data_t>>(offset, slots * tensors * Tile::packs_per_thread * Tile::threads);
#pragma unroll
        for (int tensor = 0; tensor < tensors; ++tensor) {
            from[tensor] = from_[tensor];
        }
    }
    __device__ __forceinline__ int slot(int round) const {
        return round < resident_rounds ? round : resident_rounds + (round - resident_rounds) % ahead;
    }
    __device__ __forceinline__ Pack<data_t>* of(int round, int tensor, int k) const {
        return packs + ((slot(round) * tensors + tensor) * Tile::packs_per_thread + k) * Tile::threads + threadIdx.x;
    }
    // Starts the copies of a round as one group of this thread's copies. The group is empty if there is no such round.
    // A pack at an edge of the slab is copied whole. Its elements of the neighbouring slab or row are not used. Two
    // kinds of packs are loaded element by element through registers: those at the ends of the tensor, and misaligned
    // ones. All packs of a tensor are misaligned if its alignment differs from the first tensor's.
    __device__ __forceinline__ void fetch(const TeamSlab& slab, int round) const {
        const long long row = slab.row(round), start = slab.start(row), all = slab.cut.rows * slab.cut.length;
#pragma unroll
        for (int k = 0; round >= 0 && row < slab.cut.rows && k < Tile::packs_per_thread; ++k) {
            const int first = slab.first(k);
#pragma unroll
            for (int tensor = 0; tensor < tensors && first < slab.columns; ++tensor) {
                const data_t* const of_slab = from[tensor] + start;
                const bool inside = start + first >= 0 && start + first + pack_size <= all;
                if (inside && misalignment(of_slab + first) == 0) {
                    copy_async(of(round, tensor, k), of_slab + first);
                } else {
                    *of(round, tensor, k) = load_pack(of_slab, first, slab.columns);
                }
            }
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void take(int round, held_t& held) const {
        copy_async_wait<ahead - 1>();
#pragma unroll
        for (int i = 0; i < tensors * Tile::packs_per_thread; ++i) {
            held[i / Tile::packs_per_thread][i % Tile::packs_per_thread] =
                *of(round, i / Tile::packs_per_thread, i % Tile::packs_per_thread);
        }
    }
};

// Starts the first copies of sweep_slab.
template <int tensors>
__device__ __forceinline__ void begin_slab(const TeamSlab& slab, const RoundSlots<tensors>& slots) {
    for (int round = 0; round < slots.ahead; ++round) {
        slots.fetch(slab, round);
    }
}

// Calls use(row, packs) for every row of the team, in order.
template <int tensors, typename Use>
__device__ __forceinline__ void sweep_slab(TeamSlab& slab, const RoundSlots<tensors>& slots, Use use) {
    typename RoundSlots<tensors>::held_t held;
#pragma unroll 1
    for (int round = 0; round < slab.rounds(); ++round) {
        make_opaque(slab.shift);  // the predicates of a lane's elements would fill its registers
        slots.take(round, held);
        slots.fetch(slab, round + slots.ahead);
        if (slab.row(round) < slab.cut.rows) {
            use(slab.row(round), held);
        }
    }
}

// The same in reverse. `there`: whether the slots still contain the rounds that sweep_slab left in them, which are the
// resident rounds and the last ones. The rounds between them are fetched again, the latest first.
template <int tensors, typename Use>
__device__ __forceinline__ void sweep_slab_back(TeamSlab& slab, RoundSlots<tensors> slots, bool there, Use use) {
    typename RoundSlots<tensors>::held_t held;
    if (!there) {
        slots.resident_rounds = 0;
        for (int round = slab.rounds() - 1; round >= slab.rounds() - slots.ahead; --round) {
            slots.fetch(slab, round);
        }
    }
#pragma unroll 1
    for (int round = slab.rounds() - 1; round >= 0; --round) {
        make_opaque(slab.shift);
        slots.take(round, held);
        const int next = round - slots.ahead;
        slots.fetch(slab, next < slots.resident_rounds ? -1 : next);
        if (slab.row(round) < slab.cut.rows) {
            use(slab.row(round), held);
        }
        __syncwarp();  // reconverge: lanes at an edge have stored element by element
    }
}

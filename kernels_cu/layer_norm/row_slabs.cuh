// LayerNorm's `grid`: few long rows, cut across into slabs of columns. A block owns all rows of a slab, so it asks for
// gamma and beta once and has dgamma and dbeta to itself; what it read of its slab stays in shared memory until the sums
// of whole rows, which all slabs make up together, have come round.
//
// A block draws a slab by ordered ticket, stores its sums, signals that, and draws again. When no slab is left it waits for
// slabs that run or have ended. So no number of resident blocks is too small, and no cooperative launch is needed.
// With as many blocks as slabs each has one; with fewer, the slabs before a block's last, and their gamma and beta, are
// read once more. Who folds the rows is up to the order in which blocks arrive; what is folded, and in which order, is not.
#include "common/parameters.cuh"
#include "partition/slab.cuh"
#include "partition/work_queue.cuh"

// How rows are cut.
struct RowSlabs {
    long long rows, length, columns;  // columns of a slab: whole sectors
    int slabs;

    // Where in a workspace [rows, slabs] a row's part in a slab stands.
    __device__ __forceinline__ long long part(long long row, long long slab) const { return row * slabs + slab; }
};

// The tickets, and what the threads of a block share: the slabs that it has drawn, and whether its signal is the last.
struct DrawnSlabs {
    unsigned* words;     // global, all 0: the next ticket; from ticket_words slabs whose sums are stored, then one more
    unsigned slabs;      // in all
    unsigned* drawn;     // shared, slabs + 1
    unsigned* complete;  // shared

    __device__ __forceinline__ DrawnSlabs(unsigned* words_, int slabs_, int& offset)
        : words(words_),
          slabs(slabs_),
          drawn(shared_array<unsigned>(offset, slabs_ + 1)),
          complete(shared_array<unsigned>(offset, 1)) {}
};

// sums(slab, signal) stores to the workspace, calls signal(), and may go on with what others do not wait for; fold() puts
// together what the sums of all slabs stored; output(slab, latest) may read what fold stored, and finds what the last
// sums of the block left where it is `latest`. The whole block calls; each of the three begins behind a barrier.
template <typename Sums, typename Fold, typename Output>
__device__ __forceinline__ void take_slabs(const DrawnSlabs& of, Sums sums, Fold fold, Output output) {
    const bool first = threadIdx.x == 0;
    unsigned* const signalled = of.words + ticket_words;
    unsigned next = first ? draw_ticket(of.words) : 0u;
    int taken = 0;
    for (;; ++taken) {
        if (first) {
            of.drawn[taken] = next;
        }
        __syncthreads();
        if (of.drawn[taken] >= of.slabs) {
            break;
        }
        sums(of.drawn[taken], [&] {
            __syncthreads();  // behind every thread's stores, which are published here, and seen by who folds
            if (first) {
                next = draw_ticket(of.words);  // not before: a block that starts later would find its slab gone
                *of.complete = add_release_acquire(signalled, 1u) + 1 == of.slabs;
            }
            __syncthreads();
            if (*of.complete) {
                fold();
                __syncthreads();
                if (first) {
                    store_release(signalled, of.slabs + 1);
                }
            }
        });
    }
    if (taken == 0) {
        return;
    }
    if (first) {
        wait_above(signalled, of.slabs);
    }
    for (int slot = taken - 1; slot >= 0; --slot) {
        __syncthreads();
        output(of.drawn[slot], slot == taken - 1);
    }
}

// Parts of a row that a lane folds, one of every warp_size slabs: the host sees to it that there are no more.
constexpr int lane_parts = 8;

// fold(row, parts) in a warp for every row: the warp's lanes have the parts of its slabs, of(row, slab), or T{} where there
// is no such slab. Those of a warp's next row are on their way meanwhile, where registers are enough. The whole block calls.
template <typename T, typename Of, typename Fold>
__device__ __forceinline__ void fold_rows_of_slabs(const RowSlabs& cut, Of of, Fold fold) {
    const auto fetch = [&](int row, T(&parts)[lane_parts]) {
#pragma unroll
        for (int i = 0; i < lane_parts; ++i) {
            const int slab = i * warp_size + static_cast<int>(threadIdx.x % warp_size);
            parts[i] = row < cut.rows && slab < cut.slabs ? of(row, slab) : T{};
        }
    };
    constexpr bool ahead = sizeof(T) <= 16;  // else registers have no room for both
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

// A team's part of a slab: `lanes` threads that have every teams-th row, Tile::packs_per_thread packs of it a lane. It covers all its
// rows from the 16-byte boundary before the slab in its first one, where its registers have room for that: the columns of
// a lane do not move. Rows that begin elsewhere come element by element; the host sees to it that there are none by
// default.
struct TeamSlab {
    static constexpr int lanes = Tile::lanes, teams = Tile::threads / lanes, warps = lanes / warp_size;
    static constexpr int capacity = lanes * Tile::packs_per_thread * pack_size;
    static_assert(lanes % warp_size == 0 && Tile::threads % lanes == 0,
                  "teams of whole warps, an even part of the block");
    RowSlabs cut;
    long long column;  // where the slab begins
    int columns;       // of it
    int shift;         // of the team's first pack, elements that lie before the slab

    __device__ __forceinline__ TeamSlab(const data_t* tensor, const RowSlabs& cut_, long long slab)
        : cut(cut_), column(slab * cut_.columns) {
        const long long left = cut.length - column;
        columns = static_cast<int>(left < cut.columns ? left : cut.columns);
        const int past = misalignment(tensor + team() * cut.length + column);
        shift = past + columns <= capacity ? past : 0;
    }
    static __device__ __forceinline__ int team() { return threadIdx.x / lanes; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % lanes; }
    // Which of a team's warps this is.
    static __device__ __forceinline__ int warp() { return lane() / warp_size; }
    // Rounds that it takes to have all rows, one row a team in each. row(round) may be past the last.
    static __device__ __forceinline__ int rounds_of(long long rows) {
        return static_cast<int>((rows + teams - 1) / teams);
    }
    __device__ __forceinline__ int rounds() const { return rounds_of(cut.rows); }
    __device__ __forceinline__ long long row(int round) const { return static_cast<long long>(round) * teams + team(); }
    // First element of this lane's k-th pack, counted from the slab's; neighbouring lanes hold neighbouring packs.
    __device__ __forceinline__ int first(int k) const { return (k * lanes + lane()) * pack_size - shift; }
    __device__ __forceinline__ bool holds(int k, int i) const { return PackSpan{0, first(k), columns}.holds(i); }
    // Of a row, the slab's start.
    __device__ __forceinline__ long long start(long long row) const { return row * cut.length + column; }
    // Whether a lane has all of its k-th pack.
    __device__ __forceinline__ bool whole(int k) const { return PackSpan{0, first(k), columns}.whole(); }
    // Elements that this warp has of a row.
    __device__ __forceinline__ int warp_elements() const {
        const int begin = first(0) - (lane() % warp_size) * pack_size;  // of the warp's first pack
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

// A parameter of a slab's columns: the block asks for it once, by way of shared memory, since teams have the same
// columns; each lane keeps its own in registers.
template <typename T>
struct SlabParameter {
    const T* array;  // of all columns, or null
    Pack<T>* shared;
    acc_t absent;
    ParameterPack<T> held[Tile::packs_per_thread];

    __device__ __forceinline__ SlabParameter(const T* array_, const RowSlabs& cut, acc_t absent_, int& offset)
        : array(array_),
          shared(shared_array<Pack<T>>(offset, array_ == nullptr ? 0 : static_cast<int>(cut.columns) / Pack<T>::size)),
          absent(absent_) {}
    // The whole block calls; a barrier lies between this and keep().
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

// Slots of shared memory for the packs of a team's rounds. A thread uses only its own packs: no barrier lies between a copy
// and its use. The first rounds have a slot each and stay there: they are resident. The rounds behind them share the last
// `ahead` slots in a ring, whose copies are under way while one of them is worked on.
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
    // Starts the copies of a round, a group of this thread's copies; an empty group where there is no such round. Packs at
    // an edge come with what they have of the slabs and rows beside, which nobody uses: only at the ends of the tensor, and
    // where it begins elsewhere than the first, do they come element by element, through registers.
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

// Sets the first copies of sweep_slab going.
template <int tensors>
__device__ __forceinline__ void begin_slab(const TeamSlab& slab, const RoundSlots<tensors>& slots) {
    for (int round = 0; round < slots.ahead; ++round) {
        slots.fetch(slab, round);
    }
}

// use(row, packs) for every row of the team, in order.
template <int tensors, typename Use>
__device__ __forceinline__ void sweep_slab(TeamSlab& slab, const RoundSlots<tensors>& slots, Use use) {
    typename RoundSlots<tensors>::held_t held;
#pragma unroll 1
    for (int round = 0; round < slab.rounds(); ++round) {
        make_opaque(slab.shift);  // which elements of its packs a lane has would fill its registers
        slots.take(round, held);
        slots.fetch(slab, round + slots.ahead);
        if (slab.row(round) < slab.cut.rows) {
            use(slab.row(round), held);
        }
    }
}

// The same in reverse. What a sweep in order has left in the slots is `there`: the resident rounds and the last ones. Those
// between them are fetched again, the latest first.
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
        __syncwarp();  // the lanes of a warp go on side by side: those at an edge have stored element by element
    }
}

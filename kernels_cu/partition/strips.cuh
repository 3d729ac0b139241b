// How the warps of the `split` kernels of LayerNorm and RMSNorm divide rows of any length. A strip is a range of columns.
// A band is every bands-th row. A warp processes one strip of one band. The parameters of its columns, and their sums
// for dgamma and dbeta, stay in registers.
//
// A strip is `span` elements of a row, counted from the 16-byte boundary at or before the row's start. The row's offset
// from that boundary may differ from row to row, but a warp's columns must not move. So rows are covered from the
// boundary only if all rows of a band have the same offset: if bands * length is a multiple of a pack, or if a band is
// a single row. Otherwise all rows are covered from their start.
#include "common/parameters.cuh"
#include "partition/row_norms.cuh"
#include "partition/slab.cuh"

struct Strips {
    static constexpr int span = warp_size * Tile::packs_per_thread * pack_size;
    long long rows, length, bands, strips;  // strips: per row, enough for any alignment

    __device__ __forceinline__ bool may_shift() const { return bands >= rows || bands * length % pack_size == 0; }
    __device__ __forceinline__ long long warps() const { return bands * strips; }
    __device__ __forceinline__ long long items() const { return (warps() + block_warps - 1) / block_warps; }
};

// The strip of this warp in the `item`-th set of block_warps strips. A warp past the last strip has no elements.
struct Strip {
    long long band, strip;
    long long column;  // column of the strip's first element
    int ahead;         // elements between the boundary and the row's start; 0 unless it is a row's first strip
    int length;        // elements of the strip
    bool live;

    __device__ __forceinline__ Strip(const Strips& cut, const data_t* tensor, long long item) {
        const long long own = item * block_warps + threadIdx.x / warp_size;
        live = own < cut.warps();
        band = live ? own / cut.strips : 0;
        strip = live ? own - band * cut.strips : 0;
        const int shift = cut.may_shift() ? misalignment(tensor + band * cut.length) : 0;
        ahead = strip == 0 ? shift : 0;
        column = strip == 0 ? 0 : strip * Strips::span - shift;
        const long long left = cut.length - column;
        length = live && left > 0 ? static_cast<int>(left < Strips::span - ahead ? left : Strips::span - ahead) : 0;
    }
    // First element of this lane's k-th pack, counted from the strip's first element.
    __device__ __forceinline__ int first(int k) const {
        return (k * warp_size + static_cast<int>(threadIdx.x % warp_size)) * pack_size - ahead;
    }
    __device__ __forceinline__ bool holds(int k, int i) const { return first(k) + i >= 0 && first(k) + i < length; }
    // Last row of the band, where a sweep in reverse starts.
    __device__ __forceinline__ long long last_row(const Strips& cut) const {
        return band + (cut.rows - 1 - band) / cut.bands * cut.bands;
    }
    // Index in a tensor of the strip's first element in a row.
    __device__ __forceinline__ long long start(const Strips& cut, long long row) const {
        return row * cut.length + column;
    }
    __device__ __forceinline__ void load_from(const data_t* tensor, long long at,
                                              Pack<data_t> (&held)[Tile::packs_per_thread]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held[k] = tensor == nullptr ? Pack<data_t>{} : load_pack(tensor + at, first(k), length);
        }
    }
    // Loads the parameters of the lane's columns; `absent` for each if `array` is null.
    template <typename T>
    __device__ __forceinline__ void parameters(const T* array, acc_t absent,
                                               ParameterPack<T> (&values)[Tile::packs_per_thread]) const {
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            values[k].load_from(array == nullptr ? nullptr : array + column, first(k), length, absent);
        }
    }
};

// Folds the sums of the strips of each row, one block per row, and calls emit(row, the row's sums, the place of the
// first sums) in one thread, when all threads have read theirs.
template <typename Sums, typename Emit>
__device__ __forceinline__ void fold_strips(Sums* row_sums, const Strips& cut, Emit emit) {
    int offset = 0;
    Sums* scratch = shared_array<Sums>(offset, block_warps);
    for (long long row = blockIdx.x; row < cut.rows; row += gridDim.x) {
        Sums* const parts = row_sums + row * cut.strips;
        Sums sums = {};
        for (long long strip = threadIdx.x; strip < cut.strips; strip += Tile::threads) {
            sums = sums + load(parts, strip);
        }
        sums = block_fold(sums, scratch, [](Sums value) { return warp_sum(value); });
        if (threadIdx.x == 0) {  // all threads have loaded their parts before the barrier in block_fold
            emit(row, sums, parts);
        }
        __syncthreads();  // the next row reuses scratch
    }
}

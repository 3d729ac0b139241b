// Sums per column of rows, in shared memory. Columns that are pack_size apart are neighbours there. The lanes of a warp
// process neighbouring packs, so they access different banks whatever the alignment of the row.
#include "partition/slab.cuh"

template <typename Sums>
struct ColumnSums {
    Sums* sums;
    int stride;

    static __device__ __forceinline__ int size(int length) { return ceil_div(length, pack_size) * pack_size; }
    __device__ __forceinline__ ColumnSums(Sums* sums_, int length) : sums(sums_), stride(size(length) / pack_size) {}
    __device__ __forceinline__ Sums& of(int column) const {
        return sums[column % pack_size * stride + column / pack_size];
    }
};

// The same with a stride for which threads that process neighbouring columns access different banks, too. The columns
// of two packs of eight are then 16 pairs in 16 pairs of banks, and those of four packs 32 single sums in 32 banks.
template <typename Sums>
struct SpreadColumnSums : ColumnSums<Sums> {
    static constexpr int apart = 2 * static_cast<int>(sizeof(Pair) / sizeof(Sums));
    static __device__ __forceinline__ int stride_of(int length) {
        const int packs = ceil_div(length, pack_size);
        return packs + ((apart - packs) & (2 * apart - 1));
    }
    static __device__ __forceinline__ int size(int length) { return stride_of(length) * pack_size; }
    __device__ __forceinline__ SpreadColumnSums(Sums* sums_, int length) : ColumnSums<Sums>(sums_, length) {
        this->stride = stride_of(length);
    }
};

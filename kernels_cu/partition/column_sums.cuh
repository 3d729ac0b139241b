// Sums per column of rows, in shared memory. Columns that are pack_size apart are neighbours there. The lanes of a warp
// process neighbouring packs, so they access different banks whatever the alignment of the row.
#include "partition/slab.cuh"

struct ColumnSums {
    Pair* sums;
    int stride;

    static __device__ __forceinline__ int size(int length) { return ceil_div(length, pack_size) * pack_size; }
    __device__ __forceinline__ ColumnSums(Pair* sums_, int length) : sums(sums_), stride(size(length) / pack_size) {}
    __device__ __forceinline__ Pair& of(int column) const {
        return sums[column % pack_size * stride + column / pack_size];
    }
};

// The same with a stride for which threads that process neighbouring columns access different banks, too. The columns
// of two packs of eight are then 16 pairs in 16 pairs of banks.
struct SpreadColumnSums : ColumnSums {
    static __device__ __forceinline__ int stride_of(int length) {
        const int packs = ceil_div(length, pack_size);
        return packs + ((2 - packs) & 3);
    }
    static __device__ __forceinline__ int size(int length) { return stride_of(length) * pack_size; }
    __device__ __forceinline__ SpreadColumnSums(Pair* sums_, int length) : ColumnSums(sums_, length) {
        stride = stride_of(length);
    }
};

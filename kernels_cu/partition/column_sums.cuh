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
    // The column of sums[at].
    __device__ __forceinline__ int column(int at) const { return at % stride * pack_size + at / stride; }
};

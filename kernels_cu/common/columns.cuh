// Folding the columns of a workspace: the rows of partial results [rows, C] that the blocks of an earlier kernel left.
//
// A block owns up to `columns` neighbouring columns and one slice of the rows; its threads take those rows in turn, and
// what they found is folded by halves. So the reduction is spread over slabs x slices blocks, and its
// order is fixed by indices alone. With several slices a second launch folds the slices' rows.
#include "common/norm.cuh"

// Which rows and columns the blocks of a launch fold.
struct Columns {
    long long rows, C, columns, slices;

    __device__ __forceinline__ long long slabs() const { return (C + columns - 1) / columns; }
    __device__ __forceinline__ long long items() const { return slabs() * slices; }
};

// The fold of of(row, column) by merge(a, b) over the rows [begin, end), for `live` of `columns` columns, which are at most
// as many as threads: emit(column, whole) in one thread a column. Without rows whole is T{}. `scratch` is shared, a T a
// thread.
template <typename T, typename Of, typename Merge, typename Emit>
__device__ __forceinline__ void fold_rows(int columns, long long live, long long begin, long long end, T* scratch,
                                          Of of, Merge merge, Emit emit) {
    const int parts = Tile::threads / columns;
    const int part = threadIdx.x / columns, column = threadIdx.x - part * columns;
    T whole = {};
    if (part < parts && column < live) {
#pragma unroll 4
        for (long long row = begin + part; row < end; row += parts) {
            whole = merge(whole, of(row, column));
        }
    }
    scratch[threadIdx.x] = whole;
    __syncthreads();
    fold_parts<1>(scratch, parts, columns, part, column, merge);
    if (part == 0 && column < live) {
        emit(column, scratch[column]);  // the thread's own place in scratch, as is what the next fold writes
    }
}

// As fold_rows of all rows, for any number of columns.
template <typename T, typename Of, typename Merge, typename Emit>
__device__ __forceinline__ void fold_wide(int columns, long long rows, T* scratch, Of of, Merge merge, Emit emit) {
    for (int first = 0; first < columns; first += Tile::threads) {
        const int here = columns - first < Tile::threads ? columns - first : Tile::threads;
        fold_rows(
            here, here, 0, rows, scratch, [&](long long row, int column) { return of(row, first + column); }, merge,
            [&](int column, T whole) { emit(first + column, whole); });
    }
}

// For each item of this block: emit(slice, column, whole), as fold_rows. The whole of an empty slice is T{}.
template <typename T, typename Of, typename Merge, typename Emit>
__device__ __forceinline__ void fold_columns(const Columns& shape, T* scratch, Of of, Merge merge, Emit emit) {
    const long long of_slice = (shape.rows + shape.slices - 1) / shape.slices;
    for (long long item = blockIdx.x; item < shape.items(); item += gridDim.x) {
        const long long slice = item / shape.slabs(), first = (item - slice * shape.slabs()) * shape.columns;
        const long long begin = slice * of_slice;
        const long long end = begin + of_slice < shape.rows ? begin + of_slice : shape.rows;
        fold_rows(
            static_cast<int>(shape.columns), shape.C - first, begin, end, scratch,
            [&](long long row, int column) { return of(row, first + column); }, merge,
            [&](int column, T whole) { emit(slice, first + column, whole); });
    }
}

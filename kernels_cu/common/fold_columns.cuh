// Folds the columns of a workspace: rows of partial results [rows, C] that the blocks of an earlier kernel stored.
//
// A block owns up to `columns` neighbouring columns and one slice of the rows. Its threads process the slice's rows
// in turn, and their partial results are folded. The reduction is therefore spread over slabs x slices blocks, and its
// order is fixed by indices alone. If there are several slices, a second launch folds the rows that the slices stored.
#include "common/norm.cuh"

// The shape of a launch's workspace, and the parts that its blocks fold.
struct Columns {
    long long rows, C, columns, slices;

    __device__ __forceinline__ long long slabs() const { return (C + columns - 1) / columns; }
    __device__ __forceinline__ long long items() const { return slabs() * slices; }
};

// Folds the values of a column over the lanes of a warp. Neighbouring lanes hold neighbouring columns, `width` of them, a
// power of two. The result is valid in the first `width` lanes. The whole warp calls.
template <typename T, typename Merge>
__device__ __forceinline__ T fold_lanes(T value, int width, Merge merge) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
        if (distance >= width) {
            value = merge(value, shuffle_xor(value, distance));
        }
    }
    return value;
}

// Folds of(row, column) by merge(a, b) over the rows [begin, end), for those of `columns` columns that are below
// `live`. `columns` is at most the number of threads. Calls emit(column, whole, ahead(column)) in one thread per
// column. What ahead() loads is in flight together with the rows. If there are no rows, whole is T{}. `scratch` is in
// shared memory, one T per thread. The whole block calls. A barrier must separate two calls.
//
// A thread processes every parts-th row of one column. Moments, the only T larger than a Pair, are merged in pairs
// within a batch of rows before they join the rest: a merge takes long, and each merge with an outlier's m2 rounds. Up
// to warp_size columns, the parts are folded by shuffles, with one barrier for those of several warps.
template <typename T, typename Of, typename Merge, typename Ahead, typename Emit>
__device__ __forceinline__ void fold_rows(int columns, long long live, long long begin, long long end, T* scratch,
                                          Of of, Merge merge, Ahead ahead, Emit emit) {
    constexpr int rows_at_once = sizeof(T) <= 2 * sizeof(float) ? 8 : 4;  // as many as fit in registers
    int width = 1;  // threads of a part: of up to warp_size columns, a power of two
    while (width < columns && width < warp_size) {
        width *= 2;
    }
    width = width < columns ? columns : width;
    const int parts = Tile::threads / width;
    const int part = threadIdx.x / width, column = threadIdx.x - part * width;
    T whole = {};
    decltype(ahead(column)) loaded = {};
    if (part == 0 && column < live) {
        loaded = ahead(column);
    }
    if (part < parts && column < columns && column < live) {
        for (long long row = begin + part; row < end; row += rows_at_once * parts) {
            T held[rows_at_once] = {};
#pragma unroll
            for (int k = 0; k < rows_at_once; ++k) {
                if (row + k * parts < end) {
                    held[k] = of(row + k * parts, column);
                }
            }
            if constexpr (sizeof(T) > sizeof(Pair)) {
#pragma unroll
                for (int distance = 1; distance < rows_at_once; distance *= 2) {
#pragma unroll
                    for (int k = 0; k < rows_at_once; k += 2 * distance) {
                        held[k] = merge(held[k], held[k + distance]);
                    }
                }
                whole = merge(whole, held[0]);
            } else {
#pragma unroll
                for (int k = 0; k < rows_at_once; ++k) {
                    if (row + k * parts < end) {
                        whole = merge(whole, held[k]);
                    }
                }
            }
        }
    }
    if (width > warp_size) {
        scratch[threadIdx.x] = whole;
        __syncthreads();
        fold_parts<1>(scratch, parts, width, part, column, merge);
        whole = scratch[part == 0 ? column : 0];
    } else {
        whole = fold_lanes(whole, width, merge);
        const int lane = threadIdx.x % warp_size, warps = (parts * width + warp_size - 1) / warp_size;
        if (warps > 1) {
            if (lane < width) {
                scratch[threadIdx.x / warp_size * width + lane] = whole;
            }
            __syncthreads();
            whole = T{};
            for (int warp = lane / width; threadIdx.x < warp_size && warp < warps; warp += warp_size / width) {
                whole = merge(whole, scratch[warp * width + column]);
            }
            whole = fold_lanes(whole, width, merge);
        }
    }
    if (part == 0 && column < columns && column < live) {
        emit(column, whole, loaded);
    }
}

// The fold of fold_rows over all rows [0, rows), for any number of columns.
template <typename T, typename Of, typename Merge, typename Emit>
__device__ __forceinline__ void fold_wide(int columns, long long rows, T* scratch, Of of, Merge merge, Emit emit) {
    for (int first = 0; first < columns; first += Tile::threads) {
        const int here = columns - first < Tile::threads ? columns - first : Tile::threads;
        fold_rows(
            here, here, 0, rows, scratch, [&](long long row, int column) { return of(row, first + column); }, merge,
            [](int) { return 0; }, [&](int column, T whole, int) { emit(first + column, whole); });
        __syncthreads();
    }
}

// Calls emit(slice, column, whole, ahead(column)) for each item of this block, as fold_rows does. The whole of an empty
// slice is T{}.
template <typename T, typename Of, typename Merge, typename Ahead, typename Emit>
__device__ __forceinline__ void fold_columns(const Columns& shape, T* scratch, Of of, Merge merge, Ahead ahead,
                                             Emit emit) {
    const long long of_slice = (shape.rows + shape.slices - 1) / shape.slices;
    for (long long item = blockIdx.x; item < shape.items(); item += gridDim.x) {
        const long long slice = item / shape.slabs(), first = (item - slice * shape.slabs()) * shape.columns;
        const long long begin = slice * of_slice;
        const long long end = begin + of_slice < shape.rows ? begin + of_slice : shape.rows;
        fold_rows(
            static_cast<int>(shape.columns), shape.C - first, begin, end, scratch,
            [&](long long row, int column) { return of(row, first + column); }, merge,
            [&](int column) { return ahead(first + column); },
            [&](int column, T whole, auto loaded) { emit(slice, first + column, whole, loaded); });
        __syncthreads();
    }
}

template <typename T, typename Of, typename Merge, typename Emit>
__device__ __forceinline__ void fold_columns(const Columns& shape, T* scratch, Of of, Merge merge, Emit emit) {
    fold_columns(
        shape, scratch, of, merge, [](long long) { return 0; },
        [&](long long slice, long long column, T whole, int) { emit(slice, column, whole); });
}

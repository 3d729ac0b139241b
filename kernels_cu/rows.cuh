// LayerNorm of rows that a team holds in registers: what the strategies `warp` (several teams a block) and `block` (one
// team a block) share. x, y, dy, dx (rows, length); gamma, beta (length) or null; mean, rstd (rows).
#include "parameters.cuh"
#include "team.cuh"

// Every byte of x is read once, and before the team writes y, so y may be x.
template <int lanes>
__device__ __forceinline__ void normalise_rows(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y,
                                               acc_t* mean, acc_t* rstd, long long rows, int length, acc_t eps) {
    int offset = 0;
    Team<lanes> team = {Team<lanes>::shared_scratch(offset)};
    for (long long first = static_cast<long long>(blockIdx.x) * team.count; first < rows;
         first += static_cast<long long>(gridDim.x) * team.count) {
        const long long row = first + team.index();
        const Run<lanes> run(x, row, length, row < rows, true);
        Pack<data_t> held[Tile::packs];
        run.load_from(x, held);
        const Statistics found = run_statistics(team, run, x, held, length, eps);
        if (run.length == 0) {
            continue;
        }
        if (team.lane() == 0) {
            store(mean, row, found.mean);
            store(rstd, row, found.rstd);
        }
#pragma unroll
        for (int k = 0; k < Tile::packs; ++k) {
            acc_t scale[pack_size], offset_of[pack_size];
            load_parameters(gamma, run.first(k), run.length, acc_t(1), scale);
            load_parameters(beta, run.first(k), run.length, acc_t(0), offset_of);
            Pack<data_t> out;
#pragma unroll
            for (int i = 0; i < pack_size; ++i) {
                const Affine affine = {found.mean, found.rstd * scale[i], offset_of[i]};
                out.item[i] = narrow<data_t>(normalised(widen(held[k].item[i]), affine));
            }
            store_pack(y + run.start, run.first(k), run.length, out);
        }
    }
}

// Sums of the columns of rows, in shared memory. Columns that are pack_size apart are neighbours there, so that the lanes
// of a warp, which hold packs side by side, meet different banks whatever the alignment of the row.
struct ColumnSums {
    Pair* sums;
    int stride;

    static __device__ __forceinline__ int size(int length) { return ceil_div(length, pack_size) * pack_size; }
    __device__ __forceinline__ ColumnSums(Pair* sums_, int length) : sums(sums_), stride(size(length) / pack_size) {}
    __device__ __forceinline__ Pair& of(int column) const {
        return sums[column % pack_size * stride + column / pack_size];
    }
};

// A row's part of dbeta and dgamma, as its team meets it, and dx where it is wanted. keep(k, i, column, pair) gets
// (dy, dy * xhat) of each element. Every byte of dy and x is read once, before dx is written: dx may be dy or x.
template <int lanes, typename Keep>
__device__ __forceinline__ void row_gradients(Team<lanes>& team, const Run<lanes>& run, const data_t* dy,
                                              const data_t* x, const stat_t* mean, const stat_t* rstd,
                                              const gamma_t* gamma, data_t* dx, long long row, int length, Keep keep) {
    Pack<data_t> held_dy[Tile::packs], held_x[Tile::packs];
    run.load_both(dy, x, held_dy, held_x);
    Coefficients of_row = {};
    if (run.length > 0) {
        of_row.mean = widen(load(mean, row));
        of_row.rstd = widen(load(rstd, row));
    }
    Pair sums = {};
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        acc_t weight[pack_size];
        load_parameters(gamma, run.first(k), run.length, acc_t(1), weight);
        const auto held = run.held(k);
        Pair of_pack = {};
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            if (held(i)) {
                const acc_t gradient = widen(held_dy[k].item[i]);
                const acc_t xhat =
                    x == nullptr ? acc_t(0) : (acc_t(widen(held_x[k].item[i])) - of_row.mean) * of_row.rstd;
                const Pair terms = {gradient, gradient * xhat};
                of_pack = of_pack + Pair{weight[i] * terms.first, weight[i] * terms.second};
                keep(k, i, run.first(k) + i, terms);
            }
        }
        sums = sums + of_pack;
    }
    if (dx == nullptr) {
        if (lanes > warp_size) {
            __syncthreads();  // in the place of the sum's barrier, which callers count on between two rows
        }
        return;
    }
    sums = team.sum(sums);
    if (run.length == 0) {
        return;
    }
    of_row.a = sums.first / acc_t(length);
    of_row.b = sums.second / acc_t(length);
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        acc_t weight[pack_size];
        load_parameters(gamma, run.first(k), run.length, acc_t(1), weight);
        Pack<data_t> out;
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            Coefficients of_element = of_row;
            of_element.gamma = weight[i];
            out.item[i] =
                narrow<data_t>(input_gradient(widen(held_dy[k].item[i]), widen(held_x[k].item[i]), of_element));
        }
        store_pack(dx + run.start, run.first(k), run.length, out);
    }
}

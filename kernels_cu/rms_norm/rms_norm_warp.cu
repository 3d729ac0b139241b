// RMSNorm forward, strategy `warp`: one team of `lanes` lanes of a warp per row, which the team holds in registers.
//
//   x, residual, y, h: (rows, length). residual and h are null unless Tile::addend: then h = x + residual is normalised,
//   rounded to data_t and stored. gamma: (length) or null. rstd: (rows).
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs. A row has at most lanes * packs *
//   pack_size elements.
//   Grid: `teams` teams take the rows in turn. The blocks take the teams in turn, Tile::threads / Tile::lanes teams at
//   a time. A team writes y, rstd and h of its rows.
//   Shared memory: gamma, which the teams of a block share.
//
// Every byte of x and residual is read once, before the team writes: y may be x, and h may be the residual. A row has
// one sum, which takes log2(lanes) shuffles. The only barrier is at the start. The strategy wins for rows of up to about
// four thousand elements. Short rows, such as heads of 64 or 128, have few lanes each: a warp then reads several
// neighbouring rows, with 16 bytes per lane.
#include "partition/forward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, resident_blocks(1))
    rms_norm_warp(const data_t* x, const gamma_t* gamma, const data_t* residual, y_t* y, acc_t* rstd, data_t* h,
                  long long rows, long long length, long long teams, double eps, double gamma_offset) {
    const NormalisedRows<WithoutMean> normalised = {
        x,          residual,           gamma, nullptr, y, h, nullptr, rstd, rows, static_cast<int>(length), teams, 1,
        acc_t(eps), acc_t(gamma_offset)};
    normalised.run<Tile::lanes>();
}

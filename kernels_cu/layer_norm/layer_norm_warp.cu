// LayerNorm forward, strategy `warp`: one team of `lanes` lanes of a warp per row, which the team holds in registers.
//
//   x, residual, y, h: (rows, length); residual and h are null unless Tile::addend. gamma, beta: (length) or null.
//   mean, rstd: (rows).
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs. A row has at most lanes * packs *
//   pack_size elements.
//   Grid: `teams` teams take the rows in turn. The blocks take the teams in turn, Tile::threads / Tile::lanes teams at
//   a time. A team writes y, mean, rstd and h of its rows.
//   Shared memory: gamma and beta, which the teams of a block share.
//
// Every byte of x and residual is read once. The only barrier is at the start. The strategy wins for rows of up to about three
// thousand elements.
#include "partition/forward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, resident_blocks(1))
    layer_norm_warp(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                    long long rows, long long length, long long teams, double eps, const data_t* residual, data_t* h) {
    const NormalisedRows<WithMean> normalised = {
        x, residual, gamma, beta, y, h, mean, rstd, rows, static_cast<int>(length), teams, 1, acc_t(eps), acc_t(0)};
    normalised.run<Tile::lanes>();
}

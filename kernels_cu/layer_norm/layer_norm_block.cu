// LayerNorm forward, strategy `block`: a row is held in the registers of a team, which is a block or an even part of a
// block.
//
//   x, residual, y, h: (rows, length); residual and h are null unless Tile::addend. gamma, beta: (length) or null.
//   mean, rstd: (rows).
//   A block has Tile::teams_per_block teams. A thread holds Tile::packs_per_thread packs. A row has at most as many
//   elements as the threads of a team hold.
//   Grid: `teams` teams take the rows in turn. A team writes y, mean, rstd and h of its rows.
//   Shared memory: two rows of one pair per warp, for sums; gamma and beta, if several teams share them.
//
// Every byte of x and residual is read once. There are two barriers per row, which all teams of the block pass together.
// The strategy wins from about two thousand elements up to the capacity of registers. One team and one row per block win in
// most cases: no team waits for another one, and while one block stores, the next one loads. Each block then loads gamma
// and beta, mostly from the L1 cache.
#include "partition/forward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, resident_blocks(1))
    layer_norm_block(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                     long long rows, long long length, long long teams, double eps, const data_t* residual, data_t* h) {
    const NormalisedRows<WithMean> normalised = {
        x, residual, gamma, beta, y, h, mean, rstd, rows, static_cast<int>(length), teams, 1, acc_t(eps), acc_t(0)};
    normalised.run<Tile::threads / Tile::teams_per_block>();
}

// RMSNorm forward, strategy `block`: a row is held in the registers of a team, which is a block or an even part of a
// block.
//
//   x, residual, y, h: (rows, length). residual and h are null unless Tile::addend: then h = x + residual is normalised,
//   rounded to data_t and stored. gamma: (length) or null. rstd: (rows).
//   A block has Tile::teams_per_block teams. A thread holds Tile::packs_per_thread packs. A row has at most as many
//   elements as the threads of a team hold.
//   Grid: `teams` teams take the rows in turn. A team writes y, rstd and h of its rows.
//   Shared memory: two rows of one sum per warp; gamma, if several teams share it.
//
// Every byte of x and residual is read once, before the team writes: y may be x, and h may be the residual. There is one
// barrier per row, which all teams of the block pass together. The strategy wins from about two thousand elements up to
// the capacity of registers. One team and one row per block win in most cases: no team waits for another one, and while
// one block stores, the next one loads. Each block then loads gamma, mostly from the L1 cache.
#include "partition/forward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, resident_blocks(1))
    rms_norm_block(const data_t* x, const gamma_t* gamma, const data_t* residual, y_t* y, acc_t* rstd, data_t* h,
                   long long rows, long long length, long long teams, double eps, double gamma_offset) {
    const NormalisedRows<WithoutMean> normalised = {
        x,          residual,           gamma, nullptr, y, h, nullptr, rstd, rows, static_cast<int>(length), teams, 1,
        acc_t(eps), acc_t(gamma_offset)};
    normalised.run<Tile::threads / Tile::teams_per_block>();
}

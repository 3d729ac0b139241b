// LayerNorm backward, strategy `warp`: a run of `lanes` lanes of a warp per row, held in registers.
//
//   dy, x, dx (rows, length); mean, rstd (rows); gamma (length) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   a team of Tile::lanes lanes holds Tile::packs_per_thread packs a lane of dy and of x; `teams` of them take the rows in turn,
//   and each keeps the sums of its columns over all its rows, in float32 (float64 for float64 data): in registers where
//   a lane has few enough columns, else in shared memory
//   sums: workspace row i of [teams / teams in a block, length] pairs (dbeta, dgamma) holds those of the i-th block's
//   teams; for one row they go straight to the results
//   grid: teams, a block's worth each; shared memory: a row of sums for each team of a block, for every second where the
//   teams' sums are in registers; gamma, which they share
//
// Every byte of dy and x is read once, and before the team writes dx, so dx may be dy or x. Wins for rows up to about two
// thousand elements.
#include "partition/row_gradients.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                             long long rows, long long length, long long teams) {
    const RowGradients gradients = {
        dy,    x, mean, rstd, gamma, nullptr, dx, {workspace, dgamma, dbeta, length}, rows, static_cast<int>(length),
        teams, 1};
    gradients.run<Tile::lanes, 1, 1>();
}

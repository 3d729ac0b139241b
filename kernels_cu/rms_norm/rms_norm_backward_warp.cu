// RMSNorm backward, strategy `warp`: one team of `lanes` lanes of a warp per row, which the team holds in registers.
//
//   dy, x, dh, dx: (rows, length); dh is null unless Tile::addend. x is h if the forward had a residual. rstd: (rows).
//   gamma: (length) or null. dx and dgamma are null if they are not wanted.
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs of dy, of x and of dh. `teams` teams take
//   the rows in turn. A team keeps the sums of its columns over all its rows, in float32 (float64 for float64 data): in
//   registers if a lane has few enough columns, otherwise in shared memory.
//   Sums: dgamma, stored to a workspace [teams / teams per block, length]. Row i contains the sums of the i-th block's
//   teams. If there is one row, the kernel writes dgamma itself.
//   Grid: the blocks take the teams in turn, Tile::threads / Tile::lanes teams at a time.
//   Shared memory: one row of sums per team of the block, or one per two teams if registers hold the teams' sums;
//   gamma, which the teams share.
//
// Every byte of dy, x and dh is read once, before the team writes dx. So dx may be the same array as dy or x. The
// strategy wins for rows of up to about two thousand elements.
#include "partition/backward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, resident_blocks_of_gradients())
    rms_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* rstd, const gamma_t* gamma,
                           const data_t* dh, data_t* dx, Single* workspace, gamma_t* dgamma, long long rows,
                           long long length, long long teams, double gamma_offset) {
    const GammaGradient parameters = {workspace, dgamma, length};
    const RowArrays arrays = {dy, x, dh, nullptr, rstd};
    const RowGradients<WithoutMean> gradients = {
        arrays, gamma, nullptr, dx, parameters, rows, static_cast<int>(length), teams, 1, acc_t(gamma_offset)};
    gradients.run<Tile::lanes, 1, 1>();
}

// Groups of lanes that change from shuffle to shuffle, and progress independently. y[5][32]: the value that each lane
// received.
extern "C" __global__ void masks(int* y) {
    const int lane = threadIdx.x;
    // Pairs: a lane may be two pairs ahead of a previous partner.
    for (int round = 0; round < 3; ++round) {
        const int other = lane ^ (1 << round);
        y[round * 32 + lane] = __shfl_sync(1u << lane | 1u << other, 100 * round + lane, other);
    }
    // The lower half executes four shuffles while the upper half executes one.
    int value = lane;
    if (lane < 16) {
        for (int distance = 8; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(0x0000ffffu, value, distance);
        }
    } else {
        value = __shfl_xor_sync(0xffff0000u, value, 15);
    }
    y[3 * 32 + lane] = value;
    __syncwarp();
    y[4 * 32 + lane] = __shfl_down_sync(0xffffffffu, value, 16);
}

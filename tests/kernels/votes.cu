// ballot of a predicate over a warp; any and all of it over each half of a warp.
extern "C" __global__ void votes(const int* predicate, unsigned* y) {
    const int lane = threadIdx.x % 32;
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    const int mine = predicate[threadIdx.x];
    y[threadIdx.x] = __ballot_sync(0xffffffffu, mine);
    y[blockDim.x + threadIdx.x] = __any_sync(half, mine);
    y[2 * blockDim.x + threadIdx.x] = __all_sync(half, mine);
}

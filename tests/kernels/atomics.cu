// Tickets, a sum and a maximum over all blocks. taken[ticket] counts the threads that drew the ticket.
extern "C" __global__ void atomics(unsigned* counter, unsigned long long* sum, int* maximum, unsigned* taken,
                                   int* swapped, int* locked) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&taken[atomicAdd(counter, 1u)], 1u);
    for (int i = 0; i < 50; ++i) {
        atomicAdd(sum, 1ull << 33 | index);
    }
    atomicMax(maximum, static_cast<int>(index) - 1000);
    atomicAdd(swapped + 1, atomicExch(swapped, static_cast<int>(index)));  // each value but the last is read later
    if (atomicCAS(locked, -1, static_cast<int>(index)) == -1) {
        atomicAdd(locked + 1, 1);
    }
    __threadfence();
}

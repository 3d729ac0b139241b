// Counts the runs of each thread. A block runs long enough that a launch of many blocks is distributed over cores.
extern "C" __global__ void blocks(int* ran, long long work) {
    volatile double value = 1.0;
    for (long long i = 0; i < work; ++i) {
        value = value * 1.0000001;
    }
    __syncthreads();
    atomicAdd(&ran[blockIdx.x * blockDim.x + threadIdx.x], 1);
}

// Marks the threads that ran. Long enough a block that a launch of many is spread over cores.
extern "C" __global__ void blocks(int* ran, long long work) {
    volatile double value = 1.0;
    for (long long i = 0; i < work; ++i) {
        value = value * 1.0000001;
    }
    __syncthreads();
    atomicAdd(&ran[blockIdx.x * blockDim.x + threadIdx.x], 1);
}

// The same without a barrier between writing and reading: wrong, and the orders show it.
extern "C" __global__ void racy(const float* x, float* y) {
    float* shared = static_cast<float*>(cunorm_cpu::shared_memory());
    shared[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

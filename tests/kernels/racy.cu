// Reverses values as reverse.cu does, but without a barrier between write and read. Some thread orders give wrong
// results.
extern "C" __global__ void racy(const float* x, float* y) {
    float* shared = static_cast<float*>(cunorm_cpu::shared_memory());
    shared[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

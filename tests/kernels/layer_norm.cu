// A small LayerNorm forward: one block per row. Each statistic is summed by shuffles and one barrier.
constexpr int threads = 256;

static __device__ float block_sum(float value, float* scratch) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = threadIdx.x % 32 < threads / 32 ? scratch[threadIdx.x % 32] : 0.0f;
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(threads)
    layer_norm(const float* x, float* y, long long length, double eps) {
    float* scratch = static_cast<float*>(cunorm_cpu::shared_memory());
    const float* row = x + blockIdx.x * length;
    float sum = 0.0f;
    for (long long i = threadIdx.x; i < length; i += threads) {
        cunorm_cpu::touch(row + i, 4, false);
        sum += row[i];
    }
    const float mean = block_sum(sum, scratch) / float(length);
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < length; i += threads) {
        const float d = row[i] - mean;
        squares += d * d;
    }
    const float rstd = rsqrtf(block_sum(squares, scratch + 32) / float(length) + float(eps));
    for (long long i = threadIdx.x; i < length; i += threads) {
        cunorm_cpu::touch(y + blockIdx.x * length + i, 4, true);
        y[blockIdx.x * length + i] = (row[i] - mean) * rstd;
    }
}

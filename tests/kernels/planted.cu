// Candidates for the tuner's tests: a correct batch_norm_elemt, and broken ones. Tile::kind selects the case; see
// tests/tuning/planted_device.py.

constexpr int right = 1, wrong = 4, crash = 5, hang = 6, outside = 7, random_bits = 8, unwritten = 9;

#if defined(__CUDA_ARCH__) || defined(__CUDACC__)
#define LAUNCH_NUMBER 0
#else
static int launch_number = 0;
#define LAUNCH_NUMBER (launch_number++)
#endif

extern "C" __global__ void planted(const data_t* x, const stat_t* mean, const stat_t* invstd, const gamma_t* gamma,
                                   const beta_t* beta, data_t* y, long long C, long long HxW, long long size) {
    const int number = LAUNCH_NUMBER;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) {
        const long long c = i / HxW % C;
        float value = (x[i] - mean[c]) * (invstd[c] * gamma[c]) + beta[c];
        if (Tile::kind == wrong) value *= 1.001f;
        // The next float32 number, in every second launch.
        if (Tile::kind == random_bits && i == 3 && number / blockDim.x % 2) value *= 1.0f + 1.2e-7f;
        if (Tile::kind == unwritten && i == size - 1) continue;
        y[i] = value;
    }
    if (Tile::kind == outside && threadIdx.x == 0) y[size] = 0.0f;
    if (Tile::kind == crash) {
        volatile data_t* nowhere = reinterpret_cast<data_t*>(8);
        *nowhere = 1.0f;
    }
    if (Tile::kind == hang) {
        volatile int forever = 1;
        while (forever != 0) {
        }
    }
}

// Stores its arguments and its launch indices, for the test to compare.
extern "C" __global__ void arguments(long long* integers, long long a, double b, double* reals, double c, long long d,
                                     const float* nothing) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        integers[0] = a;
        integers[1] = d;
        integers[2] = nothing == nullptr;
        integers[3] = gridDim.x * 1000 + blockDim.x;
        integers[4] = gridDim.y + gridDim.z + blockDim.y + blockDim.z;
        integers[5] = threadIdx.y + threadIdx.z + blockIdx.y + blockIdx.z;
        reals[0] = b;
        reals[1] = c;
    }
}

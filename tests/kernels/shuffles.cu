// One shuffle per call: kinds 0 to 3 are lane, xor, up and down. The host defines T.
extern "C" __global__ void shuffles(const T* x, T* y, const int* operand, long long kind, long long width) {
    const T value = x[threadIdx.x];
    const int by = operand[threadIdx.x], w = static_cast<int>(width);
    const unsigned all = 0xffffffffu;
    T result = {};
    switch (kind) {
        case 0:
            result = __shfl_sync(all, value, by, w);
            break;
        case 1:
            result = __shfl_xor_sync(all, value, by, w);
            break;
        case 2:
            result = __shfl_up_sync(all, value, unsigned(by), w);
            break;
        default:
            result = __shfl_down_sync(all, value, unsigned(by), w);
    }
    y[threadIdx.x] = result;
}

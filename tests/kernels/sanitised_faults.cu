// Faults that only the compiler's sanitisers report. Each case is harmless with one operand and a fault with another.
// No access uses load or store. The test finds the lines by the words after them.
extern "C" __global__ void __launch_bounds__(32)
    sanitised_faults(const float* x, float* y, long long what, long long operand) {
    if (threadIdx.x != 5) {
        return;
    }
    const int number = static_cast<int>(operand);
    bool* flags = static_cast<bool*>(cunorm_cpu::shared_memory());
    flags[0] = true;
    float* words = static_cast<float*>(cunorm_cpu::shared_memory());
    float own[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    const char* bytes = reinterpret_cast<const char*>(x);
    switch (what) {
        case 0:
            y[0] = x[number];  // read
            break;
        case 1:
            y[number] = 1.0f;  // write
            break;
        case 2:
            y[0] = own[number];  // index
            break;
        case 3: {
            float* start = own;
            y[0] = start[number];  // frame
            break;
        }
        case 4:
            y[0] = flags[number] ? 1.0f : 2.0f;  // bool
            break;
        case 5:
            y[0] = static_cast<float>(1 << number);  // shift
            break;
        case 6:
            y[0] = static_cast<float>(2147483647 - 40 + number);  // sum
            break;
        case 7:
            y[0] = *reinterpret_cast<const float*>(bytes + number);  // alignment
            break;
        case 8:
            y[0] = static_cast<float>(100 / number);  // division
            break;
        case 9:
            y[0] = words[number] = 7.0f;  // shared
            break;
        case 10:
            __trap();
    }
}

// Block 3 breaks one rule per `kind`. The test depends on the line numbers in this file.
extern "C" __global__ void faults(double* data, long long kind) {
    const unsigned thread = threadIdx.x, lane = thread % 32;
    if (blockIdx.x != 3) {
        __syncthreads();
        return;
    }
    if (kind == 0 && thread != 0) {
        __syncthreads();  // line 9: thread 0 ends instead
    }
    if (kind == 1) {
        if (thread < 32) {
            __syncthreads();  // line 13
        } else {
            __syncthreads();  // line 15
        }
    }
    if (kind == 2 && lane != 7) {
        __shfl_xor_sync(0xffffffffu, 1.0f, 1);  // line 19: lane 7 ends
    }
    if (kind == 3) {
        if (thread == 40) {
            __syncthreads();  // line 23
        } else {
            __shfl_down_sync(0xffffffffu, thread, 1);  // line 25
        }
    }
    if (kind == 4 && thread == 5) {
        cunorm_cpu::touch(reinterpret_cast<char*>(data) + 4, 16, false);
    }
    if (kind == 5 && thread == 33) {
        cunorm_cpu::touch(reinterpret_cast<char*>(data) + 2, 4, true);
    }
    if (kind == 6 && thread == 6) {
        cunorm_cpu::fault("wrong by %d", 42);
    }
    if (kind == 7 && lane < 2) {
        __shfl_sync(lane == 0 ? 3u : 0xfu, thread, 0);  // line 38: two masks
    }
    if (kind == 8 && lane < 2) {
        lane == 0 ? __any_sync(3u, 1) : __all_sync(3u, 1);  // line 41: two intrinsics
    }
    if (kind == 9) {
        __shfl_sync(1u, thread, 0);  // line 44: a lane is not in its own mask
    }
    if (kind == 10 && lane < 2) {
        __shfl_sync(3u, thread, 5);  // line 47: reads a lane outside the mask
    }
    if (kind == 11) {
        __shfl_xor_sync(0xffffffffu, thread, 1, 12);  // line 50: no such width
    }
    if (kind == 12 && thread == 1) {
        __trap();
    }
    if (kind == 13 && lane < 4) {
        __syncwarp(0x1fu);  // line 56: lane 4 ends
    }
    data[thread] = 1.0;
}

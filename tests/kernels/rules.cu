// One rule per `kind`. Block 1 breaks it if `broken` is 1; it is kept if `broken` is 0. x, y, workspace: 64 floats per
// block. 64 floats of dynamic shared memory. The test finds the lines by the words "rule <kind>".
#include "common/async.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    rules(const float* x, float* y, float* workspace, unsigned* flag, long long kind, long long broken) {
    const int thread = threadIdx.x, lane = thread % 32;
    const bool breaks = broken != 0 && blockIdx.x == 1;
    int offset = 0;
    float* shared = shared_array<float>(offset, Tile::threads);
    const long long base = static_cast<long long>(blockIdx.x) * Tile::threads, all = gridDim.x * Tile::threads;
    float value = load(x, base + thread);
    if (kind == 0 && thread == 5) {
        value = load(x, breaks ? all : all - 1);  // rule 0: past the end of an input
    }
    if (kind == 1 && thread == 5) {
        value = load(x, breaks ? -1 : 0);  // rule 1: before the start of an input
    }
    if (kind == 2 && thread == 5) {
        store(y, breaks ? all + 3 : all - 1, 1.0f);  // rule 2: past the end of an output
    }
    if (kind == 3 && thread == 5) {
        store(workspace, breaks ? all + 1000 : all - 1, 1.0f);  // rule 3: far past the end of the workspace
    }
    if (kind == 4 && thread == 4) {
        value = load_whole(x + (breaks ? 1 : 0)).get(0);  // rule 4: misaligned vector
    }
    if (kind == 5) {
        shared[thread] = value;
        __syncthreads();
        if (thread == 5) {
            const Pack<float>* const packs = reinterpret_cast<Pack<float>*>(shared + (breaks ? 2 : 4));
            const Pack<float> whole = *packs;  // rule 5: misaligned pack read
            value = whole.get(1);
        }
    }
    if (kind == 6) {
        shared[thread == 5 && breaks ? 64 : thread] = value;  // rule 6: more shared memory than launched with
    }
    if (kind == 7) {
        shared[breaks && thread == 9 ? 8 : thread] = value;  // rule 7: two writers of a word
    }
    if (kind == 8) {
        shared[thread] = value;
        if (!breaks) {
            __syncthreads();
        }
        value = shared[63 - thread];  // rule 8: read without a barrier
    }
    if (kind == 9) {
        shared[thread] = value;
        if (!breaks) {
            __syncwarp();
        }
        value = shared[thread ^ 1];  // rule 9: read of another lane's value without a __syncwarp
    }
    if (kind == 10) {
        if (thread != 7 || !breaks) {
            shared[thread] = value;
        }
        __syncthreads();
        value = shared[63 - thread];  // rule 10: an unwritten value reaches the output
    }
    if (kind == 11 && thread == 5) {
        value = breaks ? x[3] : load(x, 3);  // rule 11: raw dereference
    }
    if (kind == 12) {
        if (breaks && thread < 32) {
            __syncthreads();  // rule 12: divergent barriers
        } else {
            __syncthreads();
        }
    }
    if (kind == 13 && !(breaks && thread == 63)) {
        __syncthreads();  // rule 13: a thread is missing
    }
    if (kind == 14 && !(breaks && lane == 3)) {
        value = __shfl_sync(0xffffffffu, value, 3);  // rule 14: a lane is missing
    }
    if (kind == 15) {
        value = __shfl_sync(lane < 16 ? 0xffffu : 0xffff0000u, value, breaks ? 20 : lane);  // rule 15: lane not in mask
    }
    if (kind == 16 && thread == 0) {
        if (!breaks) {
            store_release(flag + blockIdx.x, 1u);
        }
        while (load_acquire(flag + blockIdx.x) == 0) {  // rule 16: endless wait
        }
    }
    if (kind == 17 && thread == 5 && breaks) {
        *reinterpret_cast<float*>(static_cast<unsigned long long>(64)) = value;  // rule 17: no such array
    }
    if (kind == 19) {
        shared[thread] = value;
        __syncthreads();
        value = shared[0];
        value += __shfl_xor_sync(0xffffffffu, value, 1);
        if (lane >= 16) {
            __syncwarp(0xffff0000u);  // only some of the readers
        }
        value += __shfl_xor_sync(0xffffffffu, value, 1);
        if (!breaks) {
            __syncthreads();
        }
        if (thread == 0) {
            shared[0] = 2;  // rule 19: write after other threads' reads, without a barrier
        }
    }
    store(y, base + thread, value);
    if (kind == 18 && thread == 5) {
        store(workspace, base + (breaks ? -64 : 0), 1.0f);
        if (breaks) {
            store(const_cast<float*>(x), -1, 1.0f);  // rule 18: a store before an input
        }
    }
}

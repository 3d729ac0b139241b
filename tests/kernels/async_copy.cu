// gate: sm_80
// y = 2 x for rows of tiles, with two stages: each tile is copied to shared memory while the previous one is processed.
// A thread reads packs that another thread has copied. So a barrier follows each wait, and another one precedes the
// next copy into the same stage.
#include "common/async.cuh"

constexpr int stages = 2;

extern "C" __global__ void __launch_bounds__(Tile::threads)
    async_copy(const data_t* x, data_t* y, long long tiles, long long shared_offset) {
    constexpr int tile = Tile::threads * pack_size;
    int offset = static_cast<int>(shared_offset);
    Pack<data_t>* staged = shared_array<Pack<data_t>>(offset, stages * Tile::threads);
    const long long base = blockIdx.x * tiles * tile;
    const int thread = threadIdx.x, other = Tile::threads - 1 - thread;
    copy_async(staged + thread, x + base + thread * pack_size);
    copy_async_commit();
    for (long long t = 0; t < tiles; ++t) {
        const int stage = static_cast<int>(t % stages);
        if (t + 1 < tiles) {
            copy_async(staged + (1 - stage) * Tile::threads + thread, x + base + (t + 1) * tile + thread * pack_size);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        Pack<data_t> pack = staged[stage * Tile::threads + other];
        for (int i = 0; i < pack_size; ++i) {
            pack.set(i, narrow<data_t>(2 * widen(pack.get(i))));
        }
        store_whole(y + base + t * tile + other * pack_size, pack);
        __syncthreads();
    }
}

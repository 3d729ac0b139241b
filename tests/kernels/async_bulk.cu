// gate: sm_90
// y = 2 x by a pipeline. Thread 0 loads tiles by bulk copies and mbarriers. All warps but the first double the tiles in
// place. One thread stores each tile by a bulk store. Phases of the mbarriers: full: the tile has landed. worked: all
// workers have doubled their packs. empty: the bulk store has read the tile, so that the stage can be filled again.
#include "common/async.cuh"

constexpr int stages = 2;

extern "C" __global__ void __launch_bounds__(Tile::threads)
    async_bulk(const data_t* x, data_t* y, long long tiles, long long packs) {
    int offset = 0;
    mbarrier_t* full = shared_array<mbarrier_t>(offset, stages);
    mbarrier_t* empty = shared_array<mbarrier_t>(offset, stages);
    mbarrier_t* worked = shared_array<mbarrier_t>(offset, stages);
    Pack<data_t>* staged = shared_array<Pack<data_t>>(offset, stages * static_cast<int>(packs));
    const int thread = threadIdx.x, workers = Tile::threads - 32;
    const unsigned bytes = static_cast<unsigned>(packs) * access_bytes;
    const long long length = packs * pack_size, base = blockIdx.x * tiles * length;
    if (thread == 0) {
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(full + s, 1);
            mbarrier_init(worked + s, static_cast<unsigned>(workers));
            mbarrier_init(empty + s, 1);
        }
    }
    __syncthreads();
    if (thread == 0) {
        unsigned parity = 0;
        for (long long t = 0; t < tiles; ++t) {
            const int stage = static_cast<int>(t % stages);
            if (t >= stages) {
                mbarrier_wait(empty + stage, parity);
                parity ^= stage == stages - 1;
            }
            mbarrier_arrive_expect(full + stage, bytes);
            bulk_load(staged + stage * packs, x + base + t * length, bytes, full + stage);
        }
    } else if (thread >= 32) {
        unsigned parity = 0;
        for (long long t = 0; t < tiles; ++t) {
            const int stage = static_cast<int>(t % stages);
            mbarrier_wait(full + stage, parity);
            for (int j = thread - 32; j < packs; j += workers) {
                Pack<data_t>& pack = staged[stage * packs + j];
                for (int i = 0; i < pack_size; ++i) {
                    pack.set(i, narrow<data_t>(2 * widen(pack.get(i))));
                }
            }
            fence_async();
            mbarrier_arrive(worked + stage);
            if (thread == 32) {
                mbarrier_wait(worked + stage, parity);
                bulk_store(y + base + t * length, staged + stage * packs, bytes);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(empty + stage);
            }
            parity ^= stage == stages - 1;
        }
    }
}

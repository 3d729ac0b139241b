// What a forward writes of a run whose elements have a gamma and a beta each: a row of LayerNorm, a group with HxW = 1.
#include "common/parameters.cuh"
#include "partition/team.cuh"

// y of the run in `held`. scale_of(k) and offset_of(k) are the parameters of the k-th pack's elements: packs of them, and
// those of the next pack are asked for before this one's store, which no load passes.
template <int lanes, int blocks, typename ScaleOf, typename OffsetOf, typename Through>
__device__ __forceinline__ void write_run(data_t* y, const Run<lanes, blocks>& run,
                                          const Pack<data_t> (&held)[Tile::packs], const Statistics& found,
                                          ScaleOf scale_of, OffsetOf offset_of, Through through) {
    auto next_scale = scale_of(0);
    auto next_offset = offset_of(0);
#pragma unroll
    for (int k = 0; k < Tile::packs; ++k) {
        const auto scale = next_scale;
        const auto offset = next_offset;
        if (k + 1 < Tile::packs) {
            next_scale = scale_of(k + 1);
            next_offset = offset_of(k + 1);
        }
        Pack<data_t> out = {};
#pragma unroll
        for (int i = 0; i < pack_size; ++i) {
            const Affine affine = {found.mean, found.rstd * scale.of(i), offset.of(i)};
            out.set(i, narrow<data_t>(through(normalised(widen(held[k].get(i)), affine))));
        }
        store_pack(y + run.start, run.first(k), run.length, out);
    }
}

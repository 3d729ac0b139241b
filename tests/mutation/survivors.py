"""The mutants that no check can distinguish from the original, each with the reason.

"Speed only" marks a mutant that gives correct results and does more work than necessary. A run fails if the mutant of
an entry is killed or no longer exists, and if a surviving mutant has no entry.
"""

from __future__ import annotations

Key = tuple[str, str, str, int]  # file, stripped line, kind, index among mutants of this kind in lines with this text

NO_ELEMENT_LEFT = "Speed only: left_over() finds no element for an item past the last."
NO_PACK_LEFT = "Speed only: `j < packs` below leaves nothing to do."
NULL_RESULTS = "Speed only: store_channel() skips each result that is null."
EMPTY_ROUND = "Speed only: every team of that round has an empty run."
NO_X = "Speed only: without x, held_x is all zeros and only dbeta is wanted. The products are added to unused sums."
SAME_STATISTICS = "Speed only: every lane of the team has the same statistics and stores them to the same address."
ZEROS = "Speed only: the copies of packs within the row overwrite the zeros."
LIVE_ALONE = "A batch has at most as many live packs as loads, and only live ones are used."
WIDER = "Speed only: a part with more threads than columns leaves some of them idle."
COPIED_TWICE = "Speed only: packs are copied twice, to the same place."
SAME_IN_THE_WARP = "Speed only: every lane of the warp has the same values and stores them to the same address."
LONGER_CHAIN = "Equally correct: a chain has one more pack, so the order of additions differs."
ALWAYS_SHIFTS = (
    "True in every launch: owners() in ops/common/strips.py and `owners` in ops/group_norm/warp.py make teams * "
    "length a multiple of a pack, or there is one team per row."
)
ALWAYS_SHIFTS_BANDS = (
    "True in every launch: owners() in ops/common/strips.py makes bands * length a multiple of a pack, or there is one "
    "band per row."
)
TWIN = (
    "Counterpart of a GPU instruction for the CPU executor. There, blocks that wait for each other take turns in one "
    "thread, so a missing fence has no effect."
)
LANDS_IN_ORDER = (
    "The copies of one round are issued too early, and again when they are due. On a GPU they might land before the "
    "slot has been read. The executor lands copies in the order of their issue."
)
BY_ELEMENT = "Speed only: the pack is accessed element by element."
SAME_PTX = (
    "NVRTC 12.8 and 13.5 generate the same PTX for the test kernels with and without it. The C++ language allows the "
    "compiler to move accesses across the statement, or to merge two statements, if it is missing."
)
RELEASING_ARRIVAL = "The executor has only the releasing arrival, which needs no fence."
NO_INSTRUCTION = "Speed only: an optimisation barrier, which contains no instruction."
#: (line, index) of the mutants of async.cuh without a memory clobber, or without volatile where they have an output.
CLOBBERS = (
    ('asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");', 4),
    ('asm volatile("cp.async.commit_group;" ::: "memory");', 1),
    ('asm volatile("cp.async.wait_group %0;" ::"n"(open) : "memory");', 2),
    ('asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" '
     '::"r"(shared_address(barrier)), "r"(arrivals) : "memory");', 3),
    ('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', 2),
    ('asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");', 2),
    ('asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)',
     4),
    ('"r"(parity)', 1),
    ('"l"(from), "r"(bytes), "r"(shared_address(barrier))', 1),
    ('"r"(bytes)', 1),
    ('asm volatile("cp.async.bulk.commit_group;" ::: "memory");', 1),
    ('asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(open) : "memory");', 2),
    ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', 1),
    ('asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");', 2),
    ('asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");', 1),
    ('asm volatile("fence.acq_rel.cluster;" ::: "memory");', 2),
    ('asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");', 2),
    ('asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");', 1),
    ('asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");', 4),
    ('asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");', 4),
    ('asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" '
     ': "=r"(before) : "l"(address), "r"(value) : "memory");', 1),
    ('asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" '
     ': "=r"(before) : "l"(address), "r"(value) : "memory");', 5),
    ('asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(address) : "memory");', 1),
    ('asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(address) : "memory");', 3),
)  # fmt: skip

# fmt: off
FIRST_CENTRE = "Rounding only: sums about any centre are corrected. tests/ops/test_accuracy.py limits the errors."
OTHER_LANES = "Speed and bounds: only lanes with a group emit results. The others read the next sets, which exist here."
SURVIVORS: dict[Key, str] = {
    ("common/async.cuh", "cunorm_cpu::fence();", "barrier", 0): TWIN,
    ("common/async.cuh", "cunorm_cpu::fence();", "barrier", 1): TWIN,
    **{("common/async.cuh", line, "ptx", nth): SAME_PTX for line, nth in CLOBBERS},
    ("common/async.cuh", 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "ptx", 0): (
        "The executor's mbarriers are initialised at once for all threads, and for copies too."
    ),
    ("common/async.cuh", 'asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");', "ptx", 1): (
        "The executor has only the releasing arrival."
    ),
    ("common/async.cuh", 'asm volatile("fence.acq_rel.cluster;" ::: "memory");', "ptx", 0): RELEASING_ARRIVAL,
    ("common/async.cuh",
     'asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");', "ptx", 2): (
        "The executor runs blocks that wait for each other in one thread, so that every load acquires."
    ),
    ("common/types.cuh", 'asm volatile("" : "+r"(value));', "ptx", 0): NO_INSTRUCTION,
    ("common/types.cuh", 'asm volatile("" : "+r"(value));', "ptx", 1): NO_INSTRUCTION,
    ("common/types.cuh", 'asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));', "ptx", 0):
        NO_INSTRUCTION,
    ("common/types.cuh", 'asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));', "ptx", 1):
        NO_INSTRUCTION,
    ("common/types.cuh", '"r"(pack.word[2]), "r"(pack.word[3])', "ptx", 0): SAME_PTX,
    ("batch_norm/joined_rows.cuh", "if (sweep.has(slot)) {", "guard", 0): (
        "Speed only: `channel` is taken modulo C, so the additional loads are in bounds. Their values belong to a slot "
        "without a channel or to an idle thread, and gather() does not emit them."
    ),
    ("batch_norm/batch_norm_backward_reduce_sweep.cu",
     "for (long long item = blockIdx.x; item < batch.items; item += gridDim.x) {",
     "guard", 0): NO_ELEMENT_LEFT,
    ("batch_norm/batch_norm_stats_sweep.cu",
     "for (long long item = blockIdx.x; item < batch.items; item += gridDim.x) {",
     "guard", 0): NO_ELEMENT_LEFT,
    ("batch_norm/flat_runs.cuh", "HxW = static_cast<int>(HxW_ < chunk ? HxW_ : chunk);", "guard", 1): (
        "Differs only for planes of more elements than an int can count, which are too large for this battery. "
        "test_elements_past_2_to_the_31 in test_batch_norm.py covers one."
    ),
    ("batch_norm/flat_runs.cuh",
     "for (int first = 0; first < packs; first += Tile::threads * loads_in_flight) {",
     "guard", 0): NO_PACK_LEFT,
    ("batch_norm/flat_runs.cuh", "} else if (j < packs) {", "guard", 0): (
        "Speed only: load_pack reads nothing past the run's end, and the pack is not used."
    ),
    ("batch_norm/flat_runs.cuh", "if (plain || j < packs) {", "guard", 0): (
        "Speed only: a pack past the run's end has no elements, and store_pack writes nothing."
    ),
    ("common/fold_columns.cuh", "while (width < columns && width < warp_size) {", "guard", 0): WIDER,
    ("common/fold_columns.cuh", "while (width < columns && width < warp_size) {", "guard", 1): WIDER,
    ("common/fold_columns.cuh", "if (part < parts && column < columns && column < live) {", "guard", 0): (
        "Speed only: idle threads fold rows too. These rows exist, and the results of idle threads are stored after "
        "the partial results that fold_parts merges."
    ),
    ("common/fold_columns.cuh", "if (part == 0 && column < live) {", "owner", 0): (
        "Speed only: only the threads of the first part use what was loaded ahead."
    ),
    ("common/fold_columns.cuh", "if (part < parts && column < columns && column < live) {", "guard", 1): (
        "Speed only: idle threads fold the columns of the next block. These exist, and the results are not stored."
    ),
    ("common/fold_columns.cuh",
     "for (long long row = begin + part; row < end; row += rows_at_once * parts) {", "guard", 0): (
        "Speed only: the round past the last has no rows."
    ),
    ("common/fold_columns.cuh", "for (int k = 0; k < rows_at_once; ++k) {", "guard", 0): (
        "The CPU executor does not see a write past a local array. The next round reads that row again."
    ),
    ("common/fold_columns.cuh", "if (row + k * parts < end) {", "guard", 1): (
        "Equally correct: a row past the end was not loaded. It is T{}, which a merge leaves out."
    ),
    ("common/fold_columns.cuh", "if (width > warp_size) {", "guard", 0): (
        "Equally correct: the fold through shared memory is right for every width. It has more barriers."
    ),
    ("common/fold_columns.cuh", "whole = scratch[part == 0 ? column : 0];", "owner", 0): (
        "Equally correct: only the threads of part 0 use what they read."
    ),
    ("common/fold_columns.cuh", "if (warps > 1) {", "guard", 0): (
        "Speed only: one warp folds its own sums once more, through shared memory."
    ),
    ("common/fold_columns.cuh",
     "for (int warp = lane / width; threadIdx.x < warp_size && warp < warps; warp += warp_size / width) {",
     "guard", 0): "Equally correct: only the first warp uses what its threads fold.",
    ("common/fold_columns.cuh", "if (part == 0 && column < columns && column < live) {", "guard", 0): (
        "True in every launch: the host's columns are a power of two, which is the width, or all columns that are live."
    ),
    ("common/fold_columns.cuh", "for (int first = 0; first < columns; first += Tile::threads) {", "guard", 0): (
        "Speed only: the turn past the last has no columns."
    ),
    ("common/reduce.cuh", "while (2 * half < parts) {", "guard", 0): (
        "Speed only: with half == parts, `part + half < parts` is false for all threads of the first round."
    ),
    ("group_norm/backward_slab.cuh", "pieces > 1 ? static_cast<int>(piece_packs) : 0);", "guard", 1): (
        "Speed only: the only piece of a slab has all its packs."
    ),
    ("group_norm/backward_slab.cuh",
     "Pair sums = pieces > 1 ? of_pieces(rank - piece, channel) : totals[channel];", "guard", 1): (
        "Speed only: a block reads its own totals through its address in the cluster."
    ),
    ("group_norm/forward_slab.cuh", "if (lane == 0 && rank == 0) {", "owner", 0): SAME_IN_THE_WARP,
    ("group_norm/group_norm_backward_grid.cu", "if (threadIdx.x % warp_size == 0) {", "owner", 0): SAME_IN_THE_WARP,
    ("group_norm/backward_registers.cuh", "for (int base = first; base < past; base += lanes / unit) {", "guard", 0): (
        "Speed only: no unit of that round has a channel."
    ),
    ("group_norm/backward_registers.cuh", "if (live && lane == 0) {", "owner", 0): (
        "Speed only: every lane of the unit has the same sums and stores them to the same address."
    ),
    ("group_norm/backward_registers.cuh",
     "for (long long first = static_cast<long long>(blockIdx.x / cluster) * team.count; first < items;",
     "guard", 0): EMPTY_ROUND,
    ("group_norm/backward_registers.cuh",
     "const long long item = (samples > 1 ? sample : 0) + first + team.index();", "guard", 1): (
        "Speed only: with the blocks of one sample in a cluster, `sample` is 0, which the compiler does not know."
    ),
    ("group_norm/backward_columns.cuh", "cluster_fence();", "barrier", 0): RELEASING_ARRIVAL,
    ("group_norm/backward_columns.cuh", "const int adders = parts_here > pack_size ? parts_here / pack_size : 1;",
     "guard", 0): "Speed only: one thread adds up all parts of a channel.",
    ("group_norm/backward_registers.cuh", "cluster_fence();", "barrier", 0): RELEASING_ARRIVAL,
    ("group_norm/backward_registers.cuh",
     "const acc_t scale_alone = alone ? weighed(group, run.length > 0, found).scale : acc_t(1);",
     "guard", 0): "Speed only: a team without a group loads the gamma of an existing group and does not use it.",
    ("group_norm/backward_registers.cuh", "if (HxW == 1 && parameters.wanted()) {", "guard", 0): NULL_RESULTS,
    ("group_norm/backward_registers.cuh",
     "if (parameters.wanted() && team.rank() == 0 && team.lane() == 0 && HxW > 1) {", "guard", 0): NULL_RESULTS,
    ("group_norm/backward_registers.cuh",
     "if (parameters.wanted() && team.rank() == 0 && team.lane() == 0 && HxW > 1) {", "owner", 0): (
        "Speed only: every lane of the team has the same sums and stores them to the same address."
    ),
    ("group_norm/backward_registers.cuh",
     "if (parameters.wanted() && team.rank() == 0 && team.lane() == 0 && HxW > 1) {", "guard", 1): (
        "Speed only: the sums of a group of one element are its terms, so the same lane stores the same values twice."
    ),
    ("group_norm/slab_columns.cuh", "for (int g = 0; g < Tile::slab_groups; ++g) {", "guard", 1): (
        "The sum that is stored past the last group is never read."
    ),
    ("group_norm/slab_columns.cuh", "for (int g = 1; g < Tile::slab_groups; ++g) {", "guard", 0): (
        "The sums past the last group are read and never chosen: no column has a group of that number."
    ),
    ("group_norm/forward_registers.cuh",
     "for (long long first = static_cast<long long>(blockIdx.x / blocks) * team.count; first < N * groups;",
     "guard", 0): EMPTY_ROUND,
    ("group_norm/forward_registers.cuh", "if (team.rank() == 0 && team.lane() == 0) {", "owner", 0): SAME_STATISTICS,
    ("partition/backward_strips.cuh",
     "for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {",
     "guard", 0): (
        "Speed only: the warps of an item past the last have no strip, and so no rows and no columns."
    ),
    ("partition/backward_strips.cuh",
     "x == nullptr ? acc_t(0) : (acc_t(widen(held_x[k].get(i))) - mean_of_row) * rstd_of_row;",
     "guard", 0): NO_X,
    ("partition/backward_strips.cuh", "if (threadIdx.x % warp_size == 0) {", "owner", 0): (
        "Speed only: every lane of the warp has the same sums and stores them to the same address."
    ),
    ("partition/backward_strips.cuh",
     "for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= cut.bands) {",
     "guard", 1): (
        "Speed only: a strip without elements loads a row's sums and statistics, in bounds, and neither loads nor "
        "stores elements."
    ),
    ("partition/add_residual.cu",
     "for (long long at = (static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x) * pack_size; at < count;",
     "guard", 0): "Speed only: a pack past the end has no elements.",
    ("partition/add_residual.cu",
     "const int length = count - at < pack_size ? static_cast<int>(count - at) : pack_size;",
     "guard", 0): (
        "Equally correct for fewer than 2^31 elements: a pack is whole in any longer range. Larger arrays are too "
        "large for this battery."
    ),
    ("rms_norm/rms_norm_split.cu", "for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {",
     "guard", 0): "Speed only: the warps of an item past the last have no strip, and so no rows.",
    ("rms_norm/rms_norm_split.cu", "if (threadIdx.x % warp_size == 0) {", "owner", 0): SAME_IN_THE_WARP,
    ("partition/forward_strips.cuh",
     "for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= cut.bands) {",
     "guard", 1): (
        "Speed only: a strip without elements loads a row's statistics, in bounds, and neither loads nor stores "
        "elements."
    ),
    ("common/reduce.cuh", "return warp == 0 ? fold(lane < block_warps ? scratch[lane] : T{}) : value;", "owner", 0): (
        "Speed only: thread 0 still has the correct result, and the results of other threads are not used."
    ),
    ("partition/column_moments.cuh", "if (begin >= end || count == acc_t(0)) {", "guard", 0): (
        "Speed only: no group reads the moments of no slots."
    ),
    ("partition/column_moments.cuh", "near = i >= begin ? mean[i].first : near;", "guard", 0): FIRST_CENTRE,
    ("partition/column_moments.cuh", "near = i >= begin ? mean[i].first : near;", "guard", 1): FIRST_CENTRE,
    ("partition/column_moments.cuh",
     "step = i >= begin && i < end ? step + share * ((mean[i].first - near) + mean[i].second) : step;",
     "guard", 0): FIRST_CENTRE,
    ("partition/column_moments.cuh",
     "step = i >= begin && i < end ? step + share * ((mean[i].first - near) + mean[i].second) : step;",
     "guard", 2): FIRST_CENTRE,
    ("partition/column_moments.cuh", "return usable_shift(batch.live < 3 ? a : (low < below ? below : low));",
     "guard", 1): (
        "Rounding only: sums may be about any element. tests/ops/test_accuracy.py limits the errors."
    ),
    ("partition/column_moments.cuh", "for (int k = 0; k < batch.loads; ++k) {", "guard", 0): LIVE_ALONE,
    ("partition/column_moments.cuh", "if (rows >= most) {", "guard", 0): (
        "Rounding and speed only: the centres may move after every batch."
    ),
    ("partition/column_moments.cuh", "most = most < longest_chain ? 2 * most : longest_chain;", "guard", 0): (
        "Rounding and speed only: the centres move later. tests/ops/test_accuracy.py limits the errors."
    ),
    ("partition/column_moments.cuh", "most = most < longest_chain ? 2 * most : longest_chain;", "guard", 1): (
        "Rounding and speed only: the centres move later. tests/ops/test_accuracy.py limits the errors."
    ),
    ("partition/sweep_moments.cuh", "for (int k = 0; k < batch.loads; ++k) {", "guard", 0): LIVE_ALONE,
    ("partition/pack_span.cuh", "return end > begin ? end - begin : 0;", "guard", 1): (
        "end - begin is never negative: each pack of a sweep overlaps its run, and the span of a step past the last "
        "is {0, 0, 0}."
    ),
    ("partition/pack_span.cuh", "if (last && i + 1 < pack_size && where.holds(i + 1)) {", "guard", 0): (
        "Speed only: looks up the channel of the next pack's first element, which is in the run, and does not use it."
    ),
    ("partition/backward_rows.cuh",
     "for (long long first = 0; first < rows; first += teams) {", "guard", 0): EMPTY_ROUND,
    ("partition/backward_rows.cuh",
     "const acc_t xhat = from.x != nullptr && there ? (value - mean_of_row) * rstd_of_row : acc_t(0);",
     "guard", 0): NO_X,
    ("partition/backward_rows.cuh",
     "const int least = merged > 1, shared_rows = kept_t::rows_for(kinds) > least ? kept_t::rows_for(kinds) : least;",
     "guard", 1): (
        "Only a block of one team then has too few rows. Nothing follows its sums in shared memory, and the host's "
        "size of shared memory includes the row."
    ),
    ("partition/backward_rows.cuh", "if (run.first(k) >= run.columns) {", "guard", 0): ZEROS,
    ("partition/backward_rows.cuh", "if (run.first(k) >= run.columns || from.x == nullptr) {", "guard", 0): ZEROS,
    ("partition/backward_rows.cuh", "if (ahead < last) {", "guard", 0): (
        "Speed only: the row of the last place is copied now, and once more before it is used."
    ),
    ("partition/backward_rows.cuh",
     "__syncwarp();  // else the compiler loads all packs' column sums at once and runs out of registers",
     "barrier", 0): "Affects the use of registers only: each lane adds to its own sums.",
    ("partition/forward_rows.cuh", "if (length % pack_size == 0) {  // a constant if the length is",
     "guard", 0): ALWAYS_SHIFTS,
    ("partition/forward_rows.cuh", "return teams >= rows || teams * length % pack_size == 0;",
     "guard", 0): ALWAYS_SHIFTS,
    ("partition/forward_rows.cuh", "return teams >= rows || teams * length % pack_size == 0;",
     "guard", 1): ALWAYS_SHIFTS,
    ("partition/forward_rows.cuh", "for (long long first = 0; Tile::single_row || first < rows; first += teams) {",
     "guard", 0): EMPTY_ROUND,
    ("partition/forward_rows.cuh", "if (team.lane() == 0 && team.rank() == 0) {",
     "owner", 0): SAME_STATISTICS,
    ("partition/slab.cuh", "return start + (first_in(0) < begin ? begin : first_in(0));", "guard", 1): (
        "Equally correct: selects the group's first element, which may be in another block's piece and is not "
        "overwritten yet. Any element of the group is a valid shift, because the second pass corrects the first."
    ),
    ("partition/slab.cuh", "const int parts = units / here < 1 ? 1 : units / here;", "guard", 1): (
        "Speed only: one unit sums a channel, and the remaining units are idle."
    ),
    ("partition/slab.cuh", "for (int base = 0; base < here * parts; base += units) {", "guard", 0): (
        "Speed only: no unit of that round has an item."
    ),
    ("partition/slab.cuh",
     "for (const int past = j + chain * step; j < past && j * pack_size < end; j += step) {", "guard", 0):
        LONGER_CHAIN,
    ("partition/slab.cuh",
     "for (const int past = j + chain * step; j < past && j * pack_size < end; j += step) {", "guard", 1):
        "Speed only: a pack that begins at the end contributes no element.",
    ("partition/slab.cuh",
     "for (const int past = row + chain * parts; row < past && row < end; row += parts) {", "guard", 0):
        LONGER_CHAIN,
    ("partition/slab.cuh",
     "__device__ __forceinline__ int columns() const { return row_packs < Tile::threads ? row_packs : Tile::threads; }",
     "guard", 0): "Speed only: the threads of columns past the last are idle, and each column has one part.",
    ("partition/slab.cuh", "for (int first = 0; first < row_packs; first += columns) {", "guard", 0): (
        "Speed only: no thread has a column in that round, and no total changes."
    ),
    ("partition/slab.cuh", "for (int row = part; part < parts && row < rows; row += parts) {", "guard", 0): (
        "Speed only: idle threads store the same values as a column's own threads, and nothing for a column past the "
        "last."
    ),
    ("partition/stage.cuh",
     "for (int base = begin + threadIdx.x; base < end; base += Tile::threads * others_in_flight) {",
     "guard", 0): (
        "Speed only: `j < end` below leaves nothing to do."
    ),
    ("partition/strips.cuh",
     "__device__ __forceinline__ bool may_shift() const { return bands >= rows || bands * length % pack_size == 0; }",
     "guard", 0): ALWAYS_SHIFTS_BANDS,
    ("partition/strips.cuh",
     "__device__ __forceinline__ bool may_shift() const { return bands >= rows || bands * length % pack_size == 0; }",
     "guard", 1): ALWAYS_SHIFTS_BANDS,
    ("partition/strips.cuh", "band = live ? own / cut.strips : 0;", "guard", 0): (
        "A warp without a strip has length 0: its band only enters addresses that are not used."
    ),
    ("partition/strips.cuh", "strip = live ? own - band * cut.strips : 0;", "guard", 0): (
        "A warp without a strip has length 0: its strip only enters addresses that are not used."
    ),
    ("partition/strips.cuh",
     "length = live && left > 0 ? static_cast<int>(left < Strips::span - ahead ? left : Strips::span - ahead) : 0;",
     "guard", 2): (
        "A negative length means no element, as 0 does."
    ),
    ("partition/strips.cuh",
     "length = live && left > 0 ? static_cast<int>(left < Strips::span - ahead ? left : Strips::span - ahead) : 0;",
     "guard", 4): (
        "A lane's packs end at the end of the strip, whatever the strip's length. Rows of more elements than an int "
        "can count are too large for this battery; test_a_row_of_more_than_2_to_the_31_elements kills the mutant."
    ),
    ("partition/sweep.cuh",
     "return static_cast<int>(columns_of(cut) < cut.most_columns ? columns_of(cut) : cut.most_columns);",
     "guard", 0): (
        "Speed only: the threads of columns past the last are idle, and each column has one part."
    ),
    ("partition/sweep.cuh",
     "if (few && before < sweep_t::slots && sweep.has(static_cast<int>(before))) {", "guard", 0): (
        "Speed only: the values of the next group, which exists, are loaded and not used."
    ),
    ("partition/sweep.cuh",
     "__device__ __forceinline__ bool live() const { return part < parts && first_channel < C; }",
     "guard", 1): (
        "Speed only: rows of a column past the last have no elements, and the results of that column are not emitted."
    ),
    ("partition/sweep.cuh", "return of_part < rows ? (rows - of_part + parts - 1) / parts : 0;", "guard", 1): (
        "The division gives 0 for every part past the rows, because rows - of_part is at most 0 and more than -parts."
    ),
    ("partition/sweep.cuh", "const int length = left < pack_size ? static_cast<int>(left) : pack_size;", "guard", 1): (
        "Every length of at least pack_size has the same effect."
    ),
    ("partition/sweep.cuh", "while (width < warp_size && width * block_warps < channels) {", "guard", 1): (
        "Speed only: fewer lanes merge the sets of a channel."
    ),
    ("partition/sweep.cuh", "for (int base = 0; base < channels; base += block_warps * width) {", "guard", 0): (
        "Speed only: no lane is live in a round past the last channel."
    ),
    ("partition/sweep.cuh", "if (live && lane < width && channel < C) {", "guard", 1): SAME_IN_THE_WARP,
    ("partition/sweep.cuh", "for (int base = 0; base < steps; base += loads) {", "guard", 0): (
        "Speed only: the batch past the last has no packs, and the loop ends there."
    ),
    ("partition/team.cuh",
     "cluster_fence();  // only by the thread that publishes: the others need not wait for their stores",
     "barrier", 0): "The CPU executor treats every arrival at a cluster barrier as a release.",
    ("partition/team.cuh",
     "assume(lane >= 0 && lane < lanes);  // the compiler drops the remainder if lanes is the size of the block",
     "guard", 0): "Speed only: a remainder of a thread's index is never negative; the compiler is told so.",
    ("partition/team.cuh",
     "assume(lane >= 0 && lane < lanes);  // the compiler drops the remainder if lanes is the size of the block",
     "guard", 1): "Speed only: a remainder is less than its divisor; the compiler is told so.",
    ("partition/team.cuh",
     "if (shift + columns < pack_size) {", "guard", 0): "Speed only: sums may be relative to any element of the run.",
    ("partition/team.cuh",
     "ahead = may_shift && past + whole <= blocks * capacity ? past : 0;", "guard", 0): (
        "Speed only: a run whose first pack begins at its first element is read element by element, with equally "
        "correct results."
    ),
    ("partition/work_queue.cuh",
        "return tiles + prefetch_tiles < tiles * slabs ? tiles + prefetch_tiles : tiles * slabs;", "guard", 0): (
        "Speed only: all sums precede the first output, whose data may then have left the cache."
    ),
    ("partition/work_queue.cuh",
        "return tiles + prefetch_tiles < tiles * slabs ? tiles + prefetch_tiles : tiles * slabs;", "guard", 1): (
        "Speed only: tickets past the last sums are no-ops, and the host's count of tickets includes them."
    ),
    ("common/types.cuh", "const bool whole = first >= 0 && first + count <= length;", "guard", 0): BY_ELEMENT,
    ("common/types.cuh", "const bool whole = first >= 0 && first + Pack<T>::size <= length;", "guard", 0): BY_ELEMENT,
    ("kernels/cluster_exchange.cu", "cluster_fence();", "barrier", 0): RELEASING_ARRIVAL,
    ("kernels/ticket_wait.cu", "if (thread == 0) {", "owner", 2): (
        "Speed only: every thread publishes the same word after the barrier."
    ),
    ("layer_norm/layer_norm_backward_grid.cu", "for (int team = 0; team < TeamSlab::teams; ++team) {", "guard", 1): (
        "Speed only: no thread belongs to the team past the last."
    ),
    ("layer_norm/layer_norm_backward_grid.cu",
     "if (threadIdx.x % warp_size == 0) {  // all lanes have loaded their parts before warp_sum", "owner",
     0): SAME_IN_THE_WARP,
    ("layer_norm/layer_norm_grid.cu", "if (threadIdx.x % warp_size == 0) {", "owner", 1): SAME_IN_THE_WARP,
    ("layer_norm/layer_norm_grid.cu", "for (int i = 0; i < lane_parts; ++i) {", "guard", 0): (
        "The value after the array changes the centre, and the error of a centre is corrected."
    ),
    ("group_norm/group_norm_grid_kept.cu", "while (width < warp_size && width * block_warps < groups) {", "guard", 1): (
        "Speed only: fewer lanes merge the sets of a group."
    ),
    ("group_norm/group_norm_grid_kept.cu",
     "for (int base = threadIdx.x / warp_size * width; base < groups; base += block_warps * width) {", "guard", 0): (
        "Speed only: a warp without groups merges no sets."
    ),
    ("group_norm/group_norm_grid_kept.cu",
     "const int channel = static_cast<int>(sweep.first_channel), all = sweep.live() ? static_cast<int>(C) : 0;",
     "guard", 0): "Speed only: a thread without packs loads parameters of another thread's column.",
    ("group_norm/group_norm_backward_grid_kept.cu",
     "for (long long first = threadIdx.x / warp_size * width; first < columns; first += block_warps * width) {",
     "guard", 0): "Speed only: a warp without columns loads and stores nothing.",
    ("group_norm/group_norm_backward_grid_kept.cu",
     "for (long long row = part; row < rows; row += rows_at_once * parts) {", "guard",
     0): "Speed only: nothing is loaded for a row past the last.",
    ("group_norm/group_norm_backward_grid_kept.cu", "for (int k = 0; k < rows_at_once; ++k) {", "guard", 0): (
        "A lane stores past its array of registers, which the CPU executor does not see."
    ),
    ("group_norm/group_norm_backward_grid_kept.cu", "if (row + k * parts < rows && column < columns) {", "guard", 1): (
        "The sums of columns past the last are not emitted."
    ),
    ("group_norm/group_norm_backward_grid_kept.cu",
     "if (part == 0 && column < columns) {", "owner", 0): SAME_IN_THE_WARP,
    ("group_norm/group_norm_backward_grid_kept.cu",
     "if (threadIdx.x % warp_size == 0) {", "owner", 0): SAME_IN_THE_WARP,
    ("group_norm/group_norm_backward_grid_kept.cu",
     "left < fold_channels ? left : fold_channels, N * chunks,", "guard",
     1): "Speed only: several items store the same sums.",
    ("group_norm/group_norm_backward_grid_kept.cu",
     "const int channel = static_cast<int>(sweep.first_channel), all = sweep.live() ? static_cast<int>(sweep.C) : 0;",
     "guard", 0): "Speed only: a thread without packs loads parameters of another thread's column.",
    ("group_norm/kept_sweep.cuh", "for (int k = 0; k < loads(tensors); ++k) {", "guard", 0): COPIED_TWICE,
    ("group_norm/kept_sweep.cuh", "for (int batch = 0; batch < ahead; ++batch) {", "guard", 0): COPIED_TWICE,
    ("group_norm/kept_sweep.cuh", "for (int first = 0; first < loaded; first += loads(tensors)) {", "guard", 0): (
        "Speed only: a batch without packs stores nothing."
    ),
    ("group_norm/kept_sweep.cuh", "for (int k = 0; k < batch.loads; ++k) {", "guard", 0): (
        "Speed only: the pack past the last of a batch does not exist."
    ),
    ("group_norm/kept_sweep.cuh", "for (int base = 0; base < steps; base += loads) {", "guard", 0): (
        "Speed only: a batch without packs adds nothing."
    ),
    ("partition/kept_items.cuh", "if (threadIdx.x == 0) {", "owner", 0): (
        "The count is too large, so blocks do not wait. But blocks of the CPU executor switch only where they draw or "
        "wait, so none is far enough ahead of another. test_traffic.py counts the accesses to the count."
    ),
    ("partition/kept_items.cuh",
     "if (taken == 0) {", "guard", 0): "Speed only: a block without an item would wait without need.",
    ("layer_norm/column_slabs.cuh", "shift = past + columns <= capacity ? past : 0;", "guard", 0): BY_ELEMENT,
    ("layer_norm/column_slabs.cuh", "for (int tensor = 0; tensor < tensors && first < slab.columns; ++tensor) {",
     "guard", 0): "Speed only: a pack of the next slab is loaded too and not used.",
    ("layer_norm/column_slabs.cuh", "for (int i = 0; i < lane_parts; ++i) {", "guard", 1): (
        "Undefined behaviour, which the compiler removes: neither array has that element."
    ),
    ("layer_norm/column_slabs.cuh", "for (int round = 0; round < slots.ahead; ++round) {", "guard", 0): LANDS_IN_ORDER,
    ("layer_norm/column_slabs.cuh",
     "for (int round = slab.rounds() - 1; round >= slab.rounds() - slots.ahead; --round) {", "guard",
     0): LANDS_IN_ORDER,
    ("layer_norm/column_slabs.cuh", "slots.fetch(slab, next < slots.resident_rounds ? -1 : next);", "guard", 0): (
        "Speed only: resident rows are loaded again, to the same place. test_layer_norm_grid.py counts the bytes that "
        "are loaded."
    ),
    ("layer_norm/column_slabs.cuh",
     "__syncwarp();  // reconverge: lanes at an edge have stored element by element",
     "barrier", 0): "Speed only: no lane depends on the stores of another lane.",
}
# fmt: on

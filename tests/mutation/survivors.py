"""The mutants that no check can tell from the original, each with the reason.

"Speed only" is what would be right without the guard, and do more than it has to. An entry whose mutant is killed, or
no longer there, fails the run: so does a survivor without an entry.
"""

from __future__ import annotations

Key = tuple[str, str, str, int]  # file, the line stripped, kind, which of those in lines of that text

NO_ELEMENT_LEFT = "Speed only: left_over() finds no element for an item past the last."
NO_PACK_LEFT = "Speed only: `j < packs` below leaves nothing to do."
NULL_RESULTS = "Speed only: store_channel() leaves out each result that is null."
EMPTY_ROUND = "Speed only: every team of that round has an empty run."
NO_X = "Speed only: without x held_x is zeros and dbeta alone is wanted; the products go into sums that nobody takes."
SAME_STATISTICS = "Speed only: every lane of the team has the same statistics, and stores them to the same place."
SAME_IN_THE_WARP = "Speed only: every lane of the warp has the same values, and stores them to the same place."
LONGER_CHAIN = "Another order of additions, as right: a chain has one pack more."
ALWAYS_SHIFTS = (
    "True in every launch: owners() in ops/layer_norm/split.py, and those of ops/group_norm/warp.py, make teams * "
    "length a multiple of a pack, or there is a team a row."
)
ALWAYS_SHIFTS_BANDS = (
    "True in every launch: owners() in ops/layer_norm/split.py makes bands * length a multiple of a pack, or "
    "there is a band a row."
)
TWIN = (
    "The twin of one instruction for the CPU executor, whose blocks that wait for each other take turns in one thread."
)
LANDS_IN_ORDER = (
    "One round's copies are issued too early, and again when they are due. A GPU might land them before the slot has "
    "been read; the executor lands copies in their order."
)
BY_ELEMENT = "Speed only: element by element."

# fmt: off
SURVIVORS: dict[Key, str] = {
    ("common/async.cuh", "cunorm_cpu::fence();", "barrier", 0): TWIN,
    ("common/async.cuh", "cunorm_cpu::fence();", "barrier", 1): TWIN,
    ("batch_norm/wide_rows.cuh", "if (sweep.has(slot)) {", "guard", 0): (
        "Speed only: `channel` is taken modulo C, so what is then loaded too is in bounds, and goes to a slot of no "
        "channel or an idle thread, which gather() emits for nobody."
    ),
    ("batch_norm/batch_norm_backward_reduce_sweep.cu",
     "for (long long item = blockIdx.x; item < batch.items; item += gridDim.x) {",
     "guard", 0): NO_ELEMENT_LEFT,
    ("batch_norm/batch_norm_stats_block.cu",
     "for (int pass = 0; pass < 2; ++pass) {  // pass 0 finds the centre, pass 1 the moments about it",
     "guard", 0): "Every sample's moments are merged twice: twice the count, the same mean and variance.",
    ("batch_norm/batch_norm_stats_sweep.cu",
     "for (long long item = blockIdx.x; item < batch.items; item += gridDim.x) {",
     "guard", 0): NO_ELEMENT_LEFT,
    ("batch_norm/sample_slabs.cuh",
     "for (int base = threadIdx.x; base < packs; base += Tile::threads * loads_in_flight) {",
     "guard", 0): NO_PACK_LEFT,
    ("batch_norm/sample_slabs.cuh", "if (j < packs) {", "guard", 0): (
        "Speed only: load_pack reads nothing past the run's end, and nobody stores the pack. Channels-last slabs, "
        "which have no such end, are not staged so: ops/batch_norm/strategies.py refuses them."
    ),
    ("batch_norm/sample_slabs.cuh",
     "for (int channel = threadIdx.x; channel < slab.channels; channel += Tile::threads) {",
     "guard", 0): (
        "One item past the totals are padding or the first partial sum, which nobody reads before it is written anew."
    ),
    ("batch_norm/flat_runs.cuh", "HxW = static_cast<int>(HxW_ < chunk ? HxW_ : chunk);", "guard", 1): (
        "Equal but for planes that an int cannot count, too large for this battery: test_elements_past_2_to_the_31 in "
        "test_batch_norm.py has one."
    ),
    ("batch_norm/flat_runs.cuh",
     "for (int base = threadIdx.x; base < packs; base += Tile::threads * loads_in_flight) {",
     "guard", 0): NO_PACK_LEFT,
    ("batch_norm/flat_runs.cuh", "if (j < packs) {", "guard", 0): (
        "Speed only: load_pack reads nothing past the run's end, and nobody uses the pack."
    ),
    ("batch_norm/flat_runs.cuh", "if (j < packs) {", "guard", 1): (
        "Speed only: for a pack past the run's end each() calls nothing and store_pack writes nothing."
    ),
    ("common/columns.cuh", "if (part < parts && column < live) {", "guard", 0): (
        "Speed only: idle threads fold rows too, which are there, and what they find stands behind what is put "
        "together."
    ),
    ("common/reduce.cuh", "while (2 * half < parts) {", "guard", 0): (
        "Speed only: with half == parts the first round finds no `part + half < parts`."
    ),
    ("group_norm/forward_slab.cuh", "if (lane == 0 && rank == 0) {", "owner", 0): SAME_IN_THE_WARP,
    ("group_norm/group_norm_backward_grid.cu", "if (threadIdx.x % warp_size == 0) {", "owner", 0): SAME_IN_THE_WARP,
    ("group_norm/backward_runs.cuh", "for (int base = 0; base < channels; base += lanes / unit) {", "guard", 0): (
        "Speed only: no unit of that round has a channel."
    ),
    ("group_norm/backward_runs.cuh", "if (live && lane == 0) {", "owner", 0): (
        "Speed only: every lane of the unit has the same sums, and stores them to the same place."
    ),
    ("group_norm/backward_runs.cuh",
     "for (long long first = static_cast<long long>(blockIdx.x) * team.count; first < items;",
     "guard", 0): EMPTY_ROUND,
    ("group_norm/backward_runs.cuh",
     "const acc_t gamma_alone = alone && run.length > 0 ? parameter(gamma, group, acc_t(1)) : acc_t(1);",
     "guard", 1): "Speed only: a team without a group asks for the gamma of one that is there, for nothing.",
    ("group_norm/backward_runs.cuh", "if (HxW == 1 && parameters.wanted()) {", "guard", 0): NULL_RESULTS,
    ("group_norm/backward_runs.cuh", "if (parameters.wanted() && team.lane() == 0 && HxW > 1) {",
     "guard", 0): NULL_RESULTS,
    ("group_norm/backward_runs.cuh", "if (parameters.wanted() && team.lane() == 0 && HxW > 1) {", "owner", 0): (
        "Speed only: every lane of the team has the same sums, and stores them to the same place."
    ),
    ("group_norm/backward_runs.cuh", "if (parameters.wanted() && team.lane() == 0 && HxW > 1) {", "guard", 1): (
        "Speed only: a group of one element has its terms for its sums, so the same lane stores the same values twice."
    ),
    ("group_norm/forward_runs.cuh",
     "for (long long first = static_cast<long long>(blockIdx.x) * team.count; first < N * groups;",
     "guard", 0): EMPTY_ROUND,
    ("group_norm/forward_runs.cuh", "if (team.lane() == 0) {", "owner", 0): SAME_STATISTICS,
    ("layer_norm/layer_norm_backward_split.cu",
     "for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {",
     "guard", 0): (
        "Speed only: the warps of an item past the last have no strip, so no rows and no columns."
    ),
    ("layer_norm/layer_norm_backward_split.cu",
     "x == nullptr ? acc_t(0) : (acc_t(widen(held_x[k].get(i))) - mean_of_row) * rstd_of_row;",
     "guard", 0): NO_X,
    ("layer_norm/layer_norm_backward_split.cu", "if (threadIdx.x % warp_size == 0) {", "owner", 0): (
        "Speed only: every lane of the warp has the same sums, and stores them to the same place."
    ),
    ("layer_norm/layer_norm_backward_split.cu",
     "for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= bands) {",
     "guard", 1): (
        "Speed only: a strip without elements loads a row's sums and statistics, in bounds, and neither loads nor "
        "stores elements."
    ),
    ("layer_norm/layer_norm_split.cu",
     "for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= bands) {",
     "guard", 1): (
        "Speed only: a strip without elements loads a row's statistics, in bounds, and neither loads nor stores "
        "elements."
    ),
    ("common/reduce.cuh", "return warp == 0 ? fold(lane < block_warps ? scratch[lane] : T{}) : value;", "owner", 0): (
        "Speed only: the result is right in thread 0 all the same, and no other thread's is used."
    ),
    ("common/moments.cuh", "for (int distance = 1; distance < lanes; distance *= 2) {", "guard", 0): (
        "Callers ask for a warp, and 32 lanes further is the lane itself: moments merged with themselves have twice "
        "the count and twice m2, in every set alike."
    ),
    ("partition/pack_channels.cuh", "return end > begin ? end - begin : 0;", "guard", 1): (
        "Never negative: the packs of a sweep meet their run, and the span of a step past the last is {0, 0, 0}."
    ),
    ("partition/pack_channels.cuh", "if (last && i + 1 < pack_size && where.holds(i + 1)) {", "guard", 0): (
        "Speed only: looks up the channel of the next pack's first element, which the run holds, and does not use it."
    ),
    ("partition/row_gradients.cuh",
     "for (long long first = 0; first < rows; first += teams) {", "guard", 0): EMPTY_ROUND,
    ("partition/row_gradients.cuh",
     "x != nullptr && holds(i) ? (acc_t(widen(held.x[k].get(i))) - mean_of_row) * rstd_of_row : acc_t(0);",
     "guard", 0): NO_X,
    ("partition/row_gradients.cuh",
     "const int least = merged > 1, shared_rows = kept_t::rows_for(kinds) > least ? kept_t::rows_for(kinds) : least;",
     "guard", 1): "Rows are fewer for one team alone, behind whose sums nothing lies; the host counts the row.",
    ("partition/row_gradients.cuh",
     "is_identity || holds(i) ? activation_grad(k, i, weight.of(i), offset.of(i)) : acc_t(0);",
     "guard", 0): (
        "The battery has no activation: test_lanes_outside_a_group_stay_out_of_its_sums in "
        "test_group_norm_activation.py has one."
    ),
    ("partition/row_gradients.cuh",
     "__syncwarp();  // else the compiler loads all packs' column sums at once and runs out of registers",
     "barrier", 0): "Registers only: a lane's sums are its own.",
    ("partition/rows.cuh", "return teams >= rows || teams * length % pack_size == 0;", "guard", 0): ALWAYS_SHIFTS,
    ("partition/rows.cuh", "return teams >= rows || teams * length % pack_size == 0;", "guard", 1): ALWAYS_SHIFTS,
    ("partition/rows.cuh", "for (long long first = 0; first < rows; first += teams) {", "guard", 0): EMPTY_ROUND,
    ("partition/rows.cuh", "if (run.live && team.lane() == 0 && team.rank() == 0) {", "owner", 0): SAME_STATISTICS,
    ("partition/slab.cuh", "return start + (first_in(0) < begin ? begin : first_in(0));", "guard", 1): (
        "As right: the group's first element, of another block's piece, which nobody has written over yet. Any element "
        "of the group does for a shift; the second pass finds what the first missed."
    ),
    ("partition/slab.cuh", "const int parts = units / here < 1 ? 1 : units / here;", "guard", 1): (
        "Speed only: one unit sums a channel, and those left over idle."
    ),
    ("partition/slab.cuh", "for (int base = 0; base < here * parts; base += units) {", "guard", 0): (
        "Speed only: no unit of that round has an item."
    ),
    ("partition/slab.cuh",
     "for (const int past = j + chain * step; j < past && j * pack_size < end; j += step) {", "guard", 0):
        LONGER_CHAIN,
    ("partition/slab.cuh",
     "for (const int past = j + chain * step; j < past && j * pack_size < end; j += step) {", "guard", 1):
        "Speed only: no element of a pack that begins at the end is taken.",
    ("partition/slab.cuh",
     "for (const int past = row + chain * parts; row < past && row < end; row += parts) {", "guard", 0):
        LONGER_CHAIN,
    ("partition/slab.cuh",
     "__device__ __forceinline__ int columns() const { return row_packs < Tile::threads ? row_packs : Tile::threads; }",
     "guard", 0): "Speed only: columns past the last have idle threads, and a column one part.",
    ("partition/slab.cuh", "for (int first = 0; first < row_packs; first += columns) {", "guard", 0): (
        "Speed only: no thread has a column in that round, and no total is added to."
    ),
    ("partition/slab.cuh", "for (int row = part; part < parts && row < rows; row += parts) {", "guard", 0): (
        "Speed only: idle threads store what a column's own threads store too, and nothing of a column past the last."
    ),
    ("partition/stage.cuh",
     "for (int base = begin + threadIdx.x; base < end; base += Tile::threads * others_in_flight) {",
     "guard", 0): (
        "Speed only: `j < end` below leaves nothing to do."
    ),
    ("layer_norm/strips.cuh",
     "__device__ __forceinline__ bool may_shift() const { return bands >= rows || bands * length % pack_size == 0; }",
     "guard", 0): ALWAYS_SHIFTS_BANDS,
    ("layer_norm/strips.cuh",
     "__device__ __forceinline__ bool may_shift() const { return bands >= rows || bands * length % pack_size == 0; }",
     "guard", 1): ALWAYS_SHIFTS_BANDS,
    ("layer_norm/strips.cuh", "band = live ? own / cut.strips : 0;", "guard", 0): (
        "A warp without a strip has length 0: its band makes addresses that are not used."
    ),
    ("layer_norm/strips.cuh", "strip = live ? own - band * cut.strips : 0;", "guard", 0): (
        "A warp without a strip has length 0: its strip makes addresses that are not used."
    ),
    ("layer_norm/strips.cuh",
     "length = live && left > 0 ? static_cast<int>(left < Strips::span - ahead ? left : Strips::span - ahead) : 0;",
     "guard", 2): (
        "A negative length holds no element, as 0 does."
    ),
    ("layer_norm/strips.cuh",
     "length = live && left > 0 ? static_cast<int>(left < Strips::span - ahead ? left : Strips::span - ahead) : 0;",
     "guard", 4): (
        "A lane's packs end with the strip whatever its length. Rows that an int cannot count are too large for this "
        "battery: there the mutant fails test_a_row_of_more_than_2_to_the_31_elements."
    ),
    ("partition/sweep.cuh",
     "return static_cast<int>(columns_of(cut) < cut.most_columns ? columns_of(cut) : cut.most_columns);",
     "guard", 0): (
        "Speed only: columns past the last have idle threads, and a column one part."
    ),
    ("partition/sweep.cuh",
     "if (few && before < sweep_t::slots && sweep.has(static_cast<int>(before))) {", "guard", 0): (
        "Speed only: what belongs to the next group is asked for, which is there, and nobody uses it."
    ),
    ("partition/sweep.cuh",
     "__device__ __forceinline__ bool live() const { return part < parts && first_channel < C; }",
     "guard", 1): (
        "Speed only: rows of a column past the last have no elements, and its results are given to nobody."
    ),
    ("partition/sweep.cuh", "return of_part < rows ? (rows - of_part + parts - 1) / parts : 0;", "guard", 1): (
        "The division gives 0 for every part past the rows: parts are fewer than rows - of_part is below 0."
    ),
    ("partition/sweep.cuh", "const int length = left < pack_size ? static_cast<int>(left) : pack_size;", "guard", 1): (
        "Only whether it is 0, and up to pack_size, matters of a row's length."
    ),
    ("partition/sweep.cuh", "for (int base = 0; base < steps; base += loads) {", "guard", 0): (
        "Speed only: the batch past the last has no elements, and adds nothing to a sum or a count."
    ),
    ("partition/sweep.cuh", "if (base + k < steps && from[t] != nullptr) {", "guard", 0): (
        "Speed only: the span of a step past the last is {0, 0, 0}, of which load_pack reads nothing."
    ),
    ("partition/team.cuh",
     "cluster_fence();  // only by the thread that publishes: the others need not wait for their stores",
     "barrier", 0): "The CPU executor takes every arrival at a cluster's barrier for one that releases.",
    ("partition/team.cuh",
     "if (shift + columns < pack_size) {", "guard", 0): "Speed only: any element of the run does.",
    ("partition/team.cuh",
     "const int ahead = may_shift && past + whole <= blocks * capacity ? past : 0;", "guard", 0): (
        "Speed only: a run that is covered from its start is read element by element, and is as right."
    ),
    ("partition/work_queue.cuh",
        "return tiles + prefetch_tiles < tiles * teams ? tiles + prefetch_tiles : tiles * teams;", "guard", 0): (
        "Speed only: all sums come before the first output, which may find its data gone from the cache."
    ),
    ("partition/work_queue.cuh",
        "return tiles + prefetch_tiles < tiles * teams ? tiles + prefetch_tiles : tiles * teams;", "guard", 1): (
        "Speed only: tickets past the last sums have nothing to do, and the host has counted them."
    ),
    ("common/types.cuh", "if (first >= 0 && first + Pack<T>::size <= length && misalignment(array + first) == 0) {",
     "guard", 0): BY_ELEMENT,
    ("common/types.cuh", "if (first >= 0 && first + Pack<T>::size <= length && misalignment(array + first) == 0) {",
     "guard", 2): BY_ELEMENT,
    ("kernels/ticket_wait.cu", "if (thread == 0) {", "owner", 2): (
        "Speed only: every thread publishes the same word, all behind the barrier."
    ),
    ("kernels/ticket_wait.cu", "__threadfence();", "barrier", 0): (
        "Redundant: store_release publishes by itself what the barrier has made the thread know of."
    ),
    ("layer_norm/layer_norm_backward_grid.cu",
     "for (int team = 0; team < TeamSlab::teams; ++team) {  // in turn: all teams add to one row of sums", "guard",
     0): "Speed only: there is no such team.",
    ("layer_norm/layer_norm_backward_grid.cu",
     "if (threadIdx.x % warp_size == 0) {  // all lanes have loaded their parts before warp_sum", "owner",
     0): SAME_IN_THE_WARP,
    ("layer_norm/layer_norm_grid.cu", "if (threadIdx.x % warp_size == 0) {", "owner", 1): SAME_IN_THE_WARP,
    ("layer_norm/layer_norm_grid.cu", "for (int i = 0; i < lane_parts; ++i) {", "guard", 0): (
        "What lies behind the array moves the centre, and what a centre misses is corrected."
    ),
    ("layer_norm/row_slabs.cuh",
     "if (taken == 0) {", "guard", 0): "Speed only: a block without a slab would wait for nothing.",
    ("layer_norm/row_slabs.cuh", "shift = past + columns <= capacity ? past : 0;", "guard", 0): BY_ELEMENT,
    ("layer_norm/row_slabs.cuh", "for (int tensor = 0; tensor < tensors && first < slab.columns; ++tensor) {", "guard",
     0): "Speed only: a pack of the next slab comes too, and nobody uses it.",
    ("layer_norm/row_slabs.cuh", "for (int i = 0; i < lane_parts; ++i) {", "guard", 1): (
        "Undefined, and left out by the compiler: neither array has such a place."
    ),
    ("layer_norm/row_slabs.cuh", "for (int round = 0; round < slots.ahead; ++round) {", "guard", 0): LANDS_IN_ORDER,
    ("layer_norm/row_slabs.cuh",
     "for (int round = slab.rounds() - 1; round >= slab.rounds() - slots.ahead; --round) {", "guard",
     0): LANDS_IN_ORDER,
    ("layer_norm/row_slabs.cuh", "slots.fetch(slab, next < slots.resident_rounds ? -1 : next);", "guard", 0): (
        "Speed only: what is kept comes again, to the same place. test_layer_norm_grid.py counts that it does not."
    ),
    ("layer_norm/row_slabs.cuh",
     "__syncwarp();  // reconverge: lanes at an edge have stored element by element",
     "barrier", 0): "Speed only: no lane needs what another has done.",
}
# fmt: on

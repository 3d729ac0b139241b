"""Test the mutants that mutants.py finds, the outcomes of some real mutants, and the whole run."""

from __future__ import annotations

import pytest

from cunorm.jit import sources
from tests.mutation import run as mutation
from tests.mutation.coverage import with_probes
from tests.mutation.mutants import KINDS, Mutant, blanked, mutants
from tests.mutation.survivors import SURVIVORS
from tests.ptx.route import MISSING, PAIRS
from tests.support.covering import every


def changes(text: str, kind: str | None = None) -> list[str]:
    return [one.change for one in mutants("a.cu", text) if kind in (None, one.kind)]


@pytest.mark.parametrize(("text", "expected"), [
    ("{ a = 1; __syncthreads(); }", ["__syncthreads(); -> ;"]),
    ("if (a) {\n    __syncwarp(mask);\n}", ["__syncwarp(mask); -> ;"]),
    ("{ __threadfence_block(); }", ["__threadfence_block(); -> ;"]),
    ("{ bars[k].arrive(f(x, 1)); }", ["bars[k].arrive(f(x, 1)); -> ;"]),
    ("{ async::wait_group<1>(); commit_group(); }", ["async::wait_group<1>(); -> ;", "commit_group(); -> ;"]),
    ("{ full->wait(phase); }", ["full->wait(phase); -> ;"]),
    ("if (lane < 4) __syncwarp();", ["lane < 4 -> true", "__syncwarp(); -> ;"]),
    ("{ while (!bar.try_wait(at)) {\n} }", ["while (!bar.try_wait(at)) { } -> ;"]),
    ("{ store_release(flag, 1u); }", ["store_release(flag, 1u); -> ;"]),
    ("{ while (load_acquire(flags + (mine - 1)) == 0) {\n} }", [
        "while (load_acquire(flags + (mine - 1)) == 0) { } -> ;"
    ]),
    ("void wait(int phase);\nint x = wait(1);\nawaited;", []),  # a declaration, a used value, no call
], ids=str)  # fmt: skip
def test_barriers(text: str, expected: list[str]) -> None:
    assert changes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("if (at < n && i + 1 >= 0) { use(at); }", ["at < n -> true", "i + 1 >= 0 -> true"]),
    ("if (f(a, b) <= g[i < 2]) { }", ["f(a, b) <= g[i < 2] -> true", "i < 2 -> true"]),
    ("if (row >= rows) {\n    continue;\n}", ["row >= rows -> false"]),
    ("if (empty == 0) return;", ["empty == 0 -> false"]),
    ("if (first < 0) return f(first);", ["first < 0 -> false", "first < 0 -> true"]),
    ("for (int i = lane; i < n; i += 32) { }", ["i < n -> i < (n) + 1"]),
    ("for (; half > 0; half /= 2) { }", ["half > 0 -> half > (0) - 1"]),
    ("for (T r = a; r < n && live; ++r) { }", ["r < n -> r < (n) + 1", "live -> true"]),
    ("while (2 * half <= parts) { }", ["2 * half <= parts -> 2 * half <= (parts) + 1"]),
    ("const bool live = own < cut.N * cut.C;", ["own < cut.N * cut.C -> true"]),
    ("bool holds(int i) const { return i >= 0 && i < n; }", ["i >= 0 -> true", "i < n -> true"]),
    ("end = a + b < n ? a + b : n;", ["a + b < n -> false", "a + b < n -> true"]),
    ("if (where.holds(i + 1)) { }", ["where.holds(i + 1) -> true"]),
    ("const int part = live ? a : 0;", ["live -> true"]),
    ("if (x != nullptr) { }", ["x != nullptr -> true"]),
    ("y = x == nullptr ? T{} : x[i];", ["x == nullptr -> false"]),
    ("if (dx == nullptr) {\n    continue;\n}", ["dx == nullptr -> false"]),
    ("if (misalignment(array + first) == 0) { }", ["misalignment(array + first) == 0 -> true"]),
    ("template <typename T, int n = (1 < 2)>\nvoid f(Team<lanes> t, int b) { x << 2; p->q; }", []),
    ("for (int i = 0; i < pack_size; ++i) { }", []),  # an array in registers
    ("if (value < acc_t(0) || total > 1.0 || bits >= 0x7c00u) { }", []),  # values, not indices
    ("static_assert(size <= pack_size);\nconstexpr int of(int n) { return n > 4 ? n / 4 : 1; }", []),
    ("if (lanes > warp_size) { } if (Tile::samples > 1) { }", []),  # the compiler decides
], ids=str)  # fmt: skip
def test_guards(text: str, expected: list[str]) -> None:
    assert changes(text) == expected
    assert len(changes(text, "guard")) == len(expected)


def test_owners_and_parities() -> None:
    assert changes("if (lane == 0) { }", "owner") == ["lane == 0 -> true"]
    assert changes("if (live() && threadIdx.x % warp_size == 0) { }", "owner") == [
        "threadIdx.x % warp_size == 0 -> true"
    ]
    for text in ("phase ^= 1;", "parity = !parity;", "slot = 1 - slot;", "parity ^= stage == last;"):
        assert changes(f"{{ {text} }}", "parity") == [f"{text} -> ;"]
    assert changes("wait(bar, phase & 1);", "parity") == ["phase & 1 -> 0"]
    assert changes("((magnitude >> 13) & 1u); a = 2 - a; b = 1 - a;", "parity") == []


def test_text_that_is_not_compiled_has_no_mutants() -> None:
    text = """// if (a < b) __syncthreads();
/* {; __syncthreads(); a = b < c ? 1 : 2;
*/ const char* s = "; __syncthreads(); a < b";
#if THREADS < 3 && \\
    OTHER < 4
#endif
#ifdef CUNORM_CPU
{ __syncthreads(); }
#else
{ __syncwarp(); }
#endif
#ifndef CUNORM_CPU
{ __syncwarp(); }
#else
{ __threadfence(); }
#endif
"""
    assert changes(text) == ["__syncthreads(); -> ;", "__threadfence(); -> ;"]
    assert [one.line for one in mutants("a.cu", text)] == [8, 15]
    assert [len(line) for line in blanked(text).split("\n")] == [len(line) for line in text.split("\n")]


def test_statements_of_inline_ptx() -> None:
    text = """#ifdef CUNORM_CPU
    wait();
#else
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");  // asm("");
#endif
"""
    whole = 'asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");'
    assert changes(text, "ptx") == [
        f"{whole} -> ;",
        "release -> relaxed",
        "0 -> 0 + 16",
        "value -> value + 1",
        ': "memory" -> nothing',
    ]
    assert {one.line for one in mutants("a.cu", text)} == {4}
    calls = 'asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));'
    calls += ' asm("cvt.rn.f16.f32 %0, %1;" : "=h"(f(x)) : "f"(y));'
    assert [change for change in changes(calls) if "asm" not in change] == [
        "volatile -> nothing",
        "cluster_ctarank -> ctaid.x",
        "f16 -> bf16",
    ]


def test_a_mutant_is_one_replacement_and_has_a_unique_key() -> None:
    text = "a;\n    if (i < n && j < n) { f(); }\n    if (i < n && j < n) { f(); }\n"
    found = mutants("a.cu", text)
    assert [(one.line, one.nth) for one in found] == [(2, 0), (2, 1), (3, 2), (3, 3)]
    assert len({one.key for one in found}) == 4
    assert found[2].applied(text) == "a;\n    if (i < n && j < n) { f(); }\n    if (true && j < n) { f(); }\n"
    with pytest.raises(AssertionError, match=r"a\.cu has changed"):
        found[2].applied(text[1:])


def test_every_mutant_of_the_kernels_changes_the_text() -> None:
    found = mutation.all_mutants()
    assert {one.kind for one in found} == set(KINDS)
    assert len({one.key for one in found}) == len(found) > 300
    for one in found:
        if "/" not in one.file:
            text = (sources.folder() / one.file).read_text(encoding="utf-8")
            assert one.applied(text) != text


def test_probes_precede_the_code_that_they_watch() -> None:
    text = "{ __syncthreads(); if (i < n) { } }"
    sites = list(enumerate(mutants("a.cu", text)))
    assert with_probes(text, sites, 2).endswith(
        "{ { CUNORM_PROBE(0); __syncthreads(); } if ((CUNORM_PROBE(1), (i < n))) { } }"
    )


def test_judge_reports_each_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known, new, dead = mutants("a.cu", "if (i < n) { } if (j < n) { } if (k < n) { }")
    monkeypatch.setattr(mutation, "SURVIVORS", {known.key: "why", dead.key: "why", ("b.cu", "x", "guard", 0): "why"})
    outcomes = [mutation.Outcome(known, "survived"), mutation.Outcome(dead, "killed", "kernel:a.cu", "hangs")]
    assert mutation.judge(outcomes[:1]) == [f"has a reason but does not survive: {dead.key}"]
    assert mutation.judge([*outcomes, mutation.Outcome(new, "stillborn")])[0].startswith("does not compile")
    assert mutation.judge([*outcomes, mutation.Outcome(new, "survived")])[0].startswith("survives without a reason")


def test_every_reason_belongs_to_an_existing_mutant() -> None:
    assert set(SURVIVORS) <= {mutant.key for mutant in mutation.all_mutants()}


# ---- real mutants ---------------------------------------------------------------------------------------------------

#: File, start of the line, kind, index among the mutants of such lines, and a case that kills the mutant.
REAL = [
    ("group_norm/forward_slab.cuh", "__syncthreads();", "barrier", 2, "group_norm-block: one part per channel"),
    ("partition/team.cuh", "slot = 1 - slot;", "parity", 0, "layer_norm-block: long rows"),
    ("partition/work_queue.cuh", "__syncthreads();", "barrier", 0, "group_norm-grid: two blocks"),
    (
        "batch_norm/batch_norm_elemt_block.cu",
        "for (long long item",
        "guard",
        0,
        "batch_norm_elemt-block: one block for all",
    ),
    (
        "batch_norm/slab_range.cuh",
        "end = begin + samples",
        "guard",
        1,
        "batch_norm_stats-block: a short last slab and range",
    ),
    (
        "batch_norm/sums_out.cuh",
        "if (sum_dy !=",
        "guard",
        0,
        "batch_norm_backward_reduce-block: one row of results, dbeta alone",
    ),
]


def real(file: str, start: str, kind: str, nth: int, named: str) -> tuple[Mutant, str]:
    """The mutant, and the check that kills it."""
    found = [one for one in mutation.all_mutants([file]) if one.kind == kind and one.source.startswith(start)]
    return found[nth], next(check for check in mutation.checks_of(file) if mutation.named(check) == named)


@pytest.mark.parametrize("which", every(2, [(one,) for one in REAL]), ids=[f"{one[0]}-{one[2]}" for one in REAL])
def test_a_real_mutant_is_killed(which: tuple[str, str, str, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")  # compiles faster
    mutant, check = real(*which)
    outcome = mutation.run_mutant(mutant, [check])
    assert outcome.state == "killed", outcome
    assert outcome.check == check


def test_the_original_survives_the_checks_that_kill_real_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    found = [real(*which) for which in REAL]
    same = Mutant(**{**vars(found[0][0]), "new": found[0][0].old})
    outcome = mutation.run_mutant(same, [check for _, check in found])
    assert outcome.state == "survived", outcome


def test_a_mutant_that_does_not_compile_is_stillborn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    mutant, check = real(*REAL[0])
    outcome = mutation.run_mutant(Mutant(**{**vars(mutant), "new": "{"}), [check])
    assert outcome.state == "stillborn", outcome
    assert "does not compile" in outcome.way


#: Change, test kernel whose PTX kills the mutant, and the start of the outcome.
REAL_PTX = [
    ("%1, %2 -> %2, %1", "async_copy.cu", "wrong:"),
    ("! -> nothing", "async_bulk.cu", "fault: kernel async_bulk"),
    ("bf16 -> f16", "conversions.cu", "wrong:"),
    ("acquire -> relaxed", "cluster_sum.cu", "refused: PTX line"),
]


@pytest.mark.skipif(not PAIRS, reason=MISSING)
@pytest.mark.parametrize(("change", "kernel", "way"), every(2, REAL_PTX), ids=[one[0] for one in REAL_PTX])
def test_a_mutant_of_inline_ptx_is_killed(change: str, kernel: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    found = mutation.all_mutants(["common/async.cuh", "common/types.cuh"])
    mutant = next(one for one in found if one.kind == "ptx" and one.change == change)
    check = f"ptx:kernel:{kernel}"
    assert check in mutation.ptx_checks_of(mutant.file)
    outcome = mutation.run_mutant(mutant, [check])
    assert (outcome.state, outcome.way[: len(way)]) == ("killed", way)


@pytest.mark.long
def test_a_kernel_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    mutant, check = real(*REAL[0])
    outcome = mutation.run_mutant(Mutant(**{**vars(mutant), "new": "for (;;) { __syncthreads(); }"}), [check])
    assert (outcome.state, outcome.way) == ("killed", "hangs")


@pytest.mark.long
def test_every_mutant_is_killed_or_has_a_reason() -> None:
    found = [one for one in mutation.all_mutants() if PAIRS or one.kind != "ptx"]
    outcomes = mutation.run_all(found, jobs=2)
    assert mutation.judge(outcomes) == []
    assert sum(one.state == "killed" for one in outcomes) > 300

"""The translator of PTX: values of instructions, errors for unknown PTX, and faults that name the line of the PTX."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cunorm.core.errors import KernelFault
from cunorm.executors.cpu import executor
from tests.kernels.kernel_checks import launch
from tests.ptx.parse import UnknownPtx
from tests.ptx.translate import translate

#: A kernel with the addresses of two arrays in %rd1 and %rd2. Its body begins in line BODY.
HEAD = """.version 8.7
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry snippet(
    .param .u64 snippet_param_0, .param .u64 .ptr .align 1 snippet_param_1
)
.maxntid 32, 1, 1
{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .f64 %fd<9>;
ld.param.u64 %rd1, [snippet_param_0]; ld.param.u64 %rd2, [snippet_param_1]; mov.u32 %r1, %tid.x;
"""
BODY = HEAD.count("\n") + 1


#: Without it, g++ computes instructions with constant operands itself, where no undefined behaviour shows.
UNOPTIMISED = '#pragma GCC optimize("O0")\n'


def run(body: str, words: int = 16, cluster: int = 1, head: str = "") -> np.ndarray:
    """Run a body with 32 threads per block on an array of ones, and return the second array."""
    x, y = np.ones(64, np.uint32), np.zeros(words, np.uint64)
    kernel = executor.compile(head + translate(f"{HEAD}{body}\nret;\n}}\n"), "snippet")
    launch(kernel, cluster, 32, 64, [x, y], cluster=cluster, resident=1)
    return y


# ---- values ---------------------------------------------------------------------------------------------------------

NAN, ONE, HUGE = "0f7FC00000", "0f3F800000", "0f4F800000"
#: (instruction with D for the result, type of the result, expected bits), by the PTX ISA.
VALUES: list[tuple[str, str, int]] = [
    ("shf.l.wrap.b32 D, 0x80000001, 1, 33", "b32", 3),
    ("shf.l.clamp.b32 D, 0x80000001, 1, 33", "b32", 0x80000001),
    ("shf.r.wrap.b32 D, 0x80000001, 3, 33", "b32", 0xC0000000),
    ("shf.r.clamp.b32 D, 0x80000001, 3, 40", "b32", 3),
    ("prmt.b32 D, 0x33221180, 0x77665544, 0x9804", "b32", 0x00FF8044),
    ("bfi.b32 D, 0xff, 0x10001, 4, 4", "b32", 0x100F1),
    ("bfi.b32 D, 0xffffffff, 5, 28, 8", "b32", 0xF0000005),
    ("bfi.b32 D, 0xff, 5, 32, 4", "b32", 5),
    ("bfi.b32 D, 0xff, 5, 4, 0", "b32", 5),
    ("bfi.b64 D, 0xff, 5, 60, 8", "b64", 0xF000000000000005),
    ("shl.b32 D, 1, 32", "b32", 0),
    ("shr.u32 D, 0x80000000, 32", "b32", 0),
    ("shr.s32 D, 0x80000000, 40", "b32", 0xFFFFFFFF),
    ("mul.hi.u32 D, 0xffffffff, 0xffffffff", "b32", 0xFFFFFFFE),
    ("mul.hi.s32 D, -1, -1", "b32", 0),
    ("mul.hi.s64 D, -1, 2", "b64", (1 << 64) - 1),
    ("mul.lo.s32 D, 0x10001, 0x10001", "b32", 0x20001),
    ("mul.wide.s32 D, -2, 3", "b64", (1 << 64) - 6),
    ("mul.wide.s16 D, -2, 3", "b32", (1 << 32) - 6),
    ("mad.wide.u32 D, 0xffffffff, 0xffffffff, 1", "b64", 0xFFFFFFFE00000002),
    ("mad.lo.s32 D, 0x10000, 0x10000, 7", "b32", 7),
    ("div.s32 D, -7, 2", "b32", (1 << 32) - 3),
    ("rem.s32 D, -7, 2", "b32", (1 << 32) - 1),
    ("div.s32 D, 0x80000000, -1", "b32", 0x80000000),
    ("div.u32 D, 0x80000000, 3", "b32", 0x2AAAAAAA),
    ("min.s32 D, -1, 1", "b32", 0xFFFFFFFF),
    ("min.u32 D, -1, 1", "b32", 1),
    ("max.relu.s32 D, -5, -3", "b32", 0),
    ("neg.s32 D, 0x80000000", "b32", 0x80000000),
    ("popc.b32 D, 0xF00F0001", "b32", 9),
    ("popc.b64 D, 0xF0000000F0000001", "b32", 9),
    ("brev.b32 D, 0x80000006", "b32", 0x60000001),
    ("bfind.shiftamt.u32 D, 0x00010001", "b32", 15),
    ("bfind.shiftamt.u32 D, 0", "b32", 0xFFFFFFFF),
    ("mov.b64 D, {0x11, 0x22}", "b64", 0x2200000011),
    # conversions
    ("cvt.s64.s32 D, -1", "b64", (1 << 64) - 1),
    ("cvt.u64.u32 D, -1", "b64", 0xFFFFFFFF),
    ("cvt.s16.s8 D, 0x80", "b16", 0xFF80),
    ("cvt.rn.f32.s32 D, 16777219", "f32", 0x4B800002),
    ("cvt.rn.f32.u32 D, 0xffffffff", "f32", 0x4F800000),
    ("cvt.rzi.s32.f32 D, 0fC039999A", "b32", (1 << 32) - 2),
    ("cvt.rni.s32.f32 D, 0f40200000", "b32", 2),
    ("cvt.rni.s32.f32 D, 0f40600000", "b32", 4),
    (f"cvt.rzi.s32.f32 D, {HUGE}", "b32", 0x7FFFFFFF),
    (f"cvt.rzi.s32.f32 D, {NAN}", "b32", 0),
    ("cvt.rzi.u32.f32 D, 0fBF800000", "b32", 0),
    (f"cvt.rzi.u32.f32 D, {HUGE}", "b32", 0xFFFFFFFF),
    (f"cvt.sat.f32.f32 D, {NAN}", "f32", 0),
    (f"cvt.ftz.sat.f32.f32 D, {HUGE}", "f32", 0x3F800000),
    ("cvt.sat.f32.f32 D, 0fBF800000", "f32", 0),
    ("cvt.rn.f16.f32 D, 0f477FEF00", "b16", 0x7BFF),
    ("cvt.rn.f16.f32 D, 0fC77FF000", "b16", 0xFC00),
    ("cvt.rn.f16.f32 D, 0f33000000", "b16", 0),
    ("cvt.rn.f16.f32 D, 0f33400000", "b16", 1),
    ("cvt.rn.f16.f32 D, 0f3A000FFF", "b16", 0x1000),
    ("cvt.rn.f16.f32 D, 0f3F801000", "b16", 0x3C00),
    ("cvt.rn.f16.f32 D, 0f3F803000", "b16", 0x3C02),
    ("cvt.rn.f16.f32 D, 0f3FFFF000", "b16", 0x4000),
    ("cvt.rn.bf16.f32 D, 0f3F808000", "b16", 0x3F80),
    ("cvt.rn.bf16.f32 D, 0f3F818000", "b16", 0x3F82),
    (f"cvt.rn.bf16.f32 D, {NAN}", "b16", 0x7FFF),
    ("cvt.rn.f16x2.f32 D, 0f3F801000, 0fC77FF000", "b32", 0x3C00FC00),
    (f"cvt.rn.bf16x2.f32 D, 0f3F818000, {NAN}", "b32", 0x3F827FFF),
    ("cvt.f32.f16 D, 0x8001", "f32", 0xB3800000),
    ("cvt.f32.f16 D, 0xfc00", "f32", 0xFF800000),
    ("cvt.f32.f16 D, 0x3555", "f32", 0x3EAAA000),
    ("cvt.rn.f32.f64 D, 0d37D0000000000000", "f32", 0x00080000),
    ("cvt.rn.ftz.f32.f64 D, 0d37D0000000000000", "f32", 0),
    # floating point
    ("fma.rm.f32 D, 0f3F800000, 0f3F800000, 0fB0800000", "f32", 0x3F7FFFFF),
    ("fma.rn.f32 D, 0f3F800000, 0f3F800000, 0fB0800000", "f32", 0x3F800000),
    ("fma.rm.f32 D, 0f3F800000, 0f3F800000, 0f30800000", "f32", 0x3F800000),
    ("fma.rn.f32 D, 0f3F800001, 0f3F800001, 0fBF800002", "f32", 0x28800000),
    ("add.ftz.f32 D, 0f00400000, 0f00000000", "f32", 0),
    ("add.f32 D, 0f00400000, 0f00000000", "f32", 0x00400000),
    ("mul.ftz.f32 D, 0f8D800000, 0f30800000", "f32", 0x80000000),
    ("mul.ftz.f32 D, 0f00400000, 0f44800000", "f32", 0),
    ("neg.ftz.f32 D, 0f00400000", "f32", 0x80000000),
    ("div.rn.f32 D, 0f3F800000, 0f40400000", "f32", 0x3EAAAAAB),
    ("rcp.rn.f64 D, 0d4010000000000000", "f64", 0x3FD0000000000000),
    ("sqrt.rn.f32 D, 0f40000000", "f32", 0x3FB504F3),
    (f"min.f32 D, {NAN}, {ONE}", "f32", 0x3F800000),
    (f"min.f32 D, {ONE}, {NAN}", "f32", 0x3F800000),
    (f"max.f32 D, {ONE}, {NAN}", "f32", 0x3F800000),
    (f"max.f32 D, {NAN}, {ONE}", "f32", 0x3F800000),
    ("min.f32 D, 0f80000000, 0f00000000", "f32", 0x80000000),
    ("max.f32 D, 0f00000000, 0f80000000", "f32", 0),
    ("min.f32 D, 0f00000000, 0f80000000", "f32", 0x80000000),
    ("max.f32 D, 0f80000000, 0f00000000", "f32", 0),
    ("ex2.approx.ftz.f32 D, 0f40400000", "f32", 0x41000000),
    ("rcp.approx.ftz.f32 D, 0f40800000", "f32", 0x3E800000),
    ("rsqrt.approx.ftz.f32 D, 0f40800000", "f32", 0x3F000000),
    # comparisons: true for unordered operands or not
    *[(f"setp.{compare}.f32 D, {NAN}, {ONE}", "pred", 0) for compare in ("eq", "ne", "lt", "le", "gt", "ge", "num")],
    *[(f"setp.{compare}u.f32 D, {NAN}, {ONE}", "pred", 1) for compare in ("eq", "ne", "lt", "le", "gt", "ge")],
    (f"setp.nan.f32 D, {NAN}, {ONE}", "pred", 1),
    ("setp.eq.ftz.f32 D, 0f00400000, 0f00000000", "pred", 1),
    ("setp.ltu.f32 D, 0f3F800000, 0f40000000", "pred", 1),
    ("setp.lt.s32 D, -1, 1", "pred", 1),
    ("setp.lt.u32 D, -1, 1", "pred", 0),
]
REGISTER = {"b16": "%rs1", "b32": "%r2", "b64": "%rd3", "f32": "%f1", "f64": "%fd1", "pred": "%p1"}


def stored(kind: str, place: int) -> str:
    """PTX that stores the result, extended to 64 bits."""
    register = REGISTER[kind]
    widened = {
        "b16": "cvt.u64.u16 %rd3, %rs1;",
        "b32": "cvt.u64.u32 %rd3, %r2;",
        "b64": "",
        "f32": "mov.b32 %r2, %f1; cvt.u64.u32 %rd3, %r2;",
        "f64": "mov.b64 %rd3, %fd1;",
        "pred": f"selp.b64 %rd3, 1, 0, {register};",
    }[kind]
    return f"{widened} st.global.b64 [%rd2+{8 * place}], %rd3;"


def test_values_are_those_of_the_manual() -> None:
    lines = [f"{text.replace('D', REGISTER[kind], 1)}; {stored(kind, i)}" for i, (text, kind, _) in enumerate(VALUES)]
    found = run("\n".join(lines), words=len(VALUES), head=UNOPTIMISED)
    wrong = [
        f"{text}: {int(came):#x}, expected {expected:#x}"
        for (text, _, expected), came in zip(VALUES, found, strict=True)
        if int(came) != expected
    ]
    assert wrong == []


def test_registers_and_labels_of_a_scope_are_its_own() -> None:
    scope = "{ .reg .pred done; .reg .b32 %r2; mov.u32 %r2, 7; again: setp.eq.s32 done, %r2, 7; @!done bra again; }"
    assert run(f"mov.u32 %r2, 5;\n{scope}\n{scope}\n{stored('b32', 0)}")[0] == 5


def test_shuffles_stay_within_their_segment() -> None:
    """Operand c of shfl is (32 - width) * 256 + clamp."""
    modes = ("bfly.b32 %r2, %r1, 9, 0x101f", "up.b32 %r2, %r1, 3, 0x1000", "down.b32 %r2, %r1, 15, 0x101f",
             "idx.b32 %r2, %r1, 19, 0x101f")  # fmt: skip
    place = "cvt.u64.u32 %rd4, %r1; shl.b64 %rd4, %rd4, 3; add.s64 %rd4, %rd4, %rd2;"
    store = "cvt.u64.u32 %rd3, %r2; st.global.u64"
    lines = [f"shfl.sync.{mode}, -1; {store} [%rd4+{256 * i}], %rd3;" for i, mode in enumerate(modes)]
    found = run("\n".join([place, *lines]), words=128).reshape(4, 32).astype(int)
    lane = np.arange(32)
    begin = lane // 16 * 16
    assert np.array_equal(found[0], lane ^ 9)
    assert np.array_equal(found[1], np.where(lane - 3 >= begin, lane - 3, lane))
    assert np.array_equal(found[2], np.where(lane + 15 < begin + 16, lane + 15, lane))
    assert np.array_equal(found[3], begin + 3)


def test_a_ballot_has_a_bit_of_each_lane() -> None:
    body = f"setp.ge.u32 %p1, %r1, 29; vote.sync.ballot.b32 %r2, %p1, -1; {stored('b32', 0)}"
    assert run(body)[0] == 0xE0000000


def test_a_load_reads_only_the_bytes_that_are_used() -> None:
    """The last of four words is past the end of the array of 64 words."""
    body = '.pragma "used_bytes_mask 0x0fff";\nld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+244];'
    assert run(f"{body}\nadd.s32 %r2, %r2, %r4; {stored('b32', 0)}")[0] == 2


# ---- unknown PTX ----------------------------------------------------------------------------------------------------

UNKNOWN = [
    ("lg2.approx.f32 %f1, %f2;", "unknown opcode 'lg2.approx.f32'"),
    ("add.sat.s32 %r1, %r2, %r3;", "unknown opcode 'add.sat.s32'"),
    ("ret.uni;", "unknown opcode 'ret.uni'"),
    ("add.rz.f32 %f1, %f2, %f3;", "unknown opcode 'add.rz.f32'"),
    ("ld.acquire.cta.global.u32 %r1, [%rd1];", "unknown opcode"),
    ("fence.acq_rel.cta;", "unknown opcode"),
    ("setp.lt.and.s32 %p1, %r1, %r2, %p2;", "unknown opcode"),
    ("mbarrier.try_wait.parity.shared::cluster.b64 %p1, [%r1], 0;", "unknown opcode"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "8 bytes"),
    ("mov.u32 %r1, %laneid;", "unknown operand '%laneid' of .u32"),
    ("mov.u64 %rd3, constants;", "unknown operand 'constants' of .u64"),
    ("mov.u64 %rd3, %r1;", "operand 'r1' of .b32, expected .u64,"),
    ("mov.u32 %r1, 0d3FF0000000000000;", "a constant of 64 bits as .u32"),
    ("add.s32 %r1, %r2;", "2 operands, expected 3,"),
    ("ld.global.v4.u32 {%r1, %r2}, [%rd1];", "2 registers for .v4"),
    ("ld.global.u32 %r1, [%rd1-4];", "unknown address"),
    ("bra elsewhere;", "unknown label 'elsewhere'"),
    ("bar.sync 1;", "a barrier other than 0"),
    ("mbarrier.arrive.shared::cta.b64 %rd3, [%r1];", "the state that an arrival returns"),
    ("shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1; @%p1 ret;", "the predicate 'p1', which another instruction uses,"),
    (".shared .align 4 .b8 table[16];", "unknown directive"),
    (".reg .b8 %b<2>;", "unknown type of register"),
    ('.pragma "other";', "unknown directive"),
    ('.pragma "used_bytes_mask 3"; mov.u32 %r1, 0;', "used_bytes_mask before an instruction other than a load"),
    ("mov.u32 %r1, 0", "no semicolon"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what"), UNKNOWN, ids=[text.split(";")[0] for text, _ in UNKNOWN])
def test_unknown_ptx_is_an_error_that_names_its_line(text: str, what: str) -> None:
    end = "" if what == "no semicolon" else "\nret;\n}\n"
    with pytest.raises(UnknownPtx, match=rf"^PTX line {BODY + 1}: {re.escape(what)}.* in '"):
        translate(f"{HEAD}mov.u32 %r1, 1;\n{text}{end}")


@pytest.mark.parametrize(("old", "new", "what"), [
    (".param .u64 snippet_param_0", ".param .u32 snippet_param_0", "unknown type of parameter"),
    (".maxntid 32", ".maxnreg 32", "unknown directive"),
    (".extern .shared", ".shared", "unknown directive"),
    (".visible .entry", ".visible .func", "unknown directive"),
    ("{snippet", ".weak", "unknown directive"),
], ids=lambda one: str(one))  # fmt: skip
def test_unknown_ptx_outside_of_bodies_is_an_error(old: str, new: str, what: str) -> None:
    text = f"{HEAD}ret;\n}}\n"
    changed = text.replace(old, new) if old in text else text + new
    assert changed != text
    with pytest.raises(UnknownPtx, match=what):
        translate(changed)


# ---- faults ---------------------------------------------------------------------------------------------------------

MBARRIER = (
    "setp.ne.s32 %p1, %r1, 0;\n@%p1 bra $after;\nmbarrier.init.shared::cta.b64 [memory], 1;\n$after:\nbar.sync 0;"
)
ARRIVE = "@!%p1 mbarrier.arrive.shared::cta.b64 _, [memory];"
WAIT = """{
.reg .pred complete;
again:
mbarrier.try_wait.parity.shared::cta.b64 complete, [memory], 0; @!complete bra again;
}"""
#: (body whose last line faults, expected message); HERE is that line.
FAULTS = {
    "mapa past the cluster, whose result is not used": (
        "mov.u64 %rd3, memory;\ncvta.shared.u64 %rd3, %rd3;\nmapa.u64 %rd4, %rd3, 2;",
        "byte 0 of shared memory in the cluster's block 2, at HERE: expected a byte from 0 to below 8192, and a rank",
    ),
    "global load": (
        "ld.global.u32 %r2, [%rd1+256];",
        "out-of-bounds 4-byte load at HERE: it begins 256 bytes after the start of array0, whose size is 256 bytes",
    ),
    "global store of a vector": (
        "st.global.v2.u32 [%rd2+-4], {%r1, %r1};",
        "misaligned 8-byte store at 0x[0-9a-f]+, at HERE",
    ),
    "generic load": ("ld.u32 %r2, [%rd1+-4];", "out-of-bounds 4-byte load at HERE: it begins 4 bytes before the start"),
    "shared store": (
        "st.shared.u32 [memory+64], %r1;",
        "out-of-bounds 4-byte store at HERE: byte 64 of shared memory, but the launch allocates 64",
    ),
    "shared load of a vector": (
        "mov.u32 %r2, 8;\nld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];",
        "misaligned 16-byte load at 0x[0-9a-f]+, at HERE",
    ),
    "shared race": ("st.shared.u32 [memory], %r1;", "shared-memory race at byte 0: it writes at HERE what thread 0 "),
    "division by zero": ("rem.u64 %rd3, %rd1, 0;", r"division by zero \(HERE\)"),
    "clamp of a shuffle": ("shfl.sync.idx.b32 %r2, %r1, 0, 0x1f0f, -1;", r"shfl \(HERE\): operand c is 0x1f0f"),
    "a wait whose phase never ends": (f"{MBARRIER}\n{WAIT}", r"deadlock: thread 0 waits at an mbarrier \(HERE\)"),
    "an inverted wait": (
        f"{MBARRIER}\n{ARRIVE}\n{WAIT.replace('@!complete', '@complete')}",
        r"deadlock: thread 0 waits at an mbarrier \(HERE\)",
    ),
    "an inverted poll": (
        "$again:\nld.relaxed.gpu.global.u32 %r2, [%rd1]; setp.eq.s32 %p1, %r2, 1; @%p1 bra $again;",
        r"deadlock: thread 0 waits at a polled word \(HERE\)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_the_line_of_the_ptx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    body, said = FAULTS[name]
    line = BODY + body.count("\n") - body.endswith("\n}")
    with pytest.raises(KernelFault, match=said.replace("HERE", rf"snippet\.ptx:{line}")):
        run(body, cluster=2 if "mapa" in name else 1)


def test_the_plain_build_checks_the_bounds_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    with pytest.raises(KernelFault, match=r"out-of-bounds 4-byte store at .*: byte 64 of shared memory"):
        run(FAULTS["shared store"][0])


@pytest.mark.parametrize("build", ["plain", "checked"])
def test_a_wait_ends_when_its_phase_ends(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", build)
    done = f"mov.u32 %r2, 7; {stored('b32', 0)}"
    assert run(f"{MBARRIER}\n{ARRIVE}\n{WAIT}\n{WAIT.replace('again', 'other')}\n{done}")[0] == 7

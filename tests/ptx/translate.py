"""Translate PTX to C++ text that the CPU executor compiles as a kernel.

A register is a local variable, a label is a label, and an instruction is one statement. Shuffles, barriers, mbarriers,
copies, clusters and atomics call the executor's runtime. ptx.h contains the other functions of the text. RULES has a
pattern per instruction, which must match the whole opcode: a modifier that is in no pattern raises `UnknownPtx`.

The translation is exact except for approximations (ex2, rcp, rsqrt), whose values are those of the C library, and for
the payload of NaN. Registers start as all ones, which is NaN in every floating-point type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

from tests.ptx.parse import Instruction, Kernel, Program, parse

#: Name of ptx.h in the text. In this folder, a fault is attributed to the line that calls the function.
HEADER = "cunorm/executors/cpu/include/ptx.h"

WIDTH = {"pred": 1, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
WIDTH |= {f"{sort}{bits}": bits for sort in "bus" for bits in (8, 16, 32, 64)}
C_TYPE = {"pred": "bool", "f32": "float", "f64": "double"}
C_TYPE |= {f"{sort}{bits}": f"{'' if sort == 's' else 'u'}int{bits}_t" for sort in "bus" for bits in (8, 16, 32, 64)}
SPECIAL = {
    "%tid.x": "threadIdx.x",
    "%ntid.x": "blockDim.x",
    "%ctaid.x": "blockIdx.x",
    "%nctaid.x": "gridDim.x",
    "%cluster_ctarank": "cunorm_cpu::cluster_rank()",
}
SHUFFLES = {"bfly": "SHUFFLE_XOR", "idx": "SHUFFLE", "up": "SHUFFLE_UP", "down": "SHUFFLE_DOWN"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SYMBOL = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
PLACES = {"global": "PTX_GLOBAL", "shared": "PTX_SHARED", None: "PTX_GENERIC"}

_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_ADDRESS = re.compile(r"\[ ?([%\w$]+?) ?(?:\+ ?(-?\w+) ?)?\]")


def _as(value: str, own: str, kind: str) -> str:
    """An expression of type `own` as an expression of type `kind`; from a wider type the low bits."""
    if C_TYPE[own] == C_TYPE[kind]:
        return value
    if own in ("f32", "f64"):
        value = f"ptx::as<uint{WIDTH[own]}_t>({value})"
    if kind in ("f32", "f64"):
        return f"ptx::as<{C_TYPE[kind]}>(uint{WIDTH[kind]}_t({value}))"
    return f"{C_TYPE[kind]}({value})"


def _parts(operand: str) -> list[str]:
    """The elements of a vector in braces, or the operand itself."""
    return [one.strip() for one in operand.strip("{}").split(",")]


class Emitter:
    """Translates the instructions of one kernel. `at` is the current one; the methods after `read` return C++."""

    def __init__(self, kernel: Kernel, program: Program) -> None:
        self.kernel, self.program = kernel, program
        self.used: dict[str, str] = {}
        self.at: Instruction
        self.operands: tuple[str, ...] = ()
        instructions = [one for one in kernel.body if isinstance(one, Instruction)]
        texts = [f"{one.guard} {' '.join(one.operands[one.opcode.startswith('shfl') :])}" for one in instructions]
        self.mentioned = set(re.findall(r"\w+", " ".join(texts)))  # except as a result of a shuffle

    def statement(self, one: Instruction) -> str:
        """The C++ statement of an instruction."""
        self.at, self.operands = one, one.operands
        number, found = _rule(one.opcode)
        if found is None:
            raise one.unknown(f"unknown opcode {one.opcode!r}")
        _, operands, method = RULES[number]
        if len(one.operands) != operands:
            raise one.unknown(f"{len(one.operands)} operands, expected {operands},")
        if one.used is not None and method is not Emitter.ld:
            raise one.unknown("used_bytes_mask before an instruction other than a load")
        made = method(self, **found.groupdict())
        return f"if ({self.read(one.guard, 'pred')}) {{ {made} }}" if one.guard else made

    # ---- operands ---------------------------------------------------------------------------------------------------

    def read(self, operand: str, kind: str) -> str:
        """An operand as a C++ expression of a type."""
        if kind == "pred" and operand.startswith("!"):
            return f"!{self.read(operand[1:], kind)}"
        if (found := re.fullmatch(r"0([fFdD])([0-9A-Fa-f]+)", operand)) is not None:
            bits = 32 if found[1] in "fF" else 64
            if bits != WIDTH[kind] or len(found[2]) != bits // 4:
                raise self.at.unknown(f"a constant of {bits} bits as .{kind}")
            return _as(f"uint{bits}_t(0x{found[2]}ull)", f"b{bits}", kind)
        if _INTEGER.fullmatch(operand) is not None and kind not in ("f32", "f64"):
            return f"{C_TYPE[kind]}({int(operand.rstrip('U'), 0) & (1 << 64) - 1}ull)"
        if operand in SPECIAL and WIDTH[kind] == 32:
            return f"{C_TYPE[kind]}({SPECIAL[operand]})"
        if operand in self.program.shared and WIDTH[kind] >= 32:
            return f"{C_TYPE[kind]}(0)"
        return _as(operand, self.type_of(operand, kind), kind)

    def reads(self, kind: str, first: int = 1) -> list[str]:
        """The operands from an index on as expressions of a type."""
        return [self.read(one, kind) for one in self.operands[first:]]

    def type_of(self, register: str, kind: str) -> str:
        """The type of a register that is accessed as `kind`."""
        own = self.kernel.registers.get(register)
        if own is None:
            raise self.at.unknown(f"unknown operand {register!r} of .{kind}")
        if WIDTH[own] < WIDTH[kind] or (own == "pred") != (kind == "pred"):
            raise self.at.unknown(f"operand {register!r} of .{own}, expected .{kind},")
        self.used[register] = own
        return own

    def write(self, kind: str, value: str, to: str | None = None) -> str:
        """A statement that writes a value to a register, or to the first operand. C++ extends it to a wider one."""
        to = self.operands[0] if to is None else to
        if to == "_":
            return f"(void)({value});"
        return f"{to} = {_as(value, kind, self.type_of(to, kind))};"

    def address(self, operand: str, shared: bool = False, past: int = 0) -> str:
        """An address in brackets: of global memory, or an offset in the window of shared memory."""
        found = _ADDRESS.fullmatch(operand)
        if found is None:
            raise self.at.unknown(f"unknown address {operand!r}")
        narrow = shared and WIDTH[self.kernel.registers.get(found[1], "b64")] == 32
        kind = "b32" if narrow else "b64"
        offset = (int(found[2] or "0", 0) + past) & (1 << WIDTH[kind]) - 1
        return f"uint64_t({C_TYPE[kind]}({self.read(found[1], kind)} + {offset}u))"

    def pointer(self, index: int, shared: bool = False) -> str:
        """An operand's address as a pointer, for a function of the runtime that checks it."""
        return f"PTX_ADDRESS({'ptx::window() + ' if shared else ''}{self.address(self.operands[index], shared)})"

    # ---- moves ------------------------------------------------------------------------------------------------------

    def mov(self, kind: str) -> str:
        to, source = self.operands
        parts = _parts(to if to.startswith("{") else source)
        width = WIDTH[kind] // len(parts)
        if to.startswith("{"):
            taken = [self.write(f"b{width}", f"q >> {i * width}", one) for i, one in enumerate(parts)]
            return f"{{ const uint64_t q = {self.read(source, kind)}; {' '.join(taken)} }}"
        if source.startswith("{"):
            joined = [f"{C_TYPE[kind]}({self.read(one, f'b{width}')}) << {i * width}" for i, one in enumerate(parts)]
            return self.write(kind, " | ".join(joined))
        return self.write(kind, self.read(source, kind))

    def cvta(self, to: str | None, space: str) -> str:
        moved = "" if space == "global" else " - ptx::window()" if to else " + ptx::window()"
        return self.write("u64", self.read(self.operands[1], "u64") + moved)

    def ld(self, space: str | None, vector: str | None, kind: str) -> str:
        to, source = self.operands
        parts, size, c_type = _parts(to), WIDTH[kind] // 8, C_TYPE[kind]
        if len(parts) != int(vector[1:] if vector else 1):
            raise self.at.unknown(f"{len(parts)} registers for .{vector}")
        if vector is None or self.at.used is not None:
            loaded = [
                self.write(
                    kind, f"{PLACES[space]}({c_type}, {self.address(source, space == 'shared', i * size)}, 0)", one
                )
                for i, one in enumerate(parts)
                if self.at.used is None or self.at.used >> i * size & ((1 << size) - 1)
            ]  # an unused element may be past the end of an array
            return " ".join(loaded)
        taken = " ".join(self.write(kind, f"q.item[{i}]", one) for i, one in enumerate(parts))
        place = f"{PLACES[space]}(ptx::{vector}<{c_type}>, {self.address(source, space == 'shared')}, 0)"
        return f"{{ const auto q = {place}; {taken} }}"

    def ld_param(self, kind: str) -> str:
        name = self.operands[1].strip("[]")
        own = self.kernel.parameters.get(name)
        if own is None or WIDTH[own] < WIDTH[kind]:
            raise self.at.unknown(f"unknown parameter {name!r} of .{kind}")
        return self.write(kind, _as(name if own == "f64" else f"uint64_t({name})", own, kind))

    def st(self, space: str | None, vector: str | None, kind: str) -> str:
        parts = _parts(self.operands[1])
        if len(parts) != int(vector[1:] if vector else 1):
            raise self.at.unknown(f"{len(parts)} values for .{vector}")
        values = ", ".join(self.read(one, kind) for one in parts)
        c_type = f"ptx::{vector}<{C_TYPE[kind]}>" if vector else C_TYPE[kind]
        value = f"{c_type}{{{{{values}}}}}" if vector else values
        return f"{PLACES[space]}({c_type}, {self.address(self.operands[0], space == 'shared')}, 1) = {value};"

    def ld_word(self, order: str) -> str:
        # The executor has one kind of load that waits. Memory orders of loads are not modelled.
        return self.write("u32", f"cunorm_cpu::load_acquire((const unsigned*){self.pointer(1)}, PTX_SITE)")

    def st_word(self, order: str) -> str:
        function = "cunorm_cpu::store_release" if order == "release" else "ptx::store_relaxed"
        return f"{function}((unsigned*){self.pointer(0)}, {self.read(self.operands[1], 'u32')});"

    def atom_add(self, order: str | None) -> str:
        added = f"atomicAdd((unsigned*){self.pointer(1)}, {self.read(self.operands[2], 'u32')}, PTX_SITE)"
        fence = "cunorm_cpu::fence(); " if order in ("release", "acq_rel") else ""
        return fence + self.write("u32", added)

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    def of_floats(self, operation: str, kind: str, ftz: str | None = None) -> str:
        """An operation on floating-point numbers, on flushed operands and with a flushed result for .ftz."""
        f, values = "f" if kind == "f32" else "", self.reads(kind)
        if ftz:
            values = [f"ptx::flush({one})" for one in values]
        listed = ", ".join(values)
        if operation in SYMBOL:
            made = f" {SYMBOL[operation]} ".join(values)
        else:
            made = {
                "fma.rn": f"__builtin_fma{f}({listed})",
                "fma.rm": f"ptx::fma_down({listed})",
                "neg": f"-({listed})",
                "abs": f"__builtin_fabs{f}({listed})",
                "sqrt.rn": f"__builtin_sqrt{f}({listed})",
                "min": f"ptx::minimum({listed})",
                "max": f"ptx::maximum({listed})",
                "rcp.rn": f"1.0{f} / ({listed})",
                "rcp.approx": f"1.0{f} / ({listed})",
                "rsqrt.approx": f"1.0{f} / __builtin_sqrt{f}({listed})",
                "ex2.approx": f"exp2{f}({listed})",
                "cvt.sat": f"ptx::saturate({listed})",
            }[operation]
        return self.write(kind, f"ptx::flush({made})" if ftz else made)

    def binary(self, operation: str, kind: str) -> str:
        unsigned = kind.replace("s", "u")
        a, b = self.reads(unsigned)
        return self.write(unsigned, f"{a} {SYMBOL[operation]} {b}")  # signed numbers wrap like unsigned ones

    def logic(self, operation: str, kind: str) -> str:
        return self.write(kind, f" {SYMBOL[operation]} ".join(self.reads(kind)))

    def logical_not(self, kind: str) -> str:
        return self.write(kind, f"{'!' if kind == 'pred' else '~'}{self.read(self.operands[1], kind)}")

    def count_bits(self, kind: str) -> str:
        return self.write("u32", f"__builtin_popcountll({self.read(self.operands[1], kind)})")

    def reverse_bits(self) -> str:
        return self.write("b32", f"ptx::reverse({self.read(self.operands[1], 'u32')})")

    def find_bit(self) -> str:
        return self.write("u32", f"ptx::zeros_before({self.read(self.operands[1], 'u32')})")

    def negate(self, kind: str) -> str:
        unsigned = kind.replace("s", "u")
        return self.write(unsigned, f"0 - {self.read(self.operands[1], unsigned)}")

    def product(self, operation: str, part: str, kind: str) -> str:
        """mul and mad: the low or the high half of the product, or the whole."""
        wide = f"{kind[0]}{2 * WIDTH[kind]}" if part == "wide" else kind
        unsigned = wide.replace("s", "u")
        a, b = (self.read(one, kind) for one in self.operands[1:3])
        both = f"{'' if kind[0] == 's' else 'unsigned '}__int128"
        made = f"{C_TYPE[unsigned]}(({both})({a}) * ({b}){f' >> {WIDTH[kind]}' if part == 'hi' else ''})"
        if operation == "mad":
            made += f" + {self.read(self.operands[3], unsigned)}"
        return self.write(unsigned, made)

    def quotient(self, operation: str, kind: str) -> str:
        a, b = self.reads(kind)
        return self.write(kind, f"ptx::quotient<{C_TYPE[kind]}>({a}, {b}, {int(operation == 'rem')}, PTX_SITE)")

    def extreme(self, operation: str, relu: str | None, kind: str) -> str:
        a, b = self.reads(kind)
        made = f"{a} {'<' if operation == 'min' else '>'} {b} ? {a} : {b}"
        return self.write(kind, f"ptx::relu({made})" if relu else made)

    def shift(self, operation: str, kind: str) -> str:
        by = self.read(self.operands[2], "u32")
        return self.write(kind, f"ptx::{operation}<{C_TYPE[kind]}>({self.read(self.operands[1], kind)}, {by})")

    def funnel(self, side: str, mode: str) -> str:
        return self.write(
            "b32", f"ptx::funnel({int(side == 'l')}, {int(mode == 'wrap')}, {', '.join(self.reads('b32'))})"
        )

    def bfi(self, kind: str) -> str:
        values = [self.read(one, kind) for one in self.operands[1:3]]
        return self.write(kind, f"ptx::bfi<{C_TYPE[kind]}>({', '.join([*values, *self.reads('u32', 3)])})")

    def prmt(self) -> str:
        return self.write("b32", f"ptx::prmt({', '.join(self.reads('b32'))})")

    def selp(self, kind: str) -> str:
        _, a, b, which = self.operands
        return self.write(kind, f"{self.read(which, 'pred')} ? {self.read(a, kind)} : {self.read(b, kind)}")

    def setp(self, compare: str, kind: str, ftz: str | None = None) -> str:
        a, b = self.reads(kind)
        if ftz:
            a, b = f"ptx::flush({a})", f"ptx::flush({b})"
        unordered = f"({a} != {a} || {b} != {b})"
        if compare in ("nan", "num"):
            return self.write("pred", unordered if compare == "nan" else f"!{unordered}")
        symbol = COMPARE[compare[:2]]
        made = f"({a} {symbol} {b})"
        if len(compare) == 3:
            made += f" || {unordered}"
        elif compare == "ne" and kind[0] == "f":  # ordered, whereas != is true for NaN
            made += f" && !{unordered}"
        return self.write("pred", made)

    def cvt(self, to: str, source: str) -> str:
        return self.write(to, f"{C_TYPE[to]}({self.read(self.operands[1], source)})")

    def cvt_floats(self, ftz: str | None, to: str, source: str) -> str:
        value = self.read(self.operands[1], source)
        if ftz:  # applies to float32, be it the source or the result
            value = f"ptx::flush({value})" if source == "f32" else f"ptx::flush(float({value}))"
        return self.write(to, f"{C_TYPE[to]}({value})")

    def cvt_half(self, function: str) -> str:
        narrowing = function in ("f16.f32", "bf16.f32")
        name = {"f16.f32": "to_half", "bf16.f32": "to_bfloat", "f32.f16": "from_half"}[function]
        value = self.read(self.operands[1], "f32" if narrowing else "b16")
        return self.write("b16" if narrowing else "f32", f"ptx::{name}({value})")

    def cvt_two_halves(self, kind: str) -> str:
        name = {"f16x2": "to_half", "bf16x2": "to_bfloat"}[kind]
        upper, lower = (f"uint32_t(ptx::{name}({value}))" for value in self.reads("f32"))
        return self.write("b32", f"{upper} << 16 | {lower}")

    def cvt_integer(self, rounding: str, ftz: str | None, to: str, source: str) -> str:
        value = self.read(self.operands[1], source)
        value = f"ptx::flush({value})" if ftz else value
        return self.write(to, f"ptx::to_integer<{C_TYPE[to]}>({value}, {int(rounding == 'rni')})")

    # ---- control flow and synchronisation ---------------------------------------------------------------------------

    def bra(self) -> str:
        if self.operands[0] not in self.kernel.body:
            raise self.at.unknown(f"unknown label {self.operands[0]!r}")
        return f"goto {_label(self.operands[0])};"

    def shfl(self, mode: str) -> str:
        to, _, predicate = self.operands[0].partition("|")
        if predicate in self.mentioned:
            raise self.at.unknown(f"the predicate {predicate!r}, which another instruction uses,")
        value, operand, c, mask = self.reads("u32")
        width = f"ptx::width({c}, {int(mode == 'up')}, PTX_SITE)"
        kind = f"cunorm_cpu::{SHUFFLES[mode]}"
        return self.write("b32", f"cunorm_cpu::shuffle({kind}, {mask}, {value}, {operand}, {width}, PTX_SITE)", to)

    def ballot(self) -> str:
        predicate, mask = self.read(self.operands[1], "pred"), self.read(self.operands[2], "u32")
        return self.write("b32", f"__ballot_sync({mask}, {predicate}, PTX_SITE)")

    def barrier(self) -> str:
        if self.operands != ("0",):
            raise self.at.unknown("a barrier other than 0")
        return "cunorm_cpu::barrier(PTX_SITE);"

    def warp_barrier(self) -> str:
        return f"__syncwarp({self.read(self.operands[0], 'u32')}, PTX_SITE);"

    def mapa(self) -> str:
        address, rank = self.read(self.operands[1], "u64"), self.read(self.operands[2], "u32")
        return self.write("u64", f"uint64_t(cunorm_cpu::map_shared(PTX_ADDRESS({address}), {rank}))")

    def mbarrier_init(self) -> str:
        return f"cunorm_cpu::mbarrier_init({self.pointer(0, True)}, {self.read(self.operands[1], 'u32')});"

    def mbarrier_arrive(self) -> str:
        if self.operands[0] != "_":
            raise self.at.unknown("the state that an arrival returns")
        expected = self.read(self.operands[2], "u32") if len(self.operands) > 2 else "0"
        return f"cunorm_cpu::mbarrier_arrive({self.pointer(1, True)}, {expected});"

    def try_wait(self) -> str:
        parity = self.read(self.operands[2], "u32")
        return self.write("pred", f"ptx::try_wait({self.pointer(1, True)}, {parity}, PTX_SITE)")

    def copy(self, cache: str) -> str:
        if self.operands[2] not in ({"16"} if cache == "cg" else {"4", "8", "16"}):
            raise self.at.unknown(f"{self.operands[2]} bytes")
        return f"cunorm_cpu::copy_async({self.pointer(0, True)}, {self.pointer(1)}, {self.operands[2]});"

    def copy_wait(self, bulk: str | None) -> str:
        return f"cunorm_cpu::{'bulk' if bulk else 'copy'}_wait({self.read(self.operands[0], 'u32')});"

    def bulk_load(self) -> str:
        rest = f"{self.read(self.operands[2], 'u32')}, {self.pointer(3, True)}"
        return f"cunorm_cpu::bulk_load({self.pointer(0, True)}, {self.pointer(1)}, {rest});"

    def bulk_store(self) -> str:
        bytes = self.read(self.operands[2], "u32")
        return f"cunorm_cpu::bulk_store({self.pointer(0)}, {self.pointer(1, True)}, {bytes});"


def _call(text: str) -> Callable[[Emitter], str]:
    """The rule of an instruction without operands."""
    return lambda _: text


def _fixed(method: Callable[..., str], **options: str) -> Callable[..., str]:
    """A method with some of its arguments."""
    return lambda emitter, **found: method(emitter, **options, **found)


_SPACE, _VECTOR, _FTZ = r"(?:\.(?P<space>global|shared))?", r"(?:\.(?P<vector>v[24]))?", r"(?P<ftz>\.ftz)?"
_WORD = r"(?:[bus](?:8|16|32|64)|f32|f64)"
_INT, _BITS = r"[us](?:16|32|64)", r"b(?:16|32|64)"
_ANY = rf"(?P<kind>{_INT}|{_BITS}|f32|f64)"
_E = Emitter
#: (pattern of the whole opcode, number of operands, method). The named groups are the arguments of the method.
_RULES: list[tuple[str, int, Callable[..., str]]] = [
    (rf"mov\.(?P<kind>pred|{_INT}|{_BITS}|f32|f64)", 2, _E.mov),
    (r"cvta(?P<to>\.to)?\.(?P<space>global|shared)\.u64", 2, _E.cvta),
    (rf"ld{_SPACE}{_VECTOR}\.(?P<kind>{_WORD})", 2, _E.ld),
    (rf"ld\.param\.(?P<kind>{_WORD})", 2, _E.ld_param),
    (rf"st{_SPACE}{_VECTOR}\.(?P<kind>{_WORD})", 2, _E.st),
    (r"ld\.(?P<order>acquire|relaxed)\.gpu\.global\.u32", 2, _E.ld_word),
    (r"st\.(?P<order>release|relaxed)\.gpu\.global\.u32", 2, _E.st_word),
    (r"atom(?:\.(?P<order>relaxed|acquire|release|acq_rel)\.gpu)?\.global\.add\.u32", 3, _E.atom_add),
    # floating point
    (rf"(?P<operation>add|sub|mul)(?:\.rn)?{_FTZ}\.(?P<kind>f32)", 3, _E.of_floats),
    (r"(?P<operation>add|sub|mul)(?:\.rn)?\.(?P<kind>f64)", 3, _E.of_floats),
    (rf"(?P<operation>div)\.rn{_FTZ}\.(?P<kind>f32)", 3, _E.of_floats),
    (r"(?P<operation>div)\.rn\.(?P<kind>f64)", 3, _E.of_floats),
    (rf"(?P<operation>fma\.r[nm]){_FTZ}\.(?P<kind>f32)", 4, _E.of_floats),
    (r"(?P<operation>fma\.rn)\.(?P<kind>f64)", 4, _E.of_floats),
    (rf"(?P<operation>neg|abs|(?:sqrt|rcp)\.rn|(?:rcp|rsqrt|ex2)\.approx){_FTZ}\.(?P<kind>f32)", 2, _E.of_floats),
    (r"(?P<operation>neg|abs|(?:sqrt|rcp)\.rn)\.(?P<kind>f64)", 2, _E.of_floats),
    (rf"(?P<operation>min|max){_FTZ}\.(?P<kind>f32)", 3, _E.of_floats),
    (r"(?P<operation>min|max)\.(?P<kind>f64)", 3, _E.of_floats),
    (rf"cvt{_FTZ}\.sat\.f32\.(?P<kind>f32)", 2, _fixed(_E.of_floats, operation="cvt.sat")),
    (rf"cvt{_FTZ}\.(?P<to>f64)\.(?P<source>f32)", 2, _E.cvt_floats),
    (rf"cvt\.rn{_FTZ}\.(?P<to>f32)\.(?P<source>f64)", 2, _E.cvt_floats),
    (r"cvt(?:\.rn\.(?=b?f16)|\.(?=f32))(?P<function>b?f16\.f32|f32\.f16)", 2, _E.cvt_half),
    (r"cvt\.rn\.(?P<kind>b?f16x2)\.f32", 3, _E.cvt_two_halves),
    (rf"cvt\.(?P<rounding>r[zn]i){_FTZ}\.(?P<to>[us](?:32|64))\.(?P<source>f32)", 2, _E.cvt_integer),
    (r"cvt\.(?P<rounding>r[zn]i)\.(?P<to>[us](?:32|64))\.(?P<source>f64)", 2, _fixed(_E.cvt_integer, ftz="")),
    (rf"cvt\.rn\.(?P<to>f32|f64)\.(?P<source>{_INT})", 2, _E.cvt),
    (r"cvt\.(?P<to>[us](?:8|16|32|64))\.(?P<source>[us](?:8|16|32|64))", 2, _E.cvt),
    # integers and predicates
    (rf"(?P<operation>add|sub)\.(?P<kind>{_INT})", 3, _E.binary),
    (rf"neg\.(?P<kind>{_INT})", 2, _E.negate),
    (rf"(?P<operation>mul)\.(?P<part>lo|hi)\.(?P<kind>{_INT})", 3, _E.product),
    (r"(?P<operation>mul)\.(?P<part>wide)\.(?P<kind>[us](?:16|32))", 3, _E.product),
    (rf"(?P<operation>mad)\.(?P<part>lo|hi)\.(?P<kind>{_INT})", 4, _E.product),
    (r"(?P<operation>mad)\.(?P<part>wide)\.(?P<kind>[us](?:16|32))", 4, _E.product),
    (rf"(?P<operation>div|rem)\.(?P<kind>{_INT})", 3, _E.quotient),
    (rf"(?P<operation>min|max)\.(?P<kind>{_INT})", 3, _fixed(_E.extreme, relu="")),
    (r"(?P<operation>min|max)(?P<relu>\.relu)\.(?P<kind>s32)", 3, _E.extreme),
    (rf"(?P<operation>and|or|xor)\.(?P<kind>pred|{_BITS})", 3, _E.logic),
    (rf"not\.(?P<kind>pred|{_BITS})", 2, _E.logical_not),
    (r"brev\.b32", 2, _E.reverse_bits),
    (r"bfind\.shiftamt\.u32", 2, _E.find_bit),
    (r"popc\.(?P<kind>b32|b64)", 2, _E.count_bits),
    (rf"(?P<operation>shl)\.(?P<kind>{_BITS})", 3, _E.shift),
    (rf"(?P<operation>shr)\.(?P<kind>{_BITS}|{_INT})", 3, _E.shift),
    (r"shf\.(?P<side>[lr])\.(?P<mode>wrap|clamp)\.b32", 4, _E.funnel),
    (r"bfi\.(?P<kind>b32|b64)", 5, _E.bfi),
    (r"prmt\.b32", 4, _E.prmt),
    (rf"selp\.{_ANY}", 4, _E.selp),
    (rf"setp\.(?P<compare>eq|ne|lt|le|gt|ge)\.(?P<kind>{_INT})", 3, _E.setp),
    (rf"setp\.(?P<compare>eq|ne)\.(?P<kind>{_BITS})", 3, _E.setp),
    (rf"setp\.(?P<compare>(?:eq|ne|lt|le|gt|ge)u?|num|nan){_FTZ}\.(?P<kind>f32)", 3, _E.setp),
    (r"setp\.(?P<compare>(?:eq|ne|lt|le|gt|ge)u?|num|nan)\.(?P<kind>f64)", 3, _E.setp),
    # control flow and synchronisation
    (r"bra(?:\.uni)?", 1, _E.bra),
    (r"ret|exit", 0, _call("return;")),
    (r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32", 5, _E.shfl),
    (r"vote\.sync\.ballot\.b32", 3, _E.ballot),
    (r"bar\.sync", 1, _E.barrier),
    (r"bar\.warp\.sync", 1, _E.warp_barrier),
    (r"membar\.gl|fence\.(?:acq_rel|sc)\.gpu", 0, _call("cunorm_cpu::fence();")),
    (r"fence\.acq_rel\.cluster", 0, _call(";")),  # the executor has only the releasing arrival
    (r"fence\.mbarrier_init\.release\.cluster", 0, _call(";")),  # the executor's mbarriers are visible at once
    (r"fence\.proxy\.async\.shared::cta", 0, _call("cunorm_cpu::proxy_fence();")),
    (r"mapa\.u64", 3, _E.mapa),
    (r"barrier\.cluster\.arrive\.(?:release|relaxed)\.aligned", 0, _call("cunorm_cpu::cluster_arrive();")),
    (r"barrier\.cluster\.wait\.acquire\.aligned", 0, _call("cunorm_cpu::cluster_wait(PTX_SITE);")),
    (r"mbarrier\.init\.shared::cta\.b64", 2, _E.mbarrier_init),
    (r"mbarrier\.arrive\.shared::cta\.b64", 2, _E.mbarrier_arrive),
    (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64", 3, _E.mbarrier_arrive),
    (r"mbarrier\.try_wait\.parity\.shared::cta\.b64", 3, _E.try_wait),
    (r"cp\.async\.(?P<cache>c[ga])\.shared\.global", 3, _E.copy),
    (r"cp\.async\.commit_group", 0, _call("cunorm_cpu::copy_commit();")),
    (r"cp\.async\.wait_group", 1, _fixed(_E.copy_wait, bulk="")),
    (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes", 4, _E.bulk_load),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", 3, _E.bulk_store),
    (r"cp\.async\.bulk\.commit_group", 0, _call("cunorm_cpu::bulk_commit();")),
    (r"cp\.async(?P<bulk>\.bulk)\.wait_group\.read", 1, _E.copy_wait),
]
RULES = [(re.compile(pattern), operands, method) for pattern, operands, method in _RULES]


@functools.cache
def _rule(opcode: str) -> tuple[int, re.Match[str] | None]:
    """The index of the rule of an opcode, and its match; None if no rule matches."""
    matches = ((number, pattern.fullmatch(opcode)) for number, (pattern, _, _) in enumerate(RULES))
    return next(((number, found) for number, found in matches if found), (-1, None))


def _label(name: str) -> str:
    return f"L{name}"


def _kernel(kernel: Kernel, program: Program, file: str) -> str:
    emitter = Emitter(kernel, program)
    lines = []
    for one in kernel.body:
        if isinstance(one, str):
            lines.append(f"{_label(one)}:;")
        else:
            lines.append(f'#line {one.line} "{file}"\n{emitter.statement(one)}')
    types = {"f64": "double", "u64": "long long", "b64": "long long"}
    parameters = ", ".join(f"{types[kind]} {name}" for name, kind in kernel.parameters.items())
    start = {name: _as(f"uint{WIDTH[kind]}_t(~0ull)", f"b{WIDTH[kind]}", kind) if kind != "pred" else "true"
             for name, kind in emitter.used.items()}  # fmt: skip
    registers = "".join(f"{C_TYPE[kind]} {name} = {start[name]};\n" for name, kind in emitter.used.items())
    body = "\n".join(lines)
    return f'extern "C" __global__ void {kernel.name}({parameters}) {{\n{registers}{body}\n}}\n'


def translate(ptx: str) -> str:
    """Translate a PTX text to C++ for `cunorm.executors.cpu.executor.compile`.

    A fault names the line of the PTX, as a line of the file ENTRY.ptx.

    Raises
    ------
    UnknownPtx
        If the text contains PTX that RULES or the parser do not know.
    """
    program = parse(ptx)
    header = Path(__file__).with_name("ptx.h").read_text(encoding="utf-8")
    file = f"{program.kernels[0].name}.ptx" if program.kernels else ""
    kernels = "".join(_kernel(kernel, program, file) for kernel in program.kernels)
    return f'#line 1 "{HEADER}"\n{header}\n#line 1 "{file}"\n{kernels}'

"""Find kernels_cu and build one text per kernel: a head that the host writes, then the file with expanded #includes.

Everything is in one text because CuPy's disk cache does not track files that are included through ``-I``: after an edit
of a header, the stale kernel would run. ``#line`` makes the compiler's messages name the real file and line.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from cunorm.core.opspec import OPS
from cunorm.core.problem import Problem, accumulator
from cunorm.core.strategy import Launch, Strategy, Tile

_INCLUDE = re.compile(r'^#include "([^"]+)"$')
# A string, which may contain slashes, or a comment.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_C_TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_C_TYPES |= {"int32": "int", "int64": "long long"}
_C_TYPES |= {"identity": "Identity", "silu": "Silu", "generic": "Generic", "specialised": "Specialised"}
#: The texts of a kernel: one for all sizes, or one with the sizes of a problem as constants.
Text = Literal["generic", "specialised"]
TEXTS: tuple[Text, ...] = get_args(Text)
_LAYOUTS = {"NCHW": "ChannelsFirst", "NHWC": "ChannelsLast"}


@functools.cache
def folder() -> Path:
    """Return the folder of the kernels: inside the package when installed, next to it in a checkout.

    Raises
    ------
    FileNotFoundError
        If the folder is missing from the installation.
    """
    searched = [Path(entry) / "kernels_cu" for entry in sys.modules["cunorm"].__path__]
    for candidate in searched:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"kernels_cu: not in {', '.join(map(str, searched))}; reinstall cunorm")


@functools.cache
def _places(kernels: Path) -> dict[str, str]:
    return {path.stem: path.relative_to(kernels).as_posix() for path in kernels.rglob("*.cu")}


def place_of(kernel: str) -> str:
    """Return a kernel's path in the folder: ``"group_norm/group_norm_block.cu"`` for ``"group_norm_block"``.

    For a kernel whose text comes from an op instead of a file, return the name that messages use for it.
    """
    return _places(folder()).get(kernel, f"{kernel}.cu")


@functools.cache
def _expand(kernel: str) -> str:
    """Return the text of a kernel's file, with each include expanded at its first occurrence."""
    seen: set[str] = set()

    def read(name: str) -> str:
        return (folder() / name).read_text(encoding="utf-8")

    def lines_of(name: str, text: str) -> list[str]:
        seen.add(name)
        out = [f'#line 1 "{name}"']
        for number, line in enumerate(text.splitlines(), 1):
            found = _INCLUDE.match(line)
            if found is None:
                out.append(line)
            elif found[1] not in seen:
                out += [*lines_of(found[1], read(found[1])), f'#line {number + 1} "{name}"']
            else:
                out.append("")
        return out

    brought = (spec.kernels[kernel] for spec in OPS.values() if kernel in spec.kernels)
    return "\n".join(lines_of(place_of(kernel), next(brought, None) or read(place_of(kernel)))) + "\n"


@functools.cache  # a search takes longer than the rest of a specialised text
def _declaration(kernel: str, entry: str, text: str) -> re.Match[str]:
    """Find a kernel in its text, from its name to the opening brace; group 1 is the list of parameters."""
    found = re.search(rf"\b{entry}\(([^()]*)\)\s*\{{", text)
    if found is None:
        raise ValueError(f"{place_of(kernel)} has no kernel {entry}")
    return found


@functools.cache
def _declared(kernel: str, entry: str) -> tuple[str, ...]:
    """Return the names of a kernel's parameters, in the order of its declaration."""
    found = _declaration(kernel, entry, _code(kernel))
    return tuple(re.split(r"\W+", one.strip())[-1] for one in found[1].split(","))


def parameters(kernel: str, entry: str, given: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a kernel's parameters in the order of its declaration; `given` must contain the same names.

    Raises
    ------
    ValueError
        If the names differ, which is a fault of the strategy.
    """
    declared = _declared(kernel, entry)
    if {*declared} != {*given}:
        missing, unknown = sorted({*declared} - {*given}), sorted({*given} - {*declared})
        raise ValueError(f"{entry}: arguments missing: {missing}, unknown: {unknown}")
    return declared


def _constant(name: str, value: int | tuple[str, ...]) -> str:
    """Return a member of struct Tile: a number, or a word of an enumeration.

    For an enumeration, `value` contains the chosen word, then all words.
    """
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    kind = name.capitalize()
    return f"enum class {kind} {{ {', '.join(value[1:])} }}; static constexpr {kind} {name} = {kind}::{value[0]};"


def _head(types: Mapping[str, str], layout: str, constants: Mapping[str, int | tuple[str, ...]]) -> str:
    """Return the text that precedes a kernel: storage types, layout, and struct Tile."""
    fields = " ".join(_constant(name, value) for name, value in sorted(constants.items()))
    return "\n".join(
        [
            "struct float16; struct bfloat16; struct ChannelsFirst; struct ChannelsLast; struct Identity; struct Silu;",
            "struct Generic; struct Specialised;",
            *(f"typedef {_C_TYPES[dtype]} {name};" for name, dtype in types.items()),
            f"typedef {_LAYOUTS[layout]} layout_t;",
            f"struct Tile {{ {fields} }};",
            "",
        ]
    )


@functools.cache
def _code(kernel: str) -> str:
    """Return the expanded text without comments, ``#line`` and empty lines. It does not depend on file names."""
    bare = _STRING_OR_COMMENT.sub(lambda found: found[1] or " ", _expand(kernel))
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#line ")) + "\n"


@functools.cache
def _words(kernel: str) -> frozenset[str]:
    """Return the names and numbers in a kernel's text."""
    return frozenset(re.findall(r"\w+", _code(kernel)))


@functools.lru_cache(maxsize=4096)
def _head_of(
    kernel: str,
    types: tuple[tuple[str, str], ...],
    layout: str,
    constants: tuple[tuple[str, int | tuple[str, ...]], ...],
) -> str:
    # Leave out the types that the kernel does not use: they would change the text and cause a second build of it.
    mentioned = {name: dtype for name, dtype in types if name in _words(kernel)}
    return _head(mentioned, layout, dict(constants))


def _head_for(launch: Launch, problem: Problem, strategy: Strategy, tile: Tile, text: Text) -> str:
    sums = accumulator(problem.dtype)
    types = {
        "data_t": problem.dtype,
        "y_t": problem.dtype,
        "gamma_t": problem.gamma_dtype or (problem.stats_dtype if problem.is_backward else sums),
        "beta_t": problem.beta_dtype or sums,
        "stat_t": problem.stats_dtype,
        "activation_t": problem.activation or "identity",
        "count_t": "int64",
        "text_t": text,
        **dict(problem.others),
    }
    known = strategy.constants if launch.takes_tile else ()
    constants: dict[str, int | tuple[str, ...]] = {"threads": launch.threads, **launch.constants}
    for name, value in tile.fields:
        if name in known and name != "threads":
            constants[name] = (value, *strategy.space[name]) if isinstance(value, str) else value
    return _head_of(launch.kernel, tuple(types.items()), launch.layout or problem.layout, tuple(constants.items()))


def kernel_text(launch: Launch, problem: Problem, strategy: Strategy, tile: Tile, text: Text = "generic") -> str:
    """Return the text that an executor compiles for one launch of a problem and tile.

    Parameters
    ----------
    text : str
        One of `TEXTS`. A specialised text is the generic one with constants in place of parameters; see
        docs/guide/calls.md.
    """
    body = _expand(launch.kernel)
    if text == "specialised":
        body = _specialise(body, launch, fixed_arguments(launch, problem, strategy, tile))
    return _head_for(launch, problem, strategy, tile, text) + body


def fixed_arguments(launch: Launch, problem: Problem, strategy: Strategy, tile: Tile) -> dict[str, int]:
    """Return the arguments of a launch that are constants in its specialised text, by the kernel's parameters.

    They are the numbers that do not change with N, and 0 for each absent array, also if another N passes it.
    """
    others = strategy.launches(replace(problem, N=problem.N + 1), tile)
    other = next((one for one in others if one.entry == launch.entry), launch)
    fixed = {}
    for name, value in launch.arguments.items():
        if _is_absent(value, problem) or (value == 0 and isinstance(other.arguments.get(name), str)):
            fixed[name] = 0
        elif isinstance(value, int) and value == other.arguments.get(name):
            fixed[name] = value
    return fixed


def _is_absent(argument: str | int | float, problem: Problem) -> bool:
    return argument in problem.spec.arrays and not problem.has(str(argument))


def aligned_arrays(launch: Launch, problem: Problem) -> list[str]:
    """Return the arrays of a call that a launch's specialised text assumes to start at multiples of 16 bytes."""
    arrays = ("workspace", *problem.spec.arrays)
    return [str(one) for one in launch.arguments.values() if one in arrays and not _is_absent(one, problem)]


def _specialise(text: str, launch: Launch, fixed: Mapping[str, int]) -> str:
    """Return a text whose kernel ignores the parameters with fixed values and has constants of these names.

    The other arrays are assumed to start at multiples of 16 bytes. The list of parameters keeps its types, so that the
    launch is that of the generic text. No line is added: messages keep their line numbers.
    """
    found = _declaration(launch.kernel, launch.entry, text)
    declared, facts = [], []
    for one in found[1].split(","):
        kind, name = re.fullmatch(r"(\s*.*?)(\w+)", one, re.DOTALL).groups()  # type: ignore[union-attr]
        is_array = kind.rstrip().endswith("*")
        if name in fixed:
            value = "nullptr" if is_array else f"{fixed[name]}LL"
            facts.append(f"{kind.strip()} const {name} = {value};")
        elif is_array:
            facts.append(f"CUNORM_ALIGNED({name});")
        declared.append(kind if name in fixed else one)
    start, end = found.span(1)
    return f"{text[:start]}{','.join(declared)}{text[end : found.end()]} {' '.join(facts)}{text[found.end() :]}"


def kernel_digest(problem: Problem, strategy: Strategy, tile: Tile) -> str:
    """Return a digest of all kernels that a tile launches. It changes when their code changes.

    Comments and file names do not affect it.
    """
    launches = strategy.launches(problem, tile)
    codes = (_head_for(launch, problem, strategy, tile, "generic") + _code(launch.kernel) for launch in launches)
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]

"""Finds kernels_cu and makes one text of a kernel: what the host writes on top, then every #include in its place.

One text, because CuPy's disk cache does not see files reached by ``-I``: an edited header would run stale. ``#line``
keeps the compiler's messages on the real file and line.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from cunorm.core.opspec import OPS
from cunorm.core.problem import Problem, accumulator
from cunorm.core.strategy import Launch, Strategy, Tile

_INCLUDE = re.compile(r'^#include "([^"]+)"$')
# A string, which may hold slashes, or a comment.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_C_TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_C_TYPES |= {"int32": "int", "int64": "long long"}
_C_TYPES |= {"identity": "Identity", "silu": "Silu"}
_LAYOUTS = {"NCHW": "ChannelsFirst", "NHWC": "ChannelsLast"}


@functools.cache
def folder() -> Path:
    """The folder of the kernels: in the package when installed, beside it in a checkout.

    Raises
    ------
    FileNotFoundError
        If the installation lost it.
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
    """Where in the folder a kernel's file is: ``"group_norm/group_norm_block.cu"`` of ``"group_norm_block"``.

    Of one that an op brings without a file: what stands there for it.
    """
    return _places(folder()).get(kernel, f"{kernel}.cu")


@functools.cache
def _expand(kernel: str) -> str:
    """The text of a kernel's file with each include in the place of its first mention."""
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


@functools.cache
def _declared(kernel: str, entry: str) -> tuple[str, ...]:
    """The names of a kernel's parameters, in its order."""
    found = re.search(rf"\b{entry}\(([^()]*)\)\s*\{{", _code(kernel))
    if found is None:
        raise ValueError(f"{place_of(kernel)} has no kernel {entry}")
    return tuple(re.split(r"\W+", one.strip())[-1] for one in found[1].split(","))


def parameters(kernel: str, entry: str, given: Iterable[str]) -> tuple[str, ...]:
    """The names of a kernel's parameters, in its order, which must be those that the host gives.

    Raises
    ------
    ValueError
        If there are others: a fault of the strategy.
    """
    declared = _declared(kernel, entry)
    if {*declared} != {*given}:
        missing, unknown = sorted({*declared} - {*given}), sorted({*given} - {*declared})
        raise ValueError(f"{entry}: arguments that are missing: {missing}, that it does not have: {unknown}")
    return declared


def _constant(name: str, value: int | tuple[str, ...]) -> str:
    """A member of struct Tile: a number, or a word of an enumeration, which comes first, before all that there are."""
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    kind = name.capitalize()
    return f"enum class {kind} {{ {', '.join(value[1:])} }}; static constexpr {kind} {name} = {kind}::{value[0]};"


def _head(types: Mapping[str, str], layout: str, constants: Mapping[str, int | tuple[str, ...]]) -> str:
    """What the host writes on top: storage types, layout, and struct Tile."""
    fields = " ".join(_constant(name, value) for name, value in sorted(constants.items()))
    return "\n".join(
        [
            "struct float16; struct bfloat16; struct ChannelsFirst; struct ChannelsLast; struct Identity; struct Silu;",
            *(f"typedef {_C_TYPES[dtype]} {name};" for name, dtype in types.items()),
            f"typedef {_LAYOUTS[layout]} layout_t;",
            f"struct Tile {{ {fields} }};",
            "",
        ]
    )


@functools.cache
def _code(kernel: str) -> str:
    """The same without comments, ``#line`` and empty lines: what it says, wherever its headers are."""
    bare = _STRING_OR_COMMENT.sub(lambda found: found[1] or " ", _expand(kernel))
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#line ")) + "\n"


@functools.lru_cache(maxsize=4096)
def _head_of(
    kernel: str,
    types: tuple[tuple[str, str], ...],
    layout: str,
    constants: tuple[tuple[str, int | tuple[str, ...]], ...],
) -> str:
    # A type that a kernel does not mention would make another text, and another build, of the same kernel.
    mentioned = {name: dtype for name, dtype in types if re.search(rf"\b{name}\b", _code(kernel))}
    return _head(mentioned, layout, dict(constants))


def _head_for(launch: Launch, problem: Problem, strategy: Strategy, tile: Tile) -> str:
    sums = accumulator(problem.dtype)
    types = {
        "data_t": problem.dtype,
        "gamma_t": problem.gamma_dtype or (problem.stats_dtype if problem.is_backward else sums),
        "beta_t": problem.beta_dtype or sums,
        "stat_t": problem.stats_dtype,
        "activation_t": problem.activation or "identity",
        **dict(problem.others),
    }
    known = strategy.constants if launch.takes_tile else ()
    constants: dict[str, int | tuple[str, ...]] = {"threads": launch.threads, **launch.constants}
    for name, value in tile.fields:
        if name in known and name != "threads":
            constants[name] = (value, *strategy.space[name]) if isinstance(value, str) else value
    return _head_of(launch.kernel, tuple(types.items()), launch.layout or problem.layout, tuple(constants.items()))


def kernel_text(launch: Launch, problem: Problem, strategy: Strategy, tile: Tile) -> str:
    """The single text that an executor compiles for one launch of this problem and tile."""
    return _head_for(launch, problem, strategy, tile) + _expand(launch.kernel)


def kernel_digest(problem: Problem, strategy: Strategy, tile: Tile) -> str:
    """A short name for all that a tile launches: another one means that the kernels have changed since.

    Comments, and the files that the text comes from, have no part in it.
    """
    launches = strategy.launches(problem, tile)
    codes = (_head_for(launch, problem, strategy, tile) + _code(launch.kernel) for launch in launches)
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]

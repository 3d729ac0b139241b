"""Parser of problems and tiles on the command line, such as ``cunorm show OP --shape N,C,HxW,GROUP``."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from cunorm.core.problem import LAYOUTS, Problem
from cunorm.core.strategy import Tile

from .registry import OPS


def names_of(op: str) -> tuple[str, ...]:
    """Names of the numbers in an op's ``--shape``.

    Raises
    ------
    ValueError
        If there is no such op.
    """
    if op not in OPS:
        near = [name for name in OPS if re.sub(r"[-_ ]", "", op).lower() in name.replace("_", "")]
        raise ValueError(f"op: {op!r}, expected {'' if near else 'one of '}{' or '.join(near) or ', '.join(OPS)}")
    return tuple(name if name == "HxW" else name.upper() for name in OPS[op].sizes)


def _numbers(op: str, text: str) -> list[int]:
    names = names_of(op)
    wanted = f"for {op} expected {','.join(names)}"
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != len(names):
        raise ValueError(f"--shape: {text!r} has {len(parts)} numbers, {wanted}")
    found = []
    for name, of, part in zip(names, OPS[op].sizes.values(), parts, strict=True):
        if of == "HxW":  # also accepted as a product of sides: 64x64, 64 X 64
            part = re.sub(r"\s*[xX×]\s*", "x", part)
        if not re.fullmatch(r"\d+(x\d+)*" if of == "HxW" else r"\d+", part):
            raise ValueError(f"--shape: {name} is {part!r}, expected a whole number; {wanted}")
        found.append(math.prod(map(int, part.split("x"))))
        if found[-1] == 0:
            raise ValueError(f"--shape: {name} is 0, expected at least 1")
    return found


def _mask(op: str, outputs: str | None) -> dict[str, Any]:
    """Option ``output_mask`` of `cunorm.plan` for the text of ``--outputs``; no option if that is None."""
    if outputs is None:
        return {}
    flags = OPS[op].flags
    if not flags:
        raise ValueError(f"--outputs: {outputs!r}, but {op} always returns all of its results")
    names = tuple(OPS[op].results)
    wanted = [name.strip() for name in outputs.split(",")]
    for name in wanted:
        if name not in names:
            raise ValueError(f"--outputs: {name!r}, expected some of {','.join(names)}")
    for together in flags.values():
        if 0 < sum(name in wanted for name in together) < len(together):
            raise ValueError(f"--outputs: {outputs!r}, but {' and '.join(together)} belong together: name all or none")
    return {"output_mask": tuple(together[0] in wanted for together in flags.values())}


def _extras(op: str, extras: str | None) -> dict[str, Any]:
    """Options ``residual`` and ``dh`` of `cunorm.plan` for the text of ``--with``."""
    names = [] if extras is None else [name.strip() for name in extras.split(",")]
    for name in names:
        if name not in OPS[op].extras:
            known = " or ".join(OPS[op].extras) or f"no --with, because {op} adds no tensor"
            raise ValueError(f"--with: {name!r}, expected {known}")
    return dict.fromkeys(names, True)


def layout_named(layout: str | None) -> str | None:
    """The layout that ``--layout`` names in letters of any case; ValueError if there is none of that name."""
    if layout is None:
        return None
    if layout.upper() not in LAYOUTS:
        raise ValueError(f"--layout: {layout!r}, expected {' or '.join(LAYOUTS)}")
    return layout.upper()


def plan_options(
    op: str,
    shape: str,
    dtype: str,
    layout: str | None = None,
    outputs: str | None = None,
    extras: str | None = None,
    activation: str | None = None,
    y_dtype: str | None = None,
) -> dict[str, Any]:
    """Options of `cunorm.plan` for a problem from the command line. gamma and beta have x's dtype.

    Parameters
    ----------
    op : str
        Name of the op's function.
    shape : str
        N,C,HxW,GROUP for GroupNorm; N,C,HxW for InstanceNorm and BatchNorm; ROWS,LENGTH for LayerNorm and RMSNorm;
        WORLD,C for batch_norm_gather_stats. HxW may be a product of sides, such as 64x64.
    dtype : str
        Dtype of x.
    layout : {"NCHW", "NHWC"}, optional
        Memory order of the tensors; None means NCHW.
    outputs : str, optional
        Comma-separated names of the wanted results; None means all results.
    extras : str, optional
        Comma-separated names of the optional tensors that a call passes: residual or dh; None means none.
    activation, y_dtype : str, optional
        As in `cunorm.plan`, which checks them.

    Raises
    ------
    ValueError
        If the shape, the layout, the outputs or the extras are invalid. The message is one sentence.
    """
    numbers = _numbers(op, shape)
    data_format = layout_named(layout) or "NCHW"
    takes = OPS[op].takes
    options: dict[str, Any] = {"dtype": dtype, **_mask(op, outputs), **_extras(op, extras)}
    options |= {name: dtype for name in ("gamma_dtype", "beta_dtype") if name in takes}
    if OPS[op].is_backward and activation is None:
        options.pop("beta_dtype", None)  # without an activation, no gradient depends on beta
    chosen = {"activation": activation, "y_dtype": y_dtype}
    options |= {name: value for name, value in chosen.items() if value is not None}
    if "data_format" not in takes:
        if data_format != "NCHW":
            raise ValueError(f"--layout: {layout!r}, expected NCHW, because {op} has no channel and position axes")
        normalised = {"normalized_shape": numbers[1]} if "normalized_shape" in takes else {}
        return {"shape": tuple(numbers), **normalised, **options}
    N, C, HxW = numbers[:3]
    if "num_groups" in takes:
        if C % numbers[3]:
            raise ValueError(f"--shape: GROUP is {numbers[3]}, expected a divisor of C, which is {C}")
        options["num_groups"] = numbers[3]
    sizes = (N, C, HxW) if data_format == "NCHW" else (N, HxW, C)
    return {"shape": sizes, "data_format": data_format, **options}


def naming_options(error: Exception) -> str:
    """The message of an error of `cunorm.plan`, with the command's option in place of the function's argument."""
    option = {"op": "OP", "num_groups": "--shape"}
    return re.sub(
        r"^(op|num_groups|shape|dtype|activation|y_dtype|device):",
        lambda found: option.get(found[1], f"--{found[1].replace('_', '-')}") + ":",
        str(error),
    )


def typed_options(asked: argparse.Namespace) -> dict[str, Any]:
    """`plan_options` of a command's arguments. The default dtype is float32."""
    chosen = asked.layout, asked.outputs, asked.extras, asked.activation, asked.y_dtype
    return plan_options(asked.op, asked.shape, asked.dtype or "float32", *chosen)


def refuse_without_shape(asked: argparse.Namespace, *others: str) -> None:
    """Raise an error for an argument that describes one problem, in a command without ``--shape``.

    Parameters
    ----------
    asked : argparse.Namespace
    *others : str
        Names of more arguments that are only valid with ``--shape``.

    Raises
    ------
    ValueError
    """
    options = {"extras": "--with", "y_dtype": "--y-dtype"}
    for name in ("outputs", "extras", "activation", "y_dtype", *others):
        if getattr(asked, name) not in (None, False):
            raise ValueError(f"{options.get(name, f'--{name}')}: only valid with --shape")


def tile_of(op: str, strategy: str, text: str) -> Tile:
    """Tile of a strategy from command-line text such as ``threads=256,chunk=1024``.

    Whether the tile is legal for a problem is not checked.

    Raises
    ------
    ValueError
        If the strategy, a field or a value is invalid. The message is one sentence.
    """
    known = OPS[op].strategies
    if strategy not in known:
        raise ValueError(f"--strategy: {strategy!r}, expected one of {', '.join(known)} for {op}")
    fields: dict[str, int | str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in known[strategy].space and equals:
            raise ValueError(f"--tile: no field {name!r}, {strategy} expects {', '.join(known[strategy].space)}")
        words = [word for word in known[strategy].space.get(name, ()) if isinstance(word, str)]
        if words and value not in words:
            raise ValueError(f"--tile: {part.strip()!r}, expected {name}={' or '.join(words)}")
        if not words and (not equals or not value.isdecimal() or int(value) == 0):
            raise ValueError(f"--tile: {part.strip()!r}, expected field=number, with a number from 1 up")
        if name in fields:
            raise ValueError(f"--tile: {name} is given twice")
        fields[name] = value if words else int(value)
    missing = [name for name in known[strategy].space if name not in fields]
    if missing:
        raise ValueError(f"--tile: {', '.join(missing)} missing, {strategy} expects {', '.join(known[strategy].space)}")
    return Tile(strategy, **fields)


def shape_text(problem: Problem) -> str:
    """Text of a problem's shape, as ``--shape`` accepts it."""
    return ",".join(str(getattr(problem, field)) for field in problem.spec.sizes.values())

"""Helpers of the contract tests that all ops share: the description of an op, and wrong arguments.

A case is (label, name of the wrong argument, expected errors, function that returns the changed arguments). The call
must raise before it allocates or launches anything. Its message must start with the argument's name, and the arrays of
the call must be unchanged.
"""

from __future__ import annotations

import functools
import itertools
import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import Tile
from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from tests.support.problems import FLAGS, SENTINEL, Arrays, invoke

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]
Wrong = tuple[str, str, Any, Change]

EITHER = (TypeError, ValueError)
#: The call before the wrong call: the right call, none, or the right call without out and workspace.
STATES = ("warm", "cold", "allocating")


def flat(value: Any) -> Iterator[np.ndarray]:
    """The NumPy arrays in an argument."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)


def contents(given: Arguments) -> list[bytes]:
    """The bytes of all arrays of a call."""
    return [array.tobytes() for value in given.values() for array in flat(value)]


@contextmanager
def nothing_may_happen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make allocations, copies, compilations and launches fail while the context is open."""

    def refuse(what: str) -> Callable[..., Any]:
        def fail(*_: object, **__: object) -> Any:
            raise AssertionError(f"{what} was called before the arguments were checked")

        return fail

    with monkeypatch.context() as patched:
        for name in ("empty", "zeros", "empty_like", "zeros_like", "full", "ascontiguousarray", "copyto", "require"):
            patched.setattr(np, name, refuse(f"numpy.{name}"))
        for name in ("compile", "launch"):
            patched.setattr(f"cunorm.executors.cpu.executor.{name}", refuse(f"cunorm.executors.cpu.executor.{name}"))
        yield


def refused(monkeypatch: pytest.MonkeyPatch, op: str, given: Arguments, name: str, errors: Any = EITHER) -> str:
    """Assert that the call raises and changes no array, and return the error message."""
    before = contents(given)
    with nothing_may_happen(monkeypatch), pytest.raises(errors) as caught:
        invoke(op, given)
    sentence = str(caught.value)
    assert re.match(rf"{re.escape(name)}(?!\w)", sentence), f"does not start with {name}: {sentence}"
    assert contents(given) == before
    return sentence


@dataclass(frozen=True, eq=False)
class Contract:
    """Description of an op for the shared contract tests. Each test creates its own arrays and may modify them.

    Attributes
    ----------
    op : str
    made : callable
        (dtype) -> the arrays of the right call, also used by most other calls.
    right_tile : Tile
        Tile of the right call. It is a Tile, because calls with a dictionary as tile are not cached.
    wrong : list of Wrong
    tile : callable
        (x in its memory layout, name of a strategy or None) -> the tile of a call that must work.
    strided : tuple of callables
        Arrays large enough for every memory layout of LAYOUTS.
    ranks : callable
        (rank) -> arrays of every kind of shape of that rank.
    square : callable, optional
        Arrays whose axes have equal sizes, so that a wrong cache key could confuse them. Default: those of the right
        call.
    saved : tuple of shapes
        Shapes that mean and rstd may have.
    empty : tuple of callables
        (dtype) -> arrays without elements. The first has no samples.
    in_place : tuple of (strategy, layout, changes)
        Calls whose result overwrites an input: the layout is the input's, `changes` are other arguments.
    large, dirty : mapping of str to (arrays, strategy, layout)
        Calls whose allocations are measured, and calls that run with a dirty workspace.
    masked : tuple of str or None
        Strategies for which every mask is tried.
    alike : bool
        Whether a returned tensor has the memory layout of x. Otherwise it is contiguous.
    any_dtype : bool
        Whether results may have every supported dtype.
    needed : bool
        Whether the right call needs a workspace.
    """

    op: str
    made: Callable[..., Arrays]
    right_tile: Tile
    wrong: list[Wrong]
    tile: Callable[[Any, str | None], Tile]
    strided: tuple[Callable[[], Arrays], ...] = ()
    ranks: Callable[[int], list[Arrays]] = lambda rank: []
    square: Callable[[], Arrays] | None = None
    saved: tuple[tuple[int, ...], ...] = ()
    empty: tuple[Callable[[str], Arrays], ...] = ()
    in_place: tuple[tuple[str | None, str | None, Arguments], ...] = ()
    large: Mapping[str, Memory] = field(default_factory=dict)
    dirty: Mapping[str, Memory] = field(default_factory=dict)
    masked: tuple[str | None, ...] = (None,)
    alike: bool = True
    any_dtype: bool = False
    needed: bool = True

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the results in `out`."""
        a = self.made()
        given = [name for name in OPS[self.op].extras if getattr(a, name) is not None]
        return tuple(name for name in OPS[self.op].results_with(given) if name not in OPS[self.op].updated)

    @functools.cached_property
    def masks(self) -> list[tuple[bool, ...]]:
        """All masks of the op's flags; one without flags if it has no mask."""
        return list(itertools.product((True, False), repeat=len(OPS[self.op].flags)))

    def out(self, a: Arrays, xp: Any = np) -> Any:
        """Arrays for all results, full of SENTINEL."""
        facts = [a.result(self.op, name) for name in self.names]
        made = tuple(xp.full(shape, SENTINEL, a.x.dtype if self.any_dtype else dtype) for shape, dtype in facts)
        return made if len(made) > 1 else made[0]

    def first(self, array: Any) -> Any:
        """Return the `out` that stores the first result in that array and lets the op allocate the others."""
        return (array, *(None,) * (len(self.names) - 1)) if len(self.names) > 1 else array

    @functools.cached_property
    def workspace_nbytes(self) -> int:
        """Bytes of workspace of the right call."""
        return self.made().plan(self.op, self.right_tile).workspace_nbytes

    def right(self) -> Arguments:
        """The arguments of a correct call. All are passed, so the op allocates nothing."""
        a = self.made()
        needed = self.workspace_nbytes
        return {
            **vars(a),
            **a.options,
            **dict.fromkeys(FLAGS, True),
            "output_mask": (True,) * len(OPS[self.op].flags),
            "eps": OPS[self.op].numbers["eps"].default if "eps" in OPS[self.op].numbers else 0.0,
            "momentum": 0.25,
            "activation": None,
            "out": self.out(a),
            "tile": self.right_tile,
            "workspace": np.full(needed or 64, 0xFF, np.uint8),
        }

    def check(self, found: Any) -> None:
        """Compare the results of the right call with the oracle."""
        self.made().check(self.op, found)


#: Arrays, their strategy, and their memory layout, or None if they are contiguous.
Memory = tuple[Callable[[], Arrays], "str | Tile | None", "str | None"]


def cases_of(contracts: Iterable[Contract]) -> list[Any]:
    """Parameters (contract, wrong cases, state), by the argument that the error names.

    Thousands of cases with a test each would take minutes more. Wrong out and workspace have no "allocating" state. The
    quick suite runs each argument in the state "warm" and in one of the others, in turn.
    """
    found = []
    for one in contracts:
        for turn, name in enumerate(dict.fromkeys(case[1] for case in one.wrong)):
            cases = [case for case in one.wrong if case[1] == name]
            first, *others = STATES if name not in ("out", "workspace") else STATES[:2]
            for state in (first, *others):
                marks = () if state in (first, others[turn % len(others)]) else pytest.mark.long
                found.append(pytest.param(one, cases, state, id=f"{one.op}: {name}-{state}", marks=marks))
    return found


def warmed(op: str, given: Arguments) -> None:
    """Call an op twice, so that its next call with these arguments is found in the cache of calls."""
    invoke(op, given)
    assert len(OPS[op].calls) == 1
    invoke(op, given)


# ---- cases ----------------------------------------------------------------------------------------------------------


class Tensor:
    """Stand-in for a tensor of another library."""

    def __dlpack__(self) -> None:
        """Only its presence is checked."""


def wrong(argument: str, errors: Any, **values: Any) -> list[Wrong]:
    """Cases for one argument: label -> value, or a function that computes the value from the right arguments."""
    cases: list[Wrong] = []
    for label, value in values.items():
        made = value if callable(value) and not isinstance(value, type) else lambda _, value=value: value
        cases.append((f"{argument} {label}", argument, errors, lambda a, made=made: {argument: made(a)}))
    return cases


def both(label: str, errors: Any, change: Callable[[np.ndarray], np.ndarray]) -> list[Wrong]:
    """x and dy are wrong in the same way. The error names x."""
    return [(f"x {label}", "x", errors, lambda a: {name: change(a[name]) for name in ("x", "dy") if name in a})]


def output(index: int, label: str, errors: Any, make: Callable[[np.ndarray, Arguments], Any]) -> list[Wrong]:
    """One wrong output, derived from the right one. `index` is ignored for an op with a single result."""

    def change(a: Arguments) -> Arguments:
        if not isinstance(a["out"], tuple):
            return {"out": make(a["out"], a)}
        return {"out": tuple(make(o, a) if i == index else o for i, o in enumerate(a["out"]))}

    return [(f"out {index} {label}", "out", errors, change)]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def unaligned(array: np.ndarray) -> np.ndarray:
    """The same values at an address one byte past an aligned one."""
    moved = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _first_output(a: Arguments, array: np.ndarray) -> Any:
    return (array, *a["out"][1:]) if isinstance(a["out"], tuple) else array


def neighbours(name: str, shift: int) -> Change:
    """An input and the first output as two windows of one buffer, `shift` elements apart."""

    def change(a: Arguments) -> Arguments:
        source = a[name]
        buffer = np.zeros(2 * source.size, np.float32)
        window = buffer[: source.size].reshape(source.shape)
        window[...] = source
        return {name: window, "out": _first_output(a, buffer[shift : shift + source.size].reshape(source.shape))}

    return change


def backwards(name: str) -> Change:
    """An input with negative strides in a buffer. The first output starts before it and overlaps its last elements."""

    def change(a: Arguments) -> Arguments:
        source = a[name]
        size = source.size
        buffer, start = np.zeros(2 * size, np.float32), size * 2 // 3
        window = buffer[start : start + size][::-1].reshape(source.shape)
        window[...] = source
        assert buffer[start] != 0  # window is a view of buffer, not a copy
        return {name: window, "out": _first_output(a, buffer[:size].reshape(source.shape))}

    return change


def array_cases(name: str) -> list[Wrong]:
    """Values that are no NumPy or CuPy array, and arrays of an unsupported dtype."""
    return wrong(
        name,
        TypeError,
        **{
            "list": lambda a: a[name].tolist(),
            "tensor": lambda _: Tensor(),
            "number": 1.0,
            "scalar": lambda _: np.float32(1),
            "string": "x",
            "type": np.ndarray,
            "int": lambda a: a[name].astype(np.int32),
            "bool": lambda a: a[name] > 0,
            "complex": lambda a: a[name].astype(np.complex64),
            "object": lambda a: a[name].astype(object),
            "big-endian": lambda a: a[name].astype(">f4"),
            "longdouble": lambda a: a[name].astype(np.longdouble),
            "masked": lambda a: np.ma.masked_greater(a[name], 0),
            "masked nowhere": lambda a: np.ma.masked_array(a[name]),
        },
    )


def parameter_cases(name: str) -> list[Wrong]:
    """Wrong values for gamma or beta where x is float32."""
    return [
        *array_cases(name),
        *wrong(name, TypeError, float64=lambda a: a[name].astype(np.float64)),
        *wrong(name, TypeError, int16=lambda a: a[name].astype(np.int16)),
        *wrong(name, ValueError, short=lambda a: a[name][:-1], long=lambda a: np.concatenate([a[name], a[name][:1]])),
        *wrong(name, ValueError, column=lambda a: a[name][..., None], row=lambda a: a[name][None]),
        *wrong(name, ValueError, point=lambda _: np.ones((), np.float32), empty=lambda a: a[name][:0]),
    ]


def gradient_cases() -> list[Wrong]:
    """Wrong values for dy."""
    return [
        *array_cases("dy"),
        *wrong("dy", TypeError, none=None, float64=lambda a: a["dy"].astype(np.float64)),
        *wrong("dy", TypeError, float16=lambda a: a["dy"].astype(np.float16)),
        *wrong("dy", ValueError, flat=lambda a: a["dy"].reshape(*a["dy"].shape[:2], -1), short=lambda a: a["dy"][:1]),
        *wrong("dy", ValueError, transposed=lambda a: a["dy"].swapaxes(0, 1)),
    ]


def x_cases(least: int = 2) -> list[Wrong]:
    """Wrong values for x, which needs at least `least` dimensions."""
    return [
        *array_cases("x"),
        *wrong("x", TypeError, none=None),
        *both("0-d", ValueError, lambda x: x.ravel()[:1].reshape(())),
        *(both("rank 1", ValueError, lambda x: x.ravel()[:8]) if least > 1 else ()),
        *both("rank 9", ValueError, lambda x: x.reshape(*x.shape[:2], *(1,) * 5, *x.shape[2:])),
    ]


def saved_cases(*names: str) -> list[Wrong]:
    """Wrong values for the statistics where x is float32."""
    return [
        case
        for name in names
        for case in [
            *array_cases(name),
            *wrong(name, TypeError, none=None, float64=lambda a, name=name: a[name].astype(np.float64)),
            *wrong(name, TypeError, float16=lambda a, name=name: a[name].astype(np.float16)),
            *wrong(name, TypeError, bfloat16=lambda a, name=name: a[name].astype(DTYPES["bfloat16"])),
            *wrong(name, ValueError, long=lambda a, name=name: np.ones(a[name].size + 1, np.float32)),
            *wrong(name, ValueError, short=lambda a, name=name: np.ones(a[name].size - 1, np.float32)),
            *wrong(name, ValueError, empty=lambda _: np.ones(0, np.float32), as_x=lambda a: a["x"]),
        ]
    ]


def epsilon_cases(rounded: bool = True) -> list[Wrong]:
    """Wrong values for eps. ``rounded``: whether kernels round it to float32."""
    outside = wrong("eps", ValueError, over=1e39, under=1e-46, numpy_over=np.float64(1e300)) if rounded else []
    return [
        *outside,
        *wrong("eps", ValueError, negative=-1e-5, tiny=-1e-300, nan=float("nan"), inf=float("inf"), int=-1),
        *wrong("eps", ValueError, minus_inf=float("-inf"), numpy_nan=np.float32("nan")),
        *wrong("eps", EITHER, string="a", number="1e-5", none=None, bool=True, list=[1e-5], complex=1e-5j, bytes=b"1"),
        *wrong("eps", EITHER, array=lambda _: np.array([1e-5, 1e-5]), numpy_bool=np.True_, huge=10**400),
        *wrong("eps", TypeError, array_of_one=lambda _: np.array([1e-5]), point=lambda _: np.array(1e-5)),
    ]


def mask_cases() -> list[Wrong]:
    """Wrong values for an output_mask of three flags."""
    return [
        *wrong("output_mask", EITHER, short=(True, True), long=(True,) * 4, empty=(), none=None, flag=True),
        *wrong("output_mask", EITHER, ints=(1, 1, 1), floats=(1.0, 1.0, 1.0), string="yes", texts=("a", "b", "c")),
        *wrong("output_mask", EITHER, one_int=(True, True, 1), hole=(True, True, None)),
        *wrong("output_mask", EITHER, array=lambda _: np.ones(3), numbers=7),
    ]


def tile_cases(right: cunorm.Tile) -> list[Wrong]:
    """Wrong values for a tile, derived from a right one."""
    legal: dict[str, Any] = {"strategy": right.strategy, **right.as_dict()}
    strategy, (last, *_) = legal["strategy"], [name for name in legal if name not in ("strategy", "threads")] or [None]
    less = {name: value for name, value in legal.items() if name != (last or "threads")}
    return [
        *wrong("tile", TypeError, string=strategy, number=5, list=[strategy], array=lambda _: np.ones(3)),
        *wrong("tile", EITHER, unknown=lambda _: cunorm.Tile("nope", threads=32), empty={}, nameless={"threads": 64}),
        *wrong("tile", EITHER, missing=less, no_fields=lambda _: cunorm.Tile(strategy), more={**legal, "chunks": 64}),
        *wrong("tile", EITHER, text={**legal, "threads": "64"}, flag={**legal, "threads": True}),
        *wrong("tile", EITHER, zero={**legal, "threads": 0}, float={**legal, "threads": 64.0}),
        *wrong("tile", EITHER, odd_key={"strategy": strategy, 3: 1}),
        *wrong("tile", cunorm.UnsupportedTile, threads={**legal, "threads": 33}, many={**legal, "threads": 2048}),
    ]


def workspace_cases(needed: bool = True) -> list[Wrong]:
    """Wrong workspaces. If the call needs a workspace, the right one has exactly the needed size."""
    cases = [
        *wrong("workspace", EITHER, list=[0] * 128, number=0x1000, bytes=lambda _: bytearray(128), flag=True),
        *wrong("workspace", TypeError, masked=lambda _: np.ma.masked_array(np.zeros(1024, np.uint8))),
        *wrong("workspace", ValueError, gaps=lambda _: np.zeros(4096, np.uint8)[::2]),
        *wrong("workspace", ValueError, fortran=lambda _: np.zeros((32, 32), np.uint8).T[:, :]),
        *wrong("workspace", ValueError, read_only=lambda _: read_only(np.zeros(1024, np.uint8))),
        *wrong("workspace", ValueError, is_out=lambda a: next(flat(a["out"]))),
    ]
    if needed:
        cases += wrong("workspace", ValueError, small=lambda a: a["workspace"][:-1], empty=lambda a: a["workspace"][:0])
        cases += wrong("workspace", ValueError, misaligned=lambda _: np.zeros(1024, np.uint8)[4:])
        cases += [("workspace misaligned, no out", "workspace", ValueError, _misaligned_alone)]
    return cases


def _misaligned_alone(_: Arguments) -> Arguments:
    return {"out": None, "workspace": np.zeros(1024, np.uint8)[4:]}


def workspace_on(name: str) -> list[Wrong]:
    """A workspace that is an input, or a view of part of it."""
    return wrong("workspace", ValueError, **{f"is_{name}": lambda a: a[name], f"in_{name}": lambda a: _within(a[name])})


def _within(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)[4:]


def container_cases(results: int) -> list[Wrong]:
    """Wrong containers for `out`."""
    if results == 1:
        return [
            *wrong("out", EITHER, tuple=lambda a: (a["out"],), list=lambda a: [a["out"]], string="out", flag=True),
            *wrong("out", EITHER, empty=(), none_in_tuple=(None,), number=1.0, lists=lambda a: a["out"].tolist()),
        ]
    return [
        *wrong("out", EITHER, array=lambda a: a["out"][0], list=lambda a: list(a["out"]), string="out", flag=True),
        *wrong("out", EITHER, dict=lambda a: dict(zip("abcd", a["out"], strict=False))),
        *wrong("out", EITHER, short=lambda a: a["out"][:-1], long=lambda a: (*a["out"], None), empty=()),
        *wrong("out", EITHER, generator=lambda a: (array for array in a["out"])),
    ]


def output_cases(index: int, any_dtype: bool = False) -> list[Wrong]:
    """Arrays that cannot be that output. ``any_dtype``: it may have every supported dtype."""
    window = np.lib.stride_tricks.as_strided
    cases = [
        *output(index, "list", TypeError, lambda o, _: o.tolist()),
        *output(index, "tensor", TypeError, lambda _, __: Tensor()),
        *output(index, "int", TypeError, lambda o, _: o.astype(np.int32)),
        *output(index, "big-endian", TypeError, lambda o, _: o.astype(">f4")),
        *output(index, "masked", TypeError, lambda o, _: np.ma.masked_array(o)),
        *output(index, "flat", ValueError, lambda o, _: np.full((1, o.size), SENTINEL, np.float32)),
        *output(index, "larger", ValueError, lambda o, _: np.full((*o.shape[:-1], 9), SENTINEL, np.float32)),
        *output(index, "read-only", ValueError, lambda o, _: read_only(o)),
        *output(index, "read-only view", ValueError, lambda o, _: read_only(o[...])),
        *output(index, "broadcast", ValueError, lambda o, _: np.broadcast_to(o.ravel()[:1], o.shape)),
        *output(index, "writable broadcast", ValueError, lambda o, _: window(o, o.shape, (0,) * o.ndim)),
        *output(
            index,
            "sliding window",
            ValueError,
            lambda o, _: (
                window(np.zeros(64, np.float32), o.shape, (4,) * o.ndim)
                if sum(size > 1 for size in o.shape) > 1
                else np.broadcast_to(o.ravel()[:1], o.shape)
            ),
        ),
    ]
    if not any_dtype:
        cases += output(index, "float64", TypeError, lambda o, _: o.astype(np.float64))
        cases += output(index, "half", TypeError, lambda o, _: o.astype(np.float16))
    return cases


def result_cases(names: tuple[str, ...], tile: Tile, needed: bool = True, any_dtype: bool = False) -> list[Wrong]:
    """Wrong outputs, workspaces and tiles, and overlapping outputs. All outputs but y and dx must have one shape."""
    cases = [*container_cases(len(names)), *workspace_cases(needed), *tile_cases(tile)]
    for index in range(len(names)):
        cases += output_cases(index, any_dtype)
    tensor = names[0] in ("y", "dx")
    if tensor and len(names) > 1:
        cases += output(1, "in out 0", ValueError, lambda o, a: _start_of(a["out"][0], o, 0))
    for one, two in itertools.pairwise(range(tensor, len(names))):
        cases += output(two, f"is out {one}", ValueError, lambda _, a, one=one: a["out"][one])
        cases += output(two, f"reversed out {one}", ValueError, lambda _, a, one=one: a["out"][one][::-1])
        cases += [(f"out {two} half on out {one}", "out", ValueError, functools.partial(_half_on_each_other, one=one))]
    return cases


def _half_on_each_other(a: Arguments, one: int) -> Arguments:
    shape, size = a["out"][one].shape, a["out"][one].size
    whole, half = np.zeros(2 * size, np.float32), size // 2
    pair = (whole[:size].reshape(shape), whole[half : half + size].reshape(shape))
    return {"out": (*a["out"][:one], *pair, *a["out"][one + 2 :])}


def _start_of(array: np.ndarray, like: np.ndarray, start: int = 4) -> np.ndarray:
    return array.reshape(-1)[start : start + like.size].reshape(like.shape)


def inside(index: int, name: str) -> list[Wrong]:
    """A small output that is a view of part of an input."""
    return output(index, f"in {name}", ValueError, lambda o, a: _start_of(a[name], o))


def overlap_cases(name: str, in_place: bool) -> list[Wrong]:
    """A first output of x's shape that overlaps an input. ``in_place``: exactly the same memory is allowed."""
    exact = [
        *output(0, f"is {name}", ValueError, lambda _, a: a[name]),
        *output(0, f"view of {name}", ValueError, lambda _, a: a[name][...]),
    ]
    return [
        *(() if in_place else exact),
        *[(f"out 0 {shift} past {name}", "out", ValueError, neighbours(name, shift)) for shift in (1, 4, 8, 143)],
        (f"out 0 before {name} that runs backwards", "out", ValueError, backwards(name)),
        *output(0, f"{name} reversed", ValueError, lambda _, a: a[name][::-1]),
        *output(0, f"{name} swapped", ValueError, lambda _, a: a[name].swapaxes(2, 3)),
    ]


def gradient_overlap_cases() -> list[Wrong]:
    """dx overlaps dy, on which it may lie exactly, or x."""
    same: Wrong = ("out 0 is dy and x", "out", ValueError, lambda a: {"dy": a["x"], "out": _first_output(a, a["x"])})
    return [*overlap_cases("dy", in_place=True), *overlap_cases("x", in_place=False), same]


# ---- memory ---------------------------------------------------------------------------------------------------------


def peak_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Peak bytes that a repeated call allocates, and its results."""
    call()  # makes the plan and builds the kernels
    tracemalloc.start()
    try:
        found = call()
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()

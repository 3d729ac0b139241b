"""Malformed traces: a line that no call writes ends the command that reads it with a one-line error message."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.problems.requested import problems_of
from cunorm.tuning.problems.workloads import problems

import cunorm
from cunorm import TraceError
from cunorm.cli.main import main
from cunorm.cli.parser import add_lists, add_problem
from cunorm.core.arrays import DTYPES
from cunorm.core.problem import accumulator
from cunorm.core.strategy import Tile
from cunorm.gate.gate import problem_for
from cunorm.ops.registry import OPS, fault_of
from cunorm.runtime.plans import Plan
from cunorm.tiling import problem_trace
from tests.support.problems import BATCH_OPS, batch_arrays, forget_calls, group_arrays, layer_arrays

ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e\nsecond line"
SIZES = {"N": 2, "C": 8, "HxW": 9}
FLOAT = {"dtype": "float32", "layout": "NCHW", "calls": 3}
SUMS = dict.fromkeys(("sum_dy", "sum_dy_xmu", "dgamma", "dbeta"), "float32")
#: A line of a trace for each op, without the field op.
LINES: dict[str, dict[str, Any]] = {
    "group_norm": {**FLOAT, **SIZES, "group": 2, "outputs": "y,mean,rstd"},
    "group_norm_backward": {**FLOAT, **SIZES, "group": 2, "outputs": "dx,dgamma,dbeta", "gamma_dtype": "float32"},
    "instance_norm": {**FLOAT, **SIZES, "outputs": "y,mean,rstd"},
    "instance_norm_backward": {**FLOAT, **SIZES, "layout": "NHWC", "outputs": "dx"},
    "layer_norm": {**FLOAT, "rows": 4, "length": 16, "outputs": "y,mean,rstd"},
    "layer_norm_backward": {**FLOAT, "rows": 4, "length": 16, "outputs": "dx"},
    "rms_norm": {**FLOAT, "rows": 4, "length": 16, "outputs": "y,rstd,h", "extras": "residual"},
    "rms_norm_backward": {**FLOAT, "rows": 4, "length": 16, "outputs": "dx,dgamma", "extras": "dh"},
    "batch_norm_stats": {**FLOAT, **SIZES, "outputs": "mean,invstd"},
    "batch_norm_gather_stats": {
        **FLOAT, "world": 2, "C": 8, "outputs": "mean,invstd,running_mean,running_var",
        "types": {"count": "int64", "running_mean": "float32", "running_var": "float32"},
    },
    "batch_norm_elemt": {**FLOAT, **SIZES, "outputs": "y"},
    "batch_norm_backward_reduce": {**FLOAT, **SIZES, "outputs": ",".join(SUMS), "types": SUMS},
    "batch_norm_backward_elemt": {**FLOAT, **SIZES, "outputs": "dx", "types": {"sum": "float32"}},
}  # fmt: skip
#: Values of a field: wrong types, numbers that are not sizes, unknown names, terminal escape sequences.
VALUES = (
    None, True, False, 0, -1, 1.5, 1e300, float("nan"), float("inf"), 2**60 + 1, 2**64, 10**30, "", " ", "2", "NaN",
    "int8", "complex64", "object", "float8", "bool", "FLOAT32", "nchw", "NHWC", "y,y", "rstd,y", ",", "x" * 5000,
    ESCAPE, "\0", "\ud800", [], [2], [[]], {}, {"x": "float32"}, {ESCAPE: ESCAPE}, {"count": []},
)  # fmt: skip


def asked(path: Path) -> argparse.Namespace:
    command = argparse.ArgumentParser()
    add_problem(command)
    add_lists(command)
    return command.parse_args([f"--from-trace={path}"])


def refusal(path: Path, text: str | bytes) -> str | None:
    """The error message for a trace, without the file's name; None if the problems are accepted."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        found = problems_of(asked(path))
    except TraceError as error:
        sentence = str(error)
        assert sentence.startswith(f"{path}: line ")
        said = sentence.removeprefix(f"{path}: ")
        assert said.isascii() and said.isprintable() and len(said) < 500, said
        return said
    assert found
    return None


# ---- lines that calls write -----------------------------------------------------------------------------------------


def recorded(dtype: str, other: str) -> Iterator[Any]:
    """Calls of every op: the data have the first dtype, parameters, sums and some statistics the second."""
    sums = DTYPES[accumulator(dtype)]
    a, b, c = (made(dtype=dtype) for made in (group_arrays, batch_arrays, layer_arrays))
    for one in (a, b, c):
        for name in {"gamma", "beta", "mean", "rstd", "invstd", "sum_dy", "sum_dy_xmu"} & {*vars(one)}:
            setattr(one, name, getattr(one, name).astype(DTYPES[other] if name[0] in "gbs" else sums))
    saved = [each.astype(DTYPES[other]) for each in (a.mean, a.rstd)]
    for activation, parameters in itertools.product((None, "silu"), ((a.gamma, a.beta), (None, None))):
        yield cunorm.group_norm(a.x, 2, *parameters, activation=activation)
        gradients = {"num_groups": 2, "beta": parameters[1], "activation": activation}
        for mask in itertools.product((False, True), repeat=3 if activation is None else 1):
            mask = (*mask, True, True)[:3]
            yield cunorm.group_norm_backward(a.dy, a.x, *saved, parameters[0], output_mask=mask, **gradients)
    yield cunorm.group_norm(np.moveaxis(a.x, 1, -1), 2, data_format="NHWC")
    yield cunorm.group_norm(np.ascontiguousarray(np.moveaxis(a.x, 1, -1)), 2, data_format="NHWC")
    yield cunorm.instance_norm(a.x, a.gamma, a.beta)
    yield cunorm.instance_norm(np.moveaxis(a.x, 1, -1), data_format="NHWC")
    each = np.ones((2, 8), DTYPES[other])
    yield cunorm.instance_norm_backward(a.dy, a.x, each, each, a.gamma, output_mask=(True, False, True))
    yield cunorm.layer_norm(c.x, (3, 3), c.gamma, c.beta)
    yield cunorm.layer_norm_backward(c.dy, c.x, (3, 3), c.mean, c.rstd, c.gamma, output_mask=(False, True, True))
    yield cunorm.layer_norm(c.x, (3, 3), residual=c.dy)
    for mask in ((True, False), (False, True)):
        yield cunorm.rms_norm_backward(c.dy, c.x, (3, 3), c.rstd, c.gamma, dh=c.x, output_mask=mask)
    yield cunorm.rms_norm(c.x, (3, 3), c.gamma, residual=c.dy)
    yield cunorm.rms_norm(c.x, (3, 3))
    for op in BATCH_OPS:
        yield getattr(cunorm, op)(**b.given(op))
    wide = {"y_dtype": accumulator(dtype)}
    yield cunorm.group_norm(a.x, 2, a.gamma, activation="silu", **wide)
    yield cunorm.instance_norm(a.x, **wide)
    yield cunorm.layer_norm(c.x, (3, 3), residual=c.dy, **wide)
    yield cunorm.rms_norm(c.x, (3, 3), c.gamma, **wide)
    yield cunorm.batch_norm_elemt(**b.given("batch_norm_elemt"), **wide)
    outs = tuple(np.empty(8, DTYPES[other]) for _ in range(4))
    yield cunorm.batch_norm_backward_reduce(**b.given("batch_norm_backward_reduce"), out=outs)
    yield cunorm.batch_norm_backward_reduce(**b.given("batch_norm_backward_reduce"), input_g=False, beta_g=False)
    means, invstds = np.zeros((3, 8), DTYPES[dtype]), np.ones((3, 8), DTYPES[dtype])
    for counts in ([1, 2, 3], np.ones(3, np.int32), np.ones(3, np.float32)):
        running = {"running_mean": np.zeros(8, DTYPES[other]), "running_var": np.ones(8)}
        yield cunorm.batch_norm_gather_stats(means, invstds, counts, **running)


def test_every_line_that_a_call_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace accepts every op, dtype, mask and choice of parameters that a call accepts."""
    monkeypatch.setattr(Plan, "run", lambda *_: None)
    forget_calls()
    path, seen = tmp_path / "t", 0
    with cunorm.trace(path):
        for dtype in DTYPES:
            for other in {dtype, accumulator(dtype)}:
                seen += len(list(recorded(dtype, other)))
    forget_calls()
    found = problem_trace.read(path, fault_of)
    assert {one.op for one in found} == {*OPS}
    assert sum(found.values()) > 0.9 * seen  # calls that want no output are not recorded
    assert [*found] == problems_of(asked(path))


def test_every_problem_of_the_workloads_is_legal() -> None:
    for dtype in DTYPES:
        assert [sentence for _, one in problems(dtype) if (sentence := fault_of(one)) is not None] == []


# ---- lines that no call writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", LINES)
def test_every_field_with_every_bad_value(op: str, tmp_path: Path) -> None:
    line = {"op": op, **LINES[op]}
    assert refusal(tmp_path / "t", json.dumps(line) + "\n") is None
    names = [*line, "gamma_dtype", "beta_dtype", "stats_dtype", "types", "activation", "extras"]
    for name, value in itertools.product(names, VALUES):
        text = json.dumps(line | {name: value}) + "\n"
        legal = (name, value) == ("layout", "NHWC") or (name == "calls" and type(value) is int and 0 < value < 2**65)
        legal |= (name, value) == ("types", {}) and "types" not in line
        # Without dh, the line is a legal one of a call without dh. Without the residual, there would be no h.
        legal |= name == "extras" and value in ("", ",") and "h" not in line["outputs"].split(",")
        assert (refusal(tmp_path / "t", text) is None) == legal, (name, value)
    for name in line:
        left = {other: value for other, value in line.items() if other != name}
        said = refusal(tmp_path / "t", json.dumps(left) + "\n")
        assert said is not None or name in ("layout", "gamma_dtype") or (name, op) == ("extras", "rms_norm_backward")


BOTH = {"op": "group_norm", **LINES["group_norm"]}


def made(op: str = "group_norm", **change: Any) -> str:
    return json.dumps({"op": op, **LINES[op], **change})


#: A broken line, and part of its error message.
BROKEN: dict[str, tuple[str, str]] = {
    "no JSON": ("nonsense", "not JSON (Expecting value, column 1), expected a line that CUNORM_TRACE"),
    "a list": ("[1]", "a list, expected an object"),
    "a number": ("3", "a int, expected an object"),
    "not a number": ("NaN", "a float, expected an object"),
    "cut short": (made()[:40], "Expecting property name"),
    "two on one line": (made() * 2, "Extra data"),
    "deep lists": ("[" * 100_000, "recursion"),
    "deep objects": ('{"a":' * 100_000, "recursion"),
    "5,000 digits": (made().replace('"N": 2', '"N": ' + "9" * 5000), "a number of 5000 digits, expected at most 20"),
    "a field twice": (made().replace('"N": 2', '"N": 2, "N": 4'), "N occurs more than once"),
    "a field of a field twice": (
        made("batch_norm_backward_elemt").replace('"sum":', '"sum": "float32", "sum":'),
        "sum occurs more than once",
    ),
    "no calls": (made(calls=0), "calls is 0, expected a whole number from 1 up"),
    "calls of text": (made(calls=ESCAPE), "calls is '\\x1b[2J"),
    "an unknown op": (
        made(op="group_norm", **{"op ": 1}).replace("group_norm", "unit_norm"),
        "op is 'unit_norm', which",
    ),
    "half an op": (
        made().replace("group_norm", "group_norm_half"),
        "which this version does not know; expected one of group_norm, ",
    ),
    "int8": (made(dtype="int8"), "dtype is 'int8', expected one of float16"),
    "complex": (made(dtype="complex64"), "dtype is 'complex64', expected one of float16"),
    "gamma of float16": (
        made(dtype="bfloat16", gamma_dtype="float16"),
        "group_norm: gamma_dtype: 'float16', expected bfloat16 or float32",
    ),
    "beta of float64": (made(beta_dtype="float64"), "group_norm: beta_dtype: 'float64', expected float32"),
    "gamma that the op has not": (
        made("batch_norm_stats", gamma_dtype="float32"),
        "batch_norm_stats: gamma_dtype 'float32', expected None",
    ),
    "statistics of float64": (made(stats_dtype="float64"), "group_norm: stats_dtype 'float64', expected float32"),
    "statistics of float16 that are results": (
        made(dtype="float16", stats_dtype="float16"),
        "stats_dtype 'float16', expected float32",
    ),
    "sums of int32": (
        made("batch_norm_backward_reduce", types=SUMS | {"sum_dy": "int32"}),
        "types: sum_dy 'int32', expected float16 or",
    ),
    "counts of bfloat16": (
        made("batch_norm_gather_stats", types={**LINES["batch_norm_gather_stats"]["types"], "count": "bfloat16"}),
        "types: count 'bfloat16', expected int32 or int64 or",
    ),
    "types that the op has not": (made(types={"x": "float32"}), "group_norm: types: x, expected none; optional: y"),
    "y of float16": (
        made(dtype="bfloat16", types={"y": "float16"}),
        "group_norm: types: y 'float16', expected float32",
    ),
    "y of its default dtype": (
        made(types={"y": "float32"}),
        "group_norm: types: y 'float32', expected none, because that is its default",
    ),
    "y of float32 from float64": (
        made(dtype="float64", types={"y": "float32"}),
        "group_norm: y_dtype: 'float32', expected float64",
    ),
    "types that are missing": (made("batch_norm_backward_elemt", types={}), "types: none, expected sum"),
    "one result": (made(outputs="y"), "outputs ('y',), expected ('y', 'mean', 'rstd')"),
    "one sum of two": (
        made("batch_norm_backward_reduce", outputs="sum_dy"),
        "outputs ('sum_dy',), expected ('sum_dy', 'sum_dy_xmu')",
    ),
    "no results": (made(outputs=""), "outputs '', expected some of y,mean,rstd"),
    "a negative size": (made(N=-1), "N is -1, expected a whole number from 1 to 2^60"),
    "no channels": (made(C=0), "C is 0, expected"),
    "a size of text": (made(HxW="9"), "HxW is '9', expected"),
    "a fraction": (made(HxW=9.0), "HxW is 9.0, expected"),
    "a size beyond all": (made(N=2**60 + 1), "N is 1152921504606846977, expected"),
    "sizes that are too large together": (made(N=2**40, HxW=2**40), "expected at most 2**60 elements"),
    "groups that do not divide": (made(group=3), "group is 3, expected a divisor of C, which is 8"),
    "another activation": (made(activation="gelu"), "activation is 'gelu', expected one of silu"),
    "an activation of another op": (made("layer_norm", activation="silu"), "activation is 'silu', which layer_norm"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("command", ["tune", "bench"])
def test_a_broken_line_ends_a_command_with_one_message(command: str, name: str, capsys: Any, tmp_path: Path) -> None:
    """The message contains the file, the line number and the fault. The exit code is 2, and no file is written."""
    line, words = BROKEN[name]
    path = tmp_path / "t"
    path.write_text(f"{made()}\n\n{line}\n{made()}\n")
    more = ["--table", str(tmp_path / "new.json")] if command == "tune" else ["--rehearse"]
    assert main([command, "--from-trace", str(path), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"cunorm {command}: {path}: line 3: ")
    assert words in err
    assert "report" not in err
    assert err.count("\n") == 1
    assert err[:-1].isascii() and err[:-1].isprintable()
    assert [one.name for one in tmp_path.iterdir()] == ["t"]


def test_a_complete_but_wrong_last_line_is_not_skipped(tmp_path: Path) -> None:
    """Only an incomplete last line is skipped: a killed process may have written part of a line."""
    path = tmp_path / "t"
    said = refusal(path, f"{made()}\n{made(N=-1)}")
    assert said is not None and said.startswith("line 2: N is -1")
    for end in range(1, len(made())):
        assert refusal(path, f"{made()}\n{made()[:end]}") is None
    assert refusal(path, f"{made()}\n{made()}") is None


@pytest.mark.parametrize("count", [1000, pytest.param(50_000, marks=pytest.mark.long)])
def test_damaged_bytes_give_an_error_or_legal_problems(count: int, tmp_path: Path) -> None:
    """If bytes are changed, removed or inserted, the result is an error message or legal problems."""
    random = np.random.default_rng(5)
    lines = [made(op).encode() for op in LINES]
    refused = 0
    for _ in range(count):
        data = bytearray(lines[random.integers(len(lines))])
        for _ in range(random.integers(1, 4)):
            start, end = sorted(random.integers(0, len(data), 2))
            end = end if random.random() < 0.2 else start + 1
            data[start:end] = random.bytes(1) if random.random() < 0.5 else bytes([random.choice([*b'0-"{}[],:e.'])])
        refused += refusal(tmp_path / "t", made().encode() + b"\n" + bytes(data) + b"\n") is not None
    assert count / 2 < refused <= count


def test_an_optional_type_is_named_only_if_it_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line without it is read. A line that names the default is another key of the same problem, so an error."""
    op = OPS["batch_norm_backward_elemt"]
    sums = {name: replace(op.inputs[name], dtype=("sum_t", "stats_dtype")) for name in ("sum_dy", "sum_dy_xmu")}
    of = replace(op, inputs=op.inputs | sums, optional_types=("sum_t", "count_t"))
    monkeypatch.setitem(OPS, op.name, of)
    path = tmp_path / "t"
    lines = [made(op.name, types={}), made(op.name, types={"sum": "float64"})]
    assert [refusal(path, line) for line in lines] == [None, None]
    found = [one.others for one in problem_trace.read(path, fault_of)]
    assert found == [(("sum_t", "float64"),)]
    assert refusal(path, made(op.name, types={"sum": "float32"})) == (
        "line 1: batch_norm_backward_elemt: types: sum 'float32', expected none, because that is its default"
    )
    assert refusal(path, made(op.name, types={"sums": "float64"})) == (
        "line 1: batch_norm_backward_elemt: types: sums, expected none; optional: sum,count"
    )
    tile = op.strategies["block"].space
    first = Tile("block", **{name: values[0] for name, values in tile.items()})
    assert problem_for(op.name, "block", "bfloat16", "NCHW", first).others == ()

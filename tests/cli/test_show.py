"""``cunorm show``, and problems as command-line arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cunorm.cli import main as cli
from cunorm.core.errors import KernelFault
from cunorm.ops import parse_problem
from cunorm.ops.registry import OPS, plan
from cunorm.runtime.plans import Plan

SMALL = ("group_norm_backward", "--shape", "2,8,9,4")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``cunorm show``."""
    code = cli.main(["show", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_explains_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL, "--device", "A100")
    assert (code, err) == (0, "")
    options = {"shape": (2, 8, 9), "dtype": "float32", "num_groups": 4, "gamma_dtype": "float32", "device": "A100"}
    assert out == plan("group_norm_backward", **options).explain() + "\n"


def test_show_all_prints_every_strategy_or_why_its_tiles_are_illegal(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "group_norm_backward", "--shape", "2,8,64x64,2", "--strategy", "all")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("strategy")] == ["block", "cluster", "grid", "split"]
    assert [line for line in lines if line.startswith("refused")] == [
        "refused    warp: a group has 16384 elements, but 32 lanes with packs_per_thread=8 hold 1024"
    ]
    assert out.count("best tile by the cost model") == 4


def test_show_with_the_tile_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--strategy", "split", "--tile", "threads=64, chunk=16")
    assert code == 0
    assert "strategy   split (chunk=16, threads=64)" in out


def test_traffic_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "layer_norm", "--shape", "16,1024", "--strategy", "all", "--traffic")
    assert (code, err) == (0, "")
    assert "cpu executor: counted, not timed; with the limits and tiles of NVIDIA H200" in out
    assert "floor: 131,072 bytes of tensors" in out
    lines = out.splitlines()
    assert all(len(line) <= 120 for line in lines)
    head = next(line for line in lines if line.startswith("strategy"))
    strategies = ("warp ", "block ", "cluster ", "split ")
    found = {line.split()[0]: line.split() for line in lines if line.startswith(strategies)}
    assert len({len(line) for line in lines if line.startswith(("strategy", *strategies))}) == 1
    assert "bytes/floor" in head
    assert 1 <= float(found["warp"][2]) < 1.02
    assert 1.5 <= float(found["split"][2]) < 1.55
    assert sum(line.startswith("tile ") for line in lines) == 4


def test_traffic_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "layer_norm", "--shape", "16,256", "--strategy", "warp", "--traffic", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "cunorm-show/1"
    (one,) = document["plans"]
    assert one["strategy"] == "warp"
    assert one["problem"]["C"] == 256
    assert 1 <= one["traffic"]["tensor_ratio"] < 1.02
    code, out, _ = run(capsys, "layer_norm", "--shape", "16,256", "--json")
    assert "traffic" not in json.loads(out)["plans"][0]


def test_height_times_width_is_accepted_for_hxw(capsys: pytest.CaptureFixture[str]) -> None:
    said = {run(capsys, "group_norm", "--shape", f"2,8,{plane},4") for plane in ("12", "3x4", "3X4", "3 x 4")}
    assert len(said) == 1 and next(iter(said))[0] == 0


@pytest.mark.long
def test_a_strategy_that_cannot_be_counted_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Plan.traffic

    def traffic(self: Plan) -> Any:
        if self.strategy is not None and self.strategy.name == "block":
            raise ValueError("too large to be counted")
        return real(self)

    monkeypatch.setattr(Plan, "traffic", traffic)
    code, out, _ = run(capsys, *SMALL, "--strategy", "all", "--traffic")
    assert code == 0
    assert "refused    block: too large to be counted" in out
    assert any(line.startswith("split ") for line in out.splitlines())
    code, out, err = run(capsys, *SMALL, "--strategy", "block", "--traffic")
    assert (code, out, err) == (2, "", "cunorm show: too large to be counted\n")


def test_an_error_while_counting_is_printed_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (KernelFault("kernel k, block 0: wrong"), MemoryError()):

        def traffic(self: Plan, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(Plan, "traffic", traffic)
        code, out, err = run(capsys, *SMALL, "--traffic")
        assert (code, out) == (1, "")
        assert err == f"cunorm show: {str(error) or 'not enough memory'}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("group_norm_bakward", "--shape", "1"), "OP: 'group_norm_bakward', expected one of group_norm, "),
        (("group-norm", "--shape", "1"), "OP: 'group-norm', expected group_norm or group_norm_backward"),
        (("group_norm", "--shape", "2,8,9"), "--shape: '2,8,9' has 3 numbers, for group_norm expected N,C,HxW,GROUP"),
        (("layer_norm", "--shape", "2,8,9"), "--shape: '2,8,9' has 3 numbers, for layer_norm expected ROWS,LENGTH"),
        (("batch_norm_stats", "--shape", "2 8 9"), "has 1 numbers, for batch_norm_stats expected N,C,HxW"),
        (("batch_norm_stats", "--shape", "2,8.0,9"), "--shape: C is '8.0', expected a whole number"),
        (("batch_norm_stats", "--shape", "2,-8,9"), "--shape: C is '-8', expected a whole number"),
        (("batch_norm_stats", "--shape", "2,8,"), "--shape: HxW is '', expected a whole number"),
        (("group_norm", "--shape", "2,8,9,0"), "--shape: GROUP is 0, expected at least 1"),
        (("group_norm", "--shape", "2,8,9,3"), "--shape: GROUP is 3, expected a divisor of C, which is 8"),
        (("group_norm", "--shape", "-2,8,9,4"), "--shape: N is '-2', expected a whole number"),
        (("groupnorm", "--shape", "1"), "OP: 'groupnorm', expected group_norm or group_norm_backward"),
        ((*SMALL, "--dtype", "float8"), "dtype: 'float8'"),
        ((*SMALL, "--layout", "CHWN"), "--layout: 'CHWN', expected NCHW or NHWC"),
        (
            ("layer_norm", "--shape", "2,8", "--layout", "NHWC"),
            "--layout: 'NHWC', expected NCHW, because layer_norm has no channel",
        ),
        (("--outputs", "dx"), "--outputs: only valid with --shape"),
        (("--activation", "silu"), "--activation: only valid with --shape"),
        (("--traffic",), "--traffic: only valid with --shape"),
        (("--dtype", "float16", "--device", "H100"), "--dtype: only valid with --shape"),
        (("layer_norm", "--shape", "2,8", "--activation", "silu"), "activation: 'silu', expected None for layer_norm"),
        (("group_norm", "--shape", "2,8,9,4", "--activation", "relu"), "activation: 'relu', expected None or 'silu'"),
        ((*SMALL, "--y-dtype", "float32"), "--y-dtype: 'float32', expected None for group_norm_backward"),
        ((*SMALL, "--outputs", "dx,gamma"), "--outputs: 'gamma', expected some of dx,dgamma,dbeta"),
        (("group_norm", "--shape", "2,8,9,4", "--outputs", "y"), "--outputs: 'y', but group_norm always returns all"),
        ((*SMALL, "--device", "H201"), "--device: 'H201', expected one of A100, RTX 4090, H100, H200, B200, RTX 5090"),
        (("--table", "none.json"), "--table: none.json: no such file"),
        (
            (*SMALL, "--strategy", "warps"),
            "--strategy: 'warps', expected all or one of warp, block, cluster, grid, split for group",
        ),
        ((*SMALL, "--tile", "threads=64"), "--tile: requires --strategy NAME"),
        ((*SMALL, "--strategy", "split", "--tile", "threads"), "--tile: 'threads', expected field=number"),
        ((*SMALL, "--strategy", "split", "--tile", "threads=0"), "--tile: 'threads=0', expected field=number"),
        (
            (*SMALL, "--strategy", "split", "--tile", "thread=64"),
            "--tile: no field 'thread', split expects threads, chunk",
        ),
        (
            (*SMALL, "--strategy", "split", "--tile", "threads=64"),
            "--tile: chunk missing, split expects threads, chunk",
        ),
        ((*SMALL, "--strategy", "split", "--tile", "chunk=1,chunk=2"), "--tile: chunk is given twice"),
        (
            (*SMALL, "--strategy", "split", "--tile", "chunk=1,threads=48"),
            "tile: split: threads is 48, expected a mult",
        ),
        (
            ("batch_norm_stats", "--shape", "2,8,9", "--layout", "NHWC", "--strategy", "block"),
            "--strategy: no tile of the search space is legal; for example, block: channels-last data has no planes",
        ),
        (
            ("batch_norm_backward_reduce", "--shape", "2,8,9", "--outputs", "sum_dy,dbeta"),
            "--outputs: 'sum_dy,dbeta', but sum_dy and sum_dy_xmu belong together",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], arguments: Any, sentence: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("cunorm show: ")
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        ("group_norm", "2,8,16x16,4", {"shape": (2, 8, 256), "num_groups": 4, "data_format": "NCHW"}),
        ("group_norm", " 2, 8, 9, 4 ", {"shape": (2, 8, 9), "num_groups": 4}),
        ("layer_norm_backward", "5,7", {"shape": (5, 7), "normalized_shape": 7}),
        ("batch_norm_stats", "2,8,9", {"shape": (2, 8, 9), "dtype": "float16"}),
        ("batch_norm_gather_stats", "4,8", {"shape": (4, 8)}),
    ],
)
def test_plan_options_of_a_typed_shape(op: str, shape: str, expected: dict[str, Any]) -> None:
    options = parse_problem.plan_options(op, shape, "float16")
    assert options.items() >= expected.items()
    made = plan(op, device="cpu", **options)
    assert parse_problem.shape_text(made.problem) == ",".join(shape.replace(" ", "").replace("16x16", "256").split(","))


def test_every_op_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for op in OPS:
        sizes = ",".join(["4", "8", "9", "2"][: len(parse_problem.names_of(op))])
        assert run(capsys, op, "--shape", sizes)[0] == 0


def test_plan_options_of_outputs_layouts_and_activations() -> None:
    options = parse_problem.plan_options("group_norm_backward", "2,8,9,4", "float32", "nhwc", "dbeta, dx")
    made = plan("group_norm_backward", device="cpu", **options)
    assert (made.problem.outputs, made.problem.layout, made.problem.HxW) == (("dx", "dbeta"), "NHWC", 9)
    options = parse_problem.plan_options("group_norm_backward", "2,8,9,4", "bfloat16", activation="silu")
    problem = plan("group_norm_backward", device="cpu", **options).problem
    assert (problem.activation, problem.gamma_dtype, problem.beta_dtype) == ("silu", "bfloat16", "bfloat16")
    options = parse_problem.plan_options("group_norm", "2,8,9,4", "bfloat16", activation="silu", y_dtype="float32")
    problem = plan("group_norm", device="cpu", **options).problem
    assert (problem.activation, problem.wide_y) == ("silu", True)
    options = parse_problem.plan_options(
        "batch_norm_backward_reduce", "2,8,9", "float32", outputs="dgamma,sum_dy,sum_dy_xmu"
    )
    assert options["output_mask"] == (True, True, False)

"""The functions of cunorm.torch against torch's: dtypes, layouts, hostile tensors, and what is left to torch."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn import functional as F

import cunorm
from cunorm.torch import differentiation, functional
from cunorm.torch.norms import Call
from tests.torch.cases import CASES, CHANNELS, GROUPS, SHAPE, Case, close, exact, random, tensors

ALL = pytest.mark.parametrize("case", CASES, ids=str)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def run(case: Case, given: Any, dy: Any) -> tuple[Any, ...]:
    """y and the gradients of all that require them; None for others."""
    y = case.mine(*given)
    wanted = [one for one in given if one is not None and one.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, dy))
    return y, *[next(found) if one is not None and one.requires_grad else None for one in given]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the norms that cunorm computes, in order."""
    seen: list[str] = []
    plain = Call.forward

    def forward(self: Call, *given: Any) -> Any:
        seen.append(self.norm.name)
        return plain(self, *given)

    monkeypatch.setattr(Call, "forward", forward)
    return seen


@ALL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(case: Case, dtype: torch.dtype, launches: list[str]) -> None:
    given, dy = tensors(case, dtype), random(SHAPE, dtype)
    found = run(case, given, dy)
    close(found, exact(case, given, dy), dtype)
    assert [one.dtype for one in found] == [dtype] * len(found)
    assert launches == [case.options.name]


@ALL
def test_every_subset_of_inputs_may_require_gradients(case: Case) -> None:
    dy = random(SHAPE)
    full = run(case, tensors(case), dy)
    for subset in itertools.product((False, True), repeat=1 + len(case.parameters)):
        given = [one.detach().requires_grad_(wanted) for one, wanted in zip(tensors(case), subset, strict=True)]
        y = case.mine(*given)
        assert y.requires_grad == any(subset)
        if any(subset):
            found = run(case, given, dy)[1:]
            for one, expected, wanted in zip(found, full[1:], subset, strict=True):
                assert (one is not None) == wanted
                close(one, expected if wanted else None)
        with torch.no_grad():
            assert not case.mine(*given).requires_grad


@ALL
def test_absent_parameters(case: Case) -> None:
    dy = random(SHAPE)
    for absent in itertools.product((False, True), repeat=len(case.parameters)):
        x, *parameters = tensors(case)
        kept = [None if gone else one for one, gone in zip(parameters, absent, strict=True)]
        found = run(case, (x, *kept), dy)
        ones = [torch.ones(one) if i == 0 else torch.zeros(one) for i, one in enumerate(case.parameters)]
        filled = [new if old is None else old for new, old in zip(ones, kept, strict=True)]
        expected = list(exact(case, (x, *filled), dy))
        close(found, [e if i < 2 or kept[i - 2] is not None else None for i, e in enumerate(expected)])


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=str)
def test_a_gamma_of_16_bits_does_not_round_the_gradient_of_a_beta_of_32(case: Case) -> None:
    """The kernel writes both in one dtype. Here dbeta is more than float16 holds."""
    x, gamma = random((4400, *SHAPE[1:]), torch.float16), torch.ones(case.parameters[0], dtype=torch.float16)
    beta = torch.zeros(case.parameters[1], requires_grad=True)
    gamma.requires_grad_()
    dy = torch.full_like(x, 2.0)
    dgamma, dbeta = torch.autograd.grad(case.mine(x, gamma, beta), (gamma, beta), dy)
    assert torch.equal(dbeta, torch.full_like(dbeta, 2.0 * x.numel() / beta.numel())) and dbeta[0].max() > 65504
    assert dgamma.dtype == torch.float16 and dgamma.isfinite().all()


@pytest.mark.parametrize("parameter", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_parameters_of_other_dtypes(dtype: torch.dtype, parameter: torch.dtype) -> None:
    """Each gradient has the dtype of its tensor. Torch refuses parameters that are wider than the statistics."""
    case = CASES[0]
    x, w, b = tensors(case)
    given = [one.detach().to(to).requires_grad_() for one, to in ((x, dtype), (w, parameter), (b, torch.float32))]
    if parameter == torch.float64:
        with pytest.raises(RuntimeError):
            case.mine(*given)
        return
    dy = random(SHAPE, dtype)
    found = run(case, given, dy)
    assert [one.dtype for one in found] == [dtype, dtype, parameter, torch.float32]
    lower = min((dtype, parameter), key=lambda one: torch.finfo(one).bits * 100 + torch.finfo(one).resolution * -1)
    close(found, exact(case, given, dy), torch.bfloat16 if torch.bfloat16 in (dtype, parameter) else lower)


@pytest.mark.parametrize("case", CHANNELS, ids=str)
def test_channels_last_is_kept_and_not_copied(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("a dense tensor was copied"))
    copied: list[Any] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *given: (copied.append(self), copy(self, *given))[1])
    for shape, layout in ((SHAPE, torch.channels_last), ((2, 8, 3, 5, 1), torch.channels_last_3d)):
        x, *parameters = tensors(case, shape=shape)
        plain = run(case, (x, *parameters), random(shape))
        laid = x.detach().to(memory_format=layout).requires_grad_()
        y = case.mine(laid, *parameters)
        assert y.stride() == laid.stride()
        for dy in (random(shape), random(shape).to(memory_format=layout)):
            found = torch.autograd.grad(y, (laid, *parameters), dy, retain_graph=True)
            assert found[0].stride() == laid.stride()
            assert len(copied) == (dy.stride() != laid.stride())
            copied.clear()
            close((y, *found), plain)


def test_five_axes_channels_last() -> None:
    shape = (2, 8, 3, 2, 5)
    x = random(shape).to(memory_format=torch.channels_last_3d).requires_grad_()
    y = functional.group_norm(x, GROUPS)
    assert y.stride() == x.stride()
    close(y, F.group_norm(x.detach().double(), GROUPS))


@ALL
def test_tensors_that_are_not_dense(case: Case) -> None:
    x, *parameters = tensors(case)
    dy = random(SHAPE)
    expected = exact(case, (x, *parameters), dy)
    wide = torch.zeros(2, 8, 3, 11)
    wide[..., 1:11:2] = x.detach()
    views = {
        "steps": wide[..., 1:11:2],
        "transposed": x.detach().transpose(0, 3).contiguous().transpose(0, 3),
        "misaligned": torch.cat([torch.zeros(1), x.detach().flatten()])[1:].view(SHAPE),
    }
    for name, view in views.items():
        assert torch.equal(view, x), name
        given = (view.requires_grad_(), *parameters)
        close(run(case, given, dy), expected)
        scattered = dy.transpose(1, 2).contiguous().transpose(1, 2)
        close(run(case, given, scattered), expected)
    expanded = random((1, 8, 1, 5)).expand(SHAPE)
    close(run(case, (x, *parameters), expanded), exact(case, (x, *parameters), expanded))
    column = [torch.stack([one.detach()] * 2, -1)[..., 1].requires_grad_() for one in parameters]
    assert not column[0].is_contiguous()
    close(run(case, (x, *column), dy), expected)


def test_a_lazily_negated_gradient() -> None:
    """The imaginary part of a conjugate is a view whose sign is only a flag."""
    case = CASES[0]
    given = tensors(case)
    part = torch.complex(random(SHAPE), random(SHAPE, seed=2)).conj().imag
    for dy in (part, torch._neg_view(random(SHAPE, seed=2))):
        assert dy.is_neg()
        close(run(case, given, dy), exact(case, given, dy))
        x = dy.detach()
        close(case.mine(x), F.group_norm(x.double(), GROUPS))


@ALL
def test_no_samples(case: Case) -> None:
    shape = (0, *SHAPE[1:])
    given = tensors(case, shape=shape)
    y, dx, *others = run(case, given, random(shape))
    assert y.shape == dx.shape == shape
    assert all(torch.equal(one, torch.zeros_like(one)) for one in others)


@pytest.mark.parametrize("case", CHANNELS, ids=str)
def test_no_positions(case: Case) -> None:
    shape = (2, 8, 0)
    given = tensors(case, shape=shape)
    y, dx, *others = run(case, given, random(shape))
    assert y.shape == dx.shape == shape
    assert all(torch.equal(one, torch.zeros_like(one)) for one in others)


@ALL
def test_nan_stays_in_its_slice(case: Case) -> None:
    given = list(tensors(case))
    given[0] = given[0].detach()
    given[0][1, 2, 0, 0] = float("nan")
    close(case.mine(*given), case.theirs(*given))
    assert torch.isnan(case.mine(*given)).any() and not torch.isnan(case.mine(*given)).all()


@ALL
def test_inputs_are_not_changed_and_in_place_changes_are_noticed(case: Case) -> None:
    given = tensors(case)
    before = [one.detach().clone() for one in given]
    y = case.mine(*given)
    y.sum().backward()
    assert all(torch.equal(one, old) for one, old in zip(given, before, strict=True))
    y = case.mine(*given)
    with torch.no_grad():
        given[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- what is left to torch ------------------------------------------------------------------------------------------


def left_to_torch(launches: list[str]) -> bool:
    return not launches


def test_more_than_eight_axes(launches: list[str]) -> None:
    x = random((2, 4, 1, 1, 2, 1, 1, 1, 3))
    close(functional.group_norm(x, 2, activation="silu"), F.silu(F.group_norm(x, 2)))
    close(functional.layer_norm(x, (3,)), F.layer_norm(x, (3,)))
    assert left_to_torch(launches)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda f, x: f.group_norm(x, 3), RuntimeError),
        (lambda f, x: f.group_norm(x, 0), (RuntimeError, ZeroDivisionError)),
        (lambda f, x: f.group_norm(x, 4, torch.ones(7)), RuntimeError),
        (lambda f, x: f.group_norm(x.to(torch.float8_e4m3fn), 4), RuntimeError),
        (lambda f, x: f.group_norm(x.long(), 4), RuntimeError),
        (lambda f, x: f.group_norm(x.flatten(), 4), RuntimeError),
        (lambda f, x: f.group_norm(x.half(), 4, torch.ones(8, dtype=torch.float64)), RuntimeError),
        (lambda f, x: f.group_norm(x[:1, :, :1, 0], 8), ValueError),
        (lambda f, x: f.instance_norm(x[..., :1, :1]), ValueError),
        (lambda f, x: f.layer_norm(x, (4,)), RuntimeError),
        (lambda f, x: f.layer_norm(x, ()), RuntimeError),
        (lambda f, x: f.rms_norm(x, (4,)), RuntimeError),
        (lambda f, x: f.layer_norm(x, (5,), torch.ones(3, 5)), RuntimeError),
        (lambda f, x: f.layer_norm(x.to_sparse(), (5,)), (RuntimeError, NotImplementedError)),
        (lambda f, x: f.layer_norm(x.numpy(), (5,)), TypeError),
        (lambda f, x: f.rms_norm(None, (5,)), TypeError),
        (lambda f, x: f.layer_norm(x, 5), TypeError),
        (lambda f, x: f.rms_norm(x, 5), TypeError),
        (lambda f, x: f.layer_norm(x, (5.0,)), TypeError),
        (lambda f, x: f.layer_norm(x, (5,), [1.0] * 5), TypeError),
        (lambda f, x: f.layer_norm(x, (5,), eps="a"), TypeError),
        (lambda f, x: f.layer_norm(x, (5,), eps=None), TypeError),
    ],
)
def test_what_torch_refuses_is_refused_with_its_words(call: Any, error: Any, launches: list[str]) -> None:
    x = random(SHAPE)
    with pytest.raises(error) as theirs:
        call(F, x)
    with pytest.raises(error) as mine:
        call(functional, x)
    assert str(mine.value) == str(theirs.value)
    assert left_to_torch(launches)


def test_one_value_a_group_in_several_samples(launches: list[str]) -> None:
    """Torch allows it: y is the bias."""
    x, bias = random((2, 8)), random((8,))
    close(functional.group_norm(x, 8, None, bias), bias.expand(2, 8))
    close(functional.group_norm(x, 8, None, bias), F.group_norm(x, 8, None, bias))
    assert launches


def test_running_statistics_are_torchs(launches: list[str]) -> None:
    x, mean, var = random(SHAPE), torch.zeros(8), torch.ones(8)
    other = mean.clone(), var.clone()
    close(functional.instance_norm(x, mean, var, momentum=0.3), F.instance_norm(x, *other, momentum=0.3))
    assert torch.equal(mean, other[0]) and torch.equal(var, other[1]) and mean.abs().max() > 0
    close(
        functional.instance_norm(x, mean, var, use_input_stats=False), F.instance_norm(x, *other, use_input_stats=False)
    )
    assert left_to_torch(launches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_eps_of_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x = torch.full((1, 4), 1e-3, dtype=dtype)
    close(functional.rms_norm(x, (4,)), F.rms_norm(x, (4,)), dtype)


@pytest.mark.parametrize("eps", [1e39, 1e-40, math.inf])
def test_an_eps_outside_the_range_of_float32_is_left_to_torch(eps: float) -> None:
    x = random(SHAPE)
    found = functional.layer_norm(x, SHAPE[-1:], eps=eps), functional.group_norm(x, GROUPS, eps=eps)
    expected = F.layer_norm(x, SHAPE[-1:], eps=eps), F.group_norm(x, GROUPS, eps=eps)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"^activation: 'relu', expected None or 'silu'$"):
        functional.group_norm(random(SHAPE), GROUPS, activation="relu")


def test_signatures_are_torchs() -> None:
    """Up to the activation."""
    for name in ("group_norm", "instance_norm", "layer_norm", "rms_norm"):
        mine = list(inspect.signature(getattr(functional, name)).parameters.values())
        theirs = list(inspect.signature(getattr(F, name)).parameters.values())
        assert [(one.name, one.default) for one in mine[: len(theirs)]] == [(one.name, one.default) for one in theirs]


def test_the_calls_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm.torch import norms

    monkeypatch.setattr(norms, "KEPT", 3)
    monkeypatch.setattr(norms, "_calls", {})
    for n in range(8):
        functional.layer_norm(random((n, 5)), (5,))
        assert len(norms._calls) <= 3


def test_calls_are_traced(tmp_path: Path) -> None:
    """`cunorm.trace` records what a model runs, for the tuner."""
    given = tensors(CASES[1])
    with cunorm.trace(tmp_path / "trace.jsonl"):
        CASES[1].mine(*given).sum().backward()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(one["op"], one["calls"]) for one in lines] == [("group_norm", 1), ("group_norm_backward", 1)]


def test_plain_tensors_only_take_the_short_way() -> None:
    plain = differentiation._plain
    assert plain(random((2,))) and plain(torch.nn.Parameter(random((2,)))) and plain(None)
    assert not plain(torch.empty(2, device="meta")) and not plain(random((2, 2)).to_sparse())
    assert not plain(torch._efficientzerotensor(2))

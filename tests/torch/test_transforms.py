"""What transforms, traces or intercepts: torch.func, vmap, checkpointing, modes, fakes, subclasses, threads."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cunorm.torch import InstanceNorm2d, SyncBatchNorm, functional
from cunorm.torch.operators import OPERATORS
from tests.torch.cases import CASES, CHANNELS, SHAPE, Case, close, exact, random, tensors

ALL = pytest.mark.parametrize("case", CASES, ids=str)
SMALL = (2, 8, 3, 5)


class Seen(TorchDispatchMode):
    """Records the operators of cunorm that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cunorm":
            self.names.append(function._schema.name.removeprefix("cunorm::"))
        return function(*args, **(kwargs or {}))


# ---- operators ------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_operators_pass_opcheck(case: Case, layout: torch.memory_format) -> None:
    given = (one.detach() for one in tensors(case))
    x, gamma, beta = (*given, None)[:3]
    name, sizes, eps, activation = case.options
    forward, backward = OPERATORS[name]
    for one in (x.to(memory_format=layout), x.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.library.opcheck(forward, (one, gamma, beta, sizes, eps, activation))
    x = x.to(memory_format=layout)
    _, *stats = forward(x, gamma, beta, sizes, eps, activation)
    for mask in ([True] * 3, [True, False, False]):
        results = mask[: 1 + len(case.parameters)]
        facts = (*(None, *stats)[-2:], sizes, eps, activation, results)
        torch.library.opcheck(backward, (random(SHAPE), x, gamma, beta, *facts))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # opcheck's copies
def test_operators_have_formulas_for_autograd() -> None:
    """Twice: the gradient's operator has one, too."""
    x, gamma, beta = tensors(CASES[1], torch.float64)
    name, sizes, eps, activation = CASES[1].options
    forward, _ = OPERATORS[name]
    torch.library.opcheck(forward, (x, gamma, beta, sizes, eps, activation))
    assert [one.requires_grad for one in forward(x, gamma, beta, sizes, eps, activation)] == [True, False, False]

    def y(x: Any, gamma: Any, beta: Any) -> Any:
        return forward(x, gamma, beta, sizes, eps, activation)[0]

    assert torch.autograd.gradcheck(y, (x, gamma, beta), fast_mode=True)
    assert torch.autograd.gradgradcheck(y, (x, gamma, beta), fast_mode=True)


def test_the_gradient_of_beta_has_the_dtype_of_beta() -> None:
    """The kernel returns both gradients in one dtype."""
    x, gamma, beta = (one.detach() for one in tensors(CASES[0]))
    name, sizes, eps, activation = CASES[0].options
    forward, backward = OPERATORS[name]
    beta = beta.bfloat16()
    _, mean, rstd = forward(x, gamma, beta, sizes, eps, activation)
    given = (random(SHAPE), x, gamma, beta, mean, rstd, sizes, eps, activation, [True] * 3)
    assert [one.dtype for one in backward(*given)] == [torch.float32, torch.float32, torch.bfloat16]
    torch.library.opcheck(backward, given, test_utils=("test_schema", "test_faketensor"))


def test_an_operator_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"^cunorm::layer_norm: no kernel for torch.int64 \(2, 4\) on cpu; use the"):
        torch.ops.cunorm.layer_norm(torch.ones(2, 4, dtype=torch.int64), None, None, [4], 1e-5, None)


# ---- gradients ------------------------------------------------------------------------------------------------------


@ALL
def test_gradcheck_and_gradgradcheck(case: Case) -> None:
    given = tensors(case, torch.float64)
    assert torch.autograd.gradcheck(case.mine, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(case.mine, given, fast_mode=True)


@ALL
def test_second_gradients_are_torchs(case: Case) -> None:
    def twice(f: Any) -> Any:
        given = tensors(case)
        first = torch.autograd.grad(f(*given), given, random(SHAPE), create_graph=True)
        return torch.autograd.grad(sum((one * one).sum() for one in first), given, allow_unused=True)

    mine, theirs = twice(case.mine), twice(case.theirs)
    filled = [torch.zeros_like(one) if other is None else other for one, other in zip(mine, theirs, strict=True)]
    close(mine, filled, factor=10)


def test_second_gradients_of_some_inputs() -> None:
    """Only the first gradient of gamma is used, and only x and dy get a second one."""
    case = CASES[1]
    x, w, b = tensors(case)
    dy = random(SHAPE).requires_grad_()
    found = []
    for f in (case.mine, case.theirs):
        (dw,) = torch.autograd.grad(f(x, w, b.detach()), w, dy, create_graph=True)
        found.append(torch.autograd.grad(dw.square().sum(), (x, dy)))
    close(found[0], found[1], factor=10)


@ALL
def test_func_grad_and_hessian_products(case: Case) -> None:
    given = tuple(one.detach() for one in tensors(case))

    def of(f: Any) -> Any:
        return lambda *given: f(*given).pow(3).sum()

    argnums = tuple(range(len(given)))
    close(torch.func.grad(of(case.mine), argnums)(*given), torch.func.grad(of(case.theirs), argnums)(*given), factor=5)
    twice = [
        torch.func.grad(
            lambda *g, f=f: sum(one.square().sum() for one in torch.func.grad(of(f), argnums)(*g)), argnums
        )(*given)
        for f in (case.mine, case.theirs)
    ]
    close(twice[0], twice[1], factor=50)


@ALL
def test_a_norm_of_constants_inside_a_transform(case: Case) -> None:
    """Its tensors are no part of the transform, but require gradients outside."""
    given = tensors(case)
    found = torch.func.grad(lambda scale: (scale * case.mine(*given)).sum())(torch.tensor(2.0))
    close(found, case.theirs(*given).sum(), factor=100)


@ALL
def test_per_sample_gradients(case: Case) -> None:
    x, *parameters = (one.detach() for one in tensors(case, shape=(3, *SHAPE)))
    argnums = tuple(range(1 + len(parameters)))

    def per_sample(f: Any) -> Any:
        gradient = torch.func.grad(lambda x, *p: f(x, *p).pow(3).sum(), argnums)
        return torch.func.vmap(gradient, (0, *[None] * len(parameters)))(x, *parameters)

    close(per_sample(case.mine), per_sample(case.theirs), factor=5)


@ALL
@pytest.mark.parametrize("dims", [(0, None), (1, None), (None, 0), (2, 1)], ids=str)
def test_vmap(case: Case, dims: tuple[Any, Any]) -> None:
    """Over x, over the parameters, and over both, with the batch at several axes."""
    x, *parameters = (one.detach() for one in tensors(case))

    def batched(one: Any, dim: int | None) -> Any:
        return one if dim is None else torch.stack([one, 2 * one + 1, -one], dim)

    given = (batched(x, dims[0]), *(batched(one, dims[1] and min(dims[1], one.dim())) for one in parameters))
    in_dims = (dims[0], *(dims[1] and min(dims[1], one.dim()) for one in parameters))
    close(torch.func.vmap(case.mine, in_dims)(*given), torch.func.vmap(case.theirs, in_dims)(*given), factor=5)

    def dx(f: Any) -> Any:
        return torch.func.vmap(torch.func.grad(lambda *given: f(*given).pow(3).sum()), in_dims)(*given)

    close(dx(case.mine), dx(case.theirs), factor=10)


def test_vmap_of_rows_without_a_leading_axis() -> None:
    x, w = random((4, 6)), random((6,))
    close(torch.func.vmap(lambda x: functional.layer_norm(x, (6,), w))(x), F.layer_norm(x, (6,), w))
    gradient = torch.func.vmap(torch.func.grad(lambda x: functional.rms_norm(x, (6,), w, 1e-6).square().sum()))
    expected = torch.func.vmap(torch.func.grad(lambda x: F.rms_norm(x, (6,), w, 1e-6).square().sum()))
    close(gradient(x), expected(x), factor=5)


@ALL
def test_a_batch_of_output_gradients(case: Case) -> None:
    given = tensors(case)
    dys = torch.stack([random(SHAPE, seed=seed) for seed in (5, 6, 7)])
    found = torch.autograd.grad(case.mine(*given), given, dys, is_grads_batched=True)
    for i, dy in enumerate(dys):
        close([one[i] for one in found], exact(case, given, dy)[1:], factor=2)


@ALL
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own formulas
def test_forward_mode(case: Case) -> None:
    given = tuple(one.detach() for one in tensors(case))
    tangents = tuple(torch.ones_like(one) for one in given)
    close(torch.func.jvp(case.mine, given, tangents), torch.func.jvp(case.theirs, given, tangents), factor=5)


@ALL
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_dual_tensors(case: Case) -> None:
    given = tensors(case)
    tangents = []
    for f in (case.mine, case.theirs):
        with forward_ad.dual_level():
            y = f(*(forward_ad.make_dual(one, torch.ones_like(one)) for one in given))
            tangents.append(forward_ad.unpack_dual(y).tangent)
    close(*tangents, factor=5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_hessian_over_forward_mode() -> None:
    case, x = CASES[4], random((2, 3, 5))
    hessian = torch.func.hessian(lambda x: case.mine(x).pow(3).sum())(x)
    close(hessian, torch.func.hessian(lambda x: case.theirs(x).pow(3).sum())(x), factor=10)


# ---- saved tensors and checkpointing --------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(case: Case, reentrant: bool) -> None:
    given, dy = tensors(case), random(SHAPE)
    y = checkpoint(case.mine, *given, use_reentrant=reentrant)
    y.backward(dy)
    close((y, *(one.grad for one in given)), exact(case, given, dy))


def test_selective_checkpointing_sees_the_operators() -> None:
    seen = []

    def policy(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(str(function))
        return CheckpointPolicy.MUST_SAVE if "cunorm" in str(function) else CheckpointPolicy.PREFER_RECOMPUTE

    case, contexts = CASES[1], functools.partial(create_selective_checkpoint_contexts, policy)
    given, dy = tensors(case), random(SHAPE)
    y = checkpoint(lambda *given: 2 * case.mine(*given), *given, use_reentrant=False, context_fn=contexts)
    y.backward(dy / 2)
    close(tuple(one.grad for one in given), exact(case, given, dy)[1:])
    assert any("cunorm.group_norm" in one for one in seen)


def test_a_hook_that_returns_saved_tensors_in_another_layout() -> None:
    """`save_on_cpu` with pinned memory does that."""
    case = CASES[1]
    x, *parameters = tensors(case)
    laid = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    dy = random(SHAPE)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.contiguous(), lambda one: one):
        y = case.mine(laid, *parameters)
    close((y, *torch.autograd.grad(y, (laid, *parameters), dy)), exact(case, (x, *parameters), dy))


def _strided(one: Any) -> Any:
    """The same values, with a gap behind each."""
    return torch.stack([one, torch.full_like(one, 7)], -1)[..., 0]


def _transposed(one: Any) -> Any:
    """The same values, with the axes in reverse order in memory."""
    axes = [*range(one.dim())][::-1]
    return one.permute(axes).contiguous().permute(axes)


@ALL
@pytest.mark.parametrize("laid", [_strided, _transposed])
def test_a_hook_may_return_any_tensor_with_other_strides(case: Case, laid: Any) -> None:
    """x, gamma, beta and the statistics, of which kernels take the address."""
    given, dy = tensors(case), random(SHAPE)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, laid):
        y = case.mine(*given)
    close((y, *torch.autograd.grad(y, given, dy)), exact(case, given, dy))


def test_a_hook_that_returns_another_dtype_does_not_read_outside_the_tensors() -> None:
    """It breaks torch's contract. The results then have the precision of what it returned."""
    case = CASES[0]
    given, dy = tensors(case), random(SHAPE)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.bfloat16(), lambda one: one):
        y = case.mine(*given)
    close(torch.autograd.grad(y, given, dy), exact(case, given, dy)[1:], torch.bfloat16)


# ---- modes, fakes, subclasses ---------------------------------------------------------------------------------------


@ALL
def test_a_dispatch_mode_sees_the_operators(case: Case) -> None:
    given, dy = tensors(case), random(SHAPE)
    with Seen() as seen:
        y = case.mine(*given)
        found = torch.autograd.grad(y, given, dy)
    close((y, *found), exact(case, given, dy))
    assert seen.names == [case.options.name, f"{case.options.name}_backward"]
    y = case.mine(*given)  # of plain eager, whose backward is watched
    with Seen() as seen:
        close(torch.autograd.grad(y, given, dy), found)
    assert seen.names == [f"{case.options.name}_backward"]


@ALL
def test_meta_tensors(case: Case) -> None:
    given = [one.detach().to("meta").requires_grad_() for one in tensors(case)]
    y = case.mine(*given)
    found = torch.autograd.grad(y, given, torch.empty(SHAPE, device="meta"))
    assert [one.shape for one in (y, *found)] == [one.shape for one in (given[0], *given)]
    assert {one.device.type for one in (y, *found)} == {"meta"}


@ALL
def test_fake_tensors(case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for layout in (torch.contiguous_format, torch.channels_last):
        with FakeTensorMode() as mode:
            x, *parameters = (mode.from_tensor(one.detach()).requires_grad_() for one in tensors(case))
            x = x.detach().to(memory_format=layout).requires_grad_()
            y = case.mine(x, *parameters)
            found = torch.autograd.grad(y, (x, *parameters), torch.empty(SHAPE))
        real = case.mine(tensors(case)[0].detach().to(memory_format=layout), *tensors(case)[1:])
        outside = case.mine(x, *parameters)
        assert isinstance(outside, FakeTensor) and outside.stride() == y.stride()
        assert isinstance(y, FakeTensor) and y.stride() == real.stride() and y.dtype == real.dtype
        assert [one.shape for one in found] == [x.shape, *(one.shape for one in parameters)]


class Plain(torch.Tensor):
    """A subclass without rules of its own."""


class Logged(torch.Tensor):
    """A subclass that notes the functions it is passed to."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@ALL
def test_subclasses_are_kept_and_asked(case: Case) -> None:
    given, dy = tensors(case), random(SHAPE)
    y = case.mine(given[0].as_subclass(Plain), *given[1:])
    assert type(y) is Plain
    close(
        (y.as_subclass(torch.Tensor), *torch.autograd.grad(y.as_subclass(torch.Tensor), given, dy)),
        exact(case, given, dy),
    )
    Logged.seen.clear()
    case.mine(given[0].as_subclass(Logged), *given[1:])
    assert getattr(functional, case.options.name) in Logged.seen


@ALL
def test_a_wrapper_subclass_gets_torchs_operators(case: Case) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x, *parameters = (one.detach() for one in tensors(case))
    with Seen() as seen:
        y = case.mine(TwoTensor(x, 2 * x + 1), *parameters)
    assert type(y) is TwoTensor and seen.names == []
    close(y.b, case.theirs(2 * x + 1, *parameters))


@ALL
def test_a_graph_before_dispatch_has_the_operators(case: Case) -> None:
    given = [one.detach() for one in tensors(case)]
    graph = make_fx(case.mine, pre_dispatch=True)(*given)
    assert any(str(node.target).startswith("cunorm.") for node in graph.graph.nodes)
    close(graph(*given), case.theirs(*given))


@ALL
def test_functionalize_gets_torchs_function(case: Case) -> None:
    given = [one.detach() for one in tensors(case)]
    close(torch.func.functionalize(case.mine)(*given), case.theirs(*given))
    gradient = torch.func.functionalize(torch.func.grad(lambda x: case.mine(x, *given[1:]).square().sum()))
    close(gradient(given[0]), torch.func.grad(lambda x: case.theirs(x, *given[1:]).square().sum())(given[0]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_get_torchs_function() -> None:
    rows = [random((2, 5)), random((3, 5))]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        found = functional.layer_norm(nested, (5,), torch.ones(5), torch.zeros(5))
        for one, row in zip(found.unbind(), rows, strict=True):
            close(one, F.layer_norm(row, (5,)))


@ALL
def test_a_program_for_onnx_has_torchs_operators(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter of `torch.onnx.export` translates these alone."""

    class Model(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return case.mine(*given)

    given = tuple(one.detach() for one in tensors(case))
    mine = [str(node.target) for node in torch.export.export(Model(), given).graph.nodes]
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    theirs = [str(node.target) for node in torch.export.export(Model(), given).graph.nodes]
    assert any(name.startswith("cunorm.") for name in mine)
    assert not any(name.startswith("cunorm.") for name in theirs)


@pytest.mark.parametrize("module", [InstanceNorm2d(8, affine=True), SyncBatchNorm(8)], ids=["instance", "batch"])
def test_a_symbolic_trace_records_the_module(module: Any) -> None:
    """Their checks of the input's shape cannot be traced; those of torch's modules are not."""
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), module))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    x = random(SHAPE)
    close(traced(x), module(x.relu()))
    with pytest.raises(torch.fx.proxy.TraceError):  # as with torch's modules
        torch.fx.symbolic_trace(module)


def test_a_default_device_is_no_obstacle() -> None:
    case = CASES[0]
    with torch.device("cpu"):
        close(case.mine(*tensors(case)), case.theirs(*tensors(case)))


def test_inference_mode() -> None:
    case = CASES[0]
    with torch.inference_mode():
        y = case.mine(*tensors(case))
    assert y.is_inference()
    close(y, case.theirs(*tensors(case)))


@ALL
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_trace_runs_without_cunorm(case: Case) -> None:
    x, *parameters = (one.detach() for one in tensors(case))
    traced = torch.jit.trace(lambda x: case.mine(x, *parameters), x, check_trace=False)
    assert "cunorm" not in str(traced.graph) and "Python" not in str(traced.graph)
    close(traced(2 * x + 1), case.theirs(2 * x + 1, *parameters))


# ---- autocast and threads -------------------------------------------------------------------------------------------


@ALL
def test_autocast_keeps_the_dtype_of_x(case: Case) -> None:
    x, *parameters = tensors(case)
    low = x.detach().bfloat16().requires_grad_()
    dy = random(SHAPE, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = case.mine(low, *parameters)
        assert case.mine(x, *parameters).dtype == torch.float32
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y, (low, *parameters), dy)
    assert [one.dtype for one in found] == [torch.bfloat16, *[torch.float32] * len(parameters)]
    close((y, *found), exact(case, (low, *parameters), dy), torch.bfloat16)


def test_two_threads() -> None:
    """Each runs forwards and backwards of several norms at the same time."""
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        found = []
        for case in CASES * 3:
            given = tensors(case, seed=10 + number)
            y = case.mine(*given)
            found.append((case, given, y, torch.autograd.grad(y, given, random(SHAPE))))
        results[number] = found

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for found in results.values():
        for case, given, y, gradients in found:
            close((y, *gradients), exact(case, given, random(SHAPE)))
    assert len(results) == 2


@pytest.mark.parametrize("case", CHANNELS, ids=str)
def test_deterministic(case: Case) -> None:
    given, dy = tensors(case), random(SHAPE)
    runs = [torch.autograd.grad(case.mine(*given), given, dy) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))

"""SyncBatchNorm: several processes of gloo, and its parts in one process."""

from __future__ import annotations

import copy
import re
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'cunorm[torch]'")

from torch import nn

from cunorm.torch import SyncBatchNorm
from cunorm.torch.sync_operators import OPERATORS
from tests.distributed.processes import ranks
from tests.torch.cases import COMPILER_WARNINGS, no_waiting

MODULE = "tests.torch.sync_rank"
C = 5


def sample(dtype=torch.float32, shape=(4, C, 3, 2)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "cases", "says"),
    [
        (
            2,
            ("other_dtype", "equal", "exchanges", "parallel", "compiled"),
            ("35 cases agree", "one exchange each way", "DDP agrees", "compiled cases agree"),
        ),
        pytest.param(3, ("equal", "subgroup"), ("17 cases agree", "groups are kept"), marks=pytest.mark.long),
        pytest.param(
            2,
            ("compiled_options", "parallel_compiled"),
            ("compiled options agree", "DDP agrees"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_ranks_have_the_results_of_the_whole_batch(world, cases, says):
    ended = ranks("gloo", world, *cases, module=MODULE)
    for rank, one in enumerate(ended):
        assert one.code == 0, "\n".join(one.printed for one in ended)
        assert all(f"rank {rank} of {world}: {text}" in one.printed for text in says), one.printed

    if "other_dtype" in cases:
        first, second = (one.printed for one in ended)
        assert "ends with ValueError: input: float32 with 7 channels, but process 1 has bfloat16 with 7" in first
        assert "ends with ValueError: input: bfloat16 with 7 channels, but process 0 has float32 with 7" in second


@pytest.mark.long
def test_a_rank_that_dies_ends_the_others():
    began = time.monotonic()
    *others, last = ranks("gloo", 3, "dies", module=MODULE)
    assert time.monotonic() - began < 100  # less than the patience of gloo
    assert last.code != 0
    for one in others:
        assert one.code != 0
        assert re.search(r"ends with \w+: .*([Cc]onnection|peer)", one.printed), one.printed


@pytest.mark.long
def test_other_channels_end_with_an_error():
    ended = ranks("gloo", 2, "other_channels", module=MODULE)
    assert all(one.code != 0 for one in ended)
    assert not any("has results" in one.printed for one in ended)


# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_evaluation_uses_the_running_statistics(dtype, channels_last):
    torch.manual_seed(0)
    want = nn.BatchNorm2d(C).to(torch.float64 if dtype == torch.float64 else torch.float32)
    want(sample(want.weight.dtype))
    mine = SyncBatchNorm.convert(copy.deepcopy(want)).eval()
    before = copy.deepcopy(mine.state_dict())
    x = sample(dtype).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    y = mine(x)
    assert y.dtype == dtype and y.stride() == x.stride()
    torch.testing.assert_close(y, want.eval()(x), rtol=0, atol=0)
    assert all(torch.equal(one, before[name]) for name, one in mine.state_dict().items())


def test_evaluation_without_running_statistics_uses_the_input():
    want = nn.BatchNorm2d(C, track_running_stats=False).eval()
    torch.testing.assert_close(SyncBatchNorm.convert(copy.deepcopy(want))(sample()), want(sample()))


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_one_process_is_batch_norm(options):
    want = nn.BatchNorm2d(C, **options)
    mine = SyncBatchNorm(C, **options)
    for step in range(3):
        x, y = (sample().mul_(1 + step).requires_grad_() for _ in range(2))
        found = mine(x)
        torch.testing.assert_close(found, want(y))
        found.square().sum().backward()
    for name, one in mine.named_buffers():
        torch.testing.assert_close(one, dict(want.named_buffers())[name])


def test_conversion_is_in_place():
    class Own(nn.BatchNorm2d):
        pass

    model = nn.ModuleDict({"a": nn.BatchNorm1d(C), "b": nn.Sequential(nn.BatchNorm2d(C), nn.BatchNorm3d(C), Own(C))})
    model["c"] = nn.SyncBatchNorm(C, process_group="theirs")
    state, parameters, modules = dict(model.state_dict()), list(model.parameters()), list(model.modules())
    assert SyncBatchNorm.convert(model) is model
    assert [one is other for one, other in zip(model.parameters(), parameters, strict=True)] == [True] * 10
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    assert [type(one) for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)] == [
        *[SyncBatchNorm] * 3,
        Own,
        SyncBatchNorm,
    ]
    assert model.state_dict().keys() == state.keys()
    assert model["a"].process_group is None and model["c"].process_group == "theirs"
    nn.SyncBatchNorm(C).load_state_dict(SyncBatchNorm(C).state_dict())
    assert SyncBatchNorm.convert(model, "mine")["a"].process_group is None  # it is of this class already
    single = nn.BatchNorm1d(C)
    assert SyncBatchNorm.convert(single, "mine") is single and single.process_group == "mine"


def test_another_layout_is_copied_once_and_right():
    x = sample(shape=(3, 2, 4, C)).transpose(1, 3)[:, :, ::2].requires_grad_()
    want, mine = nn.BatchNorm2d(C), SyncBatchNorm(C)
    y = mine(x)
    torch.testing.assert_close(y, want(x))
    dy = sample(shape=y.shape)
    found, exact = (torch.autograd.grad(one(x), x, dy)[0] for one in (mine, want))
    torch.testing.assert_close(found, exact)
    expanded = torch.ones(1, 1, 1, 1).expand(y.shape)  # the gradient of a sum
    found, exact = (torch.autograd.grad(one(x), x, expanded)[0] for one in (mine, want))
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)


def test_counts_are_exact():
    packets = OPERATORS.batch_norm_packet(torch.zeros(1, 1, 2**24 + 1, dtype=torch.float16), 1e-5)
    assert packets[0] == 2**24 + 1


@pytest.mark.parametrize("shape", [(4,), (4, C + 1, 2), (1,) * 9])
def test_wrong_shapes(shape):
    module = SyncBatchNorm(C)
    with (
        pytest.raises(ValueError, match=rf"^input: shape \({shape[0]}, .*expected \(N, {C}, ...\) with 2 to 8")
        if len(shape) > 1
        else pytest.raises(ValueError, match=r"^input: shape \(4,\), expected")
    ):
        module(torch.ones(shape))
    assert module.num_batches_tracked == 0


def test_a_wrong_dtype():
    with pytest.raises(TypeError, match=r"^input: dtype torch\.int64, expected torch\.float16 or "):
        SyncBatchNorm(C)(torch.ones(2, C, dtype=torch.int64))


def test_strided_running_statistics_are_updated():
    packets = OPERATORS.batch_norm_packet(sample(), 1e-5).view(1, -1)
    dense, spread = torch.zeros(2, C), torch.zeros(2, C, 2)
    for running in (dense, spread[..., 0]):
        OPERATORS.batch_norm_merge(packets, sample(), *running, 0.1, 1e-5)
    assert dense.all() and torch.equal(spread[..., 0], dense) and not spread[..., 1].any()


@pytest.mark.parametrize("parameter", [torch.float64, torch.bfloat16])
def test_parameters_of_another_dtype(parameter):
    """float64 parameters with a float32 input are rounded first; those of 16 bits are read as they are."""
    torch.manual_seed(0)
    mine = SyncBatchNorm(C).to(parameter)
    torch.nn.init.uniform_(mine.weight, 0.5, 2)
    want = nn.BatchNorm2d(C)
    want.load_state_dict(mine.state_dict())
    x, y = (sample().requires_grad_() for _ in range(2))
    found, exact = mine(x), want(y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact)
    found.square().sum().backward(), exact.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=0)
    assert mine.weight.grad.dtype == mine.bias.grad.dtype == parameter
    torch.testing.assert_close(mine.weight.grad, want.weight.grad.to(parameter), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "parameter"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_evaluation_takes_what_training_takes(dtype, parameter):
    """Torch's function refuses some of these dtypes beside each other."""
    module = SyncBatchNorm(C).to(parameter)
    torch.nn.init.uniform_(module.weight, 0.5, 2)
    assert module(sample(dtype)).dtype == dtype
    module.eval()
    found = module(sample(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), module.double()(sample(dtype).double()), rtol=1e-2, atol=1e-2)


def test_a_gamma_of_16_bits_does_not_round_the_gradient_of_a_beta_of_32():
    module = SyncBatchNorm(C).half()
    module.bias = nn.Parameter(torch.zeros(C))
    x = sample(torch.float16, (70000, C))
    module(x).backward(torch.ones_like(x))
    assert torch.equal(module.bias.grad, torch.full((C,), 70000.0))


@pytest.mark.parametrize("shape", [(1, C), (1, C, 1, 1)])
def test_one_value_per_channel_is_an_error_as_in_torch(shape):
    """Its variance, 0, would make the running variance too small."""
    x, size = sample(shape=shape), str(torch.Size(shape))
    for options in ({}, {"track_running_stats": False}):
        mine, theirs = SyncBatchNorm(C, **options), (nn.BatchNorm2d if len(shape) > 2 else nn.BatchNorm1d)(C, **options)
        for training in (True, False):
            mine.train(training), theirs.train(training)
            if not training and not options:
                torch.testing.assert_close(mine(x), theirs(x))
                continue
            for module in (theirs, mine):
                with pytest.raises(ValueError, match=rf"^Expected more than 1 value per channel .* {re.escape(size)}$"):
                    module(x)
        assert options or (mine.num_batches_tracked == 0 and torch.equal(mine.running_var, torch.ones(C)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("missing", [("num_batches_tracked",), ("running_mean", "running_var"), ("all",)])
def test_buffers_may_be_absent(missing, momentum):
    names = ("running_mean", "running_var", "num_batches_tracked") if missing == ("all",) else missing
    mine, theirs = SyncBatchNorm(C, momentum=momentum), nn.BatchNorm2d(C, momentum=momentum)
    for name in names:
        setattr(mine, name, None), setattr(theirs, name, None)
    for _ in range(2):
        torch.testing.assert_close(mine(sample()), theirs(sample()))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name))


def test_a_hook_may_return_saved_tensors_with_other_strides():
    """x, gamma, the statistics and the counts, of which kernels take the address."""
    found = []
    for laid in (lambda one: one, lambda one: torch.stack([one, torch.full_like(one, 7)], -1)[..., 0]):
        x, module = sample().requires_grad_(), SyncBatchNorm(C)
        torch.nn.init.uniform_(module.weight, 0.5, 2, generator=torch.Generator().manual_seed(0))
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, laid):
            y = module(x)
        found.append(torch.autograd.grad(y, (x, module.weight, module.bias), sample().cos()))
    torch.testing.assert_close(found[1], found[0])


def test_a_second_derivative_is_an_error():
    x = sample().requires_grad_()
    (dx,) = torch.autograd.grad(SyncBatchNorm(C)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_operators_are_what_compilers_expect(channels_last):
    """Schemas, fakes, dynamic shapes."""
    x = sample().contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    gamma, beta = torch.rand(2, C)
    tests = ("test_schema", "test_faketensor")
    packets = OPERATORS.batch_norm_packet(x, 1e-5).view(1, -1)
    mean, invstd, counts = OPERATORS.batch_norm_merge(packets, x, None, None, 0.1, 1e-5)
    sums, _, _ = OPERATORS.batch_norm_reduce(x, x, mean, invstd, gamma, [True] * 3)
    for operator, arguments in (
        (OPERATORS.batch_norm_packet, (x, 1e-5)),
        (OPERATORS.batch_norm_merge, (packets, x, torch.zeros(C), torch.ones(C, dtype=torch.float64), 0.1, 1e-5)),
        (OPERATORS.batch_norm_merge, (packets, x, None, None, 0.1, 1e-5)),
        (OPERATORS.batch_norm_elemt, (x, mean, invstd, gamma, beta)),
        (OPERATORS.batch_norm_elemt, (x, mean, invstd, None, None)),
        (OPERATORS.batch_norm_reduce, (x, x, mean, invstd, gamma, [True, False, True])),
        (OPERATORS.batch_norm_reduce, (x, x, mean, invstd, None, [False, True, False])),
        (OPERATORS.batch_norm_input_gradient, (x, x, mean, invstd, gamma, sums, counts)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=tests)


@pytest.mark.filterwarnings(*COMPILER_WARNINGS)
def test_dynamic_batches_compile_once():
    torch._dynamo.reset()
    module = SyncBatchNorm(C)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    call = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for size in (4, 6, 9):
        x = sample(shape=(size, C, 3, 2))
        torch.testing.assert_close(call(x), nn.BatchNorm2d(C)(x))
    assert len(frames) == 1


def test_fakes_describe_a_gpu():
    """A packet from a GPU has no word that the receivers would have to read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, C, 3, 2, device="cuda")
        assert OPERATORS.batch_norm_packet(x, 1e-5).shape == (1 + C,)
        packets = torch.empty(3, 1 + C, dtype=torch.int64, device="cuda")
        mean, _, counts = OPERATORS.batch_norm_merge(packets, x, None, None, 0.1, 1e-5)
        assert mean.shape == (C,) and counts.shape == (3,) and mean.device.type == "cuda"


@pytest.mark.gpu
def test_gpu_equals_the_cpu_and_does_not_wait():
    x = sample()
    want = SyncBatchNorm(C)(x)
    module, given = SyncBatchNorm(C).cuda(), x.cuda().requires_grad_()
    module(given).backward(given.detach())  # compiles
    with no_waiting():
        y = module(given)
        y.backward(given.detach())
    torch.testing.assert_close(y.cpu(), want)

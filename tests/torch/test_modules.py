"""The modules of cunorm.torch: torch's arguments and state, pickling, DDP, and whole training steps."""

from __future__ import annotations

import copy
import doctest
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn

import cunorm.torch as ct
from cunorm.torch import functional, modules
from tests.support.paths import ROOT
from tests.torch.cases import SHAPE, close, random

MODULES = [
    (ct.GroupNorm, nn.GroupNorm, (4, 8), SHAPE),
    (ct.LayerNorm, nn.LayerNorm, ((3, 5),), SHAPE),
    (ct.RMSNorm, nn.RMSNorm, ((3, 5),), SHAPE),
    (ct.InstanceNorm1d, nn.InstanceNorm1d, (8,), (2, 8, 15)),
    (ct.InstanceNorm2d, nn.InstanceNorm2d, (8,), SHAPE),
    (ct.InstanceNorm3d, nn.InstanceNorm3d, (8,), (2, 8, 3, 1, 5)),
]
ALL = pytest.mark.parametrize(
    ("mine", "theirs", "arguments", "shape"), MODULES, ids=lambda one: getattr(one, "__name__", "")
)


def disturbed(module: Any) -> Any:
    """The module with random parameters."""
    with torch.no_grad():
        for i, one in enumerate(module.parameters()):
            one.copy_(random(one.shape, one.dtype, seed=i))
    return module


def compare(mine: Any, theirs: Any, shape: Any, dtype: Any = torch.float32) -> None:
    """Assert that outputs and gradients of two modules with the same state are equal."""
    results = []
    for module in (mine, theirs):
        x = random(shape, dtype).requires_grad_()
        y = module(x)
        gradients = torch.autograd.grad(y, [x, *module.parameters()], random(shape, dtype, seed=9))
        results.append((y, *gradients))
    close(*results, dtype=dtype, factor=2)


@ALL
def test_values_state_and_representation(mine: Any, theirs: Any, arguments: Any, shape: Any) -> None:
    options = {"affine": True} if "Instance" in mine.__name__ else {}
    one, other = disturbed(mine(*arguments, **options)), disturbed(theirs(*arguments, **options))
    assert isinstance(one, theirs)
    assert list(one.state_dict()) == list(other.state_dict())
    one.load_state_dict(other.state_dict())
    compare(one, other, shape)
    assert repr(one) == repr(other)


@ALL
def test_arguments_are_torchs(mine: Any, theirs: Any, arguments: Any, shape: Any) -> None:
    """Positions, keywords and dtype; a module without parameters."""
    plain = "affine" if "affine" in inspect.signature(theirs.__init__).parameters else "elementwise_affine"
    one = mine(*arguments, eps=0.5, dtype=torch.float64, device="cpu", **{plain: False})
    other = theirs(*arguments, eps=0.5, dtype=torch.float64, device="cpu", **{plain: False})
    assert repr(one) == repr(other) and not list(one.parameters())
    compare(one, other, shape, torch.float64)
    positional = mine(*arguments, 0.25)
    assert positional.eps == 0.25
    assert mine(*arguments, device="meta")(torch.empty(shape, device="meta")).shape == torch.Size(shape)


@ALL
def test_pickle_and_deepcopy(mine: Any, theirs: Any, arguments: Any, shape: Any) -> None:
    module = disturbed(mine(*arguments))
    module(random(shape))
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(other) is mine
        compare(other, module, shape)


def test_the_activation_of_group_norm() -> None:
    module = disturbed(ct.GroupNorm(4, 8, activation="silu"))
    other = disturbed(nn.GroupNorm(4, 8))
    compare(module, nn.Sequential(other, nn.SiLU()), SHAPE)
    assert repr(module) == "GroupNorm(4, 8, eps=1e-05, affine=True, bias=True, activation='silu')" or "silu" in repr(
        module
    )
    assert pickle.loads(pickle.dumps(module)).activation == "silu"
    with pytest.raises(ValueError, match=r"^activation: 'gelu'"):
        ct.GroupNorm(4, 8, activation="gelu")


def test_one_parameter_alone() -> None:
    for mine, theirs, arguments in ((ct.GroupNorm, nn.GroupNorm, (4, 8)), (ct.LayerNorm, nn.LayerNorm, ((3, 5),))):
        if "bias" not in inspect.signature(theirs.__init__).parameters:  # GroupNorm of PyTorch 2.11
            continue
        one, other = mine(*arguments, bias=False), theirs(*arguments, bias=False)
        assert one.bias is None
        compare(disturbed(one), disturbed(other), SHAPE)


def test_instance_norm_keeps_torchs_checks() -> None:
    module = ct.InstanceNorm2d(8)
    close(module(random(SHAPE[1:])), nn.InstanceNorm2d(8)(random(SHAPE[1:])))  # unbatched
    with pytest.raises(ValueError, match="expected 3D or 4D input"):
        module(random((2, 8)))
    with pytest.raises(ValueError, match="Expected more than 1 spatial element when training"):
        module(random((2, 8, 1, 1)))
    with pytest.raises(ValueError, match="to match num_features"):
        ct.InstanceNorm2d(7, affine=True)(random(SHAPE))
    with pytest.warns(UserWarning, match="does not match num_features"):
        ct.InstanceNorm2d(7)(random(SHAPE))


def test_instance_norm_with_running_statistics_is_torchs() -> None:
    one, other = (kind(8, track_running_stats=True) for kind in (ct.InstanceNorm2d, nn.InstanceNorm2d))
    for training in (True, False):
        one.train(training), other.train(training)
        close(one(random(SHAPE)), other(random(SHAPE)))
    close(list(one.buffers())[:2], list(other.buffers())[:2])


def test_training_with_ddp(tmp_path: Path) -> None:
    """One process: DDP's hooks see each gradient once."""
    from torch.distributed import destroy_process_group, init_process_group

    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 8, 1), ct.GroupNorm(4, 8, activation="silu"), ct.LayerNorm((3, 5)))
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        compare(parallel, model, SHAPE)
        y = parallel(random(SHAPE)).pow(3).sum()
        y.backward()
        expected = torch.autograd.grad(model(random(SHAPE)).pow(3).sum(), list(model.parameters()))
        close([one.grad for one in parallel.parameters()], list(expected), factor=5)
    finally:
        destroy_process_group()


def test_distributed_tensors(tmp_path: Path) -> None:
    """DTensor knows how torch's operators split, and gets them."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        x = distribute_tensor(random(SHAPE), init_device_mesh("cpu", (1,)), [Shard(0)])
        y = ct.LayerNorm((3, 5), elementwise_affine=False)(x)
        assert isinstance(y, DTensor)
        close(y.to_local(), nn.LayerNorm((3, 5))(random(SHAPE)))
    finally:
        destroy_process_group()


def test_a_module_on_half_precision_parameters() -> None:
    module, other = disturbed(ct.LayerNorm((3, 5)).bfloat16()), disturbed(nn.LayerNorm((3, 5)).bfloat16())
    compare(module, other, SHAPE, torch.bfloat16)


PUBLIC = [
    *(getattr(ct, name) for name in ct.__all__ if name != "functional"),
    modules.LayerNorm2d,
    functional.group_norm,
    functional.instance_norm,
    functional.layer_norm,
    functional.rms_norm,
]


@pytest.mark.parametrize("found", PUBLIC, ids=lambda one: one.__name__)
def test_every_public_docstring_has_an_example_that_runs(found: Any) -> None:
    docstring = found.__doc__
    assert docstring is not None and "Examples\n" in docstring
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(docstring), {}, found.__name__, None, 0)
    assert test.examples
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


def test_importing_cunorm_does_not_import_torch() -> None:
    code = "import sys, cunorm, cunorm.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0

"""`replace`: what it replaces, what it leaves and why, and that a model stays the same model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn
from torch.nn import functional as F

import cunorm.torch as ct
from cunorm.torch import SyncBatchNorm, modules, replace
from cunorm.torch.norms import Call
from tests.torch.cases import SHAPE, close, random


class Scaled(nn.LayerNorm):
    """A subclass that means something else."""

    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


class Rows(nn.Module):
    """LayerNorm and RMSNorm over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)

    def forward(self, x: Any) -> Any:
        return self.rms(self.layer(x.movedim(1, -1)) + 1).movedim(-1, 1)


def small() -> nn.Sequential:
    """A model with every norm, and a convolution with a GroupNorm and SiLU."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(),
        nn.Conv2d(8, 8, 1, bias=False), nn.InstanceNorm2d(8, affine=True), nn.SiLU(), Rows(),
    )  # fmt: skip
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * torch.randn_like(one))
    return model


def results(model: nn.Module, layout: Any = torch.contiguous_format) -> tuple[Any, ...]:
    """The output, and the gradients of input and parameters."""
    x = random(SHAPE).to(memory_format=layout).requires_grad_()
    y = model(x)
    parameters = list(model.parameters())
    return y, *torch.autograd.grad(y, [x, *parameters], random(y.shape, seed=4))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_small_model(fuse: bool, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients stay torch's, and each norm runs on cunorm."""
    model, seen = small(), []
    plain = copy.deepcopy(model).to(memory_format=layout)
    did = replace(model.to(memory_format=layout), fuse_silu=fuse)
    assert did.counts == {"GroupNorm": 1, "InstanceNorm2d": 1, "LayerNorm": 1, "RMSNorm": 1}
    assert did.fused == fuse and did.left == {}
    forward = Call.forward
    monkeypatch.setattr(Call, "forward", lambda self, *given: (seen.append(self.norm.name), forward(self, *given))[1])
    close(results(model, layout), results(plain, layout), factor=5)
    assert seen == ["group_norm", "instance_norm", "layer_norm", "rms_norm"]


def test_the_model_stays_the_same_model() -> None:
    """Parameters, hooks, references, optimisers, training mode, the state_dict and its order."""
    model, calls = small().eval(), []
    norm, before, names = model[1], dict(model.named_parameters()), list(model.state_dict())
    norm.register_forward_hook(lambda *_: calls.append(1))
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    replace(model)
    assert model[1] is norm and type(norm) is ct.GroupNorm and not norm.training
    assert list(model.state_dict()) == names
    assert all(one is before[name] for name, one in model.named_parameters())
    old = norm.weight.detach().clone()
    model(random(SHAPE)).pow(3).sum().backward()
    optimiser.step()
    assert not torch.equal(norm.weight, old) and calls == [1]
    close(pickle.loads(pickle.dumps(small_without_hooks(model)))(random(SHAPE)), model(random(SHAPE)))
    assert replace(model).counts == {}


def small_without_hooks(model: nn.Module) -> nn.Module:
    model = copy.copy(model)
    for one in model.modules():
        one._forward_hooks.clear()
    return model


def test_the_model_itself_may_be_a_norm() -> None:
    norm = nn.LayerNorm(4)
    assert replace(norm).counts == {"LayerNorm": 1} and type(norm) is ct.LayerNorm


def test_what_is_left_has_a_reason() -> None:
    patched, parametrized = nn.GroupNorm(2, 4), nn.LayerNorm(4)
    patched.forward = lambda x: x
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    unknown = type("RMSNormWithCare", (nn.Module,), {})()
    model = nn.ModuleDict(
        {
            "subclass": Scaled(4), "batch": nn.BatchNorm2d(4),
            "running": nn.InstanceNorm2d(4, track_running_stats=True),
            "patched": patched, "parametrized": parametrized, "lazy": nn.LazyInstanceNorm2d(), "unknown": unknown,
            "weight": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "conv": nn.Conv2d(1, 1, 1),
            "ours": SyncBatchNorm(4),
        }
    )  # fmt: skip
    unknown_class = "is an unknown class, whose forward may compute something else"
    parametrize = "torch.nn.utils.parametrize"
    types = {name: type(one) for name, one in model.items()}
    did = replace(model)
    assert did.counts == {} and {name: type(one) for name, one in model.items()} == types
    assert did.left == {
        "subclass": f"{__name__}.Scaled {unknown_class}",
        "batch": "BatchNorm2d is no norm of cunorm.torch",
        "running": "InstanceNorm2d: it keeps running statistics",
        "patched": "GroupNorm: its forward was replaced",
        "parametrized": f"{parametrize}.ParametrizedLayerNorm {unknown_class}",
        "lazy": "LazyInstanceNorm2d is no norm of cunorm.torch",
        "unknown": f"{__name__}.RMSNormWithCare {unknown_class}",
    }
    assert str(did).startswith("replaced: none; fused: 0; left: 7\n  subclass: ")


# ---- SiLU -----------------------------------------------------------------------------------------------------------


def silu(norm: Any = None, act: Any = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 8, 1), norm or nn.GroupNorm(4, 8), act or nn.SiLU(inplace=True))


def test_silu_is_fused_only_if_asked() -> None:
    model = silu()
    assert replace(model).fused == 0 and type(model[2]) is nn.SiLU
    names = list(model.state_dict())
    assert replace(model, fuse_silu=True).fused == 1
    assert model[1].activation == "silu" and type(model[2]) is nn.Identity and list(model.state_dict()) == names
    assert replace(model, fuse_silu=True).fused == 0


def test_silu_is_not_fused_where_somebody_sees_the_norm() -> None:
    shared = nn.GroupNorm(4, 8)
    cases = {
        "a hook on the norm": silu(),
        "a hook on the SiLU": silu(act=nn.SiLU()),
        "the norm in two places": nn.Sequential(silu(shared), nn.Conv2d(8, 8, 1), shared),
    }
    cases["a hook on the norm"][1].register_forward_hook(lambda *_: None)
    cases["a hook on the SiLU"][2].register_full_backward_hook(lambda *_: None)
    for name, model in cases.items():
        plain = copy.deepcopy(model)
        did = replace(model, fuse_silu=True)
        assert did.fused == 0 and len(did.left) == 1, name
        assert next(iter(did.left.values())).startswith("SiLU: "), name
        close(model(random(SHAPE)), plain(random(SHAPE)))


def test_other_containers_and_activations_are_left() -> None:
    class Skipping(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return self[1](x)

    assert replace(Skipping(*silu()), fuse_silu=True).fused == 0
    assert replace(nn.ModuleList(silu()), fuse_silu=True).fused == 0
    assert replace(silu(act=nn.ReLU()), fuse_silu=True).fused == 0
    assert replace(silu(norm=nn.InstanceNorm2d(8)), fuse_silu=True).fused == 0


def test_an_activation_that_comes_twice() -> None:
    """The second GroupNorm is followed by the shared SiLU, not by what comes after it."""
    act = nn.SiLU()
    model = nn.Sequential(nn.GroupNorm(4, 8), act, nn.GroupNorm(2, 8), act, nn.GroupNorm(8, 8), nn.ReLU(), nn.SiLU())
    plain = copy.deepcopy(model)
    assert replace(model, fuse_silu=True).fused == 2
    close(model(random(SHAPE)), plain(random(SHAPE)), factor=5)


# ---- classes of other libraries -------------------------------------------------------------------------------------


def test_layer_norm_over_channels() -> None:
    module = modules.LayerNorm2d(8)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = random(SHAPE).to(memory_format=layout)
        close(module(x), F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2))


def test_channels_last_layer_norm_2d_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("a dense tensor was copied"))
    x = random(SHAPE).to(memory_format=torch.channels_last)
    assert modules.LayerNorm2d(8)(x).stride() == x.stride()


def swapped(module: Any, x: Any, expected: type, dtype: Any = torch.float32, **options: Any) -> None:
    """Assert that a module is replaced and computes what it computed, also its gradients."""
    with torch.no_grad():
        for one in module.parameters():
            one.add_(0.1 * torch.randn_like(one))
    plain = copy.deepcopy(module)
    did = replace(module, **options)
    assert type(module) is expected and did.left == {} and list(module.state_dict()) == list(plain.state_dict())
    found = []
    for one in (module, plain):
        x = x.detach().to(dtype).requires_grad_()
        y = one(x)
        found.append((y, *torch.autograd.grad(y, [x, *one.parameters()], random(y.shape, y.dtype, seed=3))))
    close(*found, dtype=dtype, factor=3)
    pickle.loads(pickle.dumps(module))


def test_classes_of_timm() -> None:
    layers = pytest.importorskip("timm.layers", reason="timm is not installed")
    x, rows = random(SHAPE), random((2, 5, 8))
    swapped(layers.GroupNorm(8, 4), x, ct.GroupNorm)
    swapped(layers.GroupNorm1(8), x, ct.GroupNorm)
    swapped(layers.LayerNorm(8), rows, ct.LayerNorm)
    swapped(layers.LayerNormFp32(8), rows, ct.LayerNorm)
    swapped(layers.LayerNorm2d(8), x, modules.LayerNorm2d)
    swapped(layers.LayerNorm2dFp32(8), x, modules.LayerNorm2d)
    swapped(layers.RmsNorm(8), rows, ct.RMSNorm)
    for act in (nn.SiLU, nn.ReLU):
        for fuse in (False, True):
            module = layers.GroupNormAct(8, 4, act_layer=act)
            swapped(module, x, modules.GroupNormAct, fuse_silu=fuse)
            assert (module.activation == "silu") == (fuse and act is nn.SiLU)
    dropping = layers.GroupNormAct(8, 4, act_layer=nn.SiLU, drop_layer=nn.Dropout)
    assert replace(dropping, fuse_silu=True).left == {"act": "SiLU: there is dropout before it"}


def test_classes_of_diffusers() -> None:
    normalization = pytest.importorskip("diffusers.models.normalization", reason="diffusers is not installed")
    rows = random((2, 5, 8))
    swapped(normalization.RMSNorm(8, 1e-5), rows, ct.RMSNorm)
    swapped(normalization.RMSNorm(8, 1e-5, elementwise_affine=False), rows, ct.RMSNorm)
    swapped(normalization.FP32LayerNorm(8), rows, ct.LayerNorm)
    biased = normalization.RMSNorm(8, 1e-5, bias=True)
    assert replace(biased).left == {"": "RMSNorm: it has a bias"}


def test_classes_of_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.helium.modeling_helium import HeliumRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for kind in (LlamaRMSNorm, Qwen3RMSNorm, HeliumRMSNorm, T5LayerNorm):
        swapped(kind(8, 1e-3), random((2, 5, 8)), ct.RMSNorm)
        swapped(kind(8, 1e-3).bfloat16(), random((2, 5, 8)), ct.RMSNorm, torch.bfloat16)
    gemma = GemmaRMSNorm(8)  # 1 + weight
    assert "unknown class" in replace(gemma).left[""]


@pytest.mark.parametrize("model", [None, "model", [nn.LayerNorm(4)], torch.ones(3), nn.Sequential], ids=repr)
def test_what_is_no_model_is_a_type_error(model: Any) -> None:
    for convert in (replace, SyncBatchNorm.convert):
        with pytest.raises(TypeError, match=r"^model: .*, expected a torch.nn.Module; of a pipeline, pass its parts"):
            convert(model)

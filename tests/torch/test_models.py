"""Models of other packages with random weights: replaced, they and their gradients agree with torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn

from cunorm.torch import Replaced, replace
from tests.torch.cases import random

#: The packages warn about themselves and about torch.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

Call = Callable[[nn.Module], Any]


def agree(model: nn.Module, call: Call, layout: Any = torch.contiguous_format, fuse: bool = False) -> Replaced:
    """Assert that a model gives the same output and gradients after `replace`, and return what that did."""
    torch.manual_seed(0)
    with torch.no_grad():  # zero weights at the start would hide the gradients behind them
        for one in model.parameters():
            one.add_(0.02 * torch.randn_like(one))
    plain = model.to(memory_format=layout)
    mine = copy.deepcopy(plain)
    did = replace(mine, fuse_silu=fuse)
    assert list(mine.state_dict()) == list(plain.state_dict())
    outputs, gradients = [], []
    for one in (mine, plain):
        y = call(one)
        outputs.append(y.detach())
        dy = random(y.shape, seed=7)
        named = dict(one.named_parameters())
        found = torch.autograd.grad(y, list(named.values()), dy, allow_unused=True)
        gradients.append({name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None})
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-4 * outputs[1].abs().max().item())
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(one.norm().item() for one in gradients[1].values())
    for name, expected in gradients[1].items():
        difference = (gradients[0][name] - expected).norm().item()
        assert difference <= 2e-3 * expected.norm().item() + 1e-6 * largest, name
    return did


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=16, attention_head_dim=8,
        norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_unet_of_diffusers(layout: Any) -> None:
    x = random((2, 4, 8, 8)).to(memory_format=layout)
    did = agree(unet(), lambda m: m(x, torch.tensor([3, 7]), random((2, 5, 16))).sample, layout, fuse=True)
    assert set(did.counts) == {"GroupNorm", "LayerNorm"} and did.counts["GroupNorm"] > 10 and did.left == {}
    assert did.fused == 0  # a forward calls the SiLU


def test_autoencoder_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=8,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1,
    )  # fmt: skip
    did = agree(model, lambda m: m(random((2, 3, 16, 16))).sample)
    assert did.counts["GroupNorm"] > 10 and did.left == {}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("test_efficientnet_gn", {"GroupNormAct"}),
        ("test_convnext", {"LayerNorm", "LayerNorm2d"}),
        ("test_vit", {"LayerNorm"}),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_models_of_timm(name: str, kinds: set[str], layout: Any) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model(name, num_classes=5, **({"img_size": 32} if "vit" in name else {}))
    x = random((2, 3, 32, 32)).to(memory_format=layout)
    did = agree(model, lambda m: m(x), layout, fuse=True)
    assert set(did.counts) <= kinds | {"GroupNorm"} and did.counts and did.left == {}
    assert (did.fused > 0) == ("gn" in name)


def test_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    tokens = torch.arange(14).reshape(2, 7)
    did = agree(transformers.LlamaForCausalLM(config), lambda m: m(tokens).logits)
    assert did.counts == {"RMSNorm": 5} and did.left == {}


@pytest.mark.parametrize("axes", [2, 3])
def test_unet_of_nnunet(axes: int) -> None:
    unets = pytest.importorskip("dynamic_network_architectures.architectures.unet", reason="nnU-Net is not installed")
    model = unets.PlainConvUNet(
        1, 3, (8, 16, 32), getattr(nn, f"Conv{axes}d"), 3, (1, 2, 2), 1, 2, 1, conv_bias=True,
        norm_op=getattr(nn, f"InstanceNorm{axes}d"), norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU,
    )  # fmt: skip
    did = agree(model, lambda m: m(random((2, 1, *(8,) * axes))))
    assert did.counts == {f"InstanceNorm{axes}d": 5} and did.left == {}


def test_a_compiled_unet() -> None:
    model = unet()
    mine = copy.deepcopy(model)
    replace(mine)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    given = random((2, 4, 8, 8)), torch.tensor([3, 7]), random((2, 5, 16))
    y, expected = compiled(*given).sample, model(*given).sample
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)
    y.square().mean().backward()
    assert all(one.grad is not None for one in mine.conv_norm_out.parameters())

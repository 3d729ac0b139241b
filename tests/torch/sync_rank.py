"""One rank of a test of SyncBatchNorm: ``python -m tests.torch.sync_rank gloo CASE``.

It compares with torch's BatchNorm of the whole batch in float64.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cunorm.torch import SyncBatchNorm
from tests.distributed.rank import joined

C = 7
SIZES = {2: [(3, 5), (4, 0), (0, 2), (1, 1), (0, 0)], 3: [(2, 0, 3), (0, 0, 0)]}
#: Tolerances, relative to the largest value.
NEAR = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2**-7}


@dataclass
class Case:
    """A comparison of a rank's part with the whole batch."""

    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    channels_last: bool = False
    options: Any = None
    steps: int = 1
    compiled: bool = False

    def check(self, rank: int) -> None:
        whole, mine = self.modules()
        call = torch.compile(mine, fullgraph=True, backend="aot_eager") if self.compiled else mine
        part = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        for step in range(self.steps):
            torch.manual_seed(step)
            x, dy = (torch.randn(sum(self.sizes), C, 3, 5).to(self.dtype) * 2 + 1 for _ in range(2))
            whole.zero_grad(), mine.zero_grad()
            self.compare(call, whole, mine, x, dy, part)

    def modules(self) -> tuple[nn.Module, nn.Module]:
        """BatchNorm of torch in float64, and ours, with the same parameters."""
        torch.manual_seed(0)
        whole = nn.BatchNorm2d(C, **(self.options or {})).to(self.parameter_dtype)
        for one in whole.parameters():
            nn.init.uniform_(one, 0.5, 2)
        mine = SyncBatchNorm.convert(copy.deepcopy(whole))
        assert list(mine.state_dict()) == list(whole.state_dict())
        return whole.double(), mine

    def compare(
        self, call: Callable[[Tensor], Tensor], whole: nn.Module, mine: nn.Module, x: Tensor, dy: Tensor, part: slice
    ) -> None:
        own = x[part].clone(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        own.requires_grad_()
        y = call(own)
        assert y.dtype == own.dtype and (y.stride() == own.stride() or not own.numel()), self
        y.backward(dy[part])
        found = {"y": y, "dx": own.grad, **dict(mine.named_buffers())}
        for name, one in mine.named_parameters():
            found[name] = one.grad.double()
            dist.all_reduce(found[name])
        if len(x):
            want_x = x.double().requires_grad_()
            want_y = whole(want_x)
            want_y.backward(dy.double())
            want = {"y": want_y[part], "dx": want_x.grad[part], **dict(whole.named_buffers())}
            want |= {name: one.grad for name, one in whole.named_parameters()}
        else:
            want = {name: torch.zeros_like(one) for name, one in found.items()}
            want |= dict(whole.named_buffers())
            if mine.track_running_stats:
                want["num_batches_tracked"] = torch.tensor(1)
        assert found.keys() == want.keys()
        for name, one in found.items():
            close = (
                max(NEAR[self.dtype], NEAR[self.parameter_dtype]) if name in ("y", "dx") else NEAR[self.parameter_dtype]
            )
            size = want[name].double().abs().max().item() if want[name].numel() else 0.0
            torch.testing.assert_close(
                one.double(),
                want[name].double(),
                rtol=0,
                atol=close * max(size, 1),
                msg=lambda text, name=name: f"{self}: {name}: {text}",
            )


def cases(world: int) -> Iterator[Case]:
    for channels_last in (False, True):
        for sizes in SIZES[world]:
            yield Case(sizes, torch.float64, torch.float64, channels_last)
            yield Case(sizes, torch.float32, torch.float32, channels_last)
            yield Case(sizes, torch.bfloat16, torch.float32, channels_last)
    first = SIZES[world][0]
    yield Case(first, torch.bfloat16, torch.bfloat16)
    yield Case(first, options={"affine": False})
    yield Case(first, options={"track_running_stats": False})
    yield Case(first, options={"momentum": None}, steps=3)
    yield Case(first, options={"momentum": 0.3, "eps": 0.1}, steps=2)


def equal(rank: int, world: int) -> None:
    count = 0
    for case in cases(world):
        case.check(rank)
        count += 1
    print(f"rank {rank} of {world}: {count} cases agree")


def compiled(rank: int, world: int) -> None:
    """With fullgraph, so that a graph break is an error."""
    first, second = SIZES[world][:2]
    _compiled(rank, Case(first, compiled=True), Case(second, torch.bfloat16, channels_last=True, compiled=True))
    print(f"rank {rank} of {world}: compiled cases agree")


def compiled_options(rank: int, world: int) -> None:
    """With fullgraph and the module's options."""
    first = SIZES[world][0]
    _compiled(
        rank,
        Case(first, compiled=True, options={"momentum": None}, steps=2),
        Case(first, compiled=True, options={"affine": False, "track_running_stats": False}),
    )
    print(f"rank {rank} of {world}: compiled options agree")


def _compiled(rank: int, *cases: Case) -> None:
    warnings.filterwarnings("ignore", r"<class 'torch\.autograd\.", DeprecationWarning)  # of torch 2.11's compiler
    for case in cases:
        torch._dynamo.reset()
        case.check(rank)


def parallel(rank: int, world: int, compile_it: bool = False) -> None:
    """`DistributedDataParallel` has the gradients and buffers of the whole batch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
    net = nn.Sequential(*layers).double()
    whole, x = copy.deepcopy(net), torch.randn(4 * world, 3, 8, 8).double()
    model: Any = DistributedDataParallel(SyncBatchNorm.convert(net))
    if compile_it:
        warnings.simplefilter("ignore")  # the compiler looks at attributes that warn
        model = torch.compile(model, backend="aot_eager")
    whole(x).square().mean().backward()
    model(x[rank * 4 : rank * 4 + 4]).square().mean().backward()
    for (name, want), one in zip(whole.named_parameters(), net.named_parameters(), strict=True):
        assert one[0] == name
        torch.testing.assert_close(one[1].grad, want.grad, rtol=1e-9, atol=1e-12)
    for want, one in zip(whole.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-9, atol=1e-12)
    print(f"rank {rank} of {world}: DDP agrees")


def parallel_compiled(rank: int, world: int) -> None:
    """The same, compiled."""
    parallel(rank, world, compile_it=True)


class Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def exchanges(rank: int, world: int) -> None:
    """One all-gather forward and one all-reduce backward; no copy of x or dy, and no number that is read."""
    module = SyncBatchNorm(C)
    for channels_last in (False, True):
        x = torch.randn(2, C, 3, 4).contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )
        with Seen() as forward:
            y = module(x.requires_grad_())
        with Seen() as backward:
            y.backward(x.detach())
        sent = [
            {name: count for name, count in seen.names.items() if re.search("all_(gather|reduce)", name)}
            for seen in (forward, backward)
        ]
        assert [list(one.values()) for one in sent] == [[1], [1]], sent
        assert "all_gather" in min(sent[0]) and "all_reduce" in min(sent[1]), sent
        for name in ("aten::_local_scalar_dense", "aten::clone", "aten::copy_", "aten::contiguous", "aten::_to_copy"):
            assert not forward.names[name], name
        assert not backward.names["aten::_local_scalar_dense"]
    x.grad = None
    y = module(x.detach())
    with Seen() as backward:
        y.sum().backward()
    assert not any("all_reduce" in name for name in backward.names), "no dx needs no exchange"
    with Seen() as evaluation:
        SyncBatchNorm(C, track_running_stats=False).eval()(x.detach())
    assert not any("all_gather" in name for name in evaluation.names), "evaluation is this process's"
    print(f"rank {rank} of {world}: one exchange each way")


def subgroup(rank: int, world: int) -> None:
    """The last rank is alone in its group: it has the statistics of its own samples."""
    groups = [dist.new_group(list(range(world - 1))), dist.new_group([world - 1])]
    x = torch.full((2, C, 3), float(rank))
    module = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(C)), groups[rank == world - 1])[0]
    module(x)
    want = 0.1 * (rank if rank == world - 1 else sum(range(world - 1)) / (world - 1))
    torch.testing.assert_close(module.running_mean, torch.full((C,), want))
    print(f"rank {rank} of {world}: groups are kept")


def dies(rank: int, world: int) -> None:
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failing(rank, torch.ones(2, C, 3))


def failing(rank: int, x: Tensor) -> None:
    """The step is an error, and changes no running statistics."""
    module = SyncBatchNorm(x.shape[1])
    try:
        module(x)
    except Exception as error:
        assert not module.running_mean.any()
        print(f"rank {rank} ends with {type(error).__name__}: {error}")
        raise
    raise AssertionError(f"rank {rank} has results")


def other_dtype(rank: int, world: int) -> None:
    """float16 and float32 have packets of the same size. The group stays usable."""
    with contextlib.suppress(ValueError):
        failing(rank, torch.ones(2, C, 3, dtype=torch.bfloat16 if rank else torch.float32))


def other_channels(rank: int, world: int) -> None:
    failing(rank, torch.ones(2, C + rank, 3))


CASES = {
    one.__name__: one
    for one in (
        *(equal, compiled, compiled_options, parallel, parallel_compiled, exchanges, subgroup),
        *(dies, other_dtype, other_channels),
    )
}


def main(library: str, *names: str) -> None:
    engine, rank = joined(library)
    for name in names:
        CASES[name](rank, engine.size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

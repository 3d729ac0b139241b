"""Measure the host time of GroupNorm through cunorm.torch, beside torch's own, on small CPU tensors.

Example: ``python benchmarks/host_overhead_torch.py --json benchmarks/results/host_overhead_torch.json``

Stubs replace the kernels, and the sizes of arrays that only the CPU executor needs. Torch allocates, and torch's own
function is computed, as it cannot be stubbed. On a GPU a launch also makes torch's stream CuPy's current one, which is
not in these numbers. The clocks are those of host_overhead.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from host_overhead import import_cupy, machine, quartiles

from cunorm.runtime.plans import Plan
from cunorm.torch import functional
from cunorm.torch.differentiation import _Forward
from cunorm.torch.norms import Options, call_of

SHAPE, GROUPS = (2, 32, 4, 4), 8
TARGET_US = 80.0
TARGET = "cunorm.torch, forward and backward"
OPTIONS = Options("group_norm", (GROUPS,), 1e-5)


class WithCtx(torch.autograd.Function):
    """A Function that does nothing, of the kind for plain eager."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy


class WithSetup(torch.autograd.Function):
    """A Function that does nothing, of the kind for transforms."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy


def no_sizes(*_: Any, **__: Any) -> list[int]:
    """Return what a plan on a GPU returns for the sizes of its arrays."""
    return []


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Replace the kernels, and the sizes with which the CPU executor checks bounds."""
    with (
        mock.patch.object(Plan, "run", no_sizes),
        mock.patch("cunorm.runtime.raw_call.RawCall.sizes", no_sizes),
    ):
        yield


@functools.cache  # torch keeps an operator of a library that is defined again, but not its implementation
def empty_operator() -> tuple[torch.library.Library, Callable[..., Any]]:
    """Return an operator that returns its argument's kind without computing; the library keeps it alive."""
    library = torch.library.Library("cunorm_benchmark", "DEF")
    library.define("empty(Tensor x) -> Tensor")
    result = torch.empty(1)
    library.impl("empty", lambda x: result.detach(), "CPU")
    return library, torch.ops.cunorm_benchmark.empty.default


def tasks() -> dict[str, Callable[[], Any]]:
    """Return the rows of the table: title -> function."""
    given = [one.requires_grad_() for one in (torch.randn(SHAPE), torch.ones(SHAPE[1]), torch.zeros(SHAPE[1]))]
    x, gamma, beta = given
    dy, plain = torch.randn(SHAPE), x.detach()
    call = call_of(OPTIONS, plain, gamma, beta)
    launch = call._forward.plan.launch
    addresses = [one.data_ptr() for one in (plain, gamma, beta, plain, plain, plain)]
    names = call._forward.plan.names
    assert names[:3] == ("x", "gamma", "beta") and names[-2:] == ("workspace", "eps")
    pointers = (*addresses, 0, 1e-5)
    library, operator = empty_operator()

    def no_grad() -> None:
        with torch.no_grad():
            functional.group_norm(x, GROUPS, gamma, beta)

    def backward(function: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            function().backward(dy)
            x.grad = gamma.grad = beta.grad = None

        return both

    mine: Callable[[], Any] = lambda: functional.group_norm(x, GROUPS, gamma, beta)  # noqa: E731
    watched: Callable[[], Any] = lambda: _Forward.apply(x, gamma, beta, OPTIONS)[0]  # noqa: E731
    torchs: Callable[[], Any] = lambda: torch.nn.functional.group_norm(x, GROUPS, gamma, beta)  # noqa: E731
    return {
        "empty operator (define and impl), no gradients": lambda: (library, operator(plain)),
        "empty Function with ctx, forward": lambda: WithCtx.apply(x),
        "empty Function with setup_context, forward": lambda: WithSetup.apply(x),
        "Plan.launch": lambda: launch(pointers),
        "three results of torch.empty and a launch": lambda: call.forward(plain, gamma, beta),
        "cunorm.torch, forward without gradients": no_grad,
        "cunorm.torch, forward": mine,
        TARGET: backward(mine),
        "cunorm.torch where something watches, forward": watched,
        "cunorm.torch where something watches, forward and backward": backward(watched),
        "torch, forward (computed)": torchs,
        "torch, forward and backward (computed)": backward(torchs),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101, help="batches of about 2 ms per clock (default 101)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = machine(import_cupy()) | {"torch": torch.__version__}
    print("\n".join(f"{name:8s} {value}" for name, value in facts.items()))
    print(f"call     float32 {SHAPE}, {GROUPS} groups, weight and bias; kernels replaced by stubs\n")
    print("| microseconds | CPU time, median (quartiles) | wall time, median |\n|---|---:|---:|")
    results = {}
    with stubbed():
        for title, task in tasks().items():
            task()
            results[title] = times = quartiles(task, {}, max(2, options.rounds))
            low, middle, high = (times[f"cpu_{part}_us"] for part in ("q25", "median", "q75"))
            print(f"| {title} | {middle:.1f} ({low:.1f} to {high:.1f}) | {times['wall_median_us']:.1f} |")
    came = results[TARGET]["cpu_median_us"]
    print(f"\n{TARGET}: {came:.1f} us (target: at most {TARGET_US:g} us on a quiet core)")
    if options.json is not None:
        call = {"shape": SHAPE, "dtype": "float32", "num_groups": GROUPS, "rounds": options.rounds}
        document = {"schema": "cunorm-host-overhead-torch/1", "machine": facts, "call": call, "results": results}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(came > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())

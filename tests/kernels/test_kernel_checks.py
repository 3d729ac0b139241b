"""Asynchronous copies, mbarriers, clusters, tickets and static shared memory: correct in every thread order.

Each breakage removes one operation that the kernel needs. The checked build or the kernel's check must report it.
"""

from __future__ import annotations

import re

import pytest

from cunorm.core.errors import KernelFault
from tests.kernels.kernel_checks import CHECKS, ORDERS
from tests.support.paths import KERNELS


def text_of(stem: str) -> str:
    return (KERNELS / f"{stem}.cu").read_text(encoding="utf-8")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("stem", CHECKS)
def test_right_in_every_order(stem: str, build: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", build)
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    CHECKS[stem](text_of(stem))


#: (kernel, replaced text, replacement, pattern of the expected fault or failed assertion)
BROKEN = [
    (
        "async_copy",
        "copy_async_wait<1>();",
        "copy_async_wait<2>();",
        r"ends while a copy of 16 bytes, issued at async_copy\.cu:\d+, is in flight: no thread waited",
    ),
    ("async_copy", "copy_async_wait<1>();\n        __syncthreads();", "copy_async_wait<1>();", "shared-memory race"),
    ("async_copy", "pack);\n        __syncthreads();", "pack);", "shared-memory race"),
    ("async_bulk", "mbarrier_wait(full + stage, parity);", "", "race|assert"),
    ("async_bulk", "mbarrier_wait(empty + stage, parity);", "", "race|assert|more arrivals"),
    ("async_bulk", "mbarrier_wait(worked + stage, parity);", "", "race|fence_async|assert"),
    ("async_bulk", "fence_async();", "", r"bulk store at async_bulk\.cu:\d+ reads byte \d+ .* without a fence_async"),
    (
        "async_bulk",
        "bulk_wait_read<0>();",
        "",
        r"ends while a copy of 1600 bytes, issued at async_bulk\.cu:\d+, is in flight: no thread waited",
    ),
    ("async_bulk", "mbarrier_arrive(empty + stage);", "", r"deadlock: thread \d+ .*an mbarrier \(async_bulk\.cu:\d+\)"),
    ("async_bulk", "mbarrier_arrive_expect(full + stage, bytes);", "", "deadlock"),
    ("async_bulk", "expect(full + stage, bytes)", "expect(full + stage, bytes + 16)", "deadlock"),
    ("async_bulk", "__syncthreads();", "", "race|before its initialisation"),
    ("async_bulk", "parity ^= stage == stages - 1;\n        }\n    }", "}\n    }", "deadlock|race|assert"),
    (
        "cluster_sum",
        "    cluster_arrive();\n    cluster_wait();\n    if (thread == 0) {",
        "    if (thread == 0) {",
        "before the cluster's first barrier",
    ),
    (
        "cluster_sum",
        "    cluster_arrive();\n    cluster_wait();  // no block ends",
        "    // no block ends",
        "race|has ended",
    ),
    ("cluster_sum", "    cluster_wait();\n    if", "    if", "arrives at the cluster's barrier twice"),
    (
        "ticket_wait",
        "store_release(flags + mine, 1u);",
        "atomicExch(flags + mine, 1u);",
        "assert",
    ),
    ("ticket_wait", "while (load_acquire(flags + (mine - 1)) == 0) {\n            }", "", "assert"),
    ("ticket_wait", "store_release(flags + mine, 1u);", "", r"deadlock: .* a polled word \(ticket_wait\.cu:\d+\)$"),
    ("last_block", "__threadfence();", "", "assert"),
    (
        "last_block",
        "    __syncthreads();\n    if (thread == 0) {\n        __threadfence();",
        "    if (thread == 0) {\n        __threadfence();",
        "assert",
    ),
    ("last_block", "    }\n    __syncthreads();\n    if (*drawn", "    }\n    if (*drawn", "race"),
    ("statics", "__syncthreads();", "", "race"),
]


@pytest.mark.parametrize(("stem", "old", "new", "said"), BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)])
def test_what_is_taken_away_is_missed(
    stem: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    text = text_of(stem)
    assert old in text
    words = []
    for order in ORDERS:
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        try:
            CHECKS[stem](text.replace(old, new, 1))
        except KernelFault as fault:
            words.append(str(fault))
        except AssertionError as error:
            words.append(f"assert: {error}")
    assert words, "no thread order reveals the breakage"
    assert any(re.search(said, word) for word in words), words

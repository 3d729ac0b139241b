"""The sections of docs/speed.md about host time, the cost model, and what keeps kernels from the copy's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: A prediction of the cost model agrees if it differs from the measured time by at most this share. A choice is near
#: the fastest of its problem if it takes at most this factor of its time.
AGREES, NEAR_BEST = 0.25, 1.1
#: Problems of each list at most: those that are furthest off.
MOST = 12


def _spread(values: Sequence[float]) -> str:
    """Median and range of sorted values."""
    return f"median {values[len(values) // 2]:.2f}, from {values[0]:.2f} to {values[-1]:.2f}" if values else "none"


def host_section(document: Mapping[str, Any]) -> list[str]:
    """The host's time of a call."""
    lines = [
        f"## Host time, {document['device']}, {document['date']}\n",
        "The time until a call returns, which does not wait for the GPU. `python benchmarks/host_overhead_gpu.py` "
        "measures it with all arrays passed by the caller. Medians in microseconds. The difference is the median "
        "within a round; the goal is 10.\n",
        "| op | bare launches | plan | public function | plan minus launches |",
        "|---|---:|---:|---:|---:|",
    ]
    for op, times in document["results"].items():
        medians = [times[name]["median_us"] for name in ("launches", "plan", "call", "plan - launches")]
        lines.append(f"| {op} | {' | '.join(f'{one:.1f}' for one in medians)} |")
    return [*lines, ""]


def model_section(checked: Mapping[str, Any]) -> list[str]:
    """The cost model's predictions beside measured times."""
    ratios = sorted(predicted / measured for predicted, measured in checked["chosen"].values())
    losses = sorted(chosen / fastest for chosen, fastest in checked["chosen_and_fastest"].values())
    agree = sum(abs(ratio - 1) <= AGREES for ratio in ratios)
    near = sum(loss <= NEAR_BEST for loss in losses)
    lines = [
        f"## The cost model, {checked['device']}\n",
        "The cost model chooses the tile of a problem that no table contains. `python benchmarks/measure_tiles.py` "
        f"measured several tiles of {len(ratios)} problems of the workloads, {checked['dtype']}. `python "
        "benchmarks/fit_costs.py` fits the model to these times, and compares the two. The choice is the tile that the "
        "model prefers among those that were measured.\n",
        f"- The predicted time of the choice differs from the measured one by at most {AGREES:.0%} for {agree} of "
        f"{len(ratios)} problems. Predicted over measured time: {_spread(ratios)}.",
        f"- The choice takes at most {NEAR_BEST - 1:.0%} more than the fastest measured tile for {near} of "
        f"{len(losses)} problems. Choice over fastest: {_spread(losses)}.",
        "\nPredicted over measured time of all tiles, by strategy:\n",
        "| strategy | tiles | lower quartile | median | upper quartile |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (count, low, middle, high) in checked["predicted_over_measured"].items():
        lines.append(f"| {name} | {count} | {low:.2f} | {middle:.2f} | {high:.2f} |")
    wrong = [(key, *times, abs(times[0] / times[1] - 1)) for key, times in checked["chosen"].items()]
    slow = [(key, *times, times[0] / times[1]) for key, times in checked["chosen_and_fastest"].items()]
    for title, names, rows, most in (
        ("Predictions that are furthest off", ("predicted us", "measured us"), wrong, AGREES),
        ("Choices that take longest beside the fastest", ("chosen us", "fastest us"), slow, NEAR_BEST),
    ):
        kept = sorted((row for row in rows if row[-1] > most), key=lambda row: -row[-1])
        if kept:
            lines += [f"\n{title} ({len(kept)} in all):\n", f"| problem | {' | '.join(names)} |", "|---|---:|---:|"]
            lines += [f"| {key} | {one:.1f} | {other:.1f} |" for key, one, other, _ in kept[:MOST]]
    return [*lines, ""]


def profile_section(document: Mapping[str, Any]) -> list[str]:
    """What Nsight Compute says of kernels that are far from the copy's bandwidth."""
    lines = [
        f"## What keeps kernels from the copy's bandwidth, {document['device']}, {document['date']}\n",
        "Nsight Compute, clocks not locked, caches flushed: `python benchmarks/profile_tiles.py`. *DRAM* is the "
        "bandwidth in GB/s, *issue* the share of the issue slots that are used, *warps* the share of the resident "
        "warps' limit. *Waits* are the cycles that a warp waits per instruction, the longest three: *long_scoreboard* "
        "for global memory, *short_scoreboard* for shared memory and shuffles, *barrier* for other warps, *wait* for "
        "the latency of its own instructions.\n",
        "| problem | kernel | us | DRAM | issue | warps | waits |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for one in document["kernels"]:
        waits = ", ".join(f"{name} {cycles:.1f}" for name, cycles in one["waits"].items())
        lines.append(
            f"| {one['problem']} | {one['kernel']} | {one['us']:.1f} | {one['gigabytes_per_s']:.0f} | "
            f"{one['issue']:.0%} | {one['warps']:.0%} | {waits} |"
        )
    return [*lines, ""]

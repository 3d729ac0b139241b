"""The section of docs/speed/measured.md about goals, and its pages about host time, the cost model and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cunorm.tuning.bench.result import geometric_mean, own_of

from benchmarks.speed_summary import ratios_of
from cunorm.ops.registry import OPS

#: A prediction of the cost model agrees if it differs from the measured time by at most this share. A choice is near
#: the fastest of its problem if it takes at most this factor of its time.
AGREES, NEAR_BEST = 0.25, 1.1
#: Problems of each list at most: those that are furthest off.
MOST = 12


def _spread(values: Sequence[float]) -> str:
    """Median and range of sorted values."""
    return f"median {values[len(values) // 2]:.2f}, from {values[0]:.2f} to {values[-1]:.2f}" if values else "none"


#: The goals: share of the copy's bandwidth of backwards above so many bytes, and of single problems; factor over torch
#: in the geometric mean and at least; largest multiple of the floor; microseconds of a plan above the bare launches.
LARGE, LARGE_SHARE = 50e6, 0.9
SUITE_MEAN, SUITE_LEAST = 2.5, 1.1
LONG_ROWS, LONG_ROWS_SHARE = "layer_norm_backward bfloat16 rows=16384 length=4096", 0.92
FEW_ROWS, FEW_ROWS_FLOORS = "layer_norm_backward bfloat16 rows=1024 length=12288", 1.4
REDUCE, REDUCE_SHARE = "batch_norm_backward_reduce", 0.92
PLAN_US = 10.0
#: What keeps the time of a large backward up, by op, layout and strategy of its tile. A reason that neither a profile
#: nor the stage times of that kernel show is marked as assumed.
TWICE = "no cluster holds a group, so dy and x are read twice: 5/3 of the floor"
IN_TURN = "copies, sums and dx take their times one after another (stage times)"
AS_LAYER = "assumed: latency of the loads, as in layer_norm_backward"
FOLDED = "a second launch folds the parts; the first one alone is nearer to the copy"
REASONS = {
    ("group_norm_backward", "NCHW", "split"): TWICE,
    ("group_norm_backward", "NHWC", "split"): TWICE,
    ("group_norm_backward", "NCHW", "grid"): "assumed: blocks wait for the sums of the others",
    ("group_norm_backward", "NHWC", "grid"): "assumed: blocks wait for the sums of the others",
    ("group_norm_backward", "NCHW", "cluster"): IN_TURN,
    ("group_norm_backward", "NHWC", "cluster"): f"{IN_TURN}, with an eighth of the warps resident",
    ("group_norm_backward", "NCHW", "block"): IN_TURN,
    ("group_norm_backward", "NHWC", "block"): f"assumed: {IN_TURN}",
    ("layer_norm_backward", "NCHW", "block"): "latency of the loads, with a quarter of the warps resident",
    ("layer_norm_backward", "NCHW", "warp"): "latency of the loads, with a fifth of the warps resident",
    ("layer_norm_backward", "NCHW", "cluster"): "a barrier of the cluster for every row",
    ("rms_norm_backward", "NCHW", "block"): AS_LAYER,
    ("rms_norm_backward", "NCHW", "warp"): AS_LAYER,
    ("batch_norm_backward_reduce", "NCHW", "block"): FOLDED,
    ("batch_norm_backward_reduce", "NCHW", "split"): FOLDED,
    ("batch_norm_backward_reduce", "NHWC", "column"): FOLDED,
    ("batch_norm_backward_elemt", "NCHW", "block"): "latency of the loads, with a quarter of the warps resident",
    ("batch_norm_backward_elemt", "NHWC", "column"): "latency of the loads, with a third of the warps resident",
}


#: Name, op, layout, floor's bytes, share of the copy and strategy of a problem.
Row = tuple[str, str, str, float, float, str]


def _rows(documents: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield each problem with a time, once."""
    seen = set()
    for document in documents:
        for result in document["results"]:
            one = own_of(result)
            name = result["name"].partition(" (")[0]
            if one is None or name in seen:
                continue
            seen.add(name)
            share = result["floor_bytes"] / one["kernels"]["seconds"] / document["copy_bandwidth"]
            strategy = one["sentence"].partition(" ")[0]
            problem = result["problem"]
            yield name, problem["op"], problem["layout"], result["floor_bytes"], share, strategy


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def goals_section(device: str, documents: Sequence[Mapping[str, Any]], host: Mapping[str, Any] | None) -> list[str]:
    """The goals beside what was measured on one device, and why the large backwards that miss theirs do."""
    rows = [*_rows(documents)]
    shares = {name: share for name, _, _, _, share, _ in rows}
    large = sorted(
        (row for row in rows if OPS[row[1].partition(" ")[0]].is_backward and row[3] > LARGE), key=lambda row: row[4]
    )
    good = sum(row[4] >= LARGE_SHARE for row in large)
    lines = [f"## Goals, {device}\n", "| goal | measured | |", "|---|---|---|"]

    def line(goal: str, found: str, met: bool) -> None:
        lines.append(f"| {goal} | {found} | {_met(met)} |")

    line(
        f"backward above {LARGE / 1e6:.0f} MB: {LARGE_SHARE:.0%} of the copy's bandwidth",
        f"{good} of {len(large)} problems; the others are below",
        good == len(large),
    )
    ratios = ratios_of(documents).get("torch", {}).get("group_norm_backward")
    if ratios:
        mean, least = geometric_mean(ratios), min(ratios)
        met = mean >= SUITE_MEAN and least >= SUITE_LEAST
        goal = f"GroupNorm backward: {SUITE_MEAN} times torch in the geometric mean, {SUITE_LEAST} times at least"
        line(goal, f"{mean:.2f} and {least:.2f} over {len(ratios)} problems", met)
    if LONG_ROWS in shares:
        goal = f"{LONG_ROWS}: {LONG_ROWS_SHARE:.0%} of the copy"
        line(goal, f"{shares[LONG_ROWS]:.0%}", shares[LONG_ROWS] >= LONG_ROWS_SHARE)
    if FEW_ROWS in shares:
        floors = 1 / shares[FEW_ROWS]
        line(f"{FEW_ROWS}: {FEW_ROWS_FLOORS} floors at most", f"{floors:.2f}", floors <= FEW_ROWS_FLOORS)
    reduce = [row for row in large if row[1] == REDUCE]
    if reduce:
        enough = sum(row[4] >= REDUCE_SHARE for row in reduce)
        best = max(row[4] for row in reduce)
        found = f"{enough} of {len(reduce)} problems above {LARGE / 1e6:.0f} MB, {best:.0%} at best"
        line(f"{REDUCE}: {REDUCE_SHARE:.0%} of the copy", found, enough == len(reduce))
    if host is not None:
        most = max(times["plan - launches"]["median_us"] for times in host["results"].values())
        line(f"a plan's call: {PLAN_US:.0f} us above the bare launches at most", f"{most:.1f} us", most <= PLAN_US)
    return [*lines, "", *_far_off(large)]


def _assumed(reason: str) -> bool:
    return reason.startswith("assumed")


def _far_off(large: Sequence[Row]) -> list[str]:
    """The large backwards that are far from the copy's bandwidth, by what keeps their time up."""
    by_reason: dict[str, list[str]] = {}
    for name, op, layout, nbytes, share, strategy in large:
        if share < LARGE_SHARE:
            line = f"| {name} | {nbytes / 1e6:.0f} | {share:.0%} | {strategy} |"
            by_reason.setdefault(REASONS.get((op, layout, strategy), "not known"), []).append(line)
    unless = ", apart from those that begin with *Assumed*" if any(map(_assumed, by_reason)) else ""
    lines = [
        f"### Large backwards below {LARGE_SHARE:.0%}, and what keeps their time up\n",
        f"The reasons are from the [profiles and stage times](measured-kernels.md) of such kernels{unless}.\n",
    ]
    for reason, rows in by_reason.items():
        lines += [f"**{reason[0].upper()}{reason[1:]}**\n", "| problem | MB | share of the copy | strategy |"]
        lines += ["|---|---:|---:|---|", *rows, ""]
    return lines if by_reason else []


def host_page(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """The host's time of a call, on each device."""
    lines = [
        "# Host time\n",
        "The time until a call returns, which does not wait for the GPU. `python benchmarks/host_overhead_gpu.py` "
        "measures it with all arrays passed by the caller. Medians in microseconds. The difference is the median "
        "within a round; the goal is 10.\n",
    ]
    return lines + [line for document in documents for line in _host(document)]


def _host(document: Mapping[str, Any]) -> list[str]:
    """The host's time of a call, on one device."""
    lines = [
        f"## {document['device']}\n",
        f"Measured on {document['date']}.\n",
        "| op | bare launches | plan | public function | plan minus launches |",
        "|---|---:|---:|---:|---:|",
    ]
    for op, times in document["results"].items():
        medians = [times[name]["median_us"] for name in ("launches", "plan", "call", "plan - launches")]
        lines.append(f"| {op} | {' | '.join(f'{one:.1f}' for one in medians)} |")
    return [*lines, ""]


def model_page(checked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The cost model's predictions beside the times measured on each device."""
    lines = [
        "# The cost model\n",
        "The cost model chooses the tile of a problem that no table contains. `python benchmarks/measure_tiles.py` "
        "measured several tiles of each problem of the workloads. `python benchmarks/fit_costs.py` compares the model "
        "with these times; it was fitted to the same times. The choice is the tile that the model prefers among those "
        "that were measured.\n",
    ]
    return lines + [line for device, found in checked.items() for line in _model(device, found)]


def _model(device: str, checked: Mapping[str, Any]) -> list[str]:
    """The cost model's predictions beside the times measured on one device."""
    ratios = sorted(predicted / measured for predicted, measured in checked["chosen"].values())
    losses = sorted(chosen / fastest for chosen, fastest in checked["chosen_and_fastest"].values())
    agree = sum(abs(ratio - 1) <= AGREES for ratio in ratios)
    near = sum(loss <= NEAR_BEST for loss in losses)
    lines = [
        f"## {device}\n",
        f"{len(ratios)} problems, {', '.join(checked['dtypes'])}.\n",
        f"- The predicted time of the choice differs from the measured one by at most {AGREES:.0%} for {agree} of "
        f"{len(ratios)} problems. Predicted over measured time: {_spread(ratios)}.",
        f"- The choice takes at most {NEAR_BEST - 1:.0%} more than the fastest measured tile for {near} of "
        f"{len(losses)} problems. Choice over fastest: {_spread(losses)}.",
        "\n### Predicted over measured time of all tiles, by strategy\n",
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
            lines += [f"\n### {title} ({len(kept)} in all)\n", f"| problem | {' | '.join(names)} |", "|---|---:|---:|"]
            lines += [f"| {key} | {one:.1f} | {other:.1f} |" for key, one, other, _ in kept[:MOST]]
    return [*lines, ""]


#: The headings of `_stages`. A stage adds the difference between the whole kernel and the kernel without it.
STAGES = ("whole", "added by the sums", "added by dx", "without both")


def kernels_page(profiles: Iterable[Mapping[str, Any]], stages: Iterable[Mapping[str, Any]]) -> list[str]:
    """What keeps kernels from the copy's bandwidth, on each device."""
    lines = ["# What keeps kernels from the copy's bandwidth\n"]
    for document in stages:
        lines += _stages(document)
    for document in profiles:
        lines += _profile(document)
    return lines


def _stages(document: Mapping[str, Any]) -> list[str]:
    """What each stage of GroupNorm's backward slabs adds to its time."""
    lines = [
        f"## Stages of GroupNorm backward in slabs, {document['device']}\n",
        f"Measured on {document['date']}. "
        "`python benchmarks/stage_times.py` times the kernel whole and with stages left out. Microseconds, with the "
        "kernel that adds up the parameter gradients. What is left without sums and dx are the copies to shared memory "
        "and the launches. Stages that overlap add up to less than the whole.\n",
        f"| problem | strategy | {' | '.join(STAGES)} | sum of the parts |",
        f"|---|---|{'---:|' * (len(STAGES) + 1)}",
    ]
    for one in document["kernels"]:
        us = one["us"]
        parts = (us[""] - us["sums"], us[""] - us["dx"], us["sums+dx"])
        numbers = " | ".join(f"{value:.1f}" for value in (us[""], *parts, sum(parts)))
        lines.append(f"| {one['problem']} | {one['tile']['strategy']} | {numbers} |")
    return [*lines, ""]


def _profile(document: Mapping[str, Any]) -> list[str]:
    """What Nsight Compute says of kernels that are far from the copy's bandwidth."""
    lines = [
        f"## Profiles, {document['device']}\n",
        f"Measured on {document['date']}. "
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

"""The results of a bench, as a JSON document and as text: times, and the reasons why contenders have no time.

Only times that come from a GPU are printed.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from cunorm.core.problem import Problem
from cunorm.traffic.sampling import floor_bytes

from ..measure.clock import L2_TIMES

DEFAULT, TABLE = "cunorm, default tile", "cunorm, table tile"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples, in seconds."""

    seconds: float
    q25: float
    q75: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Median and quartiles of at least one sample."""
        q25, _, q75 = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median(samples), q25, q75, len(samples))


@dataclass
class Contender:
    """The outcome of one implementation on a problem.

    Attributes
    ----------
    name : str
    state : {"timed", "rehearsed", "missing", "not offered", "failed", "wrong"}
    sentence : str
        Why the contender was not timed. If it was timed: the tile or the version of the library, and the method.
    error : float or None
        The largest error of a result, divided by the result's largest value; None if it is not finite or not known.
    kernels, wall : Spread or None
        Times of the contender's kernels on the GPU, and of a call.
    """

    name: str
    state: str = "failed"
    sentence: str = ""
    error: float | None = None
    kernels: Spread | None = None
    wall: Spread | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of all contenders on a problem.

    Attributes
    ----------
    problem : Problem
    contenders : sequence of Contender
        cunorm's contenders first, then the peers in the order of ``--peers``, including those that did not run.
    walked : int
        Bytes of the inputs of all sets of arrays. The kernels walk through the sets in turn.
    """

    problem: Problem
    contenders: Sequence[Contender]
    walked: int

    @classmethod
    def failed(cls, problem: Problem, peers: Sequence[str], sentence: str) -> Outcome:
        """The outcome of a problem that no contender could run."""
        return cls(problem, [Contender(name, "failed", sentence) for name in (DEFAULT, TABLE, *peers)], 0)


class DeviceLostError(Exception):
    """The device is unusable. The sentence names the error, and the contender that caused it if it is known.

    Attributes
    ----------
    outcome : Outcome or None
        The outcome of the problem so far.
    """

    outcome: Outcome | None = None


SCHEMA = "cunorm-bench/1"
MEASURED, REHEARSED = "measured", "rehearsed"
Document = Mapping[str, Any]


def document(
    results: Sequence[Outcome],
    *,
    source: str,
    device: Mapping[str, Any],
    software: Mapping[str, Any],
    copies: Mapping[str, Mapping[str, float]],
    rounds: int,
    workload: str | None,
    problems: int,
) -> dict[str, Any]:
    """The JSON document of a bench.

    Parameters
    ----------
    results : sequence of Outcome
    source : {"measured", "rehearsed"}
    device, software : mapping
        The fields of the device, and the versions of the software.
    copies : mapping of mapping of float
        Bytes per second of each copy before and after the run; empty in a rehearsal.
    rounds : int
    workload : str or None
    problems : int
        Number of problems that the run was started for.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": source,
        "device": dict(device),
        "software": dict(software),
        "copy_bandwidth": max((value for at in copies.values() for value in at.values()), default=0.0),
        "copies": {name: dict(at) for name, at in copies.items()},
        "rounds": rounds,
        "workload": workload,
        "problems": problems,
        "results": [
            {
                "problem": asdict(result.problem),
                "name": result.problem.describe(),
                "floor_bytes": floor_bytes(result.problem),
                "walked_bytes": result.walked,
                "contenders": [asdict(one) for one in result.contenders],
            }
            for result in results
        ],
    }


def is_document(text: str) -> bool:
    """Whether a text is a document of this or of another version."""
    try:
        found = json.loads(text)
    except (RecursionError, ValueError):
        return False
    return isinstance(found, dict) and str(found.get("schema")).startswith(SCHEMA.partition("/")[0] + "/")


def refusal(found: Document) -> str | None:
    """A sentence that says why a document is no evidence of speed, or None."""
    if found.get("schema") != SCHEMA:
        return f"schema {found.get('schema')!r}, expected {SCHEMA!r}"
    if found.get("source") != MEASURED:
        return f"it was {found.get('source')}, not measured on a GPU: it contains no kernel times"
    return None


def complete(found: Document) -> bool:
    """Whether the document contains all problems of its run. The file of a killed run contains only the first ones."""
    return not found["interrupted"] and found["lost"] is None and len(found["results"]) == found["problems"]


def cold(found: Document, result: Mapping[str, Any]) -> bool:
    """Whether no kernel of a result can have found its arrays in the L2. For tiny shapes there are too few sets."""
    return bool(result["walked_bytes"] >= L2_TIMES * found["device"]["l2_bytes"])


def fraction(found: Document, result: Mapping[str, Any], contender: Mapping[str, Any]) -> float | None:
    """The byte floor over the time of a contender, as a share of the copy's bandwidth; None without a time."""
    kernels = contender["kernels"]
    if kernels is None or not found["copy_bandwidth"]:
        return None
    return float(result["floor_bytes"]) / float(kernels["seconds"]) / float(found["copy_bandwidth"])


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of at least one value."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def timed(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The contenders of a result that have a time, by name."""
    return {one["name"]: one for one in result["contenders"] if one["kernels"] is not None}


def own_of(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """cunorm's contender: with the table's tile if there is one, else with the default; None if neither has a time."""
    found = timed(result)
    return found.get(TABLE, found.get(DEFAULT))


def compared(found: Document, over: str) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each result with a time of cunorm (`own_of`) and of a peer, and how many times faster cunorm is."""
    for result in found["results"]:
        own, peer = own_of(result), timed(result).get(over)
        if own is not None and peer is not None:
            yield result, peer["kernels"]["seconds"] / own["kernels"]["seconds"]


def speedups(found: Document, over: str) -> dict[str, list[float]]:
    """The speed-ups of cunorm over a peer, by op, for all shapes with a time of both, as `compared` gives them."""
    by_op: dict[str, list[float]] = {}
    for result, ratio in compared(found, over):
        by_op.setdefault(result["problem"]["op"], []).append(ratio)
    return by_op


def _microseconds(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return ""
    return f"{spread['seconds'] * 1e6:9.1f} ({spread['q25'] * 1e6:.1f} to {spread['q75'] * 1e6:.1f})"


def text(found: Document) -> Iterator[str]:
    """Yield the lines of the text report."""
    device, measured = found["device"], found["source"] == MEASURED
    facts = ", ".join(f"{name} {value}" for name, value in found["software"].items())
    yield f"device    {device['name']}; {facts}"
    if measured:
        yield f"copy      {found['copy_bandwidth'] / 1e9:.0f} GB/s in this run; L2 cold; {found['rounds']} rounds"
    else:
        yield "rehearsed on the CPU executor: shows which contenders run and are right, no times; see `cunorm doctor`"
    for result in found["results"]:
        warm = f"; L2 not cold: {result['walked_bytes'] / 1e6:.3g} MB" if measured and not cold(found, result) else ""
        yield f"\n{result['name']}{warm}"
        for one in result["contenders"]:
            if one["state"] not in ("timed", "rehearsed"):
                yield f"  {one['name']:22s} {one['state']}: {one['sentence']}"
                continue
            share = fraction(found, result, one)
            columns = [f"  {one['name']:22s}"]
            if share is not None:
                columns.append(f"{share:6.1%} of copy")
                columns.append(f"kernels {_microseconds(one['kernels'])} us, call {_microseconds(one['wall'])} us")
            columns.append(f"off by {one['error']:.1e}; {one['sentence']}")
            yield "  ".join(columns)
    if measured:
        yield from _means(found)


def _means(found: Document) -> Iterator[str]:
    names = dict.fromkeys(one["name"] for result in found["results"] for one in result["contenders"])
    for peer in (name for name in names if not name.startswith("cunorm")):
        for op, ratios in speedups(found, peer).items():
            mean, slowest = geometric_mean(ratios), min(ratios)
            yield f"\n{op}: {mean:.2f}x {peer} in the geometric mean of {len(ratios)} shapes, {slowest:.2f}x at least"

"""The published times beside the simulated ones: the result file, the fit, and the kernels whose time is known."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks.simulator import clock, probes
from benchmarks.simulator.peers import calibration
from benchmarks.simulator.peers.published import BANDWIDTHS, PROTOCOLS, ROWS
from tests.support.covering import every


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(calibration.RESULT.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("name", "nbytes"), every(3, [("H100", 16 << 20), ("H100", 24 << 20), ("H200", 64 << 20)]))
def test_a_copy_reaches_the_bandwidth_of_a_copy(tools: None, name: str, nbytes: int) -> None:
    gpu = clock.GPUS[name]
    launch, x, y = probes.copy(nbytes)
    timing = clock.timed(launch, gpu, clock.flushed(gpu))
    assert (x == y).all()
    share = (x.nbytes + y.nbytes) / timing.seconds / gpu.copy
    # The last bytes may still be on their way to the DRAM when the last block ends.
    assert 0.95 <= share <= 1.02


def test_a_sum_reaches_the_bandwidth_and_is_right(tools: None) -> None:
    gpu = clock.GPUS["H100"]
    launch, x, sums = probes.total(64 << 20, 8 * gpu.device.multiprocessors)
    timing = clock.timed(launch, gpu, clock.flushed(gpu))
    assert sums.sum(dtype=float) == pytest.approx(x.sum(dtype=float), rel=1e-5)
    assert x.nbytes / timing.seconds >= 0.9 * gpu.copy


def test_a_probe_in_the_result_file_is_what_the_simulator_says_now(tools: None, result: dict[str, Any]) -> None:
    known = next(one for one in result["probes"] if one["nbytes"] == min(calibration.PROBES))
    found = calibration.probe(known["gpu"], known["kernel"], known["nbytes"])
    assert found["simulated_gb_per_s"] == pytest.approx(known["simulated_gb_per_s"], rel=1e-3)


def test_the_result_file_has_every_published_row(result: dict[str, Any]) -> None:
    rows = [row for row in ROWS if not result["left_out"] or calibration.cost(row) <= calibration.LARGE]
    assert len(result["rows"]) + result["left_out"] == len(ROWS)
    for found, row in zip(result["rows"], rows, strict=True):
        call = row.call
        assert (found["gpu"], found["library"], found["op"], found["shape"], found["dtype"]) == (
            row.gpu, call.library, call.op, list(call.shape), call.dtype,
        )  # fmt: skip
        assert found["published_us"] == pytest.approx(row.seconds * 1e6, abs=0.01)
        assert found["calibration"] == ("out" if row.held_out else "in")
        assert found["source"] == row.source and found["source"].startswith("https://")
        assert found["protocol"] in PROTOCOLS
        assert found["simulated_us"] > 0
        assert found["ratio"] == pytest.approx(found["simulated_us"] / found["published_us"], abs=0.002)


def test_some_rows_are_out_of_the_calibration(result: dict[str, Any]) -> None:
    assert result["summary"]["out"]["rows"] >= 2 and result["summary"]["in"]["rows"] >= 5
    assert result["summary"] == calibration.summary(result["rows"])


def test_the_result_file_is_of_the_clock_as_it_is(result: dict[str, Any]) -> None:
    assert result["constants"] == calibration.constants(), (
        "the clock's constants have changed; run python -m benchmarks.simulator.peers.calibration report"
    )


def test_the_constants_are_plausible() -> None:
    for name, value in calibration.constants().items():
        low, high = calibration.LIMITS[name]
        assert low <= value <= high, name
    for name in ("H100", "H200"):
        assert clock.GPUS[name].copy <= 0.95 * clock.GPUS[name].device.bandwidth


def test_a_row_names_each_large_error(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert max(row["ratio"], 1 / row["ratio"]) <= 1.5 or row["remark"], row


def test_the_fit_finds_constants_that_explain_the_times() -> None:
    start = calibration.constants()
    true = start | {"block_latency": start["block_latency"] * 0.7, "dram_latency": start["dram_latency"] * 1.2}

    def time(size: Any, row: Any, given: Any) -> float:
        return float(size * 1e-9 + given["dram_latency"] * 1e-8 + given["block_latency"] * size * 1e-11)

    rows = []
    for k, row in enumerate(ROWS[:8]):
        size = 1e2 * 4**k
        rows.append((dataclasses.replace(row, seconds=time(size, row, true), protocol="profiler"), size))
    found = calibration.fitted(rows, start, time, rounds=4)
    for name in ("block_latency", "dram_latency"):
        before, after = abs(start[name] / true[name] - 1), abs(found[name] / true[name] - 1)
        assert after < 0.5 * before, (name, found[name], true[name])


def test_the_bandwidths_are_published_ones() -> None:
    for name, bandwidth in BANDWIDTHS.items():
        assert clock.GPUS[name].copy == pytest.approx(bandwidth, rel=0.001)

"""The GPU clock on a fake CuPy: captured launches, their number and sets of arrays, and the value of a sample."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from cunorm.tuning.measure.clock import FEWEST, MOST, SAMPLE_SECONDS, WARM_SECONDS, GraphClock

from cunorm import Tile
from cunorm.core.devices import KNOWN
from tests.conftest import gpu_missing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
TILE = Tile("split", threads=128, chunk=64)


class Timeline:
    """A simulated GPU time. Launches, replays and copies advance it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launch_seconds: float) -> None:  # noqa: C901  # contains all of CuPy's classes
        import cupy

        self.now, self.launch_seconds = 0.0, launch_seconds
        self.captured: list[list[int]] = []
        self.capturing: list[int] | None = None
        self.eager: list[int] = []
        self.current: Any = None
        self.freed = self.copied = 0
        self.synchronized, self.bandwidths = True, {"driver": 3.5e12, "kernel": 4e12}
        timeline = self

        class Stream:
            ptr = 7

            def __init__(self, non_blocking: bool = False) -> None:
                assert non_blocking

            def __enter__(self) -> Any:
                timeline.current = self
                return self

            def __exit__(self, *_: object) -> None:
                timeline.current = None

            def begin_capture(self) -> None:
                assert timeline.capturing is None
                timeline.capturing = []

            def end_capture(self) -> Any:
                graph = Graph(timeline.capturing or [])
                timeline.captured.append(graph.launches)
                timeline.capturing = None
                return graph

            def synchronize(self) -> None:
                assert timeline.capturing is None

        class Graph:
            def __init__(self, launches: list[int]) -> None:
                self.launches = launches

            def launch(self, stream: Any) -> None:
                assert isinstance(stream, Stream)
                timeline.now += timeline.launch_seconds * len(self.launches)

        class Event:
            def record(self, stream: Any) -> None:
                assert isinstance(stream, Stream)
                self.at = timeline.now

            def synchronize(self) -> None:
                assert timeline.capturing is None

        def elapsed(begin: Any, end: Any) -> float:
            return 1e3 * (end.at - begin.at)

        def moved(nbytes: int, bandwidth: float) -> None:
            assert timeline.synchronized  # the zeros are written on another stream, so the clock must synchronise
            timeline.copied += 1
            timeline.now += (
                2 * nbytes / bandwidth * (3 if timeline.now < WARM_SECONDS else 1)
            )  # copies are slower until the GPU's clock rates have risen

        def copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            assert (target, source, stream) == (1000, 1000, 7)
            moved(nbytes, timeline.bandwidths["driver"])

        class Zeros:
            def __init__(self, count: int, dtype: Any) -> None:
                self.nbytes = count * 16
                self.data = type("data", (), {"ptr": 1000})
                timeline.synchronized = False

        class Kernel:
            def __init__(self, *_: str) -> None:
                pass

            def __call__(self, source: Zeros, target: Zeros) -> None:
                assert isinstance(timeline.current, Stream)
                moved(source.nbytes, timeline.bandwidths["kernel"])

        class Device:
            def synchronize(self) -> None:
                timeline.synchronized = True

        class Pool:
            def free_all_blocks(self) -> None:
                timeline.freed += 1

        monkeypatch.setattr(cupy.cuda, "Stream", Stream)
        monkeypatch.setattr(cupy.cuda, "Event", Event)
        monkeypatch.setattr(cupy.cuda, "get_elapsed_time", elapsed)
        monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (2**36, 2**37))
        monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", copy)
        monkeypatch.setattr(cupy.cuda, "Device", Device)
        monkeypatch.setattr(cupy, "zeros", Zeros)
        monkeypatch.setattr(cupy, "ElementwiseKernel", Kernel)
        monkeypatch.setattr(cupy, "get_default_memory_pool", Pool)

    def run(self, index: int) -> None:
        """Launch a plan on one set of arrays."""
        assert self.current is not None
        if self.capturing is None:
            self.eager.append(index)
            self.now += self.launch_seconds
        else:
            self.capturing.append(index)


@pytest.mark.parametrize("microseconds", [0.5, 3.0, 20.0, 49.0, 2000.0])
def test_a_sample_is_a_replay_of_many_launches(microseconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph launches on each set in turn and lasts long enough.

    One launch precedes the capture: it compiles the kernel and raises the limit of its shared memory.
    """
    timeline = Timeline(monkeypatch, microseconds * 1e-6)
    clock = GraphClock()
    sample = clock.sampler(TILE, timeline.run, 3)
    assert timeline.eager == [0]
    launches = timeline.captured[-1]
    assert launches == [index % 3 for index in range(len(launches))]
    assert FEWEST <= len(launches) < MOST + 3
    assert len(launches) % 3 == 0
    before = timeline.now
    assert sample() == pytest.approx(microseconds * 1e-6)
    lasted = (timeline.now - before) / 2  # an untimed replay precedes the timed one
    assert lasted >= 0.99 * SAMPLE_SECONDS or len(launches) >= MOST
    assert lasted <= max(1.5 * SAMPLE_SECONDS, 2 * 3 * microseconds * 1.01e-6)


def test_a_failed_capture_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, 1e-6)
    clock = GraphClock()
    calls = iter([None])

    def run(index: int) -> None:
        next(calls)  # the first launch, before the capture, succeeds

    with pytest.raises(StopIteration):
        clock.sampler(TILE, run, 1)
    assert timeline.capturing is None
    assert clock.sampler(TILE, timeline.run, 1)() > 0


def test_cached_memory_is_freed_before_the_number_of_sets_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, 1e-6)
    device = KNOWN["H200"]
    assert GraphClock().sets(10 * 2**20, device) == 18
    assert timeline.freed == 1


def test_the_bandwidth_of_a_copy_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth is that of the faster copy, after the GPU's clock rates have risen.

    `bandwidth` measures once, `copies` measures in each call.
    """
    timeline, clock = Timeline(monkeypatch, 1e-6), GraphClock()
    assert clock.bandwidth() == pytest.approx(4e12)
    before = timeline.copied
    assert clock.bandwidth() == pytest.approx(4e12) and timeline.copied == before
    timeline.bandwidths = {"driver": 3e12, "kernel": 2e12}
    assert clock.copies() == pytest.approx({"driver": 3e12, "kernel": 2e12})


def test_the_gpu_clock_measures_and_the_planted_clock_does_not() -> None:
    from tests.tuning import planted_device

    assert GraphClock.measures
    assert not planted_device.PlantedClock.measures


@pytest.mark.gpu
def test_tune_on_a_gpu(tmp_path: Any) -> None:
    """The parent creates no CUDA context, the table gets a measured entry, and the next plan uses it."""
    import json
    import subprocess
    import sys

    assert gpu_missing() is None
    path = tmp_path / "t.json"
    script = (
        "import sys, cunorm, cupy\n"
        "from cunorm.cli.main import main\n"
        "code = main(['tune', 'group_norm_backward', '--shape', '2,320,4096,32', '--dtype', 'bfloat16',"
        f" '--trials', '12', '--table', {str(path)!r}])\n"
        "context = cupy.cuda.driver.ctxGetCurrent()\n"
        "print('context', context); sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "context 0" in done.stdout
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["source"] == "measured"
    assert 0 < entry["q25_us"] <= entry["time_us"] <= entry["q75_us"]
    assert 0.01 < entry["roofline"] < 1.5
    check = (
        "import os; os.environ['CUNORM_TILING_TABLE'] = " + repr(str(path)) + "\n"
        "import cunorm\n"
        "print(cunorm.plan('group_norm_backward', shape=(2, 320, 64, 64), dtype='bfloat16', num_groups=32).explain())"
    )
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert f"the problem's entry in {path}: measured" in said

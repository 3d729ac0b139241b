"""Tuning by the simulator: planted times, processes that die, missing tools, and one run of the real simulator."""

from __future__ import annotations

import importlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cunorm.tuning import command, tuner
from cunorm.tuning.measure import precompile, simulate, worker
from cunorm.tuning.measure.errors import CandidateError, Failed, Lost, Stopped
from cunorm.tuning.measure.race import GAIN
from cunorm.tuning.measure.result import MORE, SIMULATED_TRIALS, Budget, TuningResult
from cunorm.tuning.measure.session import Session, Spec
from cunorm.tuning.measure.simulate import Simulators
from cunorm.tuning.problem_tuner import Simulating
from cunorm.tuning.search.space import UNLIKELY
from cunorm.tuning.search.study import ProblemStudy
from cunorm.tuning.tuner import Options

pytest.importorskip("elftools", reason="the simulator needs pyelftools, which is not installed")

import cunorm
from benchmarks.simulator import cubin
from cunorm import Tile
from cunorm.cli.main import main
from cunorm.core.devices import KNOWN
from cunorm.core.errors import CompileError
from cunorm.core.problem import Problem
from cunorm.jit import nvrtc, sources
from cunorm.runtime import plans, specialised
from cunorm.tiling import table
from cunorm.tiling.table import MEASURED, SIMULATED, Entry, entry_of, raw_of
from tests.tuning.test_tuning_measuring import DEVICE, SMALL, FakeWorker, space_of, times_of

TUNE = ("tune", "layer_norm", "--shape", "16,64", "--dtype", "bfloat16", "--evaluator", "simulate")


class Planted:
    """Simulators with planted times, in microseconds. At most `processes` candidates run at once."""

    def __init__(self, times: Callable[[Tile], float], processes: int = 2) -> None:
        self.times, self.processes = times, processes
        self.submitted: list[Tile] = []
        self.failures: dict[Tile, CandidateError] = {}
        self._running: deque[Tile] = deque()
        self.stop_after = float("inf")

    def __enter__(self) -> Planted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, problem: Problem, tile: Tile, seconds: float) -> None:
        self.submitted.append(tile)
        self._running.append(tile)
        assert len(self._running) <= self.processes

    def next(self, stopped: Callable[[], bool]) -> tuple[Tile, float | CandidateError]:
        if len(self.submitted) - len(self._running) >= self.stop_after:
            raise Stopped
        tile = self._running.popleft()
        return tile, self.failures.get(tile) or self.times(tile) * 1e-6


def tuned(
    planted: Planted, study: ProblemStudy | None = None, wrong: tuple[Tile, ...] = (), trials: int | None = 12
) -> TuningResult:
    space = space_of(SMALL)
    study = study or ProblemStudy(space, None, [], 0)
    verifier = FakeWorker({})
    verifier.wrong = set(wrong)
    verifier.stopped = lambda: False  # type: ignore[attr-defined]
    facts: dict[str, Any] = {"simulators": planted, "bandwidth": 4e12, "simulator": "7"}
    return Simulating(space, study, verifier, Budget(trials), None, lambda _: None, **facts).run()


# ---- one problem ----------------------------------------------------------------------------------------------------


def test_the_fastest_simulated_tile_is_stored_with_all_facts_of_an_entry() -> None:
    space = space_of(SMALL)
    best, second = space.tiles[7], space.tiles[3]
    planted = Planted((times_of(space) | {best: 8.0, second: 8.9}).__getitem__)
    result = tuned(planted)
    assert (result.source, result.winner) == (SIMULATED, best)
    assert result.software["simulator"] == "7"
    entry = result.entry
    assert entry is not None
    assert (entry.source, entry.kernel, entry.text) == (SIMULATED, space.kernel(best), "specialised")
    assert dict(entry.facts) == {
        "simulated_us": 8.0,
        "predicted_us": round(space.predicted(best) * 1e6, 3),
        "default_us": 10.0,
        "trials": 12,
        "verified": entry.facts["verified"],
        "text": "specialised",
        "runner_up": {"strategy": second.strategy, "tile": second.as_dict(), "simulated_us": 8.9},
    }
    assert str(entry.facts["verified"]).startswith("cpu executor, ")
    assert entry_of(raw_of(entry)) == entry
    assert planted.submitted == list(space.tiles[:12])  # the model's best come first


@pytest.mark.parametrize(("gain", "stored"), [(GAIN - 0.005, False), (GAIN + 0.005, True)])
def test_a_simulated_gain_below_two_per_cent_keeps_the_default(gain: float, stored: bool) -> None:
    space = space_of(SMALL)
    result = tuned(Planted((times_of(space) | {space.tiles[4]: 10.0 / gain}).__getitem__))
    assert result.winner == (space.tiles[4] if stored else space.default)
    assert result.entry is not None
    assert result.entry.facts.get("default", False) != stored


def test_a_wrong_winner_is_not_stored_and_never_tried_again() -> None:
    """The next fastest tile is stored. A later run of the study does not choose the wrong one either."""
    space = space_of(SMALL)
    wrong, right, failed = space.tiles[2], space.tiles[5], space.tiles[6]
    planted = Planted((times_of(space) | {wrong: 5.0, right: 6.0, failed: 1.0}).__getitem__)
    planted.failures[failed] = Failed("simulator", "unknown instruction")
    study = ProblemStudy(space, None, [], 0)
    result = tuned(planted, study, (wrong,))
    assert result.winner == right
    assert {trial.tile: trial.failure for trial in result.failures} == {wrong: "wrong", failed: "simulator"}
    again = tuned(planted, study)
    assert (again.winner, again.trials) == (right, [])
    result = tuned(planted, wrong=space.tiles)
    assert (result.winner, result.entry) == (None, None)
    assert result.sentence == "none of the fastest simulated tiles passed verification"


def test_if_no_tile_can_be_simulated_the_number_of_failures_is_reported() -> None:
    planted = Planted(lambda tile: 3.0)
    planted.failures = dict.fromkeys(space_of(SMALL).tiles, Failed("simulator", "unknown instruction"))
    result = tuned(planted)
    assert (result.winner, result.entry, result.sentence) == (None, None, "12 of 12 tiles failed")


def test_a_stopped_run_stores_nothing_and_keeps_its_trials() -> None:
    """A second run of the study simulates only the tiles that the first one has not finished."""
    space = space_of(SMALL)
    study = ProblemStudy(space, None, [], 0)
    planted = Planted(times_of(space).__getitem__)
    planted.stop_after = 5
    result = tuned(planted, study)
    assert (result.interrupted, result.entry, len(result.trials)) == (True, None, 5)
    rest = Planted(times_of(space).__getitem__)
    result = tuned(rest, study)
    assert result.winner == space.default
    assert rest.submitted == list(space.tiles[5:12])


def test_the_budget_is_small_unless_a_time_or_a_number_is_given() -> None:
    def options(**given: Any) -> Options:
        return Options(DEVICE, given.pop("evaluator", "simulate"), (), Path("t.json"), **given)

    assert options().budget().trials == SIMULATED_TRIALS
    assert options(trials=3).budget().trials == 3
    assert (options(seconds=9.0).budget().trials, options(seconds=9.0).budget().seconds) == (None, 9.0)
    assert options(evaluator="measure").budget().trials is None
    assert SIMULATED_TRIALS < MORE


def test_tiles_that_are_unlikely_to_be_fastest_are_left_out() -> None:
    space = space_of(SMALL)
    likely = space.likely()
    least = min(one.predicted for one in space.candidates)
    assert 1 < len(likely) < len(space)
    assert likely.default == space.default
    left = [one for one in space.candidates if one.predicted <= UNLIKELY * least]
    assert list(likely.candidates) == left
    assert all(likely.predicted(tile) == space.predicted(tile) for tile in likely.tiles)


# ---- the processes --------------------------------------------------------------------------------------------------


class FakeProcess:
    """A worker that answers each request with the next of some answers."""

    answers: deque[Any]
    made = 0

    def __init__(self, spec: Spec, stopped: Callable[[], bool]) -> None:
        type(self).made += 1

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, what: str, problem: Problem, tile: Tile, *, seconds: float) -> Any:
        assert (what, problem, seconds) == ("simulate", SMALL, 60)
        found = self.answers.popleft()
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([2e-6], 2e-6),
        ([Lost("crash", "SIGKILL"), 2e-6], 2e-6),  # the system may have killed it for its memory
        ([Lost("crash", "SIGKILL"), Lost("crash", "again")], "again"),
        ([Lost("hang", "no answer"), 2e-6], "no answer"),
        ([Failed("fault", "out of bounds"), 2e-6], "out of bounds"),
    ],
)
def test_a_process_that_dies_is_tried_twice(answers: list[Any], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "Worker", FakeProcess)
    monkeypatch.setattr(FakeProcess, "answers", deque(answers), raising=False)
    tile = space_of(SMALL).default
    with Simulators(Spec("cpu", DEVICE), 1) as made:
        made.submit(SMALL, tile, 60)
        found = made.next()
    assert found[0] == tile
    assert (found[1].sentence if isinstance(found[1], CandidateError) else found[1]) == expected


def test_candidates_run_in_several_processes_and_a_broken_one_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no candidate causes, such as a full disk, ends the run. A stop ends the wait."""
    monkeypatch.setattr(simulate, "Worker", FakeProcess)
    monkeypatch.setattr(FakeProcess, "answers", deque([OSError("disk full")]), raising=False)
    monkeypatch.setattr(FakeProcess, "made", 0)
    with Simulators(Spec("cpu", DEVICE), 3) as made:
        made.submit(SMALL, space_of(SMALL).default, 60)
        with pytest.raises(OSError, match="disk full"):
            made.next()
        with pytest.raises(Stopped):
            made.next(lambda: True)
    assert FakeProcess.made == 3


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STUDIES", tmp_path / "studies")


@pytest.fixture
def tools(own_studies: None) -> None:
    """Skip if a tool of the simulator is missing."""
    try:
        simulate.check()
    except simulate.NoSimulatorError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("tools")
def test_the_simulator_runs_tiles_and_the_table_says_that_they_were_simulated(capsys: Any, tmp_path: Path) -> None:
    """The real simulator, in a process of its own. The command `show` prints the evidence."""
    path = tmp_path / "t.json"
    arguments = (*TUNE, "--device", "H100", "--table", str(path), "--workers", "1", "--json")
    assert main([*arguments, "--trials", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["evaluator"], found["device"], found["simulated"], found["measured"]) == (
        "simulate", KNOWN["H100"].name, 1, 0,
    )  # fmt: skip
    first, second = found["results"][0]["trials"]
    assert 5e-7 < first["seconds"] < 1e-4
    assert second["failure"] in (None, "simulator")  # the simulator may not know an instruction of a tile
    (entry,) = table.read(path).entries.values()
    assert (entry.source, entry.text, entry.facts["trials"]) == (SIMULATED, "specialised", 2)
    assert entry.facts["verified"] == "cpu executor, rows=16 length=64"
    assert table.read(path).software["simulator"] == simulate.version()
    assert main(["show", "--device", "H100", "--table", str(path)]) == 0
    assert "specialised  simulated, not measured" in capsys.readouterr().out
    shape = ("layer_norm", "--shape", "16,64", "--dtype", "bfloat16")
    assert main(["show", *shape, "--device", "H100", "--table", str(path)]) == 0
    reason = f"{path}: simulated on NVIDIA H100 80GB HBM3, not measured: {entry.microseconds:.1f} us, specialised"
    assert reason in capsys.readouterr().out


@pytest.mark.usefixtures("tools")
def test_a_simulated_result_ranks_between_a_modelled_and_a_measured_one(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the model's entry, is not replaced by it, and does not replace a measured entry.

    With --resume, only the tiles that were not simulated before are simulated.
    """
    monkeypatch.setattr(tuner, "Simulators", lambda spec, processes: Planted(lambda tile: 3.0, processes))
    path = tmp_path / "t.json"
    modelled = (*TUNE[:-1], "model", "--device", "H200", "--table", str(path), "--trials", "1")
    simulated = (*TUNE, "--device", "H200", "--table", str(path), "--trials", "1")
    assert main([*modelled]) == main([*simulated]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"table      {path}: 1 simulated, not measured, for NVIDIA H200"
    assert main([*simulated[:-1], "3", "--resume", "--json"]) == 0  # 1 tile was simulated before
    assert len(json.loads(capsys.readouterr().out)["results"][0]["trials"]) == 2
    (entry,) = table.read(path).entries.values()
    assert entry.source == SIMULATED
    assert main([*modelled]) == 0
    assert "not stored: the table contains a simulated entry" in capsys.readouterr().out
    assert table.read(path).entries == {entry.problem: entry}
    mine = Entry(entry.problem, entry.tile, MEASURED, "x", {"time_us": 50.0})
    table.update(path, KNOWN["H200"], {}, [mine])
    assert main([*simulated]) == 0
    assert "not stored: the table contains a measured entry" in capsys.readouterr().out
    assert table.read(path).entries == {entry.problem: mine}


@pytest.mark.usefixtures("tools")
def test_a_problem_that_is_too_large_is_skipped(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says so, the other problems are tuned, and the exit code is 1."""
    monkeypatch.setattr(tuner, "Simulators", lambda spec, processes: Planted(lambda tile: 3.0, processes))
    monkeypatch.setattr("benchmarks.simulator.problems.LARGEST", 2**19)
    path = tmp_path / "t.json"
    arguments = ("layer_norm", "--workload", "quick", "--evaluator", "simulate", "--device", "H200", "--trials", "1")
    monkeypatch.setattr(command, "problems_of", few(command.problems_of))
    assert main(["tune", *arguments, "--table", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "elements, expected at most 524288 to be simulated" in out
    assert "elements, expected at most 524288 to be simulated" in err
    assert {one.N * one.C for one in table.read(path).entries} == {512}


def few(problems: Callable[..., Any]) -> Callable[..., Any]:
    """A problem of 512 elements and a larger one, of a list of problems."""

    def found(asked: Any) -> list[Problem]:
        first = problems(asked)[0]
        return [replace(first, N=4, C=2**20), replace(first, N=4, C=128)]

    return found


def test_a_device_that_is_not_simulated_is_a_wrong_argument(
    tools: None, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*TUNE, "--table", str(tmp_path / "t.json"))
    assert main([*arguments, "--device", "A100"]) == 2
    words = "cunorm tune: --device: NVIDIA A100-SXM4-80GB cannot be simulated, expected H100 or H200\n"
    assert capsys.readouterr().err == words
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "RTX 4090")
    assert main([*arguments]) == 2
    assert "--device: NVIDIA GeForce RTX 4090 cannot be simulated" in capsys.readouterr().err
    assert main([*arguments, "--device", "V100"]) == 2
    assert "--device: 'V100', expected one of" in capsys.readouterr().err
    assert main([*arguments, "--device", "H200", "--workers", "0"]) == 2
    assert "--workers: 0, expected 1 to 256" in capsys.readouterr().err


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


MISSING: dict[str, tuple[tuple[Any, str, Any], str]] = {
    "nvdisasm": (
        (cubin, "nvdisasm", _raise(CompileError("the simulator needs nvdisasm and found none; pip install x"))),
        "the simulator needs nvdisasm and found none; pip install x",
    ),
    "NVRTC": ((nvrtc, "installed", lambda: []), "the simulator needs NVRTC"),
    "a C++ compiler": ((simulate.cxx, "chosen", _raise(CompileError("no C++ compiler; install g++"))), "install g++"),
    "the checkout": (
        (simulate, "_checkout", lambda: Path("/nowhere")),
        "the simulator is not part of an installed package, and /nowhere is no checkout; clone the repository, and in "
        "it type: pip install -e '.[dev,cuda13]'",
    ),
    "a package": (
        (importlib, "import_module", _raise(ImportError("No module named 'elftools'"))),
        "the simulator cannot be imported: No module named 'elftools'; in ",
    ),
    "the right package": (
        (importlib, "import_module", lambda name: SimpleNamespace(__file__="/other/benchmarks/simulator/cubin.py")),
        "is hidden by /other/benchmarks/simulator/cubin.py; run in another folder",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tool_is_one_sentence_with_what_to_install(
    name: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is that of an evaluator that cannot run here."""
    (place, attribute, value), words = MISSING[name]
    cubin.compiler.cache_clear()
    with monkeypatch.context() as patch:
        if place is importlib:  # the module under test uses it; the program itself imports the command
            patch.setattr(simulate, "importlib", SimpleNamespace(import_module=value))
        else:
            patch.setattr(place, attribute, value)
        arguments = [*TUNE, "--table", str(tmp_path / "t.json")]
        assert main(arguments) == 3
    cubin.compiler.cache_clear()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cunorm tune: --evaluator simulate: ")
    assert words in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# ---- the text that is compiled and measured -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "wanted"),
    [
        ("gpu", "background", ("generic", "specialised")),
        ("gpu", "never", ("generic",)),
        ("cpu", "background", ("generic",)),
    ],
)
def test_the_texts_that_calls_run_are_compiled_ahead(
    kind: str, mode: str, wanted: tuple[sources.Text, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_SPECIALISE", mode)
    asked: list[tuple[Any, ...]] = []

    class Notes(FakeProcess):
        def ask(self, *request: Any, seconds: float) -> Any:
            asked.append(request)

    monkeypatch.setattr(precompile, "Worker", Notes)
    space = space_of(SMALL)
    with precompile.Precompiler(Spec(kind, DEVICE), 1) as ahead:
        ahead.submit(space, space.tiles[:2])
        ahead.submit(space, space.tiles[:1])  # nothing new
        ahead.wait()
    expected = {  # two kernels of one text are compiled together
        ("warm", text, sources.kernel_text(launch, SMALL, space.strategy(tile), tile, text))
        for tile in space.tiles[:2]
        for launch in space.strategy(tile).launches(SMALL, tile)
        for text in wanted
    }
    assert {request[:3] for request in asked} == expected
    assert len(asked) == len(expected)


def test_a_specialised_text_is_compiled_ahead_to_the_file_that_plans_load(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str, str]] = []
    place = SimpleNamespace(
        compile=lambda code, entry: done.append(("compile", code, entry)),
        build=lambda code, entry: done.append(("build", code, entry)),
    )
    monkeypatch.setattr(worker, "executor", lambda kind: place)
    stand: Any = SimpleNamespace(spec=Spec("gpu", DEVICE))
    for text in sources.TEXTS:
        worker._answer(stand, ("warm", text, f"{text} code", "entry"), lambda _: None)
    assert done == [("compile", "generic code", "entry"), ("build", "specialised code", "entry")]


def test_a_worker_loads_any_number_of_specialised_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that suits applications would make a tuner measure generic kernels from some tile on."""
    requests = deque([Spec("cpu", DEVICE)])
    answers: list[Any] = []

    def receive() -> Any:
        if not requests:
            raise EOFError
        return requests.popleft()

    monkeypatch.setattr(specialised, "MOST_KERNELS", 512)
    connection: Any = SimpleNamespace(recv=receive, send=answers.append)
    worker.serve(connection)
    assert answers == [("ready", None)]
    assert specialised.MOST_KERNELS > 10**6


def test_a_sample_runs_the_compiled_text_in_a_new_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that replaces a lost one samples tiles that it was never asked to compile."""
    compiled: list[Tile] = []

    class Made:
        text = "specialised"

        def __init__(self, tile: Tile) -> None:
            self.tile = tile

        def compile(self) -> Made:
            compiled.append(self.tile)
            return self

    made = Session(Spec("cpu", DEVICE))
    made.clock = SimpleNamespace(sampler=lambda tile, run, sets: lambda: run)  # type: ignore[assignment]
    monkeypatch.setattr(Session, "_plan", lambda self, tile: Made(tile))
    monkeypatch.setattr(Session, "_runner", lambda self, plan: compiled.index(plan.tile))
    first, second = space_of(SMALL).tiles[:2]
    assert (made.sample(first), made.sample(second), made.sample(first)) == (0, 1, 0)
    assert made.compile(first) == "specialised"


def test_a_plan_says_which_text_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", {})
    made = cunorm.plan("layer_norm", shape=(4, 8), normalized_shape=8, dtype="float32", device="cpu")
    assert made.text == "generic"
    made._specialised.steps = []
    assert made.text == "specialised"

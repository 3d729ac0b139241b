"""Measuring without a GPU: spawned workers on the CPU executor, broken candidates, a clock with planted times."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from cunorm.tuning.measure.errors import Failed, Lost, Stopped
from cunorm.tuning.measure.result import Budget, Deadlines, TuningResult, measured_entry
from cunorm.tuning.measure.worker import Worker
from cunorm.tuning.problem_tuner import Measuring, Modelling
from cunorm.tuning.search.sampler import tried
from cunorm.tuning.search.space import Candidate, Space
from cunorm.tuning.search.storage import storage_of
from cunorm.tuning.search.study import ProblemStudy
from cunorm.tuning.tuner import Events, Options, tune

from cunorm import Tile
from cunorm.core.problem import Problem
from cunorm.ops.registry import OPS
from cunorm.tiling import table
from tests.support.paths import environment
from tests.tuning import planted_device as device

DEADLINES = Deadlines(open=60, compile=60, verify=4, sample=4)
SHORT = Deadlines(open=60, compile=60, verify=2, sample=2)


def tile(kind: int, threads: int = 64) -> Tile:
    return Tile("planted", kind=kind, threads=threads)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that adds candidates of some kinds to the op, in this process and in the workers."""

    def plant(*wanted: int) -> Space:
        monkeypatch.setenv("CUNORM_TESTS_PLANT", ",".join(map(str, wanted)))
        device.plant(device.planted(wanted))
        return Space.of(device.PROBLEM, OPS[device.OP].strategies, device.DEVICE)

    yield plant
    device.uproot()


@pytest.fixture
def worker(kinds: Any) -> Iterator[Worker]:
    kinds(*device.KINDS)
    with Worker(device.spec()) as made:
        made.open(device.PROBLEM, 60)
        yield made


# ---- one worker -----------------------------------------------------------------------------------------------------


def test_verification_names_the_fault_of_a_candidate(worker: Worker) -> None:
    """The right candidate passes. The fault of each wrong candidate that does not kill the worker is named."""
    said = {}
    for kind in (device.RIGHT, device.WRONG, device.OUTSIDE, device.RANDOM, device.UNWRITTEN):
        worker.ask("compile", tile(kind), seconds=60)
        said[kind] = worker.ask("verify", tile(kind), seconds=60)
    assert said[device.RIGHT] is None
    assert "oracle" in said[device.WRONG]
    assert said[device.OUTSIDE] == "y: memory outside the array was written"
    assert said[device.RANDOM] == "y: a second run is not bitwise equal"
    assert "NaN elsewhere than in the oracle" in said[device.UNWRITTEN]
    assert worker.spawned == 1


def test_a_worker_starts_again_after_a_candidate_has_killed_it(worker: Worker) -> None:
    worker.ask("compile", tile(device.CRASH), seconds=60)
    with pytest.raises(Lost, match="SIGSEGV") as caught:
        worker.ask("verify", tile(device.CRASH), seconds=60)
    assert caught.value.kind == "crash"
    assert not worker.alive
    worker.open(device.PROBLEM, 60)
    worker.ask("compile", tile(device.RIGHT), seconds=60)
    assert worker.ask("verify", tile(device.RIGHT), seconds=60) is None
    assert worker.spawned == 2


def test_a_hung_candidate_is_stopped_at_its_deadline(worker: Worker) -> None:
    worker.ask("compile", tile(device.HANG), seconds=60)
    began = time.monotonic()
    with pytest.raises(Lost, match="no answer within 1 s") as caught:
        worker.ask("verify", tile(device.HANG), seconds=1)
    assert caught.value.kind == "hang"
    assert time.monotonic() - began < 10
    assert not worker.alive


def test_the_error_of_a_round_has_the_index_of_the_failing_tile(worker: Worker) -> None:
    order = [tile(device.RIGHT), tile(device.DIES_LATER), tile(device.RIGHT, 32)]
    with pytest.raises(Lost) as caught:
        worker.ask("round", order, seconds=30)
    assert (caught.value.index, caught.value.kind) == (1, "crash")
    worker.open(device.PROBLEM, 60)
    with pytest.raises(Lost) as caught:
        worker.ask("round", [tile(device.RIGHT), tile(device.HANGS_LATER)], seconds=1)
    assert (caught.value.index, caught.value.kind) == (1, "hang")


def test_a_worker_survives_a_failed_compilation(worker: Worker) -> None:
    with pytest.raises(Failed, match="UnsupportedTile") as caught:
        worker.ask("compile", Tile("planted", kind=1, threads=64, more=1), seconds=60)
    assert caught.value.kind == "compile"
    assert worker.alive
    assert worker.spawned == 1


def test_a_busy_worker_can_be_stopped(kinds: Any) -> None:
    kinds(*device.KINDS)
    stop = threading.Event()
    with Worker(device.spec(), stop.is_set) as made:
        made.open(device.PROBLEM, 60)
        made.ask("compile", tile(device.HANG), seconds=60)
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(Stopped):
            made.ask("verify", tile(device.HANG), seconds=60)
        assert not made.alive


def test_a_worker_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """After `kill -9` of the parent, a worker with a hung candidate ends too."""
    import subprocess
    import sys

    script = (
        "import sys; from tests.tuning import planted_device as d\n"
        "from cunorm.tuning.measure.worker import Worker\n"
        "from cunorm import Tile\n"
        "w = Worker(d.spec()); w.open(d.PROBLEM, 60)\n"
        "print(w._process.pid, flush=True)\n"
        "w.ask('compile', Tile('planted', kind=d.HANG, threads=64), seconds=60)\n"
        "w.ask('verify', Tile('planted', kind=d.HANG, threads=64), seconds=60)\n"
    )
    planted = environment(CUNORM_TESTS_PLANT=str(device.HANG))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=planted, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1.0)
        parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
            if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the worker is still running 10 s after its parent was killed")


# ---- one problem ----------------------------------------------------------------------------------------------------


def tuned(space: Space, storage: Any = None, **options: Any) -> tuple[TuningResult, Worker, ProblemStudy]:
    study = ProblemStudy(space, storage, [], 0)
    assert study.claim()
    budget = Budget(options.pop("trials", None), options.pop("seconds", None))
    with Worker(device.spec()) as worker:
        made = Measuring(space, study, worker, budget, None, lambda _: None, options.pop("deadlines", SHORT))
        result = made.run()
    study.release()
    return result, worker, study


def test_the_planted_best_is_found_among_broken_candidates(kinds: Any) -> None:
    """Every broken candidate is recorded with its failure, costs at most one worker and never wins."""
    space = kinds(*device.KINDS)
    result, worker, study = tuned(space)
    assert result.winner == tile(device.RIGHT)
    assert result.sentence == ""
    found = {trial.tile: trial.failure for trial in result.failures}
    killers = (device.CRASH, device.HANG, device.DIES_LATER, device.HANGS_LATER)
    expected = {**device.BROKEN, device.DIES_LATER: "crash", device.HANGS_LATER: "hang"}
    assert found == {tile(kind): what for kind, what in expected.items()}
    assert worker.spawned == 1 + len(killers)
    assert set(study.failures()) == set(found)
    assert result.timings[tile(device.RIGHT)].seconds == pytest.approx(
        10e-6, rel=0.3
    )  # a ratio times the time of the drifting control
    assert set(result.timings).isdisjoint(found)


def test_rehearsed_times_are_never_stored_as_measured(kinds: Any) -> None:
    space = kinds(device.RIGHT)
    result, _, _ = tuned(space)
    assert result.source == "rehearsed"
    assert result.winner == tile(device.RIGHT)
    assert result.entry is None
    with pytest.raises(ValueError, match="cannot be stored as measured"):
        measured_entry(
            space,
            result.winner,
            result.timings,
            measures=False,
            bandwidth=1e12,
            trials=3,
            default=False,
            text="generic",
        )


def test_tiles_that_killed_a_worker_are_not_tried_again(kinds: Any, tmp_path: Path) -> None:
    """A second run on the same storage proposes no tile again. That includes the tiles that killed a worker."""
    space = kinds(device.RIGHT, device.CRASH)
    storage = storage_of(str(tmp_path / "study.journal"))
    first, worker, _ = tuned(space, storage)
    assert worker.spawned == 2
    again, worker, study = tuned(space, storage)
    assert worker.spawned == 1
    assert again.trials == []
    assert again.winner == first.winner == tile(device.RIGHT)
    assert {one.kind for one in study.failures()} == {device.CRASH}


def led_by(space: Space, first: Tile) -> Space:
    """The space, with a cost model that predicts `first` as by far the fastest tile."""
    ahead = Candidate(first, 1e-9)
    rest = (candidate for candidate in space.candidates if candidate.tile != first)
    candidates = (ahead, *rest)
    at = {candidate.tile: index for index, candidate in enumerate(candidates)}
    return Space(space.problem, space.device, space.strategies, candidates, at)


def test_a_default_that_fails_is_not_the_control(kinds: Any) -> None:
    space = kinds(device.WRONG, device.DIES_LATER)
    bad = [one for one in space.tiles if one.strategy == "planted"]
    for first in bad:
        moved = led_by(space, first)
        assert moved.default == first
        result, _, _ = tuned(moved)
        assert result.winner is not None
        assert result.winner not in bad


def test_the_winner_of_the_model_is_verified(kinds: Any) -> None:
    """A worker verifies it on the CPU executor. A wrong winner is recorded as a failure, and the next tile wins."""
    space = kinds(device.RIGHT, device.WRONG, device.CRASH)
    for first, failure in ((tile(device.WRONG), "wrong"), (tile(device.CRASH), "crash"), (tile(device.RIGHT), None)):
        moved = led_by(space, first)
        study = ProblemStudy(moved, None, [], 0)
        with Worker(device.spec()) as worker:  # importing its clock adds the candidates; nothing is timed
            made = Modelling(moved, study, worker, Budget(), None, lambda _: None, SHORT)
            result = made.run()
        assert result.source == "model"
        assert [(trial.tile, trial.failure) for trial in result.failures] == ([(first, failure)] if failure else [])
        assert (result.winner == first) == (failure is None)
        assert result.entry is not None
        assert result.entry.source == "model"
        assert result.entry.facts["verified"] == "cpu executor, N=2 C=13 HxW=35"


def test_without_a_compiler_a_modelled_result_is_marked_as_not_verified(
    kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kinds(device.RIGHT)
    monkeypatch.setenv("CUNORM_CXX", "no-such-compiler")
    study = ProblemStudy(space, None, [], 0)
    with Worker(replace(device.spec(), clock=None)) as worker:
        result = Modelling(space, study, worker, Budget(), None, lambda _: None, SHORT).run()
    assert result.entry is not None
    assert result.entry.facts["verified"] is False
    assert result.sentence.startswith("not verified: ")
    assert "no-such-compiler" in result.sentence


def test_no_tile_is_tried_without_time(kinds: Any) -> None:
    space = kinds(device.RIGHT)
    result, _, study = tuned(space, seconds=0.0)
    assert result.trials == []
    assert result.winner is None
    assert study.count == 0


def test_a_budget_of_trials_limits_the_trials(kinds: Any) -> None:
    space = kinds(device.RIGHT)
    result, _, study = tuned(space, trials=4)
    assert study.count == 4 == len(result.trials)
    assert [trial.tile for trial in result.trials] and result.winner in space.tiles[:4]


def the_study(storage: Any) -> optuna.Study:
    """The only study of a storage. Its claims are also stored as studies."""
    (name,) = [name for name in optuna.get_all_study_names(storage) if " claim " not in name]
    return optuna.load_study(storage=storage, study_name=name)


# ---- many problems --------------------------------------------------------------------------------------------------


class Notes(Events):
    def __init__(self) -> None:
        self.happened: list[tuple[str, Any]] = []

    def begins(self, space: Space, trials: int) -> None:
        self.happened.append(("begins", space.problem))

    def tried(self, space: Space, trial: Any) -> None:
        self.happened.append(("tried", trial))

    def ends(self, result: TuningResult) -> None:
        self.happened.append(("ends", result))

    def elsewhere(self, problem: Any, entry: Any) -> None:
        self.happened.append(("elsewhere", entry))


def options(path: Path, workers: int = 1, evaluator: str = "measure", **more: Any) -> Options:
    return Options(device.DEVICE, evaluator, (device.spec(),) * workers, path, deadlines=SHORT, **more)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_the_trials_of_the_study(kinds: Any, tmp_path: Path) -> None:
    """Ctrl-C after a candidate has hung: the run ends early, and the study can be resumed."""
    space = kinds(device.RIGHT, device.HANG)
    storage = storage_of(str(tmp_path / "study.journal"))

    class Interrupts(Notes):
        def tried(self, space: Space, trial: Any) -> None:
            super().tried(space, trial)
            if trial.failure == "hang":
                os.kill(os.getpid(), signal.SIGINT)  # sent immediately: a moment later the run might have ended

    notes = Interrupts()
    path = tmp_path / "t.json"
    results, _, interrupted = tune([device.PROBLEM], options(path, storage=storage), notes)
    assert interrupted
    assert len(results) == 1
    assert results[0].interrupted
    study = the_study(storage)
    assert 0 < len(tried(study)) <= len(space)
    results, _, interrupted = tune([device.PROBLEM], options(path, storage=storage), Notes())
    assert not interrupted
    assert results[0].winner == tile(device.RIGHT)
    assert len(tried(study)) == len(space)


def test_two_workers_tune_every_problem_once(kinds: Any, tmp_path: Path) -> None:
    kinds(device.RIGHT)
    todo = [device.PROBLEM, replace(device.PROBLEM, N=3), replace(device.PROBLEM, N=4)]
    notes = Notes()
    results, found, _ = tune(todo, options(tmp_path / "t.json", workers=2), notes)
    assert {result.space.problem for result in results} == set(todo)
    assert [result.winner for result in results] == [tile(device.RIGHT)] * 3
    assert found == []  # nothing was measured
    assert not (tmp_path / "t.json").exists()


def test_only_one_host_proposes_tiles_of_a_study(kinds: Any, tmp_path: Path) -> None:
    """Two hosts use one storage. One of them tries every tile once, and both tables get the result."""
    space = kinds(device.RIGHT)
    url = str(tmp_path / "shared.journal")
    found: dict[str, Any] = {}

    def host(name: str) -> None:
        evaluated = Options(
            device.DEVICE, "model", (device.spec(),), tmp_path / f"{name}.json", storage_of(url), deadlines=DEADLINES
        )
        found[name] = tune([device.PROBLEM], evaluated, Notes())

    threads = [threading.Thread(target=host, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = [result for results, _, _ in found.values() for result in results]
    assert len(results) == 1
    trials = the_study(storage_of(url)).get_trials(deepcopy=False)
    assert len(trials) == len(space)
    assert {trial.state for trial in trials} == {optuna.trial.TrialState.COMPLETE}
    tables = [table.read(tmp_path / f"{name}.json").entries for name in ("one", "other")]
    assert tables[0].keys() == tables[1].keys() == {device.PROBLEM}


def test_a_claim_ends_with_its_process_or_its_lease(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kinds(device.RIGHT)
    storage = storage_of(str(tmp_path / "s.journal"))
    first = ProblemStudy(space, storage, [], 0)
    assert first.claim()
    left_running = first.propose(3)
    second = ProblemStudy(space, storage, [], 0)
    assert not second.claim()
    monkeypatch.setattr("cunorm.tuning.search.study._alive", lambda owner: False)
    assert second.claim()
    assert second.count == 0  # tiles of unfinished trials may be proposed again
    assert second.propose(3) == left_running
    monkeypatch.undo()
    third = ProblemStudy(space, storage, [], 0)
    assert not third.claim()  # the owner, this process, is alive
    monkeypatch.setattr("cunorm.tuning.search.study._alive", lambda owner: None)  # as for a process of another host
    assert not third.claim()
    monkeypatch.setattr("cunorm.tuning.search.study.LEASE_SECONDS", -1)
    assert third.claim()
    # The processes that took over the claim have ended the trials of the first one. Its calls raise no error.
    first.tell(left_running[0], 1e-5)
    first.fail(left_running[1], "wrong", "so")
    first.abandon()
    for one in (first, second, third):
        one.release()


def test_a_claim_without_an_owner_expires(kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process died before it wrote its name. The claim expires after `BARE_SECONDS`."""
    space = kinds(device.RIGHT)
    storage = storage_of(str(tmp_path / "s.journal"))
    study = ProblemStudy(space, storage, [], 0)
    optuna.create_study(storage=storage, study_name=f"{study.name} claim 1")
    assert not study.claim()
    monkeypatch.setattr("cunorm.tuning.search.study.BARE_SECONDS", 0)
    assert study.claim()
    study.release()


def test_times_of_another_source_are_not_compared(kinds: Any, tmp_path: Path) -> None:
    """Tuning by a clock does not continue a study by the model. A study of another driver is not continued either."""
    space = kinds(device.RIGHT)
    storage = storage_of(str(tmp_path / "s.journal"))
    found = [ProblemStudy(space, storage, [], 0, source) for source in ("model", "measured 1", "measured 2")]
    assert len({study.name for study in found}) == 3
    path = tmp_path / "t.json"
    tune([device.PROBLEM], options(path, evaluator="model", storage=storage), Notes())
    results, _, _ = tune([device.PROBLEM], options(path, storage=storage), Notes())
    assert {trial.tile for trial in results[0].trials} == set(space.tiles)


def test_a_study_continues_from_a_truncated_journal(kinds: Any, tmp_path: Path) -> None:
    """A killed process has left an incomplete last line. The study continues from the lines before it."""
    space = kinds(device.RIGHT)
    path = tmp_path / "s.journal"
    study = ProblemStudy(space, storage_of(str(path)), [], 0)
    for one in study.propose(3):
        study.tell(one, 1e-5)
    data = path.read_bytes()
    for cut in (1, 20, len(data) - data.rfind(b"\n", 0, -1) - 3):
        path.write_bytes(data[:-cut])
        again = ProblemStudy(space, storage_of(str(path)), [], 0)
        assert again.count >= 2
        again.propose(1)
        assert path.read_bytes().endswith(b"}\n")


def test_a_worker_imports_no_module_from_the_current_folder(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds(device.RIGHT)
    (tmp_path / "platformdirs.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with Worker(device.spec()) as made:
        made.open(device.PROBLEM, 60)
        assert made.ask("verify", tile(device.RIGHT), seconds=60) is None


def test_problems_that_differ_in_a_dtype_have_separate_studies(tmp_path: Path) -> None:
    """Problems with and without gamma and beta each have a study and a table entry."""
    base = Problem(
        op="layer_norm",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=8,
        C=32,
        HxW=1,
        group=1,
        outputs=("y", "mean", "rstd"),
    )
    todo = [
        base,
        replace(base, gamma_dtype="float32"),
        replace(base, beta_dtype="float32"),
        replace(base, gamma_dtype="float32", beta_dtype="float32"),
    ]
    assert len({one.describe() for one in todo}) < len(todo)
    path = tmp_path / "t.json"
    storage = storage_of(str(tmp_path / "s.journal"))
    results, found, _ = tune(todo, options(path, evaluator="model", storage=storage, trials=1), Notes())
    assert len(results) == len(found) == len(todo)
    assert set(table.read(path).entries) == set(todo)


def test_a_worker_that_cannot_open_a_problem_is_reported_for_that_problem(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the problem contains the error message, and the run continues with the next problem."""
    kinds(device.RIGHT)

    def ask(self: Worker, what: str, *arguments: Any, seconds: float) -> Any:
        raise Failed("memory", "out of memory")

    monkeypatch.setattr(Worker, "ask", ask)
    todo = [device.PROBLEM, replace(device.PROBLEM, N=3)]
    results, _, interrupted = tune(todo, options(tmp_path / "t.json"), Notes())
    assert [result.sentence for result in results] == ["the worker cannot start: memory: out of memory"] * 2
    assert not interrupted


def test_a_run_can_be_stopped_while_the_worker_starts(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds(device.RIGHT)

    def ask(self: Worker, what: str, *arguments: Any, seconds: float) -> Any:
        raise Stopped

    monkeypatch.setattr(Worker, "ask", ask)
    assert tune([device.PROBLEM], options(tmp_path / "t.json"), Notes()) == ([], [], False)

"""``cunorm tune``, ``cunorm show`` of tables and ``cunorm merge``, with right and with wrong arguments."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cunorm.tuning import command
from cunorm.tuning.problems import workloads

import cunorm
from cunorm.cli.main import main
from cunorm.core.devices import KNOWN
from cunorm.tiling import choose_tile, table
from cunorm.tiling.table import MEASURED, Entry

OP = "group_norm_backward"
SMALL = (OP, "--shape", "2,8,9,2")
TUNE = ("tune", *SMALL)


@pytest.fixture(autouse=True)
def own_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write journals to the test's folder. Builds stay in the cache that all tests share."""
    monkeypatch.setattr(command, "STUDIES", tmp_path / "studies")


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_tune_by_the_model_writes_an_entry_that_plans_use(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model tunes the problem within a minute. Plans then use the entry of the table, and explain() names it."""
    path = tmp_path / "t.json"
    began = time.monotonic()
    arguments = (OP, "--shape", "2,320,4096,32", "--dtype", "bfloat16", "--trials", "30", "--table", str(path))
    code, out, err = run(capsys, "tune", *arguments)
    assert code == 0, err
    assert time.monotonic() - began < 60
    assert "modelled, not measured" in out
    assert "verified on the cpu executor" in out
    (entry,) = table.read(path).entries.values()
    assert entry.source == "model"
    # The winner is verified on fewer groups. The work per thread is the same.
    assert entry.facts["verified"] == "cpu executor, N=2 C=80 HxW=4096 group=8"
    assert {"predicted_us", "trials"} <= entry.facts.keys()
    assert not {"time_us", "gigabytes_per_s", "roofline"} & entry.facts.keys()
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(path))
    made = cunorm.plan(OP, shape=(2, 320, 64, 64), dtype="bfloat16", num_groups=32, device="cpu")
    assert made.tile == entry.tile
    assert f"the problem's entry in {path}: modelled, not measured" in made.explain()
    code, out, _ = run(capsys, "show", OP, "--shape", "2,320,64x64,32", "--dtype", "bfloat16", "--device", "H200")
    assert code == 0
    assert f"the problem's entry in {path}" in out
    code, out, _ = run(capsys, "show", "--device", "H200")
    assert code == 0
    assert re.search(r"N=2 C=320 HxW=4096 group=32 .* modelled, not measured", out)


def test_stdout_of_tune_json_is_one_document(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"), "--trials", "3", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["schema"], found["evaluator"], found["measured"]) == ("cunorm-tune/1", "model", 0)
    (result,) = found["results"]
    assert len(result["trials"]) == 3 <= result["space"]
    assert (result["source"], result["stored"]) == ("model", True)
    assert result["time_us"] <= result["default_us"]
    assert found["failed"] == []


def test_progress_without_a_terminal_is_plain_lines(capsys: Any, tmp_path: Path) -> None:
    code, out, err = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"))
    assert code == 0
    assert err.startswith("[1/1] group_norm_backward float32")
    assert "\r" not in out + err
    assert out.splitlines()[-1].startswith(
        f"table      {tmp_path / 't.json'}: 1 modelled, not measured, for NVIDIA H200"
    )


def test_progress_on_a_terminal_is_a_bar(tmp_path: Path) -> None:
    import fcntl
    import pty
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    arguments = ["tune", *SMALL, "--table", str(tmp_path / "t.json")]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "cunorm", *arguments], stdout=subprocess.PIPE, stderr=child, env=environment
    ) as process:
        os.close(child)
        seen = b""
        while True:
            try:
                part = os.read(parent, 4096)
            except OSError:
                break
            if not part:
                break
            seen += part
        out = process.stdout.read() if process.stdout else b""
    os.close(parent)
    assert process.returncode == 0
    assert b"tile" in seen
    assert b"\r" in seen
    assert b"modelled, not measured" in out


def test_tune_one_op_of_a_workload(capsys: Any, tmp_path: Path) -> None:
    """Every problem of the op in the workload has an entry, and the table is for the device of `--device`."""
    path = tmp_path / "t.json"
    arguments = ("layer_norm", "--workload", "quick", "--device", "A100", "--table", str(path), "--trials", "2")
    code, _, err = run(capsys, "tune", *arguments)
    assert code == 0, err
    wanted = {one for name, one in workloads.problems("float32") if name == "quick" and one.op == "layer_norm"}
    found = table.read(path)
    assert set(found.entries) == wanted
    assert len(wanted) == 3
    assert found.device["name"] == KNOWN["A100"].name


@pytest.mark.parametrize(
    ("workload", "op"),
    [
        *[("quick", op) for op in ("rms_norm", "batch_norm_backward_reduce")],
        *[pytest.param(name, None, marks=pytest.mark.long) for name in workloads.WORKLOADS],
    ],
)
def test_a_workload_is_tuned_without_wrong_results(workload: str, op: str | None, capsys: Any, tmp_path: Path) -> None:
    """Tuning by the model, as without a GPU: every winner is verified, and no tile has wrong results."""
    path, ops = tmp_path / "t.json", [op] if op else []
    code, out, err = run(capsys, "tune", *ops, "--workload", workload, "--evaluator", "model", "--table", str(path))
    assert code == 0, out + err
    found = table.read(path).entries
    wanted = {one for name, one in workloads.problems("float32") if name == workload and op in (None, one.op)}
    assert set(found) == wanted != set()
    assert all(entry.facts["verified"] for entry in found.values())
    assert "wrong" not in out + err


def test_every_listed_workload_has_problems() -> None:
    """The workloads that the help lists exist, and each has problems."""
    found: dict[str, set[str]] = {}
    for name, problem in workloads.problems("bfloat16"):
        found.setdefault(name, set()).add(problem.op)
    assert set(found) == set(workloads.WORKLOADS)
    promised = ("sd15-unet", "sdxl-unet", "vae", "resnet50-gn", "nnunet", "llm", "convnext", "resnet50-bn", "quick")
    assert set(promised) <= set(found)
    assert {op.rsplit("_", 1)[0] for op in found["quick"]} >= {"group_norm", "layer_norm", "batch_norm"}
    assert {"rms_norm", "rms_norm_backward"} <= found["quick"] & found["llm-rms"]


def test_tune_from_a_trace(capsys: Any, tmp_path: Path) -> None:
    path, traced = tmp_path / "t.json", tmp_path / "run.trace"
    x = np.ones((2, 8, 3, 3), np.float32)
    with cunorm.trace(traced):
        y, mean, rstd = cunorm.group_norm(x, 2)
        cunorm.group_norm_backward(y, x, mean, rstd, num_groups=2)
    assert run(capsys, "tune", "--from-trace", str(traced), "--table", str(path), "--trials", "2")[0] == 0
    assert {one.op for one in table.read(path).entries} == {"group_norm", OP}
    assert run(capsys, "tune", OP, "--from-trace", str(traced), "--table", str(tmp_path / "u.json"))[0] == 0
    assert {one.op for one in table.read(tmp_path / "u.json").entries} == {OP}


def test_a_report_that_cannot_be_written_keeps_the_table(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cunorm.tuning.report import page

    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(page, "write_whole", full)
    folder, path = tmp_path / "report", tmp_path / "t.json"
    asked = ("--shape", "2,8,64,2", "--trials", "1", "--table", str(path), "--report", str(folder))
    code, _, err = run(capsys, "tune", OP, *asked)
    assert code != 0 and len(table.read(path).entries) == 1
    assert f"--report: {folder / 'index.html'}: No space left on device; the table is complete" in err


def test_tune_writes_a_report(capsys: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    code, out, _ = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"), "--report", str(folder))
    assert code == 0
    page = (folder / "index.html").read_text()
    assert "modelled" in page
    assert f"report     {folder / 'index.html'}" in out


def test_resume_continues_a_study(capsys: Any, tmp_path: Path) -> None:
    """With --resume, a run continues the study of a run with fewer trials. Without --resume, the study starts anew."""
    arguments = (*TUNE, "--table", str(tmp_path / "t.json"), "--json")
    first = json.loads(run(capsys, *arguments, "--trials", "3")[1])["results"][0]
    again = json.loads(run(capsys, *arguments, "--trials", "5", "--resume")[1])["results"][0]
    assert (len(first["trials"]), len(again["trials"])) == (3, 2)
    done = json.loads(run(capsys, *arguments, "--trials", "5", "--resume")[1])
    assert done["results"] == []  # the budget is spent: the problem is skipped and its entry is kept
    fresh = json.loads(run(capsys, *arguments, "--trials", "4")[1])["results"][0]
    assert len(fresh["trials"]) == 4


def test_resume_of_a_damaged_journal_says_what_to_do(capsys: Any, tmp_path: Path) -> None:
    folder = tmp_path / "studies"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "STUDIES", folder)
        arguments = (*TUNE, "--table", str(tmp_path / "t.json"), "--trials", "1")
        assert run(capsys, *arguments)[0] == 0
        (journal,) = folder.glob("*.journal")
        with journal.open("a") as file:
            file.write("garbage\n")
        code, _, err = run(capsys, *arguments, "--resume")
        assert code == 2
        assert err.startswith(f"cunorm tune: --resume: the journal '{journal}': cannot be opened: damaged")
        assert err.endswith("leave out --resume to start anew\n")
        assert run(capsys, *arguments)[0] == 0


def test_one_file_for_the_table_and_the_storage_is_refused(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    for storage in (str(path), f"journal:{tmp_path}/../{tmp_path.name}/new.json"):
        code, _, err = run(capsys, *TUNE, "--table", str(path), "--storage", storage)
        assert (code, err) == (
            2, f"cunorm tune: --storage: {storage!r} is also the table of --table; name another file\n"
        )  # fmt: skip
        assert not path.exists()


def test_a_foreign_page_is_not_replaced_by_a_report(capsys: Any, tmp_path: Path) -> None:
    folder, arguments = tmp_path / "site", (*TUNE, "--trials", "1", "--table", str(tmp_path / "t.json"))
    folder.mkdir()
    (folder / "index.html").write_text("<h1>My site</h1>")
    code, _, err = run(capsys, *arguments, "--report", str(folder))
    assert code == 2
    assert f"--report: {folder / 'index.html'} has other contents than an earlier result; delete it" in err
    assert (folder / "index.html").read_text() == "<h1>My site</h1>"
    assert not (tmp_path / "t.json").exists()
    real = tmp_path / "real.html"
    (folder / "index.html").unlink()
    (folder / "index.html").symlink_to(real)
    for _ in range(2):  # the second one replaces the first one
        assert run(capsys, *arguments, "--report", str(folder))[0] == 0
    assert (folder / "index.html").is_symlink()
    assert "<h1>" in real.read_text()


@pytest.mark.parametrize("storage", ["study.journal", "journal:study.journal", "sqlite:///study.db"])
def test_the_second_command_on_a_storage_takes_results_from_it(
    storage: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second command on a storage copies the result of the first one into its own table."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.json", "two.json"):
        code, _, err = run(capsys, *TUNE, "--table", name, "--trials", "2", "--storage", storage)
        assert code == 0, err
    assert "already tuned in this storage" in err
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("storage", "tables", "what"),
    [
        ("study.journal", ("one.json", "two.json"), ("--shape", "16,64")),
        pytest.param("study.journal", ("t.json", "t.json"), ("--workload", "quick"), marks=LONG),
        pytest.param("sqlite:///study.db", ("one.json", "two.json"), ("--workload", "quick"), marks=LONG),
    ],
)
def test_two_tuners_on_one_storage_at_once(
    storage: str, tables: tuple[str, str], what: tuple[str, str], tmp_path: Path
) -> None:
    """Both run at once, with one table each or a common one. Every table contains every problem, and both succeed."""
    command = [sys.executable, "-m", "cunorm", "tune", "layer_norm", *what, "--trials", "2", "--storage", storage]
    command += ["--evaluator", "model", "--device", "H200"]
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([*command, "--table", name], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
        for name in tables
    ]
    for one in both:
        out, err = one.communicate(timeout=300)
        assert one.returncode == 0, err
        assert "Traceback" not in out + err
    wanted = {one for name, one in workloads.problems("float32") if name == "quick" and one.op == "layer_norm"}
    for name in tables:
        found = table.read(tmp_path / name)
        assert found.faults == []
        assert set(found.entries) == wanted if "quick" in what else len(found.entries) == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_a_workload_keeps_the_tuned_problems(tmp_path: Path) -> None:
    """The exit code is 130, the table contains the tuned problems, and no process is left running."""
    path = tmp_path / "t.json"
    command = [sys.executable, "-m", "cunorm", "tune", "group_norm", "--workload", "sd15-unet", "--table", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # the first problem is tuned
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "results so far are kept" in out
    assert len(table.read(path).entries) >= 1


def test_a_modelled_result_does_not_replace_a_measured_entry(capsys: Any, tmp_path: Path) -> None:
    """The command reports that the modelled result was not stored."""
    path = tmp_path / "t.json"
    options = {"shape": (2, 8, 9), "dtype": "float32", "num_groups": 2, "gamma_dtype": "float32", "device": "H200"}
    problem = cunorm.plan(OP, **options).problem  # type: ignore[arg-type]
    mine = Entry(problem, cunorm.Tile("split", threads=128, chunk=16), MEASURED, "x", {"time_us": 5.0})
    table.update(path, KNOWN["H200"], {}, [mine])
    code, out, _ = run(capsys, *TUNE, "--table", str(path))
    assert code == 0
    assert "not stored: the table contains a measured entry" in out
    assert table.read(path).entries[problem] == mine


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("postgresql://bob:hunter2@db.example/x", "hunter2"),
        ("postgresql://bob:hunter2@db.example:5432/x?sslmode=require&sslpassword=hunter3", "hunter3"),
        ("mysql+pymysql://:hunter2@[::1]/x", "hunter2"),
        ("postgresql://bob:a/b?hunter2@[bad/x", "a/b?hunter2"),
        ("postgresql://bob:a@b hunter2@host", "a@b hunter2"),
        ("sqlite:////no/where?key=hunter2", "hunter2"),
        ("bob:hunter2@host/x", "hunter2"),
    ],
)
def test_no_password_is_printed(url: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a printed URL nor an error message of a database driver contains the password."""
    from cunorm.tuning.search import storage

    monkeypatch.setattr(storage, "PAUSES", ())
    assert secret not in storage.shown(url)
    assert secret not in storage.without_secrets(f"cannot reach {url}: password {secret!r} of bob:{secret}", url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="--storage: ") as caught:
            storage.storage_of(url)
    assert "hunter" not in str(caught.value)


def test_a_decoded_password_is_not_printed(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The URL contains the percent-encoded password, the driver's message during a run contains the decoded one."""
    from optuna.exceptions import StorageInternalError

    def gone(*_: Any) -> None:
        raise StorageInternalError("no connection for 'bob' with 'hun%ter@2'\nmore")

    monkeypatch.setattr(command, "storage_of", lambda url, resumed: None)
    monkeypatch.setattr(command, "tune", gone)
    url = "postgresql://bob:hun%25ter%402@host/x"
    code, _, err = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"), "--storage", url)
    assert (code, err) == (1, "cunorm tune: the study storage failed: no connection for 'bob' with '***'\n")


def test_the_path_of_a_storage_file_is_printed_unchanged() -> None:
    from cunorm.tuning.search.storage import shown

    for name in ("study.journal", "journal:study.journal", "/a b/c@d", "sqlite:///study.db"):
        assert shown(name) == name


def test_a_table_that_cannot_be_written_is_an_error_before_tuning(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check precedes the tuning and leaves no file."""
    import tempfile

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(command, "tune", lambda *_: pytest.fail("tune was called, expected an error before it"))
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", refuse)
        code, _, err = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"))
    assert (code, err) == (
        2,
        f"cunorm tune: --table: {tmp_path}/t.json: cannot be written: Permission denied; name another file\n",
    )
    (tmp_path / "t.json.lock").touch()
    real = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, *more: not str(path).endswith(".lock") and real(path, *more))
        code, _, err = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"))
    assert code == 2
    assert "no permission to read and write" in err
    assert [one.name for one in tmp_path.iterdir()] == ["t.json.lock"]


# ---- wrong arguments ------------------------------------------------------------------------------------------------

#: Last lines of a damaged journal: no JSON, half a record, and a record that is not Optuna's.
DAMAGED = ("garbage", '{"op_code":2,"wor', '{"op_code":99}', '{"op_code":4}', "[]")
WRONG: dict[str, tuple[tuple[str, ...], int, str]] = {
    "nothing": (("tune",), 2, "--shape, --workload, --from-trace or --stale: received none, expected exactly one"),
    "two sources": (("tune", "--shape", "1,2", "--workload", "llm"), 2, "received --shape and --workload, expected"),
    "no op": (("tune", "--shape", "2,8,9,2"), 2, "OP: missing"),
    "an unknown op": (("tune", "groupnorm", "--shape", "2,8,9,2"), 2, "op: 'groupnorm', expected"),
    "an unknown op of a workload": (("tune", "unit_norm", "--workload", "llm"), 2, "op: 'unit_norm', expected one of"),
    "a short shape": (("tune", OP, "--shape", "2,8,9"), 2, "--shape: '2,8,9' has 3 numbers"),
    "a shape of words": (("tune", OP, "--shape", "a,b,c,d"), 2, "--shape: N is 'a'"),
    "a negative shape": (("tune", OP, "--shape", "-2,8,9,2"), 2, "--shape: N is '-2'"),
    "a zero": (("tune", OP, "--shape", "2,8,0,2"), 2, "--shape: HxW is 0"),
    "groups that do not divide": (("tune", OP, "--shape", "2,8,9,3"), 2, "--shape: GROUP is 3"),
    "a shape beyond all": (("tune", OP, "--shape", "99999999999999,8,99999999999,2"), 2, "shape"),
    "a dtype": ((*TUNE, "--dtype", "float8"), 2, "dtype"),
    "a layout": ((*TUNE, "--layout", "CHWN"), 2, "--layout: 'CHWN'"),
    "outputs": ((*TUNE, "--outputs", "dw"), 2, "--outputs: 'dw'"),
    "outputs of a workload": (("tune", "--workload", "llm", "--outputs", "dx"), 2, "only valid with --shape"),
    "a workload": (("tune", "--workload", "resnet"), 2, "--workload: 'resnet', expected one of sd15-unet"),
    "a workload without the op": (("tune", "layer_norm", "--workload", "vae"), 2, "no problem left"),
    "a device": ((*TUNE, "--device", "V100"), 2, "--device: 'V100', expected one of A100"),
    "no trials": ((*TUNE, "--trials", "0"), 2, "--trials: 0, expected at least 1"),
    "no time": ((*TUNE, "--seconds", "0"), 2, "--seconds: 0, expected more than 0"),
    "no trace": (("tune", "--from-trace", "none.trace"), 2, "--from-trace: none.trace: no such file"),
    "a trace that is no trace": (
        ("tune", "--from-trace", "a100.json"),
        2,
        "a100.json: line 1: not JSON (",
    ),
    "time runs backwards": ((*TUNE, "--seconds", "-1"), 2, "--seconds: -1"),
    "no workers": ((*TUNE, "--workers", "0"), 2, "--workers: 0"),
    "more workers than anybody has": (
        (*TUNE, "--workers", "4294967295"),
        2,
        "--workers: 4294967295, expected 1 to 256",
    ),
    "a table that cannot be written": ((*TUNE, "--table", "/proc/t.json"), 2, "/proc/t.json: cannot be written"),
    "a table whose lock is a link": ((*TUNE, "--table", "linked.json"), 2, "linked.json.lock is a link, expected a re"),
    "a password": (
        (*TUNE, "--storage", "nosql://bob:hunter2@x/y?key=hunter2"),
        2,
        "'nosql://***@x/y?***': cannot be opened",
    ),
    "a password of a file": (
        (*TUNE, "--storage", "bob:hunter2@x/y"),
        2,
        "'bob:***@x/y': cannot be opened: no folder ***",
    ),
    "a trace that is not there": (("tune", "--from-trace", "nowhere"), 2, "nowhere"),
    "a dtype of a trace": (("tune", "--from-trace", "empty", "--dtype", "float16"), 2, "--dtype"),
    "an empty trace": (("tune", "--from-trace", "empty"), 2, "--from-trace: empty: contains no problem"),
    "a text for a trace": (("tune", "--from-trace", "report.md"), 2, "report.md: line 1: not JSON"),
    "a workload's layout": (
        ("tune", "--workload", "quick", "--layout", "XX"),
        2,
        "--layout: 'XX', expected NCHW or NHWC",
    ),
    "an activation": ((*TUNE, "--activation", "relu"), 2, "tune: --activation: 'relu', expected"),
    "a table in no folder": ((*TUNE, "--table", "no/where/t.json"), 2, "no folder no/where"),
    "a folder for a table": ((*TUNE, "--table", "."), 2, "is a folder"),
    "a corrupt table": ((*TUNE, "--table", "corrupt"), 2, "corrupt: not JSON"),
    "a table's option": ((*TUNE, "--table", "corrupt"), 2, "cunorm tune: --table: /"),
    "a table of another device": ((*TUNE, "--table", "a100.json"), 2, "a table of NVIDIA A100-SXM4-80GB, expected"),
    "a storage in no folder": ((*TUNE, "--storage", "no/where/j"), 2, "cannot be opened: no folder no/where"),
    "no storage": ((*TUNE, "--storage", ""), 2, "--storage: '': cannot be opened: expected a file or a URL"),
    "a storage of something else": ((*TUNE, "--storage", "corrupt"), 2, "--storage: 'corrupt': cannot be opened"),
    **{
        f"a damaged storage: {line}": (
            (*TUNE, "--storage", line),
            2,
            f"--storage: {line!r}: cannot be opened: damaged, a line is not a record of an Optuna journal",
        )
        for line in DAMAGED
    },
    "time that is none": ((*TUNE, "--seconds", "nan"), 2, "--seconds: nan"),
    "a seed": ((*TUNE, "--seed", "-1"), 2, "--seed: -1"),
    "a loop of links": ((*TUNE, "--table", "loop"), 2, "loop"),
    "a pipe for a table": ((*TUNE, "--table", "pipe"), 2, "pipe: not a regular file"),
    "a pipe for a trace": (("tune", "--from-trace", "pipe"), 2, "pipe: not a regular file"),
    "a trace of another op": (("tune", "--from-trace", "other.trace"), 2, "line 1: op is 'unit_norm', which"),
    "a trace of other results": (("tune", "--from-trace", "foo.trace"), 2, "outputs 'foo', expected some of"),
    "merge: into a device": (("merge", "h200.json", "-o", "/dev/null"), 2, "/dev/null: not a regular file"),
    "merge: into something else": (("merge", "h200.json", "-o", "corrupt"), 2, "corrupt: not JSON"),
    "merge: into a read-only folder": (
        ("merge", "h200.json", "-o", "/proc/m.json"),
        2,
        "merge: -o: /proc/m.json: cannot be written: No such file or directory; name another file",
    ),
    "merge: into no folder": (("merge", "h200.json", "-o", "no/c.json"), 2, "no folder"),
    "a storage of nothing": ((*TUNE, "--storage", "nosql://x"), 2, "--storage: 'nosql://x'"),
    "a report on a file": ((*TUNE, "--report", "empty"), 2, "tune: --report: empty: File exists, expected a folder"),
    "nothing to measure on": ((*TUNE, "--evaluator", "measure"), 3, "no GPU"),
    "show: no shape": (("show", OP), 2, "--shape: missing, expected N,C,HxW,GROUP"),
    "show: no op": (("show", "--shape", "1,2"), 2, "OP: missing"),
    "show: a device": (("show", "--device", "V100"), 2, "--device: 'V100'"),
    "merge: nothing there": (("merge", "nowhere.json", "-o", "c.json"), 2, "merge: nowhere.json: no such file"),
    "merge: corrupt": (("merge", "corrupt", "-o", "c.json"), 2, "corrupt: not JSON"),
    "merge: two devices": (("merge", "a100.json", "h200.json", "-o", "c.json"), 2, "tables of different devices"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_line_on_stderr(
    name: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written or changed."""
    monkeypatch.setattr(command, "gpu_present", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "corrupt").write_text('{"a')
    for line in DAMAGED:
        (tmp_path / line).write_text(f'{{"op_code":0,"worker_id":"w","study_name":"s","directions":[1]}}\n{line}\n')
    (tmp_path / "report.md").write_text("# Report")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "linked.json.lock").symlink_to(tmp_path / "corrupt")
    os.mkfifo(tmp_path / "pipe")
    sizes = {"dtype": "float32", "N": 2, "C": 8, "HxW": 9, "group": 2, "rows": 2, "length": 3, "calls": 1}
    for stem, op, outputs in (("other", "unit_norm", "y"), ("foo", "group_norm", "foo")):
        (tmp_path / f"{stem}.trace").write_text(json.dumps({"op": op, "outputs": outputs, **sizes}) + "\n")
    for device in ("A100", "H200"):
        table.update(f"{device.lower()}.json", KNOWN[device], {}, [])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments, code, words = WRONG[name]
    if arguments[0] == "tune" and "--table" not in arguments:
        arguments = (*arguments, "--table", "new.json")
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith(f"cunorm {arguments[0]}: ")
    assert "hunter2" not in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_wrong_value_of_specialise_is_an_error_before_tuning(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_SPECIALISE", "sometimes")
    code, out, err = run(capsys, *TUNE, "--table", str(tmp_path / "t.json"))
    words = "cunorm tune: CUNORM_SPECIALISE: 'sometimes', expected background, always or never\n"
    assert (code, out, err) == (2, "", words)


def test_tune_without_optuna_names_the_package(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "optuna" else real(name, *more)
    )
    assert main(list(TUNE)) == 1
    assert "cunorm tune needs optuna; type: pip install 'cunorm[tune]'" in capsys.readouterr().err


# ---- show and merge -------------------------------------------------------------------------------------------------


def test_show_without_tables_lists_the_paths_it_read(capsys: Any) -> None:
    code, out, _ = run(capsys, "show", "--device", "B200")
    assert code == 0
    assert out.startswith("device     NVIDIA B200\n\nno tiling table; looked for\n")
    assert "`cunorm tune` writes one" in out
    assert json.loads(run(capsys, "show", "--json", "--device", "B200")[1])["tables"] == []


def test_an_unreadable_table_is_reported(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text("{")
    monkeypatch.setattr("cunorm.tiling.choose_tile.user_table", lambda device: path)
    monkeypatch.setattr("cunorm.tiling.choose_tile._shipped", lambda *_: ())
    sentence = f"{path}: not JSON, or cut short"
    with pytest.warns(cunorm.TableWarning, match="not JSON"):
        code, out, _ = run(capsys, "show", "--device", "B200")
    assert code == 0
    assert sentence in out and "the table is not used: delete it" in out
    assert "no tiling table" not in out
    (said,) = json.loads(run(capsys, "show", "--json", "--device", "B200")[1])["unreadable"]
    assert said.startswith(sentence)
    code, _, err = run(capsys, *TUNE)
    assert code == 2
    assert sentence in err and err.endswith("; delete it, or name another file with --table\n")
    out = run(capsys, "doctor")[1]
    assert "tiling table" in out
    assert f"rm {path}" in out


def test_entries_that_differ_in_an_option_alone_are_told_apart(capsys: Any, tmp_path: Path) -> None:
    """Typed options reach the problem: each call tunes another one."""
    path, shape = str(tmp_path / "a.json"), ("group_norm", "--shape", "2,8,9,2", "--dtype", "bfloat16")
    options = ((), ("--activation", "silu"), ("--y-dtype", "float32"), ("--activation", "silu", "--y-dtype", "float32"))
    for given in options:
        assert run(capsys, "tune", *shape, *given, "--table", path, "--trials", "1")[0] == 0
    assert len(table.read(path).entries) == 4
    _, out, _ = run(capsys, "show", "--table", path, "--device", "H200")
    for text in ("group=2 ", "group=2 activation=silu ", "group=2 y=float32 ", "group=2 activation=silu y=float32 "):
        assert len(re.findall(f"{text} *y,mean,rstd", out)) == 1, text


def test_merge_drops_duplicate_entries(capsys: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    for path, shape in zip(paths, ("2,8,9,2", "2,8,9,4"), strict=False):
        assert run(capsys, "tune", OP, "--shape", shape, "--table", path, "--trials", "1")[0] == 0
    code, out, _ = run(capsys, "merge", paths[0], paths[1], paths[0], "-o", paths[2])
    assert code == 0
    assert "2 entries, 0 measured, 0 simulated, 2 modelled, of NVIDIA H200; " in out
    assert "; 1 dropped for a better entry of the same problem" in out
    assert len(table.read(paths[2]).entries) == 2
    code, out, _ = run(capsys, "show", "--table", paths[2], "--json", "--device", "H200")
    (shown,) = json.loads(out)["tables"]
    assert [one["group"] for one in shown["entries"]] == [2, 4]
    assert all(one["legal"] and not one["stale"] for one in shown["entries"])


# ---- --stale --------------------------------------------------------------------------------------------------------


def changed(path: Path, op: str, **facts: Any) -> None:
    """Write another digest, and facts, into the entry of an op: as if its kernels had changed since."""
    document = json.loads(path.read_text())
    for one in document["entries"]:
        if one["op"] == op:
            one |= {"kernel": "0" * 16, **facts}
    path.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a table with a modelled entry of two ops."""
    folder = tmp_path_factory.mktemp("two")
    with mock.patch.object(command, "STUDIES", folder / "studies"):
        for problem in (("group_norm", "--shape", "2,8,64,2"), ("layer_norm", "--shape", "8,64")):
            assert main(["tune", *problem, "--trials", "1", "--table", str(folder / "t.json")]) == 0
    return (folder / "t.json").read_text()


@pytest.fixture
def two(of_two: str, tmp_path: Path) -> Path:
    """A table with a modelled entry of two ops."""
    path = tmp_path / "t.json"
    path.write_text(of_two)
    return path


def test_stale_entries_alone_are_tuned_again(capsys: Any, two: Path) -> None:
    before = two.read_text()
    changed(two, "layer_norm")
    code, _, err = run(capsys, "tune", "--stale", "--table", str(two), "--trials", "1")
    assert code == 0
    assert re.findall(r"\[1/1\] (\w+)", err) == ["layer_norm"]
    found = {entry.problem.op: entry.kernel for entry in table.read(two).entries.values()}
    assert found == {one["op"]: one["kernel"] for one in json.loads(before)["entries"]}
    assert json.loads(run(capsys, "tune", "--stale", "--table", str(two), "--json")[1])["results"] == []
    assert run(capsys, "tune", "--stale", "--table", str(two))[1] == f"nothing to tune: no entry is stale in {two}\n"


def test_stale_entries_of_impossible_problems_are_refused(capsys: Any, two: Path) -> None:
    changed(two, "layer_norm", outputs="y,dx")
    code, _, err = run(capsys, "tune", "--stale", "--table", str(two))
    assert code == 2 and f"{two}: layer_norm: outputs 'y,dx', expected some of y,mean,rstd" in err


def test_stale_entries_of_the_tables_that_calls_read(
    capsys: Any, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a problem in several tables, the first entry counts: a stale one behind a fresh one is not tuned."""
    changed(two, "layer_norm")
    changed(two, "group_norm")
    monkeypatch.setattr(choose_tile, "user_table", lambda _: two)
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(tmp_path / "named.json"))
    assert run(capsys, "tune", "group_norm", "--shape", "2,8,64,2", "--trials", "1")[0] == 0
    code, _, err = run(capsys, "tune", "--stale", "--trials", "1")
    assert (code, re.findall(r"\[1/1\] (\w+)", err)) == (0, ["layer_norm"])
    assert run(capsys, "tune", "--stale", "group_norm")[0] == 0


def test_a_stale_entry_with_better_evidence_is_left(capsys: Any, two: Path) -> None:
    changed(two, "layer_norm", source="measured", time_us=3.0)
    changed(two, "group_norm")
    before = two.read_text()
    code, out, err = run(capsys, "tune", "layer_norm", "--stale", "--table", str(two))
    assert (code, two.read_text()) == (0, before)
    assert out == f"nothing to tune: no other entry is stale in {two}\n"
    assert "better evidence than a new one (modelled, not measured), left as they are: 1" in err
    code, _, err = run(capsys, "tune", "--stale", "--table", str(two), "--trials", "1")
    assert (code, re.findall(r"\[1/1\] (\w+)", err)) == (0, ["group_norm"])
    assert "left as they are: 1" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stale", "--shape", "8,64"), "--shape, --workload, --from-trace or --stale: received --shape and --stale"),
        (("--stale", "--workload", "quick"), "received --workload and --stale, expected exactly one"),
        (("--stale", "--dtype", "float16"), "--dtype: not valid with --stale"),
        (("--stale", "--outputs", "dx"), "--outputs: only valid with --shape"),
        (("--stale", "batch_norm"), "op: 'batch_norm', expected batch_norm_stats"),
        (("--stale", "--table", "none.json"), "--table: none.json: no such file"),
        (("--stale", "rms_norm"), "no problem left: 1 in all, none matches OP and --layout"),
    ],
)
def test_wrong_arguments_of_stale(
    capsys: Any, two: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    changed(two, "layer_norm")
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(two))
    code, _, err = run(capsys, "tune", *arguments)
    assert code == 2
    assert said in err

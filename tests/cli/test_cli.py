"""``cunorm doctor`` as text and JSON, on this machine and with missing software; ``cunorm demo``; ``--version``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cunorm
from cunorm.cli import doctor
from cunorm.cli import main as cli
from cunorm.cli import parser as cli_parser
from cunorm.cli.doctor import CheckResult, report
from cunorm.gate import gate
from cunorm.jit import cxx, nvrtc
from cunorm.jit.nvrtc import Nvrtc, Usage

GROUPS = [
    "Packages",
    "GPU executor",
    "CPU executor",
    "Cache folders",
    "Settings",
    "Demo",
    "Tuner",
    "PyTorch",
    "MPI",
    "Check",
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "show group_norm --shape 2 8 64 4",
            "unrecognized arguments: 8 64 4; --shape is one word with commas: 2,8,64,4",
        ),
        ("show group_norm --shape 2,8,64,4 --trafic", "unrecognized arguments: --trafic"),
        ("tune layer_norm --shape 8,64 --trial 3", "unrecognized arguments: --trial 3"),
        ("tune layer_norm --shape 8,64 --table=", "argument --table: empty, expected a path"),
        ("show --table=", "argument --table: empty, expected a path"),
        ("doctor --tiles all", "--tiles: requires --kernels"),
    ],
)
def test_a_wrong_option_prints_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    words = arguments.split()
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"usage: cunorm {words[0]} ")
    assert err.endswith(f"cunorm {words[0]}: error: {sentence}\n")


def facts(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """Exit code and document of ``doctor --json``; its findings by group and name."""
    code, out, err = run(capsys, "doctor", "--json")
    document = json.loads(out)  # stdout contains nothing else
    assert err == ""
    assert document["schema"] == "cunorm-doctor/1"
    for finding in document["findings"]:
        assert finding["state"] in ("ok", "missing", "fault")
        assert (finding["advice"] is None) == (finding["state"] == "ok"), finding
    return code, document, {(finding["group"], finding["name"]): finding for finding in document["findings"]}


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which the named modules seem not to be installed."""

    def hide(*modules: str) -> None:
        find, version = importlib.util.find_spec, importlib.metadata.version

        def find_spec(name: str, package: str | None = None) -> Any:
            return None if name in modules else find(name, package)

        def version_of(name: str) -> str:
            if name.startswith(modules):
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(importlib.metadata, "version", version_of)
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return hide


def test_doctor_text_has_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    lines = out.splitlines()
    assert [line for line in lines if line in GROUPS] == GROUPS
    assert lines[-1].startswith("cunorm runs on: ")
    assert "agrees with the reference" in " ".join(out.split())  # the length of the paths decides where lines wrap
    assert all(len(line) <= 80 or "/" in line for line in lines)  # a long path is not wrapped


def test_doctor_json_has_the_same_groups_as_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, found = facts(capsys)
    assert code == 0
    assert document["ok"]
    assert document["executors"]["cpu"]
    assert list(dict.fromkeys(group for group, _ in found)) == GROUPS
    assert found["Packages", "cunorm"]["facts"]["version"] == cunorm.__version__
    assert found["CPU executor", "simulated GPU"]["facts"]["device"] == "NVIDIA H200"
    used = [
        finding for (group, _), finding in found.items() if group == "CPU executor" and finding["facts"].get("used")
    ]
    assert [finding["facts"]["command"] for finding in used] == [list(cxx.chosen().command)]
    cache = found["Cache folders", "cunorm"]["facts"]
    assert cache["writable"]
    assert cache["bytes"] > 0


def test_doctor_without_a_compiler_fails_with_advice(tmp_path: Path) -> None:
    program = """if True:
        import importlib.util, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "ziglang" else find(name, package)
        from cunorm.cli.main import main
        sys.exit(main(["doctor", "--json"]))
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUNORM_CXX"}
    environment |= {"PATH": str(tmp_path), "CUNORM_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["executors"] == {"cpu": False, "gpu": False}
    found = {(finding["group"], finding["name"]): finding for finding in document["findings"]}
    assert found["CPU executor", "C++ compiler"]["state"] == "missing"
    for name in (("CPU executor", "C++ compiler"), ("Check", "CPU executor")):
        assert found[name]["advice"] == "pip install 'cunorm[cpu]'"


def test_doctor_without_cupy_reports_it_as_missing(capsys: pytest.CaptureFixture[str], no_module: Any) -> None:
    no_module("cupy")
    code, _, found = facts(capsys)
    assert code == 0
    assert found["GPU executor", "CuPy"]["state"] == "missing"
    assert found["GPU executor", "CuPy"]["advice"].startswith("pip install 'cunorm[cuda1")
    assert ("Cache folders", "CuPy") not in found


@pytest.mark.parametrize("error", [ImportError("libnvrtc.so.12: gone"), OSError("bad\nsecond line"), SystemExit(3)])
def test_a_failed_import_of_cupy_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(doctor, "_import_cupy", fail)
    monkeypatch.setattr(doctor, "_version_of", lambda name: "14.2.0" if name == "cupy-cuda12x" else None)
    code, _, found = facts(capsys)
    assert code == 0
    finding = found["GPU executor", "CuPy"]
    assert finding["state"] == "fault"
    assert str(error).partition("\n")[0] in finding["text"]


def test_two_installed_cupy_wheels_are_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(doctor, "_version_of", both.get)
    finding = facts(capsys)[2]["GPU executor", "CuPy wheels"]
    assert finding["state"] == "fault"
    assert finding["facts"]["wheels"] == both
    assert finding["advice"].startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install")


def test_gpus_are_listed_and_a_broken_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 1 << 37, "multiProcessorCount": 132}
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 12080, getDeviceCount=lambda: 2, getDeviceProperties=lambda ordinal: properties
    )
    cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)))
    monkeypatch.setattr(doctor, "_import_cupy", lambda: SimpleNamespace(__version__="14.2.0", cuda=cuda))
    monkeypatch.setattr(doctor, "_version_of", lambda name: "14.2.0" if name == "cupy-cuda12x" else None)
    found = {(finding.group, finding.name): finding for finding in doctor.examine()}
    gpu = found["GPU executor", "GPU 1"]
    assert gpu.text == "NVIDIA H200, compute capability 9.0, 128.0 GiB, 132 multiprocessors"
    assert gpu.facts["compute_capability"] == [9, 0]
    assert found["GPU executor", "driver"].facts["cuda"] == "12.8"
    assert found["Check", "GPU 1"].state == "fault"  # the fake CuPy has no arrays
    assert found["Check", "GPU 1"].advice


@pytest.mark.gpu
def test_doctor_finds_a_working_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, found = facts(capsys)
    assert code == 0
    assert document["executors"]["gpu"]
    assert found["Check", "GPU 0"]["state"] == "ok"


def test_an_unwritable_cache_folder_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    # A folder below a file: even root cannot create it.
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = facts(capsys)[2]["Cache folders", "cunorm"]
    assert finding["state"] == "fault"
    assert not finding["facts"]["writable"]
    assert finding["advice"] == 'export CUNORM_CACHE_DIR="$(mktemp -d)"'


def test_wrong_settings_are_faults_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_CPU_DEVICES", "A100")
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "C64")
    wrong = {"CORES": "many", "BUILD": "check"}
    for name, value in wrong.items():
        monkeypatch.setenv(f"CUNORM_CPU_{name}", value)
    monkeypatch.setenv("CUNORM_SPECIALISE", "yes")
    monkeypatch.setenv("CUNORM_TILING_TABLE", "/none.json")
    code, _, found = facts(capsys)
    assert code == 1
    assert "did you mean CUNORM_CPU_DEVICE?" in found["Settings", "CUNORM_CPU_DEVICES"]["text"]
    assert found["Settings", "CUNORM_CPU_DEVICES"]["advice"] == "unset CUNORM_CPU_DEVICES"
    for name in ("CUNORM_CPU_CORES", "CUNORM_CPU_BUILD", "CUNORM_SPECIALISE", "CUNORM_TILING_TABLE"):
        assert found["Settings", name]["state"] == "fault", name
        assert found["Settings", name]["text"].startswith(f"{name}: ")
    assert found["CPU executor", "simulated GPU"]["advice"] == "unset CUNORM_CPU_DEVICE"
    assert found["Check", "CPU executor"]["advice"] == "unset CUNORM_CPU_DEVICE"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("CACHE_DIR", "/dev/null", "/dev/null cannot be written: File exists"),
        ("TILING_TABLE", "bad.json", "bad.json: not JSON, or cut short: "),
        ("TILING_TABLE", "entries.json", "entries.json: entry 1: a int, expected an object"),
        ("TILING_TABLE", "/tmp", "/tmp: not a regular file"),
        ("TILING_TABLE", "none.json", "none.json: no such file"),
        ("TRACE", "/nope/x", "/nope/x: No such file or directory; nothing is traced; name another file"),
        ("TRACE", "/tmp", "/tmp: not a regular file; nothing is traced; name another file"),
        ("CPU_DEVICE", "foo", "'foo', expected one of A100"),
        ("CXX", "/nope", "'/nope' does not run"),
        ("CPU_ORDER", "foo", "'foo', expected ascending, descending, random or random:SEED"),
        ("CPU_BUILD", "sanitised", "'sanitised' needs the sanitiser's library loaded before Python"),
    ],
)
def test_each_setting_is_checked_as_a_call_checks_it(
    name: str, value: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "entries.json").write_text('{"schema": "cunorm-tiling/1", "device": {}, "entries": [1]}')
    monkeypatch.setenv(f"CUNORM_{name}", value)
    found = {finding.name: finding for finding in doctor._guarded("Settings", doctor._variables)}[f"CUNORM_{name}"]
    assert found.state == "fault"
    assert found.text.startswith(f"CUNORM_{name}: {sentence}")
    assert found.advice == f"unset CUNORM_{name}"


@pytest.mark.parametrize("command", ["doctor", "bench --rehearse --peers= layer_norm --shape 8,16"])
def test_the_problems_of_a_command_are_not_in_the_trace(command: str, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    environment = os.environ | {"CUNORM_TRACE": str(path)}
    subprocess.run([sys.executable, "-m", "cunorm", *command.split()], env=environment, check=True, capture_output=True)
    assert path.read_text() == ""


def test_a_wrong_result_is_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (0.5, float("nan")):
        monkeypatch.setattr(doctor, "_differences", lambda xp, wrong=wrong: wrong)
        code, document, found = facts(capsys)
        assert code == 1
        assert not document["ok"]
        assert "is wrong" in found["Check", "CPU executor"]["text"]


def test_a_check_that_raises_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("odd")

    monkeypatch.setattr(cxx, "present", fail)
    code, _, found = facts(capsys)
    assert code == 0
    assert found["CPU executor", "checks"]["text"] == "RuntimeError: odd"


def test_each_command_of_an_advice_is_printed_on_its_own_line() -> None:
    text = report([CheckResult("Group", "name", "fault", "words " * 30, "first && second")])
    assert max(map(len, text.splitlines())) <= 80
    assert [line.strip() for line in text.splitlines() if "type:" in line] == ["type: first", "type: second"]


@pytest.mark.parametrize("missing", [("sklearn",), ("tqdm", "matplotlib")])
def test_demo_names_its_missing_packages(
    capsys: pytest.CaptureFixture[str], no_module: Any, missing: tuple[str, ...]
) -> None:
    no_module(*missing)
    code, out, err = run(capsys, "demo", "--epochs", "1")
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "pip install 'cunorm[demo]'" in err
    assert all(doctor.DEMO[module] in err for module in missing)


def test_demo_passes_its_arguments_to_the_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in doctor.DEMO:
        pytest.importorskip(module)
    example = importlib.import_module("cunorm.examples.train_digits")
    seen: list[list[str]] = []
    monkeypatch.setattr(example, "main", lambda argv: seen.append(argv) or 3)
    assert run(capsys, "demo", "--epochs", "1", "--json")[0] == 3
    assert run(capsys, "demo", "--", "--help")[0] == 3
    assert seen == [["--epochs", "1", "--json"], ["--help"]]

    def no_compiler(argv: list[str]) -> int:
        raise cunorm.CompileError("none found")

    monkeypatch.setattr(example, "main", no_compiler)
    code, _, err = run(capsys, "demo")
    assert code == 1
    assert err == "none found\nsee `cunorm doctor`\n"


@pytest.mark.parametrize("arguments", [[], ["doctr"], ["doctor", "--jsn"], ["--no-such"]])
def test_unknown_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: cunorm" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["demo", "--help"]])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    assert "example:\n  cunorm " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["--version", "--help", "show group_norm --shape 2,4,6,2", "merge --help"])
def test_a_closed_pipe_and_a_full_disk_end_a_command_with_a_code(command: str, tmp_path: Path) -> None:
    """Without PYTHONUNBUFFERED the output is written when the program ends."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    whole = f"{sys.executable} -m cunorm {command}"
    script = f"{{ sleep 0.2; {whole}; echo $? >code; }} | true"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ((tmp_path / "code").read_text(), done.stderr) == ("141\n", "")
    if Path("/dev/full").exists():
        done = subprocess.run(["bash", "-c", f"{whole} >/dev/full"], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, "cunorm: standard output: No space left on device\n")
    done = subprocess.run(["bash", "-c", f"{whole} >&-"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr  # argparse prints to stderr then


def test_an_error_of_the_system_without_a_file_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(cli, "_run", busy)
    assert run(capsys, "doctor") == (1, "", "cunorm: Too many open files\n")


@pytest.mark.parametrize("arguments", [["--vers"], ["demo", "--epo", "0"]])
def test_a_name_cannot_be_abbreviated(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2 and arguments[-2:][0] in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"cunorm {cunorm.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "cunorm", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cunorm {cunorm.__version__}\n", "")


# ---- doctor --kernels -----------------------------------------------------------------------------------------------

OLD, NEW = Nvrtc("12.8.93", "/nowhere"), Nvrtc("13.5.37", "/elsewhere")


@pytest.fixture
def ptxas(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace NVRTC by a fake: the oldest and the newest supported version.

    Returns the resources that the fake ptxas reports. A test changes them.
    """
    says = {"registers": 32, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0, "barriers": 1}

    def usages(text: str, architecture: str, version: Nvrtc) -> list[Usage]:
        entry = re.findall(r'extern "C" __global__ void (?:CLUSTER )?__launch_bounds__\([^\n]*\)\s+(\w+)\(', text)[0]
        return [Usage(entry=entry, loads_16=1, stores_16=1, **says)]

    monkeypatch.setattr(nvrtc, "ends", lambda: [OLD, NEW])
    monkeypatch.setattr(gate, "usages", usages)
    return says


def test_doctor_kernels_as_text_and_json(capsys: pytest.CaptureFixture[str], ptxas: dict[str, int]) -> None:
    code, out, err = run(capsys, "doctor", "--kernels")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 120
    assert out.endswith("no spill, no stack, all launchable.\n")
    code, out, err = run(capsys, "doctor", "--kernels", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["ok"], document["faults"], document["missing"]) == (True, [], None)
    assert document["nvrtc"] == ["12.8.93", "13.5.37"]
    assert {row["architecture"] for row in document["kernels"]} == set(nvrtc.ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [("spill_bytes", 16, "spills 16"), ("stack_bytes", 8, "stack"), ("registers", 255, "launch")],
)
def test_doctor_kernels_fails_on_a_fault(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ptxas: dict[str, int],
    name: str,
    value: int,
    word: str,
) -> None:
    only = next(case for case in gate.cases() if (case.op, case.strategy) == ("group_norm", "block"))
    monkeypatch.setattr(gate, "builds", partial(gate.builds, only=only))
    ptxas[name] = value
    code, out, _ = run(capsys, "doctor", "--kernels")
    assert code == 1
    assert any(line.startswith("fault: group_norm_block: ") and word in line for line in out.splitlines())
    code, out, _ = run(capsys, "doctor", "--kernels", "--json")
    assert code == 1
    assert not json.loads(out)["ok"]


def test_doctor_kernels_without_nvrtc_names_the_wheels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "installed", list)
    code, out, err = run(capsys, "doctor", "--kernels")
    assert (code, out) == (1, "")
    assert "needs NVRTC 12.8 or newer, before 14.0" in err
    for wheel in nvrtc.INSTALL:
        assert wheel in err


def test_doctor_tiles_requires_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ptxas: dict[str, int]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--tiles", "all"])
    assert stop.value.code == 2
    for tiles in gate.TILES:
        assert cli_parser.parser().parse_args(["doctor", "--tiles", tiles]).tiles == tiles
    only, builds = gate.cases()[0], gate.builds
    monkeypatch.setattr(gate, "builds", lambda nvrtcs, tiles: builds(nvrtcs, tiles=tiles, only=only))
    texts = [json.loads(run(capsys, "doctor", "--kernels", "--json", *more)[1]) for more in ([], ["--tiles", "all"])]
    assert [document["tiles"] for document in texts] == ["choice", "all"]
    assert sum(row["tiles"] for row in texts[1]["kernels"]) > 10 * sum(row["tiles"] for row in texts[0]["kernels"])


def test_doctor_kernels_needs_no_cupy(tmp_path: Path) -> None:
    """The command needs neither CuPy nor a GPU. Without NVRTC, it prints the pip command to type."""
    program = """if True:
        import sys
        sys.modules["cupy"] = None
        from cunorm.cli import main as cli
        from cunorm.jit import nvrtc
        nvrtc._WHEELS = nvrtc._TOOLKITS = ()
        sys.exit(cli.main(["doctor", "--kernels"]))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install --no-deps --target" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_extras_are_those_of_the_project() -> None:
    """Each name that doctor reports as missing is installed by the command that it prints."""
    required = importlib.metadata.requires("cunorm") or []
    for extra, modules in doctor.EXTRAS.items():
        mine = [one for one in required if re.search(rf"extra == ['\"]{extra}['\"]", one)]
        names = {found[0] for one in mine if (found := re.match(r"[\w.-]+", one)) is not None}
        assert set(modules.values()) == names, extra
    assert {extra for extra, _ in doctor.OPTIONAL.values()} == set(doctor.EXTRAS)

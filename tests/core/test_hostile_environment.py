"""Absurd values of the CUNORM_ variables: a call succeeds, or its error message names the variable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.errors import CompileError
from cunorm.executors.cpu import executor
from cunorm.executors.cpu import kernel as cpu_kernel
from cunorm.jit import cpu_builds, cxx
from tests.support.problems import forget_calls

#: Values for every variable: empty, blanks, numbers, paths, quotes, shell syntax, characters that no codec encodes.
ANY = (
    "", " ", "\t\n", "0", "-1", "1e9", "9" * 5000, "nan", "None", "/", ".", "/dev/null", "/dev/zero", "/proc/self/mem",
    "x" * 300, "y/" * 3000, "'", '"', "$(touch owned)", "`touch owned`", "; touch owned", "a|b&c", "%s%n{}", "[a]*?",
    "\x1b[2J", "ü\u202e", "\udcff\udcfe", "~", "~nobody-here/x", "-rf", "--help",
)  # fmt: skip
#: More values for single variables.
MORE: dict[str, tuple[str, ...]] = {
    "CUNORM_CXX": ("true", "echo", "false", "cat", "g++ --nonsense", "python3"),
    "CUNORM_CPU_CORES": (
        "1.5", "+1", "0x2", "\u0663", "2**9", "1_000", "9" * 18, "9" * 19, "0" * 18, "1\n", "2 ", "inf",
    ),
    "CUNORM_CPU_ORDER": (
        "random", "random:", "random:-1", "random:x", "ascending:1", "ASCENDING", "random:" + "9" * 18,
        "random:" + "9" * 19, "random:" + "9" * 5000, "random:\u0663", "random:\u00b2", "random:1\n", "random: 1",
        "random:1e9", "random:nan", "random:1_0", "random:1:2", "random\udcff", ":", "ascending\n",
    ),
    "CUNORM_CPU_BUILD": ("plain ", "sanitised", "Checked", "checked\n"),
    "CUNORM_CPU_DEVICE": ("h200 ", "V100", "H 1 0 0", "rtx_4090", "H200\n", "\u2460"),
    "CUNORM_TILING_TABLE": ("table.json",),
}  # fmt: skip


TEXT = 'extern "C" __global__ void one(float* y) { y[threadIdx.x] = 1.0f; }'
X = np.arange(32, dtype=np.float32).reshape(4, 8)
EXPECTED = reference.layer_norm(X.astype(np.float64), 8)[0]


def call() -> None:
    """Call a public function with empty caches of calls, and check its result."""
    forget_calls()
    np.testing.assert_allclose(cunorm.layer_norm(X, 8)[0], EXPECTED, atol=1e-5)


def compile_one() -> None:
    """Compile a kernel that the process has not cached, run it, and check its result."""
    cpu_kernel._kernels.clear()
    y = np.zeros(32, np.float32)
    executor.launch(executor.compile(TEXT, "one"), 1, 32, 0, [y.ctypes.data])
    assert (y == 1).all()


def sentence(run: Callable[[], None]) -> str | None:
    """The error message of a function, or None if it succeeds."""
    try:
        run()
    except (CompileError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MORE)
def test_a_call_succeeds_or_its_error_names_the_variable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error message contains the variable or the compiler that it names. No shell syntax is executed."""
    call()
    compile_one()
    monkeypatch.chdir(tmp_path)
    refused = []
    for value in (*ANY, *MORE[name]):
        monkeypatch.setenv(name, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = sentence(compile_one if name == "CUNORM_CXX" else call)
        assert said is None or name in said or f"does not compile with {value} (" in said, (value[:40], said)
        refused += [value] if said is not None else []
        assert len(caught) <= 1, (value[:40], [str(one.message) for one in caught])
        assert all(issubclass(one.category, cunorm.TableWarning) for one in caught)
    assert not (tmp_path / "owned").exists()
    assert len(refused) > 10 or name == "CUNORM_TILING_TABLE"


TRACES = """
import warnings, numpy as np, cunorm
from cunorm.core import settings
from cunorm.tiling import problem_trace
x = np.ones((1, 4), np.float32)
for number, value in enumerate({values}):
    settings.os.environ["CUNORM_TRACE"] = value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        problem_trace._from_environment()
        assert np.array_equal(cunorm.layer_norm(x, 4)[0], 0 * x)
    said = [str(one.message) for one in caught]
    expected = 0 if problem_trace.active() or not value else 1
    assert len(said) == expected or value == "/proc/self/mem", (value[:40], said)
    assert problem_trace.active() or all(one.startswith("CUNORM_TRACE: ") for one in said), said
    while problem_trace._traces:
        problem_trace._traces.pop().close()
        print(number)
"""


def test_names_of_trace_files(tmp_path: Path) -> None:
    """Each value opens a trace file, or causes one warning that names the variable. No call waits or fails."""
    values = (*ANY, "/dev/full", "/dev/tty", str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TRACES.format(values=values)],
        capture_output=True, text=True, cwd=tmp_path / "here", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    traced = [values[int(line)] for line in done.stdout.split()]
    assert {"0", "1e9", "nan", "ü\u202e", "\udcff\udcfe", "--help"} <= {*traced}
    assert not {"", "/", ".", "~", "/dev/null", "/dev/zero", "/dev/full", "x" * 300, str(tmp_path / "pipe")} & {*traced}
    assert not [*tmp_path.rglob("owned")]


def test_names_of_cache_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder is used, or the error message names the variable.

    The test replaces the compiler by a copy of a finished build, to be fast. Nothing is linked to the copy.
    """
    cpu_kernel._kernels.clear()
    build = shutil.copytree(executor.compile(TEXT, "one").path.parent, tmp_path / "build")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cxx, "shared_object", lambda *a: shutil.copy(build / "kernel.so", a[6] / a[1]))
    monkeypatch.setattr(cxx, "object_file", lambda *a: (a[5] / a[1]).write_bytes(b"the runtime"))
    (tmp_path / "here").mkdir(0o700)
    monkeypatch.chdir(tmp_path / "here")
    used = 0
    for value in ANY:
        if value in ("", "/"):  # "" selects the default folder; no test may write to "/"
            continue
        monkeypatch.setenv("CUNORM_CACHE_DIR", value)
        said = sentence(compile_one)
        assert said is None or "CUNORM_CACHE_DIR" in said, (value[:40], said)
        used += said is None
    assert used > 15
    assert not [*tmp_path.rglob("owned")]


@pytest.mark.parametrize("link", [False, True])
def test_a_compile_in_a_folder_with_metacharacters(link: bool, tmp_path: Path) -> None:
    """Compile, link and load, then load the build from disk in a second process; also through a symbolic link."""
    folder = tmp_path / "a b;'\"$(touch owned)`x`[c]*?%s\n\\ü" / "-o"
    if link:
        (tmp_path / "real").mkdir(0o700)
        folder.parent.mkdir()
        folder.symlink_to(tmp_path / "real")
    script = (
        "import numpy as np\nfrom cunorm.executors.cpu import executor as cpu\ny = np.zeros(32, np.float32)\n"
        """cpu.launch(cpu.compile('extern "C" __global__ void one(float* y) { y[0] = 1.0f; }', 'one'), 1, 32, 0, """
        "[y.ctypes.data])\nprint(y[0])"
    )
    environment = {**os.environ, "CUNORM_CACHE_DIR": str(folder)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    kernel, runtime = sorted((folder / "cpu").iterdir())
    assert cpu_builds._whole(kernel) and cpu_builds._whole(runtime, "runtime.o")
    assert not (tmp_path / "owned").exists()

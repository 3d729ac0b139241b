"""Builds on disk: damaged, planted by another user, left incomplete by a killed process, made by several processes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.errors import CompileError
from cunorm.executors.cpu import executor
from cunorm.executors.cpu import kernel as cpu_kernel
from cunorm.jit import cpu_builds, cxx

TEXT = 'extern "C" __global__ void ramp(float* y) { y[threadIdx.x] = threadIdx.x * 2.0f; }'
OTHER = TEXT.replace("2.0f", "3.0f")
EXPECTED = f"{[2.0 * lane for lane in range(32)]}\n"
#: Compiles and runs a kernel and prints its output. The first argument is the kernel's text.
CHILD = """
import sys, numpy as np
from cunorm.executors.cpu import executor as cpu
y = np.zeros(32, np.float32)
cpu.launch(cpu.compile(sys.argv[1], "ramp"), 1, 32, 0, [y.ctypes.data])
print(y.tolist())
"""
#: Another user. No process on this machine runs as this user.
STRANGER = 54321
SECONDS = 240  # time limit of a child, enough on a busy machine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that contains the build of one kernel, and the runtime's. Tests copy it."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUNORM_CACHE_DIR", str(folder))
        executor.compile(TEXT, "ramp")
    return folder


@pytest.fixture
def kept(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the build in a copy of the cache for one test. No process has loaded the build from it."""
    shutil.copytree(built, tmp_path / "cache", symlinks=True)
    (tmp_path / "cache").chmod(0o700)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    (folder,) = (tmp_path / "cache" / "cpu").glob("ramp-*")
    yield folder
    assert [*(tmp_path / "cache").rglob(".build-*")] == []


def runtime_in(folder: Path) -> Path:
    """The build of the runtime, which is intact."""
    (found,) = folder.glob("runtime-*")
    assert cpu_builds._whole(found, "runtime.o")
    return found


def only_kernel(folder: Path) -> Path:
    """The only build in a folder besides the runtime's."""
    (found,) = {*folder.iterdir()} - {runtime_in(folder)}
    return found


def child(text: str = TEXT, script: str = CHILD, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process; by default the one that compiles and runs a kernel."""
    return subprocess.run(
        [sys.executable, "-c", script, text],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout) == (0, EXPECTED), done.stderr


def no_compiler(*_: Any) -> None:
    pytest.fail("the kernel was compiled again")


# ---- damage ---------------------------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeroed(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 3)
    os.truncate(path, size)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder_in_the_place_of_the_build(path: Path) -> None:
    shutil.rmtree(path.parent)
    (path.parent / "full").mkdir(parents=True)


def a_file_in_the_place_of_the_build(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_bytes(b"rubbish")


def a_link_to_nothing(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.symlink_to("nowhere")


DAMAGES: tuple[Callable[[Path], None], ...] = (
    truncated,
    zeroed,
    emptied,
    flipped,
    a_folder,
    a_pipe,
    a_folder_in_the_place_of_the_build,
    a_file_in_the_place_of_the_build,
    a_link_to_nothing,
)


@pytest.mark.parametrize("damage", DAMAGES[:2])
def test_a_damaged_build_does_not_end_the_process(damage: Callable[[Path], None], kept: Path) -> None:
    """Without a check, every call would raise SIGBUS with the truncated build and SIGSEGV with the zeroed one."""
    damage(kept / "kernel.so")
    check(child())
    assert cpu_builds._whole(kept)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_build_is_detected_and_replaced(
    damage: Callable[[Path], None], kept: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces the compiler by a copy of a finished build, to be fast."""
    (whole,) = (built / "cpu").glob("ramp-*")

    def copied(source: str, target: str, entry: str, *rest: Any) -> None:
        shutil.copy(whole / "kernel.so", rest[3] / target)

    assert cpu_builds._whole(kept)
    damage(kept / "kernel.so")
    assert not cpu_builds._whole(kept)
    monkeypatch.setattr(cxx, "shared_object", copied)
    cpu_kernel._kernels.clear()
    y = np.zeros(32, np.float32)
    executor.launch(executor.compile(TEXT, "ramp"), 1, 32, 0, [y.ctypes.data])
    assert y.tolist() == [2.0 * lane for lane in range(32)]
    assert cpu_builds._whole(kept)
    monkeypatch.setattr(cxx, "shared_object", no_compiler)
    cpu_kernel._kernels.clear()
    executor.compile(TEXT, "ramp")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_runtime_is_not_linked(damage: Callable[[Path], None], kept: Path) -> None:
    """It is compiled again. Without a check, the linker would fail or link what is left of it."""
    runtime = runtime_in(kept.parent)
    damage(runtime / "runtime.o")
    assert not cpu_builds._whole(runtime, "runtime.o")
    cpu_kernel._kernels.clear()
    y = np.zeros(32, np.float32)
    executor.launch(executor.compile(OTHER, "ramp"), 1, 32, 0, [y.ctypes.data])
    assert y.tolist() == [3.0 * lane for lane in range(32)]
    assert runtime_in(kept.parent) == runtime


def test_a_runtime_that_vanishes_after_its_check_is_linked(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may delete or replace it at any time. What was checked is linked."""
    genuine = cxx.object_file

    def deleting(*given: Any) -> None:
        genuine(*given)
        shutil.rmtree(runtime_in(kept.parent), ignore_errors=True)

    monkeypatch.setattr(cxx, "object_file", deleting)
    cpu_kernel._kernels.clear()
    y = np.zeros(32, np.float32)
    executor.launch(executor.compile(OTHER, "ramp"), 1, 32, 0, [y.ctypes.data])
    assert y.tolist() == [3.0 * lane for lane in range(32)]
    assert not [*kept.parent.glob("runtime-*")]


def test_kernels_share_a_runtime_and_depend_on_its_text(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is linked to an older runtime is not loaded."""
    cpu_kernel._kernels.clear()
    executor.compile(OTHER, "ramp")
    old = runtime_in(kept.parent)
    before = {*kept.parent.iterdir()}
    genuine, every = cpu_kernel._headers, cpu_kernel.RUNTIME_HEADERS
    monkeypatch.setattr(cpu_kernel, "_headers", lambda names: genuine(names) + "// another\n" * (names == every))
    cpu_kernel._kernels.clear()
    executor.compile(TEXT, "ramp")
    kernel, runtime = sorted({*kept.parent.iterdir()} - before)
    assert (kernel / "kernel.cpp").read_text() == (kept / "kernel.cpp").read_text()
    assert runtime.name.startswith("runtime-") and old.exists()


@pytest.mark.parametrize("file", ["kernel.so", "kernel.sha256"])
def test_every_flipped_bit_is_detected(file: str, kept: Path) -> None:
    data = (kept / file).read_bytes()
    for place in np.random.default_rng(5).integers(0, 8 * len(data), 40):
        other = bytearray(data)
        other[place // 8] ^= 1 << (place % 8)
        (kept / file).write_bytes(other)
        assert not cpu_builds._whole(kept), place
    (kept / file).write_bytes(data)
    assert cpu_builds._whole(kept)


def test_the_build_of_another_text_is_not_loaded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intact build under the name of another one would silently compute wrong results."""
    cpu_kernel._kernels.clear()
    other = executor.compile(OTHER, "ramp").path.parent
    shutil.rmtree(kept)
    shutil.copytree(other, kept)
    check(child())
    check(child())


def test_a_build_is_verified_once_per_process(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm call does not compute the checksum, and a second process does not compile."""
    monkeypatch.setattr(cxx, "shared_object", no_compiler)
    genuine, looks = cpu_builds._whole, []
    monkeypatch.setattr(cpu_builds, "_whole", lambda folder: (looks.append(folder), genuine(folder))[1])
    cpu_kernel._kernels.clear()
    for _ in range(3):
        executor.compile(TEXT, "ramp")
    assert looks == [kept]


def test_the_build_that_counts_reuse_distances_is_verified_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    script = (
        "from cunorm.core import settings; from cunorm.traffic import reuse\n"
        "print(reuse._library(settings.cache_dir()).cunorm_reuse_new() > 0)"
    )
    first = child(script=script)
    assert first.returncode == 0, first.stderr
    (path,) = (tmp_path / "cpu").glob("reuse*/kernel.so")
    zeroed(path)
    assert child(script=script).stdout == first.stdout == "True\n"
    assert cpu_builds._whole(path.parent)


def test_a_build_is_flushed_to_disk_before_it_is_renamed_into_place(
    kept: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = (built / "cpu").glob("ramp-*")
    done: list[str] = []
    genuine, rename = os.fsync, Path.rename
    monkeypatch.setattr(cxx, "shared_object", lambda *a: shutil.copy(whole / "kernel.so", a[6] / a[1]))

    def noted(handle: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        genuine(handle)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append("rename"), rename(self, to))[1])
    shutil.rmtree(kept)
    cpu_kernel._kernels.clear()
    executor.compile(TEXT, "ramp")
    assert [Path(one).name.partition("-")[0] for one in done] == ["kernel.so", "kernel.sha256", ".build", "rename"]


# ---- builds of other users ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernel.so", "runtime.o"])
@pytest.mark.parametrize("of_folder", [False, True])
@pytest.mark.parametrize("how", ["another owner", "others may write"])
def test_a_build_that_another_user_may_have_planted_is_rejected(
    name: str, of_folder: bool, how: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build is intact and its seal is right: a user who plants a build can also write its seal."""
    folder = kept if name == "kernel.so" else runtime_in(kept.parent)
    what = folder if of_folder else folder / name
    if how == "others may write":
        what.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(what, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert not cpu_builds._whole(folder, name)


def test_a_planted_build_does_not_run(kept: Path, tmp_path: Path) -> None:
    """An attacker may have planted it while all users could write to the cache."""
    mark = tmp_path / "it ran"
    evil = f'__attribute__((constructor)) static void run() {{ fclose(fopen("{mark}", "w")); }}'
    (tmp_path / "evil.cpp").write_text(f"#include <stdio.h>\n{evil}\n")
    compiler = cxx.chosen()
    command = [*compiler.command, "-shared", "-fPIC", str(tmp_path / "evil.cpp"), "-o", str(kept / "kernel.so")]
    subprocess.run(command, check=True)
    seal = cpu_builds._seal(kept.name, (kept / "kernel.so").read_bytes())
    (kept / "kernel.sha256").write_text(seal)
    kept.chmod(0o777)
    check(child())
    assert not mark.exists()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o022])
def test_modes_do_not_depend_on_the_umask(
    umask: int, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = (built / "cpu").glob("ramp-*")
    monkeypatch.setattr(cxx, "shared_object", lambda *a: shutil.copyfile(whole / "kernel.so", a[6] / a[1]))
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "a" / "b"))
    cpu_kernel._kernels.clear()
    before = os.umask(umask)
    try:
        path = executor.compile(TEXT, "ramp").path
    finally:
        os.umask(before)
    runtime = runtime_in(path.parents[1])
    inside = (*path.parent.iterdir(), *runtime.iterdir())
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in (path, *path.parents[:5], runtime, *inside)}
    private = ("kernel.sha256", "kernel.cpp", "runtime.sha256", "runtime.cpp", "runtime.o")
    assert {modes.pop(name) for name in private} == {0o600}
    assert set(modes) == {"kernel.so", path.parent.name, runtime.name, "cpu", "b", "a", tmp_path.name}
    assert set(modes.values()) == {0o700}


# ---- killed processes, full disks, several processes at once --------------------------------------------------------


def test_work_folders_of_killed_processes_are_deleted(kept: Path) -> None:
    """A folder in which a process compiles at this moment is not deleted."""
    folder = kept.parent
    shutil.rmtree(kept)
    for name in (".build-killed", ".build-x.old"):
        (folder / name).mkdir()
        (folder / name / "kernel.o").write_bytes(b"half")
    with cpu_builds._working(folder) as work:
        (work / "kernel.o").write_bytes(b"half")
        check(child())
        assert {*folder.iterdir()} == {work, kept, runtime_in(folder)}
        assert (work / "kernel.o").exists()


def test_only_old_work_folders_are_deleted_if_folders_cannot_be_locked(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EBADF, "the error on NFS")

    monkeypatch.setattr(cpu_builds.fcntl, "flock", refused)
    new, old = kept.with_name(".build-new"), kept.with_name(".build-old")
    for path in (new, old):
        path.mkdir()
    os.utime(old, (0, 0))
    cpu_builds._sweep(kept.parent)
    assert (new.exists(), old.exists()) == (True, False)
    new.rmdir()


@pytest.mark.parametrize("source", ["runtime.cpp", "kernel.cpp"])
def test_a_process_that_is_killed_while_it_compiles(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 while the compiler runs, no incomplete build is used. The next process deletes the work folder."""
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", CHILD, TEXT], start_new_session=True) as process:
        limit = time.monotonic() + SECONDS
        while not [*tmp_path.glob(f"cpu/.build-*/{source}")]:
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    left = sorted(one.name.partition("-")[0] for one in (tmp_path / "cpu").iterdir())
    assert left == [".build", *["runtime"] * (source == "kernel.cpp")]
    check(child())
    assert cpu_builds._whole(only_kernel(tmp_path / "cpu"))


def test_an_intact_build_is_not_replaced(kept: Path) -> None:
    """Another process may be loading it."""
    before = (kept / "kernel.so").stat().st_ino
    with cpu_builds._working(kept.parent) as work:
        shutil.copytree(kept, work, dirs_exist_ok=True)
        cpu_builds._publish(work, kept, "kernel.so")
    assert (kept / "kernel.so").stat().st_ino == before


def test_several_threads_build_at_once(kept: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen threads share an empty cache. None loads an incomplete build or deletes the work folder of another.

    The test replaces the compiler by a copy of a finished build.
    """
    (whole,) = (built / "cpu").glob("ramp-*")
    shutil.rmtree(kept)

    def copied(*given: Any) -> None:
        time.sleep(0.01)
        shutil.copy(whole / "kernel.so", given[6] / given[1])

    monkeypatch.setattr(cxx, "shared_object", copied)
    cpu_kernel._kernels.clear()
    gate, options = threading.Barrier(16), cxx.flags(cxx.chosen())

    def load(_: int) -> Path:
        gate.wait(SECONDS)
        return cpu_builds.load("the same for all", "ramp", cxx.chosen(), options)[1]

    with ThreadPoolExecutor(16) as pool:
        paths = set(pool.map(load, range(16)))
    assert len(paths) == 1
    assert cpu_builds._whole(paths.pop().parent)


def test_a_path_with_names_that_the_loader_replaces(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept.parent.parent / "$ORIGIN"
    shutil.copytree(kept.parent, folder / "cpu")
    folder.chmod(0o700)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(folder))
    with pytest.raises(CompileError, match=r"replaces \$ORIGIN, .*; set CUNORM_CACHE_DIR to a path without them"):
        executor.compile(TEXT, "ramp")


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("damaged", [False, pytest.param(True, marks=pytest.mark.long)])
def test_several_processes_build_at_once(number: int, damaged: bool, tmp_path: Path, built: Path) -> None:
    """The processes share an empty cache, or a cache whose builds are damaged."""
    if damaged:
        shutil.copytree(built / "cpu", tmp_path / "cpu")
        zeroed(*(tmp_path / "cpu").glob("ramp-*/kernel.so"))
        zeroed(*(tmp_path / "cpu").glob("runtime-*/runtime.o"))
    command = [sys.executable, "-c", CHILD, TEXT]
    environment = {**os.environ, "CUNORM_CACHE_DIR": str(tmp_path)}
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(number)]
    for one in children:
        out, err = one.communicate(timeout=SECONDS)
        assert (one.returncode, out) == (0, EXPECTED), err
    assert cpu_builds._whole(only_kernel(tmp_path / "cpu"))


#: Sixteen threads make their first call at the same moment.
THREADS = """
import threading, numpy as np, cunorm
from cunorm import reference
x = np.arange(64, dtype=np.float32).reshape(4, 16)
exact = reference.layer_norm(x, 16)[0]
gate, right = threading.Barrier(16), []
def first_call():
    gate.wait()
    right.append(np.abs(cunorm.layer_norm(x, 16)[0] - exact).max() < 1e-5)
threads = [threading.Thread(target=first_call) for _ in range(16)]
for one in threads: one.start()
for one in threads: one.join()
print(right.count(True))
"""


@pytest.mark.parametrize("number", [1, pytest.param(8, marks=pytest.mark.long)])
def test_first_calls_of_processes_with_sixteen_threads_each(number: int, tmp_path: Path) -> None:
    """The processes share an empty cache. Every call is right, and intact builds are all that is left."""
    environment = {**os.environ, "CUNORM_CACHE_DIR": str(tmp_path)}
    pipe, command = subprocess.PIPE, [sys.executable, "-c", THREADS]
    children = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(number)]
    for one in children:
        out, err = one.communicate(timeout=2 * SECONDS)
        assert (one.returncode, out) == (0, "16\n"), err
    found = only_kernel(tmp_path / "cpu")
    (launch,) = cunorm.plan("layer_norm", shape=(4, 16), dtype="float32", normalized_shape=16, device="cpu").launches
    assert found.name.partition("-")[0] == launch.kernel
    assert cpu_builds._whole(found)


@pytest.mark.parametrize("has_runtime", [True, False])
def test_a_full_disk(has_runtime: bool, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files has the effect of a full disk: one error, and no incomplete build is left."""
    shutil.rmtree(kept)
    if not has_runtime:
        shutil.rmtree(runtime_in(kept.parent))
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)){CHILD}"
    done = child(script=limited)
    assert done.returncode == 1
    assert "CompileError: ramp" in done.stderr
    assert "CUNORM_CACHE_DIR" in done.stderr
    assert [one.name.partition("-")[0] for one in kept.parent.iterdir()] == ["runtime"] * has_runtime


@pytest.mark.parametrize("call", ["fsync", "chmod", "mkdir", "rename"])
def test_a_write_to_disk_that_fails(call: str, kept: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step may fail. The error names the folder and the remedy, and the next call compiles."""
    (whole,) = (built / "cpu").glob("ramp-*")
    monkeypatch.setattr(cxx, "shared_object", lambda *a: shutil.copy(whole / "kernel.so", a[6] / a[1]))
    shutil.rmtree(kept.parent if call == "mkdir" else kept)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cpu_kernel._kernels.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, full)
        with pytest.raises(CompileError, match=r"ramp: cannot write .* \(No space left on device\); set CUNORM_CACHE"):
            executor.compile(TEXT, "ramp")
    assert not kept.exists()
    executor.compile(TEXT, "ramp")

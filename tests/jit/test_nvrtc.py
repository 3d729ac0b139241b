"""NVRTC without a GPU: the versions that are found, what is parsed from its output, and the cache of its results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cunorm.core.errors import CompileError
from cunorm.jit import nvrtc
from cunorm.jit.nvrtc import Nvrtc, Usage, usages_in
from tests.support.compilers import NVRTCS, SMALL, needs_nvrtc


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    return tmp_path / "nvrtc"


def test_the_usages_of_every_kernel_are_parsed_from_ptx_and_log() -> None:
    log = (
        "ptxas info    : 48 bytes gmem\n"
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\n"
        "ptxas         .     8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 210 registers, used 2 barriers, 400 bytes smem\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 24 registers\n"
    )
    ptx = (
        ".visible .entry one(\nld.global.nc.v4.u32 {\nld.global.v2.f32 {\n"
        "\tld.global.v4.u32 \t{%r1, %r2, %r3, %r4}, [%rd1];\n\tmov.b32 \t{%rs1, %rs2}, %r4;\n"
        "\tld.global.v4.u32 \t{%r5, %r6, %r7, %r8}, [%rd1];\n\tmov.b32 \t{%rs3, %rs4}, %r9;\n"
        ".entry two(\nst.global.v4.b32 [%rd]\n"
    )
    one, two = usages_in(ptx, log)
    assert one == Usage("one", 210, 20, 8, 400, 2, 3, 0, taken_apart=1)
    assert two == Usage("two", 24, 0, 0, 0, 0, 0, 1)
    for unknown in ("", log.replace("spill stores", "spilled"), log.replace("Used 24 registers", "")):
        with pytest.raises(CompileError):
            usages_in(ptx, unknown)


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were passed to NVRTC."""
    seen: list[str] = []
    compile = Nvrtc.compile

    def noted(self: Nvrtc, text: str, architecture: str) -> tuple[str, str]:
        seen.append(text)
        return compile(self, text, architecture)

    monkeypatch.setattr(Nvrtc, "compile", noted)
    return seen


@needs_nvrtc
def test_the_cache_key_covers_text_architecture_nvrtc_options_and_format(
    empty_cache: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nvrtc.usages(SMALL, "sm_90", NVRTCS[0])
    assert nvrtc.usages(SMALL, "sm_90", NVRTCS[0]) == first
    assert len(compiles) == 1
    nvrtc.usages(SMALL.replace("1", "2"), "sm_90", NVRTCS[0])  # an edited kernel
    nvrtc.usages(SMALL, "sm_80", NVRTCS[0])
    nvrtc.usages(SMALL, "sm_90", Nvrtc(NVRTCS[0].version + ".1", NVRTCS[0].path))
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
    nvrtc.usages(SMALL, "sm_90", NVRTCS[0])
    monkeypatch.setattr(nvrtc, "_FORMAT", -1)
    nvrtc.usages(SMALL, "sm_90", NVRTCS[0])
    assert len(compiles) == len(list(empty_cache.glob("*.json"))) == 6


@needs_nvrtc
@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "half", "digit", "field", "binary", "folder"])
def test_a_damaged_cache_entry_is_compiled_again(empty_cache: Path, compiles: list[str], damage: str) -> None:
    first = nvrtc.usages(SMALL, "sm_90", NVRTCS[0])
    (file,) = empty_cache.iterdir()
    text = file.read_text()
    damaged = {
        "half": text[: len(text) // 2],
        "digit": text.replace('"spill_bytes": 0', '"spill_bytes": 1'),
        "field": text.replace("spill_bytes", "spilt_bytes"),
    }.get(damage, damage)
    assert damaged != text
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(b"\xff\xfe" if damage == "binary" else damaged.encode())
    assert nvrtc.usages(SMALL, "sm_90", NVRTCS[0]) == first
    assert len(compiles) == 2
    assert damage == "folder" or file.read_text() == text


@needs_nvrtc
def test_an_unwritable_cache_raises_no_error(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "file"))  # not a folder: even root cannot write into it
    assert nvrtc.usages(SMALL, "sm_90", NVRTCS[0]) == nvrtc.usages(SMALL, "sm_90", NVRTCS[0])
    assert len(compiles) == 2


@needs_nvrtc
def test_two_processes_write_the_same_cache_entries_at_once(empty_cache: Path, compiles: list[str]) -> None:
    program = (
        "import sys; from cunorm.jit import nvrtc; version = nvrtc.ends()[0]\n"
        "for number in range(12):\n"
        "    text = sys.argv[1].replace('= 1', f'= {number}')\n"
        "    print(nvrtc.usages(text, 'sm_90', version)[0].registers)\n"
    )
    command = [sys.executable, "-c", program, SMALL]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert told[0] == told[1] and len(told[0]) == 12
    assert len(list(empty_cache.glob("*.json"))) == len(list(empty_cache.iterdir())) == 12
    for number in range(12):
        nvrtc.usages(SMALL.replace("= 1", f"= {number}"), "sm_90", NVRTCS[0])
    assert compiles == []


# ---- finding NVRTC --------------------------------------------------------------------------------------------------


def test_unsupported_and_broken_nvrtcs_are_not_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {}
    for number, version in enumerate(["12.6.85", "13.5.37", "12.10.3", "14.0.1", "12.8.93", "13.5.37"]):
        folder = tmp_path / str(number) / "nvidia/cu13/lib"
        folder.mkdir(parents=True)
        (folder / "libnvrtc.so.13").touch()
        (folder / "libnvrtc-builtins.so.13.0").touch()
        versions[str(folder / "libnvrtc.so.13")] = version
    broken = tmp_path / "broken/nvidia/cuda_nvrtc/lib"
    broken.mkdir(parents=True)
    (broken / "libnvrtc.so.12").write_text("no library")
    opened = nvrtc._opened
    monkeypatch.setattr(
        nvrtc, "_opened", lambda path: Nvrtc(versions[path], path) if path in versions else opened(path)
    )
    monkeypatch.setattr(sys, "path", [str(folder) for folder in tmp_path.iterdir()])
    monkeypatch.setattr(nvrtc, "_TOOLKITS", ())
    assert [found.version for found in nvrtc.installed()] == ["12.8.93", "12.10.3", "13.5.37"]
    assert [found.version for found in nvrtc.ends()] == ["12.8.93", "13.5.37"]


def test_nvrtc_of_a_cuda_toolkit_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libnvrtc.so.12.9.86").touch()
    (tmp_path / "lib64/libnvrtc.so.12").symlink_to("libnvrtc.so.12.9.86")
    monkeypatch.setattr(nvrtc, "_opened", lambda path: Nvrtc("12.9.86", path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert nvrtc.installed()[0].path == str(tmp_path / "lib64/libnvrtc.so.12.9.86")


def test_nvrtc_options_equal_those_of_the_gpu_executor() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import compiler

    from cunorm.executors import gpu

    given: list[tuple[str, ...]] = []

    class Program:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def compile(self, options: tuple[str, ...], *_: Any) -> Any:
            given.append(options)
            raise StopIteration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_NVRTCProgram", Program)
        patch.setattr(compiler, "_preprocess", lambda *_, **__: "")
        patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda *_: ("-arch=sm_90", "cubin"))
        patch.setenv("CUPY_CACHE_IN_MEMORY", "1")
        with pytest.raises(StopIteration):
            compiler._compile_with_cache_cuda(SMALL, gpu.OPTIONS, "90", cache_in_memory=True)
    assert [option for option in given[0] if not option.startswith("-arch=")] == list(nvrtc.OPTIONS)

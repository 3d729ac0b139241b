"""benchmarks/prepare_proof.py: kernels compiled on one machine are found by another, and the packages to carry."""

from __future__ import annotations

import importlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cunorm.core.devices import KNOWN
from cunorm.executors.choose import executor
from cunorm.jit.sources import TEXTS
from tests.battery import cases as battery
from tests.support.compilers import needs_nvrtc
from tests.support.paths import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.prepare_proof")


@pytest.fixture
def archive(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of two kernels, whose cache folder is another one than that of the test."""
    kernels = {f'extern "C" __global__ void one(int* p) {{ p[0] = {value}; }}': "one" for value in (1, 2)}
    with monkeypatch.context() as other:
        other.setenv("CUNORM_CACHE_DIR", str(tmp_path / "there"))
        script.write_archive(tmp_path / "tests.tar.xz", kernels, "sm_90")
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "here"))
    return tmp_path / "tests.tar.xz"


@needs_nvrtc
def test_unpacked_kernels_are_not_compiled_again(
    script: ModuleType, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["unpack", str(archive)])
    assert "2 kernels of tests.tar.xz added to" in capsys.readouterr().out
    gpu = executor("gpu")
    monkeypatch.setattr(gpu, "_machine_code", lambda *_: pytest.fail("compiled again"))
    found = gpu.build_for('extern "C" __global__ void one(int* p) { p[0] = 2; }', "one", "sm_90")
    assert found.read_bytes().startswith(b"\x7fELF") and len([*found.parent.iterdir()]) == 2


@needs_nvrtc
def test_kernels_of_another_nvrtc_are_refused(
    script: ModuleType, archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = script.nvrtc_version()
    monkeypatch.setattr(script, "nvrtc_version", lambda: "99.1")
    with pytest.raises(SystemExit, match=rf"kernels of NVRTC {compiled}, expected those of 99\.1"):
        script.main(["unpack", str(archive)])
    assert not [*tmp_path.glob("here/**/*.cubin")]


@needs_nvrtc
def test_an_archive_is_refused_without_a_version(script: ModuleType, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar.xz", "w:xz"):
        pass
    with pytest.raises(SystemExit, match=r"other\.tar\.xz: kernels of NVRTC \?, expected"):
        script.main(["unpack", str(tmp_path / "other.tar.xz")])


@needs_nvrtc
@pytest.mark.parametrize("op", ["batch_norm_stats", "group_norm_backward", "layer_norm"])
def test_the_kernels_of_a_case_are_both_texts_of_its_launches(script: ModuleType, op: str) -> None:
    case = next(one for one in battery.CASES if one.op == op)
    found, made = script.kernels_of_case(case, KNOWN["H200"]), case.plan()
    assert {*found.values()} == {one.entry for one in made.launches}
    assert len(found) == len(dict(kernel for text in TEXTS for kernel in made.texts(text)))
    assert all(text in found for text, _ in made.texts("generic"))


def test_wheels_are_the_needs_of_tests_and_tuner_that_are_not_there(script: ModuleType) -> None:
    every = {line.partition("==")[0] for line in script.wheels_without(frozenset())}
    assert {"optuna", "sqlalchemy", "pytest", "platformdirs", "numpy"} <= every
    assert not {"cunorm", "ruff", "mypy", "cupy-cuda13x", "nvidia-cuda-nvrtc"} & every
    fewer = {line.partition("==")[0] for line in script.wheels_without(frozenset({"optuna"}))}
    assert "optuna" not in fewer and "alembic" not in fewer and "pytest" in fewer

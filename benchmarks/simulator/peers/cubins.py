"""The machine code of PyTorch's kernels, extracted from its library into the cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.simulator import cubin, machine
from benchmarks.simulator.cubin import Cubin
from cunorm.core import cache_folder
from cunorm.core.errors import CompileError

ARCHITECTURE = "sm_90"
INSTALL = "pip install torch liger_kernel nvidia-cuda-cuobjdump -e .[dev], in an environment of their own"
_ENTRY = re.compile(rb"\.text\.([A-Za-z0-9_$.]+)\0")


def toolkit() -> Path:
    """The folder of NVIDIA's packages for CUDA 13."""
    return Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"


def installed(package: str) -> Path:
    """The folder of an installed package. It is not imported.

    Raises
    ------
    CompileError
        If it is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise CompileError(f"the peers need {package}, which is not installed; {INSTALL}")
    return Path(found.origin).parent


def library() -> Path:
    """The library with PyTorch's kernels.

    Raises
    ------
    CompileError
        If PyTorch is not installed, or is built without CUDA.
    """
    path = installed("torch") / "lib" / "libtorch_cuda.so"
    if not path.is_file():
        raise CompileError(f"the peers need PyTorch with CUDA 13, and {path} was not found; {INSTALL}")
    return path


@functools.cache
def folder() -> Path:
    """The folder of the extracted cubins; they are extracted if it is empty.

    Raises
    ------
    CompileError
        If PyTorch or cuobjdump is missing, or cuobjdump fails.
    """
    source = library()
    facts = f"{source}\0{source.stat().st_size}\0{source.stat().st_mtime_ns}\0{ARCHITECTURE}"
    into = cache_folder.folder("peers") / hashlib.sha256(facts.encode()).hexdigest()[:16]
    if not (into / "index.json").is_file():
        into.mkdir(parents=True, exist_ok=True)
        tool = toolkit() / "bin" / "cuobjdump"
        if not tool.is_file():
            raise CompileError(f"the peers need cuobjdump and found none at {tool}; {INSTALL}")
        done = subprocess.run(
            [tool, "-arch", ARCHITECTURE, "-xelf", "all", source], cwd=into, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise CompileError(f"cuobjdump failed: {done.stderr.strip()}")
        index = {}
        for path in sorted(into.glob("*.cubin")):
            for entry in set(_ENTRY.findall(path.read_bytes())):
                index[entry.decode()] = path.name
        (into / "index.json").write_text(json.dumps(index))
    return into


@functools.cache
def _index() -> dict[str, str]:
    found: dict[str, str] = json.loads((folder() / "index.json").read_text())
    return found


@functools.cache
def kernel(entry: str) -> machine.Kernel:
    """A kernel of PyTorch.

    Raises
    ------
    CompileError
        If PyTorch has no such kernel for this architecture.
    """
    if entry not in _index():
        raise CompileError(f"entry: {entry!r}, PyTorch has no such kernel for {ARCHITECTURE}")
    return machine.Kernel(cubin.read((folder() / _index()[entry]).read_bytes(), entry, ARCHITECTURE))


def arguments(code: Cubin, values: Any) -> bytes:
    """The bytes of a launch's arguments, from an array of pointers to them."""
    places = cubin.arguments_of(code.image, code.entry)
    bank = bytearray(max((offset + size for offset, size in places), default=0))
    for number, (offset, size) in enumerate(places):
        bank[offset : offset + size] = ctypes.string_at(values[number], size)
    return bytes(bank)

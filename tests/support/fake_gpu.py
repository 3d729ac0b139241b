"""A fake GPU: real CuPy classes, memory that does not exist, and a driver that records its calls.

The fixture ``driver`` in conftest.py passes it to a test. The test is skipped if CuPy is not installed.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

import cunorm
from cunorm.executors import gpu
from cunorm.jit import cubins, sources
from cunorm.runtime.specialised import builder
from tests.support.problems import fake_cupy, forget_calls

FACTS = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "l2CacheSize": 60 * 2**20,
    "memoryClockRate": 3201000,
    "memoryBusWidth": 6144,
    "sharedMemPerBlockOptin": 227 * 1024,
    "sharedMemPerMultiprocessor": 228 * 1024,
    "reservedSharedMemPerBlock": 1024,
    "regsPerMultiprocessor": 65536,
    "maxThreadsPerMultiProcessor": 2048,
    "maxBlocksPerMultiProcessor": 32,
}


class Driver:
    """Record of the calls to a CUDA driver and to CuPy."""

    def __init__(self) -> None:
        self.current = 0
        self.capturing = False
        self.compiled: list[tuple[str, str, int]] = []
        self.built: list[tuple[str, str]] = []
        self.launches: list[dict[str, Any]] = []
        self.launched: list[str] = []
        self.opted_in: list[tuple[str, int, int]] = []
        self.allocated: list[tuple[str, int, int]] = []
        self.synchronised: list[int] = []
        self.sent: list[Any] = []
        self.address = 0x1000000

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Any:
        shape = tuple(shape) if isinstance(shape, (list, tuple)) else (int(shape),)
        made = fake_cupy(shape, dtype, device=self.current, address=self.address)
        self.allocated.append(("empty", made.nbytes, self.current))
        self.address += (made.nbytes + 511) // 512 * 512
        return made

    def ascontiguousarray(self, array: Any, dtype: Any = None) -> Any:
        return self.empty(array.shape, array.dtype)

    def asarray(self, array: Any) -> Any:
        """Record host numbers that would be copied to the current GPU."""
        self.sent.append(array)
        return self.empty(array.shape, array.dtype)

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32, device: int = 0) -> Any:
        made = fake_cupy(shape, dtype, device=device, address=self.address)
        self.address += (made.nbytes + 511) // 512 * 512
        return made


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:  # noqa: C901  # CuPy's classes, in one place
    """Patch CuPy to use a recording driver."""
    notes = Driver()

    class Device:
        def __init__(self, ordinal: int = 0) -> None:
            self.id = ordinal
            self.before: list[int] = []

        def __enter__(self) -> Any:
            self.before.append(notes.current)
            notes.current = self.id
            return self

        def __exit__(self, *_: object) -> None:
            notes.current = self.before.pop()

        def use(self) -> Any:
            notes.current = self.id
            return self

        def synchronize(self) -> None:
            notes.synchronised.append(self.id)

    class Stream:
        ptr = 0

        def is_capturing(self) -> bool:
            return notes.capturing

        def synchronize(self) -> None:
            notes.synchronised.append(notes.current)

    class RawKernel:
        def __init__(self, code: str, name: str, options: tuple[str, ...] = (), **others: Any) -> None:
            assert isinstance(options, tuple)
            assert others == {}
            self.code, self.name, self.options = code, name, options

        def compile(self, log_stream: Any = None) -> None:
            if "broken" in self.code:
                log = "\n".join(f'norm.cuh({line}): error: identifier "chanels" is undefined' for line in range(200))
                raise cupy.cuda.compiler.CompileException(log, self.code, self.name, self.options, "nvrtc")
            if "slow" in self.code:
                time.sleep(0.05)
            notes.compiled.append((self.code, self.name, notes.current))

        @property
        def max_dynamic_shared_size_bytes(self) -> int:
            return 48 * 1024

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, value: int) -> None:
            notes.opted_in.append((self.name, value, notes.current))

        def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, stream: Any = None) -> None:
            assert isinstance(grid, tuple)
            assert isinstance(block, tuple)
            assert isinstance(args, tuple)
            launch = {"entry": self.name, "grid": grid, "block": block, "args": args, "shared_mem": shared_mem}
            notes.launches.append({**launch, "device": notes.current, "stream": stream})
            notes.launched.append(self.code)

    class RawModule:
        def __init__(self, *, path: str) -> None:
            self.code = Path(path).read_text(encoding="utf-8")

        def get_function(self, name: str) -> Any:
            return RawKernel(self.code, name)

    def machine_code(text: str, entry: str, options: tuple[str, ...]) -> bytes:
        notes.built.append((text, entry))
        return f"machine code for {options[-1]} of {text}".encode()

    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(cupy, "RawModule", RawModule)
    monkeypatch.setattr(gpu, "_machine_code", machine_code)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda *_: Stream())
    monkeypatch.setattr(cupy.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cupy, "RawKernel", RawKernel)
    monkeypatch.setattr(cupy, "empty", notes.empty)
    monkeypatch.setattr(cupy, "ascontiguousarray", notes.ascontiguousarray)
    monkeypatch.setattr(cupy, "asarray", notes.asarray)
    monkeypatch.setattr(gpu.runtime, "getDevice", lambda: notes.current)
    monkeypatch.setattr(gpu.runtime, "getDeviceProperties", lambda _: dict(FACTS))
    monkeypatch.setattr(gpu, "_full_clusters", lambda *_: None)
    monkeypatch.setattr("cunorm.runtime.plans._plans", {})
    _forget()
    with tempfile.TemporaryDirectory() as folder:  # a real GPU must never find this machine code
        monkeypatch.setattr(cubins, "_folder", lambda: Path(folder))
        try:
            yield notes
        finally:
            _finish_builds()
    _forget()


def _finish_builds() -> None:
    """Wait until the thread that compiles specialised kernels has no more jobs: they write to the folder."""
    done = threading.Event()
    builder().submit(done.set)
    assert done.wait(60)


def _forget() -> None:
    forget_calls()
    for value in vars(gpu).values():
        if callable(clear := getattr(value, "cache_clear", None)):
            clear()


def expected(plan: cunorm.Plan, values: dict[str, Any]) -> list[tuple[int | float, ...]]:
    """The arguments of each launch of a plan in the order of the kernel's parameters. Names are replaced by values."""
    return [
        tuple(
            values[argument] if isinstance(argument, str) else argument
            for argument in map(launch.arguments.__getitem__, sources._declared(launch.kernel, launch.entry))
        )
        for launch in plan.launches
    ]

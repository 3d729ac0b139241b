"""Run kernels on the CPU executor from their PTX instead of from their text.

`through_ptx` replaces the executor's compiler: NVRTC compiles the text to PTX, translate.py translates the PTX to C++,
and the executor compiles that. Builds are cached on disk like all builds of the executor, and PTX beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cunorm.core import cache_folder
from cunorm.core.devices import KNOWN
from cunorm.core.files import write_whole
from cunorm.executors.cpu import executor
from cunorm.gate.gate import device_of
from cunorm.jit import nvrtc
from cunorm.jit.nvrtc import ARCHITECTURES, Nvrtc
from tests.battery.case import forget
from tests.ptx.translate import translate

#: (architecture, NVRTC) with the oldest and the newest NVRTC in turn: neighbours differ in both. Empty without NVRTC.
PAIRS = tuple(
    (architecture, version)
    for shift in range(len(nvrtc.ends()))
    for index, architecture in enumerate(ARCHITECTURES)
    for version in nvrtc.ends()[(index + shift) % len(nvrtc.ends()) :][:1]
)
MISSING = f"needs NVRTC {nvrtc.supported()}: see `cunorm doctor --kernels`"


def ptx_of(text: str, architecture: str, version: Nvrtc) -> str:
    """The PTX of a text, from the cache if possible. ptxas does not run.

    Raises
    ------
    CompileError
        If the text does not compile.
    """
    options = (*nvrtc.OPTIONS, f"-arch={architecture.replace('sm', 'compute')}")
    digest = hashlib.sha256(json.dumps([text, options, version.version]).encode()).hexdigest()
    file = cache_folder.folder("ptx") / f"{digest[:32]}.ptx"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    ptx, _ = nvrtc._compile(version.path, version.version, text, options)
    write_whole(file, ptx, mode=0o600)
    return ptx


@contextlib.contextmanager
def through_ptx(architecture: str, version: Nvrtc) -> Iterator[list[str]]:
    """Compile all kernels of the CPU executor through PTX, for the device of an architecture.

    Parameters
    ----------
    architecture, version
        One of PAIRS.

    Yields
    ------
    list of str
        The PTX of each kernel that is compiled.
    """
    compile, made = executor.compile, list[str]()

    def compiled(text: str, entry: str, ordinal: int = 0, **options: Any) -> executor.Kernel:
        made.append(ptx_of(text, architecture, version))
        return compile(translate(made[-1]), entry, ordinal, **options)

    device = next(name for name, one in KNOWN.items() if one is device_of(architecture))
    forget()
    try:
        with mock.patch.object(executor, "compile", compiled), mock.patch.dict("os.environ", CUNORM_CPU_DEVICE=device):
            yield made
    finally:
        forget()

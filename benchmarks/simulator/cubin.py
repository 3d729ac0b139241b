"""Machine code of a kernel: compiled with the options that users run, disassembled, and its facts read from the file.

Sources: NVIDIA's "CUDA binary utilities" (nvdisasm, its JSON format); the ELF standard; for the control word of an
instruction, Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking" (2018), section 2.1, whose
layout of 128-bit instructions is still that of sm_90.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from cunorm.core import cache_folder
from cunorm.core.errors import CompileError
from cunorm.core.files import write_whole
from cunorm.jit import nvrtc

#: Bytes of an instruction.
WIDTH = 16
#: Architectures whose instructions `decode` knows.
ARCHITECTURES: tuple[str, ...] = ("sm_90",)
INSTALL = "pip install nvidia-cuda-nvdisasm nvidia-cuda-nvrtc"
#: Attributes of the sections ``.nv.info``, as readelf tools name them: where the arguments lie in constant bank 0, the
#: registers of each function, the bytes of local memory per thread, and the place of each argument.
PARAM_CBANK, REGCOUNT, FRAME_SIZE, KPARAM_INFO = 0x0A, 0x2F, 0x11, 0x17
#: Bytes of shared memory that the system reserves at the start of each block's window.
RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Line:
    """One disassembled instruction.

    Attributes
    ----------
    address : int
        Bytes from the start of the kernel.
    guard : str
        ``"@P0"``, ``"@!UP1"`` or an empty string.
    opcode : str
        With its modifiers: ``"ISETP.GE.U32.AND"``.
    operands : str
        Separated by commas.
    control : int
        The 21 bits for the scheduler: stall cycles, scoreboards.
    """

    address: int
    guard: str
    opcode: str
    operands: str
    control: int

    def __str__(self) -> str:
        return f"/*{self.address:04x}*/ {self.guard} {self.opcode} {self.operands}".replace("  ", " ").rstrip()


@dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel.

    Attributes
    ----------
    entry, architecture : str
    image : bytes
        The file that the compiler wrote.
    lines : tuple of Line
    registers : int
        32-bit registers per thread.
    shared_bytes : int
        Bytes of static shared memory per block, without the bytes that the system reserves.
    local_bytes : int
        Bytes of local memory per thread.
    parameters : int
        Offset of the arguments in constant bank 0.
    constants : mapping of int to bytes
        Contents of the constant banks. Bank 0 lacks the arguments.
    symbols : mapping of str to int
        Addresses of the functions within the kernel's section.
    """

    entry: str
    architecture: str
    image: bytes = field(repr=False)
    lines: tuple[Line, ...] = field(repr=False)
    registers: int
    shared_bytes: int
    local_bytes: int
    parameters: int
    constants: Mapping[int, bytes] = field(repr=False)
    symbols: Mapping[str, int] = field(repr=False)


# ---- tools ----------------------------------------------------------------------------------------------------------


@functools.cache
def nvdisasm() -> str:
    """Path of nvdisasm.

    Raises
    ------
    CompileError
        If it is not installed.
    """
    path = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    if not path.is_file():
        raise CompileError(f"the simulator needs nvdisasm and found none at {path}; {INSTALL}")
    return str(path)


def _disassembled(image: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([nvdisasm(), *options, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(f"nvdisasm {' '.join(options)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@functools.cache
def compiler() -> nvrtc.Nvrtc:
    """The newest NVRTC.

    Raises
    ------
    CompileError
        If none of a supported version is installed.
    """
    found = nvrtc.installed()
    if not found:
        raise CompileError(f"the simulator needs NVRTC {nvrtc.supported()} and found none; {INSTALL}")
    return found[-1]


# ---- compiling ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def compiled(text: str, entry: str, architecture: str = "sm_90", with_lines: bool = False) -> Cubin:
    """Compile a kernel, or read it from the cache on disk.

    Parameters
    ----------
    text : str
        Complete CUDA C, for instance from `cunorm.jit.sources.kernel_text`.
    entry : str
        Name of the kernel.
    architecture : str
        One of `ARCHITECTURES`.
    with_lines : bool
        Compile with ``-lineinfo``. The instructions are the same; `places` then finds their source lines.

    Raises
    ------
    CompileError
        If the text does not compile, or a tool is missing.
    """
    if architecture not in ARCHITECTURES:
        raise CompileError(f"architecture: {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    options = (*nvrtc.OPTIONS, f"-arch={architecture}", *(["-lineinfo"] if with_lines else []))
    tool = compiler()
    digest = hashlib.sha256("\0".join((text, entry, tool.version, *options)).encode()).hexdigest()
    file = cache_folder.folder("cubin") / f"{digest}.cubin"
    if not file.exists():
        write_whole(file, tool.cubin(text, options), mode=0o600)
    return read(file.read_bytes(), entry, architecture)


def read(image: bytes, entry: str, architecture: str) -> Cubin:
    """Read a kernel from the bytes of a cubin.

    Raises
    ------
    CompileError
        If the file has no such kernel.
    """
    elf = ELFFile(io.BytesIO(image))
    code = elf.get_section_by_name(f".text.{entry}")
    if code is None:
        raise CompileError(f"entry: {entry!r}, the cubin has no such kernel")
    number = elf.get_section_index(code.name)
    symbols = list(_section(elf, ".symtab").iter_symbols())
    named = [index for index, one in enumerate(symbols) if one.name == entry]
    functions = (one for one in symbols if one["st_shndx"] == number)
    shared = elf.get_section_by_name(f".nv.shared.{entry}")
    facts = _facts(_section(elf, ".nv.info").data(), named[0])
    parameters = _attributes(_section(elf, f".nv.info.{entry}").data())[PARAM_CBANK]
    return Cubin(
        entry,
        architecture,
        image,
        _lines(image, entry, code.data(), named[0]),
        registers=facts[REGCOUNT],
        shared_bytes=max(shared["sh_size"] - RESERVED_SHARED, 0) if shared else 0,
        local_bytes=facts[FRAME_SIZE],
        parameters=int.from_bytes(parameters[0][4:6], "little"),
        constants=_banks(elf, entry),
        symbols={one.name: one["st_value"] for one in functions if one["st_info"]["type"] == "STT_FUNC"},
    )


def arguments_of(image: bytes, entry: str) -> list[tuple[int, int]]:
    """The arguments of a kernel in their order: the offset among the arguments, and the size, in bytes.

    Raises
    ------
    CompileError
        If the file has no such kernel.
    """
    section = _section(ELFFile(io.BytesIO(image)), f".nv.info.{entry}").data()
    found = {}
    for value in _attributes(section).get(KPARAM_INFO, []):
        number, offset = int.from_bytes(value[4:6], "little"), int.from_bytes(value[6:8], "little")
        found[number] = (offset, int.from_bytes(value[8:12], "little") >> 18)
    return [found[number] for number in sorted(found)]


def _section(elf: ELFFile, name: str) -> Any:
    found = elf.get_section_by_name(name)
    if found is None:
        raise CompileError(f"the cubin has no section {name}")
    return found


def _attributes(section: bytes) -> dict[int, list[bytes]]:
    """The attributes of a section ``.nv.info``: format, number, and a value whose size the format tells."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(section):
        kind, number, size = section[at], section[at + 1], int.from_bytes(section[at + 2 : at + 4], "little")
        value = section[at + 4 : at + 4 + size] if kind == 4 else section[at + 2 : at + 4]
        found.setdefault(number, []).append(value)
        at += 4 + (size if kind == 4 else 0)
    return found


def _facts(section: bytes, symbol: int) -> dict[int, int]:
    """The attributes of one function, given the number of its symbol: value by attribute."""
    pairs = ((number, value) for number, values in _attributes(section).items() for value in values if len(value) == 8)
    of_symbol = ((number, value) for number, value in pairs if int.from_bytes(value[:4], "little") == symbol)
    return {number: int.from_bytes(value[4:], "little") for number, value in of_symbol}


def _banks(elf: ELFFile, entry: str) -> dict[int, bytes]:
    """Contents of the constant banks: ``.nv.constant<bank>.<entry>`` of one kernel, ``.nv.constant<bank>`` of all."""
    found = {}
    for section in elf.iter_sections():
        name = re.fullmatch(rf"\.nv\.constant(\d+)(\.{re.escape(entry)})?", section.name)
        if name is not None:
            found[int(name[1])] = section.data()
    return found


def _lines(image: bytes, entry: str, code: bytes, symbol: int) -> tuple[Line, ...]:
    """The instructions of a kernel, given the number of its symbol: other kernels of the file are not disassembled."""
    _, functions = json.loads(_disassembled(image, "-json", "-fun", str(symbol)))
    listed = next(one for one in functions if one["function-name"] == entry)["sass-instructions"]
    found = []
    for number, line in enumerate(listed):
        words = int.from_bytes(code[number * WIDTH : (number + 1) * WIDTH], "little")
        control = words >> 105 & 0x1FFFFF  # above the 105 bits of the operation, below 2 unused bits
        guard = line.get("predicate", "")
        if not guard.startswith("@"):  # for P2R nvdisasm puts the operand PR there
            guard = ""
        found.append(Line(number * WIDTH, guard, line["opcode"], line.get("operands", ""), control))
    return tuple(found)


# ---- source lines ---------------------------------------------------------------------------------------------------

#: A place in the source: file and line.
Place = tuple[str, int]
_PLACE = re.compile(r'//## File "([^"]*)", line (\d+)')
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s")


@functools.lru_cache(maxsize=64)
def places(text: str, entry: str, architecture: str = "sm_90") -> dict[int, tuple[Place, ...]]:
    """The source lines of each instruction of a kernel, by its address: the line itself, then the lines that inline it.

    Parameters are those of `compiled`.

    Raises
    ------
    CompileError
        If ``-lineinfo`` changes the instructions, so that lines cannot be assigned.
    """
    found = compiled(text, entry, architecture, with_lines=True)
    if found.lines != compiled(text, entry, architecture).lines:
        raise CompileError(f"{entry}: -lineinfo changes its instructions, so their source lines are unknown")
    names = sorted(set(re.findall(r'^#line \d+ "([^"]+)"', text, re.MULTILINE)), key=len, reverse=True)
    listing = _disassembled(found.image, "-gi", "-c")
    _, _, body = listing.partition(f"\n.text.{entry}:\n")
    stack: list[Place] = []
    known: dict[int, tuple[Place, ...]] = {}
    open_group = False
    for line in body.partition("\n\t.section")[0].splitlines():
        place = _PLACE.search(line)
        if place is not None:  # nvdisasm prints the frames of an instruction innermost first, one per line
            frame = _named(place[1], names), int(place[2])
            stack = [*stack, frame] if open_group else [frame]
            open_group = True
        elif (address := _ADDRESS.match(line)) is not None:
            known[int(address[1], 16)] = tuple(stack)
            open_group = False
    return known


def _named(path: str, names: Sequence[str]) -> str:
    """The name of a file in ``#line``, to which the compiler has prepended its working folder."""
    return next((name for name in names if path.endswith(f"/{name}")), path.rpartition("/")[2])

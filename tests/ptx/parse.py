"""Parse the PTX that NVRTC writes: kernels, their parameters, registers, labels and instructions.

The grammar is the part of PTX that NVRTC uses for the kernels of this project. Any other statement raises `UnknownPtx`.
A register or label that is declared inside braces gets a name of its own, because inline PTX declares the same names
again at each place where it is inlined. Source: PTX ISA 8.7, chapters "Syntax" and "Directives".
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count


class UnknownPtx(Exception):
    """PTX that the translator does not know. The message names the line."""

    def __init__(self, what: str, line: int, text: str) -> None:
        super().__init__(f"PTX line {line}: {what} in {' '.join(text.split())!r}; add it to tests/ptx, with a test")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    line : int
        Line in the PTX text, from 1.
    text : str
        The statement.
    guard : str
        Name of the predicate register that guards it, after ``!`` if negated; "" if there is none.
    opcode : str
        The opcode with all its modifiers.
    operands : tuple of str
        The operands, with the names of registers and labels as in `Kernel`.
    used : int, optional
        The bytes of a load whose values are used, one bit per byte; None: all.
    """

    line: int
    text: str
    guard: str
    opcode: str
    operands: tuple[str, ...]
    used: int | None = None

    def unknown(self, what: str) -> UnknownPtx:
        """The error for this instruction."""
        return UnknownPtx(what, self.line, self.text)


@dataclass(frozen=True)
class Kernel:
    """One entry of a program.

    Attributes
    ----------
    name : str
    parameters : dict of str to str
        Type by name, in the order of declaration.
    registers : dict of str to str
        Type by unique name, for the registers that instructions use.
    body : list of Instruction or str
        Instructions, and unique names of labels.
    """

    name: str
    parameters: dict[str, str]
    registers: dict[str, str] = field(default_factory=dict)
    body: list[Instruction | str] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """The kernels of a PTX text, and the names of its array in dynamic shared memory."""

    kernels: list[Kernel]
    shared: frozenset[str]


#: Directives outside kernels. NVRTC writes the constants of a text as .global variables, which no instruction may use.
_OUTSIDE = re.compile(
    r"\.version [\d.]+\n|\.target sm_\d+[af]?\n|\.address_size 64\n|"
    r"\.global \.align \d+ \.[usbf]\d+ [\w$]+(?: = -?\w+)?;|"
    r"\.extern \.shared \.align \d+ \.b8 (?P<shared>[\w$]+)\[\];|"
    r"\.visible \.entry (?P<entry>[\w$]+)\((?P<parameters>[^)]*)\)(?P<limits>[^{]*)\{"
)
_PARAMETER = re.compile(r"\s*\.param \.(u64|b64|f64)(?: \.ptr(?: \.global)? \.align \d+)? ([\w$]+)\s*")
#: Limits for ptxas. They do not change what a kernel computes.
_LIMITS = re.compile(r"(?:\s*\.(?:maxntid [\d, ]+|minnctapersm \d+|reqnctapercluster [\d, ]+|explicitcluster)\b)*\s*")
_LABEL = re.compile(r"([$\w]+):(?!:)")
_REGISTERS = re.compile(r"\.reg \.(pred|[bus](?:16|32|64)|f32|f64) (.+)")
_USED = re.compile(r'\.pragma "used_bytes_mask (\w+)"')
_INSTRUCTION = re.compile(r"(?:@(?P<guard>!?%?[$\w]+) )?(?P<opcode>[a-z]\w*(?:(?:\.|::)\w+)*)(?: (?P<operands>.*))?")
_WORD = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyz])?")


# ---- text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Statement:
    line: int
    text: str  # a brace, a label with its colon, or a statement without its semicolon
    scopes: tuple[int, ...]  # from the outermost, 0, to the innermost


class _Text:
    """A PTX text without comments and with single spaces, and the line of each offset."""

    def __init__(self, text: str) -> None:
        lines = (" ".join(line.partition("//")[0].split()) for line in text.splitlines())
        self.text = "\n".join(lines) + "\n"
        self._ends = [found.start() for found in re.finditer("\n", self.text)]

    def line(self, at: int) -> int:
        return bisect.bisect_left(self._ends, at) + 1

    def skip(self, at: int) -> int:
        """The offset of the next character that is not white space."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at

    def statements(self, at: int) -> Iterator[tuple[_Statement, int]]:
        """Yield the statements of the body that starts at `at`, and the offset after each."""
        numbers = count()
        path = (next(numbers),)
        while path:
            at = self.skip(at)
            label = _LABEL.match(self.text, at)
            if self.text[at : at + 1] in ("{", "}"):
                end = at + 1
                path = (*path, next(numbers)) if self.text[at] == "{" else path[:-1]
            elif label is not None:
                end = label.end()
            else:
                end = self.text.find(";", at) + 1
                if end == 0:
                    raise UnknownPtx("no semicolon", self.line(at), self.text[at : at + 80])
            yield _Statement(self.line(at), " ".join(self.text[at:end].removesuffix(";").split()), path), end
            at = end


# ---- parsing --------------------------------------------------------------------------------------------------------


def parse(text: str) -> Program:
    """Parse a PTX text.

    Raises
    ------
    UnknownPtx
        If the text contains a statement that this file does not know.
    """
    source, kernels, shared = _Text(text), list[Kernel](), set[str]()
    at = source.skip(0)
    while at < len(source.text):
        found = _OUTSIDE.match(source.text, at)
        if found is None:
            raise UnknownPtx("unknown directive", source.line(at), source.text[at:].partition("\n")[0])
        at = found.end()
        if found["shared"]:
            shared.add(found["shared"])
        if found["entry"]:
            made = list(source.statements(at))
            kernels.append(_kernel(found, source.line(found.start()), [statement for statement, _ in made]))
            at = made[-1][1]
        at = source.skip(at)
    return Program(kernels, frozenset(shared))


def _kernel(header: re.Match[str], line: int, statements: Iterable[_Statement]) -> Kernel:
    if _LIMITS.fullmatch(header["limits"]) is None:
        raise UnknownPtx("unknown directive", line, header["limits"])
    parameters = {}
    for one in filter(str.strip, header["parameters"].split(",")):
        found = _PARAMETER.fullmatch(one)
        if found is None:
            raise UnknownPtx("unknown type of parameter", line, one)
        parameters[found[2]] = found[1]
    kernel = Kernel(header["entry"], parameters)
    _Names(kernel, list(statements)).fill()
    return kernel


class _Names:
    """The declarations of a kernel by scope. `fill` writes the body, in which every name is unique."""

    def __init__(self, kernel: Kernel, statements: list[_Statement]) -> None:
        self.kernel = kernel
        self.registers: dict[tuple[int, str], str] = {}  # type by scope and name
        self.families: dict[tuple[int, str], str] = {}  # the same for names with a number at the end
        self.labels: set[tuple[int, str]] = set()
        self.rest: list[_Statement] = []
        for one in statements:
            if (label := _LABEL.fullmatch(one.text)) is not None:
                self.labels.add((one.scopes[-1], label[1]))
            if one.text.startswith(".reg "):
                self._declare(one)
            elif one.text not in "{}":
                self.rest.append(one)

    def _declare(self, one: _Statement) -> None:
        found = _REGISTERS.fullmatch(one.text)
        if found is None:
            raise UnknownPtx("unknown type of register", one.line, one.text)
        for name in found[2].split(", "):
            family = re.fullmatch(r"(.+)<\d+>", name)
            if family is None:
                self.registers[one.scopes[-1], name] = found[1]
            else:
                self.families[one.scopes[-1], family[1]] = found[1]

    def _type(self, scope: int, name: str) -> str | None:
        family = re.sub(r"\d+$", "", name)
        return self.registers.get((scope, name)) or (self.families.get((scope, family)) if family != name else None)

    def _unique(self, name: str, scopes: tuple[int, ...]) -> str:
        """The unique name of a register or label; the name itself for any other word."""
        for scope in reversed(scopes):
            kind = self._type(scope, name)
            unique = re.sub(r"\W", "_", name.lstrip("%")) + (f"_{scope}" if scope else "")
            if kind is not None:
                self.kernel.registers[unique] = kind
            if kind is not None or (scope, name) in self.labels:
                return unique
        return name

    def fill(self) -> None:
        used = None
        for one in self.rest:
            mask = _USED.fullmatch(one.text)
            if _LABEL.fullmatch(one.text) is not None:
                self.kernel.body.append(self._unique(one.text[:-1], one.scopes))
            elif mask is not None:
                used = int(mask[1], 0)
            elif one.text != '.pragma "nounroll"':
                self.kernel.body.append(self._instruction(one, used))
                used = None

    def _instruction(self, one: _Statement, used: int | None) -> Instruction:
        found = _INSTRUCTION.fullmatch(one.text)
        if found is None:
            raise UnknownPtx("unknown directive", one.line, one.text)
        unique = _WORD.sub(lambda word: self._unique(word[0], one.scopes), found["operands"] or "")
        guard = _WORD.sub(lambda word: self._unique(word[0], one.scopes), found["guard"] or "")
        return Instruction(one.line, one.text, guard, found["opcode"], _operands(unique), used)


def _operands(text: str) -> tuple[str, ...]:
    """Split at the commas that are outside brackets."""
    return tuple(one.strip() for one in re.split(r",(?![^{]*\})(?![^\[]*\])", text) if one.strip())

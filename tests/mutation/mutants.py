"""Find mutants of a CUDA source that still compile: removed barriers, bounds guards, parity flips, inline PTX.

There is no parser. Text that must not change is replaced by spaces (comments, strings, preprocessor lines, code that is
not compiled for the CPU), so that offsets and line numbers stay valid. A few regular expressions search the rest. They
rely on clang-format's spacing: a comparison has a space on either side, the angle bracket of a template has none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

#: barrier: remove a statement that waits, signals or orders. guard: replace a comparison that keeps an index in range
#: by true, or by false if the branch leaves early; let a loop run one iteration further. owner: let all threads do the
#: work of one thread. parity: keep a value that flips with every use. ptx: remove or change a statement of inline PTX.
KINDS = ("barrier", "guard", "owner", "parity", "ptx")


@dataclass(frozen=True)
class Mutant:
    """One replacement in one file. Its key stays valid while other lines of the file change."""

    file: str
    line: int
    kind: str
    source: str  # the line, stripped
    nth: int  # index from 0 among the mutants of this kind in lines with this text
    start: int
    end: int
    old: str
    new: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Key of the mutant in the table of survivors."""
        return self.file, self.source, self.kind, self.nth

    @property
    def change(self) -> str:
        """Description of the replacement on one line, for reports."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{old} -> {new or 'nothing'}"

    def applied(self, text: str) -> str:
        """The file's text with the replacement made."""
        assert text[self.start : self.end] == self.old, f"{self.file} has changed"
        return text[: self.start] + self.new + text[self.end :]


# ---- text that may change -------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def _spaces(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def blanked(text: str) -> str:
    """The text, with spaces in place of all code that must not change."""
    text = _COMMENT_OR_STRING.sub(lambda found: _spaces(found[0]), text)
    lines, active, continued = [], [True], False
    for line in text.split("\n"):
        directive = line.lstrip().startswith("#")
        if directive and (words := line.replace("#", " ", 1).split()):
            if words[0] in ("if", "ifdef", "ifndef"):
                # Code after #ifndef CUNORM_CPU, or in the #else of an #ifdef, is never compiled for the CPU.
                active.append(active[-1] and words[:2] != ["ifndef", "CUNORM_CPU"])
            elif words[0] in ("else", "elif"):
                active[-1] = active[-2] and not active[-1]
            elif words[0] == "endif":
                active.pop()
        lines.append(_spaces(line) if directive or continued or not active[-1] else line)
        continued = (directive or continued) and line.endswith("\\")
    return "\n".join(lines)


# ---- barriers and parities ------------------------------------------------------------------------------------------

_WAITS = r"(?:__sync(?:threads|warp)\w*|__threadfence\w*|\w*(?:barrier|wait|fence|arrive|commit|release)\w*)"
#: A call that is a whole statement: it follows a semicolon, a brace, or the closing parenthesis of an if or a loop.
_BARRIER = re.compile(
    rf"(?<=[;{{}})])(\s*)((?:[\w:\[\]]+(?:\.|->|::))*{_WAITS}(?:<[^<>;]*>)?\((?:[^();]|\([^()]*\))*\);)"
)
_SPIN = re.compile(r"\bwhile \([^;{}]*\b\w*(?:wait|acquire)\w*\([^;{}]*\) (?:\{\s*\}|;)")
_PARITY = [
    (re.compile(r"\b\w*(?:phase|parity)\w* \^= (?!1u?;)[^;]+;"), ";"),
    (re.compile(r"\b([\w.]+) (?:\^= 1u?|= !\1|= 1u? - \1|= \1 \^ 1u?);"), ";"),
    (re.compile(r"\b\w*(?:phase|parity)\w* & 1u?\b"), "0"),
    (re.compile(r"\b\w*(?:phase|parity)\w* % 2u?\b"), "0"),
]


def _plain(text: str) -> Iterator[tuple[str, int, int, str]]:
    for found in _BARRIER.finditer(text):
        yield "barrier", found.start(2), found.end(2), ";"
    for found in _SPIN.finditer(text):
        yield "barrier", found.start(), found.end(), ";"
    for pattern, new in _PARITY:
        for found in pattern.finditer(text):
            yield "parity", found.start(), found.end(), new


# ---- guards ---------------------------------------------------------------------------------------------------------

_COMPARISON = re.compile(r"(?<=\s)(<=|>=|<|>|==|!=)(?=\s)")
#: A condition that is no comparison: a predicate of the kernels for whether an element, lane or row exists.
_PREDICATE = re.compile(
    r"(?<=[(;=&|,!])\s*!?((?:[\w:]+(?:\.|::))*\b(?:holds|inside|held|has|live|uses?|full|wanted)\b(?:\((?:[^()]|\([^()]*\))*\))?)"
    r"(?=\)| &&| \|\|| \?|;)"
)
_OPEN, _CLOSE = "([{", ")]}"
#: Upper bounds of unrolled loops over arrays in registers. The compiler drops an additional iteration.
_IN_REGISTERS = {
    *(
        "pack_size",
        "Tile::packs_per_thread",
        "loads",
        "loads_in_flight",
        "others_in_flight",
        "tensors",
        "size",
        "Pack<T>::size",
    ),
    "sweep_t::slots",
}
#: Comparisons of values, not of indices: with floating-point constants, bit patterns, or names of values.
_VALUES = re.compile(
    r"\d\.\d|acc_t\(|0x[0-9a-f]|sizeof|^(?:a < b|high < c|low < below|value < 0|whole [<>] kept|magnitude\b.*)$"
)
#: Comparisons that the compiler decides: between constants of the tile and template parameters.
_CONSTANT = re.compile(
    r"^(?:Tile::\w+|lanes|blocks|merged|scratch_size|team\.count|(?:sweep|kept)_t::\w+|blocks>::count) "
    r"(?:[<>]=?|==) (?:\d+|warp_size)$(?<!lanes < warp_size)"
)
_OWNER = re.compile(r"^(?:lane|warp|part|thread|threadIdx\.x(?: % warp_size)?|[\w.:]+(?:lane|index)\(\)) == 0$")
_ALIGNMENT = re.compile(r"misalignment\(.*\) == 0$|% pack_size == 0$")


def _left(text: str, at: int, stops: tuple[str, ...]) -> int:
    """Start of the operand that ends at ``at``: it follows a stop or an open bracket at its own depth."""
    depth = 0
    while at > 0:
        char = text[at - 1]
        if char in _CLOSE:
            if depth == 0 and char == "}":
                break
            depth += 1
        elif char in _OPEN:
            if depth == 0:
                break
            depth -= 1
        elif depth == 0:
            if any(text.startswith(stop, at - len(stop)) for stop in stops):
                break
            if char == "=" and text[at - 2] not in "<>!=" and text[at] != "=":
                break
            if char == ":" and text[at - 2] != ":" and text[at] != ":":
                break
        at -= 1
    return at


def _right(text: str, at: int, stops: tuple[str, ...]) -> int:
    """End of the operand that starts at ``at``."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            if depth == 0:
                break
            depth -= 1
        elif depth == 0:
            if any(text.startswith(stop, at) for stop in stops):
                break
            if char == ":" and text[at - 1] != ":" and text[at + 1] != ":":
                break
        at += 1
    return at


@dataclass(frozen=True)
class _Context:
    """The statement that uses a condition: "loop", "if", "choice" (before a question mark) or "value"."""

    kind: str
    leaves: bool = False  # the branch of the if is an early continue, break or return without a value


def _context(text: str, start: int, end: int) -> _Context:
    whole = _left(text, start, (";", "?", ",", "return "))
    after = _right(text, end, (";", "?", ","))
    if text[after : after + 1] == "?":
        return _Context("choice")
    outer = _left(text, whole, ())
    while outer > 0 and text[outer - 1] == "=":  # the first part of a for contains an assignment
        outer = _left(text, outer - 1, ())
    head = re.search(r"\b(if|while|for)(?: constexpr)? ?\($", text[:outer])
    if head is None:
        return _Context("value")
    if head[1] == "for":
        return _Context("loop" if text[:whole].rstrip().endswith(";") else "value")
    if head[1] == "while":
        return _Context("loop")
    branch = text[_right(text, outer, ()) + 1 :]
    if re.match(r"\s*\{?\s*return\s+\w", branch):
        return _Context("choice")  # between two returned values
    return _Context("if", re.match(r"\s*\{?\s*(?:continue|break|return)\b", branch) is not None)


def _replacements(context: _Context, condition: str, operator: str | None) -> list[tuple[str, str]]:
    """(kind, new text) of each mutant of a condition."""
    gone = "false" if context.leaves else "true"
    if operator is None:
        return [("guard", gone)]
    left, right = (side.strip() for side in re.split(rf"\s{re.escape(operator)}\s", condition, maxsplit=1))
    if operator in ("==", "!="):
        exists = "true" if operator == "!=" else "false"  # always take the branch for arrays that are not null
        if right == "nullptr" and context.kind in ("if", "choice"):
            return [("guard", exists)] if context.kind == "choice" or context.leaves == (exists == "false") else []
        if _OWNER.search(condition):
            return [("owner", gone)]
        return [("guard", gone)] if _ALIGNMENT.search(condition) or context.leaves else []
    if context.kind == "loop":
        if right in _IN_REGISTERS or condition == "i >= 0":
            return []
        return [("guard", f"{left} {operator} ({right}) {'+' if operator[0] == '<' else '-'} 1")]
    if context.kind == "choice":
        return [("guard", "true"), ("guard", "false")]
    return [("guard", gone)]


def _guards(text: str) -> Iterator[tuple[str, int, int, str]]:
    stops = (";", "?", ",", "&&", "||", "return ", "!(")
    spans = [
        (_left(text, found.start(), stops), _right(text, found.end(), (";", "?", ",", "&&", "||")), found[1])
        for found in _COMPARISON.finditer(text)
    ]
    spans += [(found.start(1), found.end(1), None) for found in _PREDICATE.finditer(text)]
    for start, end, operator in spans:
        start += len(text[start:end]) - len(text[start:end].lstrip())
        end -= len(text[start:end]) - len(text[start:end].rstrip())
        condition = " ".join(text[start:end].split())
        line = text[text.rfind("\n", 0, start) + 1 : start].lstrip()
        head = text[max(text.rfind(mark, 0, start) for mark in ";{}") + 1 : start].lstrip()
        decided = any(
            re.match(r"(?:static )?constexpr|static_assert|template|if constexpr", one) for one in (line, head)
        )
        if decided or _VALUES.search(condition) or _CONSTANT.search(condition):
            continue  # a comparison that the compiler decides guards nothing in a running kernel
        context = _context(text, start, end)
        if operator is None and context.kind == "value":
            continue
        for kind, new in _replacements(context, condition, operator):
            yield kind, start, end, new


# ---- inline PTX -----------------------------------------------------------------------------------------------------

_ASM = re.compile(r"\basm(?: volatile)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\);")
#: (pattern within a statement, replacement). A group in the pattern is what is replaced.
_PTX_CHANGES = [
    (re.compile(r'asm( volatile)(?=.*"[=+])', re.DOTALL), ""),  # without outputs, a statement is volatile anyway
    (re.compile(r'(\s*: "memory")'), ""),
    (re.compile(r"\.(acquire|release|acq_rel)\b(?=[^\n]*[;%])"), "relaxed"),
    (re.compile(r"\{(%1, %2)"), "%2, %1"),
    (re.compile(r'"n"\((open)\)'), "open + 1"),
    (re.compile(r'"[rlf]"\((parity|bytes|rank|value|arrivals)\)'), r"\1 + 1"),
    (re.compile(r"\[%([013])\]"), r"\1 + 16"),
    (re.compile(r"(\.expect_tx)(?=[^%]*%0\])"), ""),
    (re.compile(r"@(!)complete"), ""),
    (re.compile(r"(cg\.shared\.global \[%0\], \[%1\], 16)"), "ca.shared.global [%0], [%1], 8"),
    (re.compile(r"%%(cluster_ctarank)"), "ctaid.x"),
    (re.compile(r"\b(f16|bf16)\b"), {"f16": "bf16", "bf16": "f16"}),
    (re.compile(r"(rcp)\.approx"), "rsqrt"),
]


def _inline_ptx(text: str) -> Iterator[tuple[str, int, int, str]]:
    """Remove each statement, and change its operands and modifiers. Comments have been blanked."""
    for statement in _ASM.finditer(text):
        yield "ptx", statement.start(), statement.end(), ";"
        for pattern, new in _PTX_CHANGES:
            for found in pattern.finditer(statement[0]):
                start = statement.start()
                changed = new[found[1]] if isinstance(new, dict) else found.expand(new)
                yield "ptx", start + found.start(1), start + found.end(1), changed


def mutants(file: str, text: str) -> list[Mutant]:
    """All mutants of a text, from its start to its end."""
    searched, commented = blanked(text), _COMMENT.sub(lambda found: _spaces(found[0]), text)
    every = {*_plain(searched), *_guards(searched), *_inline_ptx(commented)}
    found = sorted(every, key=lambda one: (one[1], one[2], one[0], one[3]))
    lines, seen, made = text.split("\n"), Counter[tuple[str, str]](), []
    for kind, start, end, new in found:
        number = text.count("\n", 0, start) + 1
        source = lines[number - 1].strip()
        made.append(Mutant(file, number, kind, source, seen[source, kind], start, end, text[start:end], new))
        seen[source, kind] += 1
    return made

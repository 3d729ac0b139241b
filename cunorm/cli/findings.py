"""What `cunorm doctor` finds, and how it is told: in 80 columns to people, as JSON to programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Finding", "document", "report", "sentence", "size", "works"]

WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    group, name : str
    state : str
        ``"ok"``, ``"missing"`` or ``"fault"``.
    text : str
        What was found.
    advice : str or None
        What to type about it, commands with ``&&`` between them; None where it is ok.
    facts : dict
        The same for programs.
    """

    group: str
    name: str
    state: str
    text: str
    advice: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def sentence(error: BaseException) -> str:
    """The first line of an exception, and which kind it is."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def works(findings: list[Finding], kind: str) -> bool:
    """Whether an executor ran the check."""
    return any(finding.facts.get("executor") == kind and finding.facts["works"] for finding in findings)


def document(findings: list[Finding]) -> dict[str, Any]:
    """The findings for programs."""
    executors = {kind: works(findings, kind) for kind in ("cpu", "gpu")}
    facts = [asdict(finding) for finding in findings]
    return {"schema": "cunorm-doctor/1", "ok": any(executors.values()), "executors": executors, "findings": facts}


def report(findings: list[Finding]) -> str:
    """The findings for people, in 80 columns."""
    lines: list[str] = []
    group = ""
    wide = min(20, max(len(finding.name) for finding in findings))
    indent = " " * (2 + 7 + 2 + wide + 2)
    for finding in findings:
        if finding.group != group:
            group = finding.group
            lines += ["", group]
        head = f"  {finding.state:7s}  {finding.name:{wide}s}  "
        lines += textwrap.wrap(
            finding.text,
            WIDTH,
            initial_indent=head,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        if finding.advice is not None:
            lines += [f"{indent}type: {command}" for command in finding.advice.split(" && ")]
    usable = [name for kind, name in (("gpu", "GPU executor"), ("cpu", "CPU executor")) if works(findings, kind)]
    wrong = sum(finding.state != "ok" for finding in findings)
    rest = f"; {wrong} finding{'s' if wrong > 1 else ''} with something to type" if wrong else ""
    lines += ["", f"cunorm runs on: {', '.join(usable) or 'nothing yet'}{rest}."]
    return "\n".join(lines[1:])

"""Renew the digests of stored times whose kernels have a new text but the same code.

    python benchmarks/renew_digests.py REVISION [--check]

A measured or simulated time and an entry of a tiling table name their kernels by a digest of the text. A change of a
shared file gives many kernels another text, and most of them the same code. The script compiles to PTX the kernels of
REVISION, to which the stored digests belong, and those of the checkout, and compares them: the generic text of every
digest, and the specialised text of every eighth. Stored times are those of specialised kernels. So where the generic
text has other code, it compares the specialised text of every stored problem of the digest. Where nothing differs, it
writes the new digest into the files of benchmarks/results and tuning/tables. The other times stay out of date.
``--check`` writes nothing. No GPU is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cunorm.core.errors import TableError
from cunorm.core.strategy import Tile
from cunorm.jit import nvrtc, sources
from cunorm.ops.registry import OPS
from cunorm.tiling import table

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = "compute_90"
SPECIALISED = 8  # every eighth digest
#: A problem and a tile, as they are stored.
Raw = tuple[dict[str, Any], dict[str, Any]]

_DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
_VARIABLE = re.compile(r"^\.(?:global|const)\s.*?([\w$]+)(?:\[\d*\])?(?: = [^;]*)?;$")


# ---- stored digests -------------------------------------------------------------------------------------------------


def files(root: Path) -> list[Path]:
    """The files with digests."""
    results = root / "benchmarks" / "results"
    return sorted([*results.glob("*.jsonl"), *(root / "tuning" / "tables").glob("*.json")])


def stored(path: Path) -> Iterator[tuple[Raw, str]]:
    """The problems, tiles and digests in a file."""
    if path.suffix == ".json":
        for entry in table.read(path).entries.values():
            yield (table.key_of(entry.problem), {"strategy": entry.tile.strategy, **entry.tile.as_dict()}), entry.kernel
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        for one in raw.get("tiles", [raw]):
            if "problem" in raw and "kernel" in one:
                yield (raw["problem"], one["tile"]), one["kernel"]


# ---- the kernels of one checkout ------------------------------------------------------------------------------------


def code_of(ptx: str) -> str:
    """PTX without comments, and without variables that no instruction uses."""
    lines = [line for line in ptx.splitlines() if line and not line.startswith("//")]
    words = Counter(re.findall(r"[\w$]+", "\n".join(lines)))
    return "\n".join(line for line in lines if (found := _VARIABLE.match(line)) is None or words[found[1]] > 1)


def digest_of(raw: Raw) -> str | None:
    """The digest of a tile's kernels in this checkout; None if it has no such problem or tile."""
    try:
        problem, tile = table.problem_of(raw[0]), Tile.of(raw[1])
        return sources.kernel_digest(problem, OPS[problem.op].strategies[tile.strategy], tile)
    except (KeyError, TypeError, ValueError, TableError):
        return None


def codes_of(raw: Raw, texts: Sequence[sources.Text]) -> str:
    """A digest of the PTX of a tile's kernels in this checkout."""
    problem, tile, end = table.problem_of(raw[0]), Tile.of(raw[1]), nvrtc.ends()[-1]
    strategy = OPS[problem.op].strategies[tile.strategy]
    whole = hashlib.sha256()
    for launch in strategy.launches(problem, tile):
        for text in texts:
            ptx, _ = end.compile(sources.kernel_text(launch, problem, strategy, tile, text), ARCHITECTURE)
            whole.update(code_of(ptx).encode())
    return whole.hexdigest()


def describe() -> None:
    """Answer a question from standard input: the digests of problems and tiles, or those of their code."""
    asked = json.load(sys.stdin)
    if asked["what"] == "digests":
        found: list[str | None] = [digest_of(raw) for raw in asked["of"]]
    else:
        bar = tqdm(asked["of"], unit="kernel", desc=Path.cwd().name, position=asked["position"])
        found = [codes_of(raw, texts) for raw, texts in bar]
    json.dump(found, sys.stdout)


def answer(root: Path, what: str, of: Sequence[Any], position: int) -> list[Any]:
    """The answer to a question, by a process with the modules and kernels of a checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--describe"]
    question = json.dumps({"what": what, "of": of, "position": position})
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, cwd=root, env=environment, text=True, input=question, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise SystemExit(f"renew_digests: the process in {root} failed with exit code {done.returncode}")
    found: list[Any] = json.loads(done.stdout)
    return found


def answers(roots: Sequence[Path], what: str, of: Sequence[Any]) -> list[list[Any]]:
    """The answers of some checkouts, which work at the same time."""
    with ThreadPoolExecutor(len(roots)) as pool:
        return [*pool.map(lambda at: answer(roots[at], what, of, at), range(len(roots)))]


# ---- renewal --------------------------------------------------------------------------------------------------------


def renewals(old: Path, new: Path) -> tuple[dict[str, str], int]:
    """Old digest -> new digest of kernels with the same code; the number of old digests whose kernels changed.

    Only digests that belong to the kernels of `old` count.
    """
    kept = dict.fromkeys((json.dumps(raw), digest) for path in files(new) for raw, digest in stored(path))
    asked = [json.loads(raw) for raw, _ in kept]
    before, after = answers([old, new], "digests", asked)
    pairs: dict[str, dict[str | None, list[Raw]]] = {}
    for raw, (_, digest), was, now in zip(asked, kept, before, after, strict=True):
        if was == digest and now != digest:
            pairs.setdefault(digest, {}).setdefault(now, []).append(raw)
    # A digest with several new ones cannot be replaced by its text.
    unique = [(digest, *found.popitem()) for digest, found in pairs.items() if len(found) == 1]
    chosen = [(digest, now, raws) for digest, now, raws in unique if now is not None]
    every = [(raws[-1], sources.TEXTS[: 1 + (index % SPECIALISED == 0)]) for index, (*_, raws) in enumerate(chosen)]
    alike = same_code([old, new], every)
    other = [(index, raw) for index, (*_, raws) in enumerate(chosen) if not alike[index] for raw in raws]
    timed = same_code([old, new], [(raw, sources.TEXTS[1:]) for _, raw in other])
    differing = {index for (index, _), same in zip(other, timed, strict=True) if not same}
    made = {digest: now for index, (digest, now, _) in enumerate(chosen) if index not in differing}
    return made, len(pairs) - len(made)


def same_code(roots: Sequence[Path], of: Sequence[tuple[Raw, Sequence[sources.Text]]]) -> list[bool]:
    """Whether the kernels of each tile, in those texts, have the same code in all checkouts."""
    return [len({*codes}) == 1 for codes in zip(*answers(roots, "codes", of), strict=True)]


def renew(root: Path, made: Mapping[str, str]) -> None:
    """Write the new digests into the files."""
    for path in files(root):
        before = path.read_text(encoding="utf-8")
        after = _DIGEST.sub(lambda found: made.get(found[0], found[0]), before)
        if after != before:
            path.write_text(after, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", metavar="REVISION", help="the commit whose kernels were timed")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.describe:
        describe()
        return 0
    if asked.revision is None:
        parser.error("REVISION: missing, expected a commit, for instance HEAD")
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "--quiet", "--detach", str(old), asked.revision], check=False).returncode:
            return 2
        try:
            made, changed = renewals(old, ROOT)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    if not asked.check:
        renew(ROOT, made)
    print(f"kernels with a new text: {len(made)} with the same code, {changed} with other code")
    return 0


if __name__ == "__main__":
    sys.exit(main())

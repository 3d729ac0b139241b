"""The tile chain with tables: which link decides, the order of tables, the text of explain(), and bad tables."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import TableWarning, Tile
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.jit import sources
from cunorm.ops.registry import OPS
from cunorm.tiling import choose_tile, costmodel, table
from cunorm.tiling.table import MEASURED, MODEL, SIMULATED, Entry
from tests.support.problems import forget_calls, group_arrays

H200 = KNOWN["H200"]
OP = "group_norm_backward"
STRATEGIES = OPS[OP].strategies
SHAPE = {"shape": (2, 320, 64, 64), "dtype": "bfloat16", "num_groups": 32}
PROBLEM = Problem(
    op=OP,
    dtype="bfloat16",
    gamma_dtype="bfloat16",
    beta_dtype=None,
    stats_dtype="float32",
    layout="NCHW",
    N=2,
    C=320,
    HxW=4096,
    group=32,
    outputs=("dx", "dgamma", "dbeta"),
)
#: Tiles that the cost model does not choose, and that it predicts to be much slower.
TUNED, OTHER = Tile("split", threads=128, chunk=65536), Tile("split", threads=256, chunk=256)


def plan(**options: Any) -> cunorm.Plan:
    return cunorm.plan(OP, **{**SHAPE, "device": "H200", **options})


def entry(problem: Problem = PROBLEM, tile: Tile = TUNED, source: str = MEASURED, **facts: Any) -> Entry:
    strategy = STRATEGIES.get(tile.strategy)
    kernel = sources.kernel_digest(problem, strategy, tile) if strategy is not None else "none"
    return Entry(problem, tile, source, kernel, facts or {"time_us": 12.5})


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that writes a table and points CUNORM_TILING_TABLE at it."""

    def write(*entries: Entry, device: Any = H200) -> Path:
        path = tmp_path / "named.json"
        table.update(path, device, {}, entries)
        monkeypatch.setenv("CUNORM_TILING_TABLE", str(path))
        return path

    return write


def test_without_a_table_the_cost_model_decides() -> None:
    made = plan()
    assert made.tile == costmodel.choose(made.problem, STRATEGIES.values(), H200).tile
    assert made.reason.startswith("the cost model: no tiling table has an entry")
    assert made.tile != TUNED


def test_the_entry_of_the_problem_is_used(named: Callable[..., Path]) -> None:
    path = named(entry())
    made = plan(gamma_dtype="bfloat16")
    assert made.tile == TUNED
    assert made.reason == f"the problem's entry in {path}: measured 12.5 us, generic kernels"
    assert f"chosen by  the problem's entry in {path}" in made.explain()
    assert plan(gamma_dtype="bfloat16", tile=OTHER).tile == OTHER
    assert "the tile= argument" in plan(tile=OTHER).reason


def test_explain_marks_a_modelled_entry(named: Callable[..., Path]) -> None:
    named(entry(source=MODEL, predicted_us=14.2))
    assert "modelled, not measured: predicted 14.2 us" in plan(gamma_dtype="bfloat16").explain()


@pytest.mark.parametrize("facts", [{"trials": 3}, {"predicted_us": float("nan")}, {"predicted_us": "fast"}])
def test_explain_leaves_out_a_prediction_that_is_not_there(named: Callable[..., Path], facts: dict[str, Any]) -> None:
    named(entry(source=MODEL, **facts))
    assert plan(gamma_dtype="bfloat16").reason.endswith("named.json: modelled, not measured")


def test_explain_marks_a_simulated_entry(named: Callable[..., Path]) -> None:
    named(entry(source=SIMULATED, simulated_us=13.1, text="specialised"))
    reason = plan(gamma_dtype="bfloat16").reason
    assert reason.endswith(": simulated on NVIDIA H200, not measured: 13.1 us, specialised kernels")


def test_of_entries_with_other_dtypes_the_best_evidence_is_used(named: Callable[..., Path]) -> None:
    """A measured entry comes before a simulated one, and that before a modelled one, whatever their times."""
    found = {
        MODEL: entry(
            replace(PROBLEM, gamma_dtype="float32"), Tile("split", threads=256, chunk=512), MODEL, predicted_us=1
        ),
        SIMULATED: entry(replace(PROBLEM, gamma_dtype="float64"), OTHER, SIMULATED, simulated_us=2),
        MEASURED: entry(replace(PROBLEM, gamma_dtype="float16"), TUNED, MEASURED, time_us=3),
    }
    named(found[MODEL])
    assert plan(gamma_dtype="bfloat16").tile == found[MODEL].tile
    for source in (SIMULATED, MEASURED):
        named(found[source])
        assert plan(gamma_dtype="bfloat16").tile == found[source].tile


def test_the_reason_says_that_no_tile_beat_the_default(named: Callable[..., Path]) -> None:
    named(entry(time_us=9.0, default=True))
    assert "no tile beat the default" in plan().reason


def test_an_entry_serves_other_dtypes_of_parameters(named: Callable[..., Path]) -> None:
    """A plan with an absent or another gamma_dtype uses the entry, unless an entry has exactly its dtypes."""
    named(entry())
    for gamma in (None, "float32"):
        made = plan(gamma_dtype=gamma)
        assert made.tile == TUNED
        assert "tuned with gamma bfloat16" in made.reason
    named(entry(replace(PROBLEM, gamma_dtype="float32"), OTHER))
    assert plan(gamma_dtype="float32").tile == OTHER
    assert plan(gamma_dtype="bfloat16").tile == TUNED


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16", "gamma_dtype": "float16"},
        {"output_mask": (True, False, False)},
        {"data_format": "NHWC", "shape": (2, 64, 64, 320)},
        {"num_groups": 16},
        {"device": "A100"},
        {"device": "B200"},
    ],
)
def test_an_entry_does_not_serve_another_problem(change: dict[str, Any], named: Callable[..., Path]) -> None:
    named(entry())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        assert plan(**change).reason.startswith("the cost model")


# ---- order ----------------------------------------------------------------------------------------------------------


def test_the_order_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Callable[..., Path]) -> None:
    """The named table, the user's, the package's; a nearest entry only if no table has the problem."""
    tiles = [Tile("split", threads=threads, chunk=16384) for threads in (128, 256, 512)]
    shipped = tmp_path / "package" / "tuning" / "tables" / f"{table.slug(H200)}.json"
    table.update(shipped, H200, {}, [entry(tile=tiles[2])])
    monkeypatch.setattr(cunorm, "__path__", [*cunorm.__path__, str(tmp_path / "package")])
    assert plan().tile == tiles[2]
    user = tmp_path / "user.json"
    monkeypatch.setattr(choose_tile, "user_table", lambda device: user)
    table.update(user, H200, {}, [entry(tile=tiles[1])])
    assert plan().tile == tiles[1]
    named(entry(replace(PROBLEM, N=3), TUNED))
    assert plan().tile == tiles[1]
    named(entry(tile=tiles[0]))
    assert plan().tile == tiles[0]


def test_the_paths_of_tables(tmp_path: Path) -> None:
    """Run in a subprocess, because the fixtures of the tests replace the user's table."""
    script = (
        "from cunorm.tiling import choose_tile; from cunorm.core.devices import KNOWN\n"
        "for one in choose_tile.places(KNOWN['H200']): print(one.path, one.named, one.shipped)"
    )
    environment = {**os.environ, "CUNORM_CACHE_DIR": str(tmp_path), "CUNORM_TILING_TABLE": "mine.json"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    first, second, *shipped = done.stdout.splitlines()
    assert first == "mine.json True False"
    assert second == f"{tmp_path / 'tiling' / 'nvidia_h200_sm_90_132.json'} False False"
    assert all(line.endswith("tuning/tables/nvidia_h200_sm_90_132.json False True") for line in shipped)
    assert shipped


def test_a_new_plan_sees_a_changed_table(named: Callable[..., Path]) -> None:
    named(entry())
    before = plan()
    path = named(entry(tile=OTHER))
    assert (before.tile, plan().tile) == (TUNED, OTHER)
    path.unlink()
    with pytest.warns(TableWarning, match=r"named.json: no such file"):
        assert plan().reason.startswith("the cost model")


def test_a_call_uses_the_table(named: Callable[..., Path]) -> None:
    """A call uses the tile of the entry, and is bitwise equal to a call with that tile as its argument."""
    a = group_arrays((2, 8, 3, 5))
    problem = Problem(
        op=OP,
        dtype="float32",
        gamma_dtype="float32",
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=2,
        C=8,
        HxW=15,
        group=2,
        outputs=("dx", "dgamma", "dbeta"),
    )
    tile = Tile("split", threads=128, chunk=16)
    named(entry(problem, tile))
    forget_calls()
    seen = []
    real = choose_tile.exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_tile, "exact", lambda *given: seen.append(real(*given)) or seen[-1])
        found = cunorm.group_norm_backward(a.dy, a.x, a.mean, a.rstd, a.gamma, num_groups=2)
    assert [one.tile for one in seen] == [tile]
    forget_calls()
    own = cunorm.group_norm_backward(a.dy, a.x, a.mean, a.rstd, a.gamma, num_groups=2, tile=tile)
    assert all(np.array_equal(one, other) for one, other in zip(found, own, strict=True))


# ---- nearest --------------------------------------------------------------------------------------------------------


def own(problem: Problem) -> Tile:
    return costmodel.choose(problem, STRATEGIES.values(), H200).tile


def test_the_nearest_entry_is_used_if_its_predicted_time_is_close(named: Callable[..., Path]) -> None:
    """The reason contains the entry, its distance and both predicted times. For the distance see `distance`."""
    asked = replace(PROBLEM, N=3)
    near, far = replace(PROBLEM, N=4), replace(PROBLEM, N=64)
    path = named(entry(near, own(asked)), entry(far, OTHER))
    made = plan(shape=(3, 320, 64, 64))
    assert made.tile == own(asked)
    assert made.reason.startswith(f"the nearest entry in {path}, N=4 C=320 HxW=4096 group=32 at a distance of 0.42:")
    assert "the cost model's own choice" in made.reason
    assert choose_tile.nearest(asked, STRATEGIES, H200).entry.problem == near  # type: ignore[union-attr]


def test_of_equally_near_entries_the_best_evidence_is_used(named: Callable[..., Path]) -> None:
    """Measured comes before simulated, and that before modelled. N is a power of two, so distances are exact."""
    halves, doubles = replace(PROBLEM, N=2), replace(PROBLEM, N=8)
    asked, tile = replace(PROBLEM, N=4), own(replace(PROBLEM, N=4))
    order = [(MODEL, "predicted_us"), (SIMULATED, "simulated_us"), (MEASURED, "time_us")]
    for (worse, time), (better, other) in itertools.pairwise(order):
        for one, two in ((halves, doubles), (doubles, halves)):
            path = named()
            path.unlink()
            named(entry(one, tile, worse, **{time: 1.0}), entry(two, tile, better, **{other: 9.0}))
            found = choose_tile.nearest(asked, STRATEGIES, H200)
            assert found is not None
            assert (found.distance, found.entry.source) == (1.0, better)


def test_a_nearest_entry_that_is_predicted_slower_is_not_used(named: Callable[..., Path]) -> None:
    named(entry(replace(PROBLEM, N=4), TUNED))
    made = plan(shape=(3, 320, 64, 64))
    assert made.tile == own(replace(PROBLEM, N=3))
    assert made.reason.startswith("the cost model: predicted")
    assert "the nearest entry in" in made.reason
    assert "is predicted" in made.reason


def test_an_illegal_nearest_entry_is_skipped_without_a_warning(named: Callable[..., Path]) -> None:
    """A tile that fits in shared memory for another problem may be too large for this one. That is no fault."""
    small = replace(PROBLEM, HxW=1024)
    block = Tile("block", threads=512, groups=4, stages=2, load="cp_async", packs_per_thread=1)
    assert STRATEGIES["block"].refuses(small, block, H200) is None
    asked = replace(PROBLEM, HxW=2048)
    assert STRATEGIES["block"].refuses(asked, block, H200) is not None
    legal = replace(PROBLEM, HxW=65536)
    named(entry(small, block), entry(legal, own(asked)))
    found = choose_tile.nearest(asked, STRATEGIES, H200)
    assert found is not None
    assert found.entry.problem == legal


def test_distances() -> None:
    def far(**change: int) -> float:
        return choose_tile.distance(PROBLEM, replace(PROBLEM, **change))

    assert far() == 0
    assert far(N=4) == far(N=1) == far(HxW=8192) == far(C=640) == 1
    assert far(C=640, group=64) == 1  # the same C / group, twice as many groups
    assert far(group=64) == pytest.approx(2**0.5)
    assert choose_tile.distance(replace(PROBLEM, N=4), PROBLEM) == far(N=4)
    assert choose_tile.alike(PROBLEM, replace(PROBLEM, N=9, gamma_dtype=None))
    for other in (
        replace(PROBLEM, dtype="float16"),
        replace(PROBLEM, layout="NHWC"),
        replace(PROBLEM, outputs=("dx",)),
    ):
        assert not choose_tile.alike(PROBLEM, other)


# ---- bad tables -----------------------------------------------------------------------------------------------------


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is TableWarning]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b'{"schema": "cunorm-tiling/1", "dev', "cut short"),
        (b'{"schema": "cunorm-tiling/9", "device": {}, "entries": []}', "schema 'cunorm-tiling/9'"),
        (b"{}", "not a tiling table"),
        (None, "no such file"),
    ],
)
def test_a_bad_table_causes_one_warning(
    data: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.json"
    if data is not None:
        path.write_bytes(data)
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(path))
    said = warned(lambda: [plan(shape=(N, 320, 64, 64)) for N in (2, 3, 5)])
    assert len(said) == 1
    assert str(path) in said[0]
    assert words in said[0]
    assert said[0].endswith("calls go on without it")
    assert plan().reason.startswith("the cost model")


def test_a_folder_in_place_of_a_table_causes_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(tmp_path))
    assert len(said := warned(plan)) == 1
    assert "not a regular file" in said[0]


def test_a_table_of_another_device_causes_one_warning_and_is_not_used(named: Callable[..., Path]) -> None:
    path = named(entry(), device=KNOWN["A100"])
    said = warned(lambda: [plan(shape=(N, 320, 64, 64)) for N in (2, 3, 5)])
    assert said == [f"{path}: a table of NVIDIA A100-SXM4-80GB, not used on NVIDIA H200; calls go on without it"]
    named_for_it = plan(device="A100")
    assert named_for_it.tile == TUNED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "column"}, "strategy 'column', expected one of"),
        ({"tile": {"threads": 128}}, "fields threads, expected"),
        ({"tile": {"threads": 100, "chunk": 64}}, "threads is 100"),
        ({"tile": None}, "tile is None"),
    ],
)
def test_a_bad_entry_causes_one_warning(change: dict[str, Any], words: str, named: Callable[..., Path]) -> None:
    """The other entries of the table are still used."""
    good = replace(PROBLEM, HxW=1024)
    path = named(entry(), entry(good, OTHER))
    raw = json.loads(path.read_text())
    raw["entries"][[one["HxW"] for one in raw["entries"]].index(4096)].update(change)
    path.write_text(json.dumps(raw))
    said = warned(lambda: [(plan(), plan(gamma_dtype="bfloat16")) for _ in range(2)])
    assert len(said) == 1
    assert str(path) in said[0]
    assert words in said[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        assert plan(shape=(2, 320, 32, 32)).tile == OTHER


def test_a_stale_entry_is_used_while_legal_and_marked(named: Callable[..., Path], capsys: Any) -> None:
    from cunorm.cli.main import main

    named(replace(entry(), kernel="of_another_day"))
    made = plan()
    assert made.tile == TUNED
    assert "stale: its kernels have changed since" in made.reason
    assert choose_tile.is_stale(replace(entry(), kernel="of another day"), STRATEGIES)
    assert not choose_tile.is_stale(entry(), STRATEGIES)
    assert main(["show", "--device", "H200"]) == 0
    assert "STALE" in capsys.readouterr().out


@pytest.mark.parametrize("threads", [7, 10**30, "dx"])
def test_an_entry_with_an_impossible_tile_is_stale(
    threads: Any, named: Callable[..., Path], capsys: Any, tmp_path: Path
) -> None:
    """Somebody may have edited the file: the commands that read it say so, without a traceback."""
    from cunorm.cli.main import main

    path = named(entry())
    raw = json.loads(path.read_text())
    raw["entries"][0]["tile"]["threads"] = threads
    path.write_text(json.dumps(raw))
    entries = [*table.read(path).entries.values()]
    assert entries and choose_tile.is_stale(entries[0], STRATEGIES)
    assert main(["show", "--device", "H200", "--json"]) == 0
    assert main(["merge", str(path), "-o", str(tmp_path / "merged.json")]) == 0
    assert "Traceback" not in "".join(capsys.readouterr())


def digests() -> dict[Tile, str]:
    """The kernel digests of a tile of `split` and of the tile that the cost model chooses."""
    return {tile: str(entry(tile=tile).kernel) for tile in (TUNED, own(PROBLEM))}


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """A function that edits a file in a copy of the kernel sources; later reads use the copy."""
    there = tmp_path / "kernels_cu"
    shutil.copytree(sources.folder(), there)
    cached = (sources._expand, sources._code, sources._head_of)

    def edit(name: str, old: str, new: str) -> None:
        path = there / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        monkeypatch.setattr(sources, "folder", lambda: there)
        for one in cached:
            one.cache_clear()

    yield edit
    monkeypatch.undo()
    for one in cached:
        one.cache_clear()


def test_an_edited_kernel_changes_the_digest_of_its_strategy_only(edited: Callable[[str, str, str], None]) -> None:
    """An edited statement makes the entries of its strategy stale, and those of no other strategy."""
    before = digests()
    assert len(set(before.values())) == 2
    edited(
        "group_norm/group_norm_backward_split.cu",
        "__launch_bounds__(Tile::threads",
        "__launch_bounds__(1 * Tile::threads",
    )
    after = digests()
    assert after[TUNED] != before[TUNED]
    assert after[own(PROBLEM)] == before[own(PROBLEM)]


def test_a_statement_of_a_header_is_part_of_the_digest(edited: Callable[[str, str, str], None]) -> None:
    before = digests()
    edited("common/norm.cuh", "return value - value == acc_t(0);", "return value - value == acc_t(1);")
    assert not set(digests().values()) & set(before.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// The mathematics of normalisation.", "// Once: the mathematics of normalisation, beta_t.\n//"),
        ('#include "common/reduce.cuh"\n', '\n\n#include "common/reduce.cuh"\n/* a line,\n   and "another" */\n'),
        ("struct Statistics {\n", 'struct  Statistics {  // "of a slice\n'),
    ],
)
def test_comments_do_not_change_a_digest(edited: Callable[[str, str, str], None], old: str, new: str) -> None:
    """Blank lines and white space do not change it either: clang-format may change them."""
    before = digests()
    edited("common/norm.cuh", old, new)
    assert digests() == before


def test_moving_a_header_does_not_change_a_digest(edited: Callable[[str, str, str], None]) -> None:
    """The expanded source has #line directives for the compiler's messages; the digest ignores them."""
    before = digests()
    edited("common/norm.cuh", '#include "common/reduce.cuh"', '#include "partition/sums.cuh"')
    (sources.folder() / "common" / "reduce.cuh").rename(sources.folder() / "partition" / "sums.cuh")
    assert '#line 1 "partition/sums.cuh"' in sources._expand("group_norm_backward_split")
    assert digests() == before


def test_slashes_in_a_string_are_not_a_comment(edited: Callable[[str, str, str], None]) -> None:
    edited("common/norm.cuh", "struct Statistics {", 'const char* const named = "a//b";\nstruct Statistics {')
    before = digests()
    edited("common/norm.cuh", '"a//b"', '"a//c"')
    assert not set(digests().values()) & set(before.values())


def test_importing_and_planning_load_neither_optuna_nor_filelock(tmp_path: Path, named: Callable[..., Path]) -> None:
    path = named(entry())
    script = (
        "import sys, cunorm\n"
        "plan = cunorm.plan('group_norm_backward', shape=(2, 320, 64, 64), dtype='bfloat16', num_groups=32)\n"
        "print(plan.tile, [name for name in ('optuna', 'filelock', 'cupy', 'matplotlib', 'cunorm.tuning')"
        " if name in sys.modules and not (name == 'cupy' and plan.place.kind == 'gpu')])"
    )
    environment = {**os.environ, "CUNORM_TILING_TABLE": str(path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(repr(TUNED))
    assert "optuna" not in done.stdout
    assert "filelock" not in done.stdout
    assert "tuning" not in done.stdout

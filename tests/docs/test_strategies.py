"""The page of the strategies: its pictures, its table and its example agree with the kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cunorm.ops.registry import OPS
from docs.drawings import strategies, themes
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "strategies.md").read_text(encoding="utf-8")

STRATEGIES = ("warp", "block", "cluster", "grid", "split", "column")
EVERY_PANEL = [(name, number) for name, panels in strategies.PANELS.items() for number in range(len(panels))]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures and the example are those of the default device."""
    monkeypatch.delenv("CUNORM_CPU_DEVICE", raising=False)


def reads(name: str, panel: int) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """Each read of x by a panel: its launch's owners, and the block and the warp of each row and sector."""
    width = strategies.PANELS[name][panel].width // strategies.ELEMENTS
    found = strategies.reads_of_x(strategies.owners(name, panel))
    return [(one, block.reshape(-1, width), warp.reshape(-1, width)) for one, block, warp in found]


def only(ids: np.ndarray) -> list[int]:
    """The owner of each row, if each row has one."""
    assert (ids == ids[:, :1]).all()
    return [int(owner) for owner in ids[:, 0]]


# ---- claims of the pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "panel"), EVERY_PANEL)
def test_each_element_is_written_once_by_the_block_that_read_it_last(name: str, panel: int) -> None:
    found = strategies.owners(name, panel)
    stores = [one for one in found if one.stored]
    assert len(stores) == (strategies.PANELS[name][panel].calls != ("batch_norm_stats",))
    for one in stores:
        assert one.tensor in ("y", "dx")
        assert one.block.shape[0] == 1 and (one.block != strategies.NOBODY).all()
        _, block, _ = strategies.reads_of_x(found)[-1]
        assert (one.block[0] == block).all()


@pytest.mark.parametrize(
    ("name", "panel", "times"),
    [
        *((name, panel, 1) for name in ("warp", "block", "cluster") for panel in (0, 1)),
        ("grid", 0, 2),
        ("grid", 1, 1),
        ("split", 0, 2),
        ("split", 1, 2),
        ("column", 0, 2),  # once by each of the two functions
    ],
)
def test_each_element_is_read_as_often_as_the_picture_says(name: str, panel: int, times: int) -> None:
    found = strategies.owners(name, panel)
    for tensor in {one.tensor for one in found if not one.stored}:
        each = sum(one.times for one in found if one.tensor == tensor and not one.stored)
        assert (each == times).all()
        assert f"{tensor} read {('once', 'twice')[times - 1]}" in strategies.moves(found)
    # Some kernels read the first element of a slice once more, at most once per warp.
    assert all(one.glances <= one.launch.grid * one.launch.threads // 32 for one in found)


def test_a_warp_owns_a_slice() -> None:
    ((_, block, warp),) = reads("warp", 0)
    owners = list(zip(only(block), only(warp), strict=True))
    assert owners == [(block, warp) for block in range(2) for warp in range(4)]
    ((_, block, warp),) = reads("warp", 1)
    owners = list(zip(only(block), only(warp), strict=True))
    assert len(set(owners[:8])) == 8 and owners[:8] == owners[8:]  # every 8th row


def test_a_block_owns_a_slice_and_in_batch_norm_channels_of_samples() -> None:
    ((_, block, _),) = reads("block", 0)
    assert only(block) == list(range(8))
    ((_, block, _),) = reads("block", 1)
    corners = block[::2, ::16]  # of two samples and two channels of 64 positions
    assert (np.kron(corners, np.ones((2, 16), int)) == block).all()
    assert sorted(corners.ravel()) == list(range(16))


@pytest.mark.parametrize(("panel", "clusters", "ranks"), [(0, [*range(8)], 4), (1, [0, 1, 2, 3] * 2, 2)])
def test_the_blocks_of_a_cluster_own_a_slice(panel: int, clusters: Sequence[int], ranks: int) -> None:
    ((one, block, _),) = reads("cluster", panel)
    assert one.launch.cluster == 4
    assert only(block // 4) == clusters
    for row in block % 4:
        assert len(set(row)) == ranks and (np.diff(row) >= 0).all()  # pieces, in the order of the ranks
    assert {*block[:, 0] % 4} == ({0} if panel == 0 else {0, 2})  # the second sample has the other half of the cluster


def tickets_of_group_norm() -> tuple[list[list[int]], list[list[int]]]:
    """Tickets of the sums and of the outputs of each tile, by the rule of work_queue.cuh."""
    tiles, slabs, prefetch = 4, 8, 1
    ahead = tiles + prefetch
    sums = [[0] * tiles for _ in range(slabs)]
    outputs = [[0] * tiles for _ in range(slabs)]
    order = [("sums", tile) for tile in range(ahead)]
    for slab in range(slabs):
        order += [("outputs", slab * tiles + tile) for tile in reversed(range(tiles))]
        order += [("sums", ahead + slab * tiles + tile) for tile in range(tiles)]
    for ticket, (kind, tile) in enumerate(order):
        if tile < tiles * slabs:
            (sums if kind == "sums" else outputs)[tile // tiles][tile % tiles] = ticket
    return sums, outputs


def test_grid_reads_tiles_in_the_order_of_tickets_and_slabs_of_columns_in_layer_norm() -> None:
    (_, sums, _), (_, outputs, _) = reads("grid", 0)
    for found, expected in zip((sums, outputs), tickets_of_group_norm(), strict=True):
        assert (found == np.kron(expected, np.ones((1, 32), int))).all()
    ((_, slab, _),) = reads("grid", 1)
    assert (slab == np.repeat(np.arange(8), 16)).all()


def test_split_gives_a_slice_to_no_one() -> None:
    (sums, block, _), (outputs, again, _) = reads("split", 0)
    assert sums.launch.entry == "split_moments" and outputs.launch.entry == "group_norm_split_apply"
    assert all(len(set(row)) == 4 for row in block)
    assert (again == 31 - block).all()  # from the end
    for _, block, warp in reads("split", 1):
        owner = block * 4 + warp
        assert (owner[:4] == owner[4:]).all()  # every 4th row
        assert len(np.unique(owner[:4])) == 4 * 8
        assert all(len(set(owner[0, first : first + 16])) == 1 for first in range(0, 128, 16))


def test_a_block_of_column_owns_columns_of_rows() -> None:
    first, second = reads("column", 0)
    for _, block, warp in (first, second):
        assert (block == np.kron(block[::16, ::4], np.ones((16, 4), int))).all()
        assert sorted(block[::16, ::4].ravel()) == list(range(16))
        assert (warp == np.tile(np.repeat(np.arange(4), 4), 8)[:, None]).all()
    assert (second[1] == 15 - first[1]).all()


# ---- committed pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_committed_pictures_are_those_of_the_kernels(name: str) -> None:
    """What was counted is in the metadata of a picture; so no bytes are compared."""
    light = strategies.PICTURES / f"strategy-{name}.svg"
    for picture in (light, themes.twin(light)):
        assert themes.facts_of(picture) == strategies.description(name), "run python docs/drawings/strategies.py"
        assert picture.stat().st_size < 150_000


def test_the_boxes_of_a_drawing_cover_it() -> None:
    ids = np.array([[0, 0, 1], [0, 0, 1], [2, 0, 0]])
    boxes = list(strategies.boxes(ids))
    assert sorted(boxes) == [(0, 0, 2, 2), (0, 2, 2, 1), (2, 0, 1, 1), (2, 1, 1, 2)]
    for row, column, high, wide in boxes:
        assert len(set(ids[row : row + high, column : column + wide].ravel())) == 1


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_has_a_section_with_a_picture_for_each_strategy() -> None:
    assert tuple(strategies.PANELS) == STRATEGIES
    assert {strategy for op in OPS.values() for strategy in op.strategies} == {*STRATEGIES}
    assert tuple(re.findall(r"^## `(\w+)`$", PAGE, re.MULTILINE)) == STRATEGIES
    assert tuple(re.findall(r"\]\(\.\./pictures/strategy-(\w+)\.svg\)", PAGE)) == STRATEGIES


def test_the_table_of_strategies_is_that_of_the_ops() -> None:
    header = re.search(r"^\| function \|(.*)\|$", PAGE, re.MULTILINE)
    assert header is not None
    assert tuple(re.findall(r"`(\w+)`", header[1])) == STRATEGIES
    found = {}
    table = PAGE[header.end() :].partition("\n\n")[0]
    for line in re.findall(r"^\| (`\w+`.*)\|$", table, re.MULTILINE):
        functions, *cells = line.split("|")
        assert {cell.strip() for cell in cells} <= {"yes", ""} and len(cells) == len(STRATEGIES)
        chosen = {name for name, cell in zip(STRATEGIES, cells, strict=True) if cell.strip()}
        found |= dict.fromkeys(re.findall(r"`(\w+)`", functions), chosen)
    assert found == {name: {*op.strategies} for name, op in OPS.items()}


def test_the_example_prints_the_text_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_the_page_explains_every_field_of_every_tile() -> None:
    _, _, table = PAGE.partition("## The fields of a tile")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table.partition("\n## ")[0], re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    strategies_ = [one for op in OPS.values() for one in op.strategies.values()]
    fields = {name for strategy in strategies_ for tile in strategy.tiles() for name, _ in tile.fields}
    assert sorted(explained) == sorted(fields)

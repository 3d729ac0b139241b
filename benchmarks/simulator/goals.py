"""The goals of the kernels: problems with the share of the floor, or the time, that their default tile should reach.

The goals were set when the kernels had one text and were not yet written for few instructions; `before` is the
simulated time of then, bfloat16 on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cunorm.core.problem import Problem
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import problem_of


@dataclass(frozen=True)
class Goal:
    """A goal for one problem.

    Attributes
    ----------
    op, shape : str
        As on the command line.
    before : float
        Simulated time when the goal was set, microseconds.
    share : float
        Share of the floor to reach; 0 if the goal is a time.
    us : float
        Time to reach, microseconds; 0 if the goal is a share.
    layout, activation : str or None
    why : str
        What keeps the time above the goal, if it does.
    """

    op: str
    shape: str
    before: float
    share: float = 0.0
    us: float = 0.0
    layout: str | None = None
    activation: str | None = None
    why: str = ""

    @property
    def problem(self) -> Problem:
        """The problem in bfloat16, with all outputs."""
        options = plan_options(self.op, self.shape, "bfloat16", self.layout)
        return problem_of(self.op, **options, activation=self.activation)

    @property
    def text(self) -> str:
        """The goal in words."""
        return f"{self.us:g} us" if self.us else f"{self.share:.0%}"

    def met(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the results reaches the goal."""
        return bool(row["us"] <= self.us if self.us else row["floor_us"] >= self.share * row["us"])


def key_of(problem: Problem) -> str:
    """The name of a row: op, layout, sizes, activation and what the op adds."""
    layout = f" {problem.layout}" if len(problem.spec.layouts) > 1 else ""
    activation = f" {problem.activation}" if problem.activation else ""
    return f"{problem.op}{layout} {problem.sizes_text}{activation}{problem.extras_text}"


GOALS: tuple[Goal, ...] = (
    Goal(
        "group_norm_backward",
        "2,320,64x64,32",
        15.8,
        0.55,
        layout="NCHW",
        why="There are 64 groups for 132 multiprocessors, so blocks of a cluster share a group, and the loads, "
        "sums and stores of a group follow each other. A second launch sums dgamma and dbeta: one launch for "
        "both samples needs 32 clusters of four blocks that fill a multiprocessor each, and an H200 is "
        "certain to hold 31.",
    ),
    Goal(
        "group_norm_backward",
        "2,320,64x64,32",
        26.3,
        0.50,
        layout="NHWC",
        why="As channels-first, and the 20 bytes of a group's row are no whole sectors, so a slab has four "
        "groups, whose sums go through shared memory.",
    ),
    Goal("group_norm_backward", "2,320,64x64,32", 19.9, 0.45, layout="NCHW", activation="silu"),
    Goal(
        "group_norm_backward",
        "1,320,128x128,32",
        17.5,
        0.75,
        layout="NCHW",
        why="Each of 32 groups needs the shared memory of four multiprocessors, and an H200 is certain to hold 31 "
        "such clusters. `grid` reads dy and x twice, the second time from the L2 cache, and blocks wait for "
        "the sums of others. A launch before it clears the counters.",
    ),
    Goal("group_norm_backward", "32,256,56x56,32", 71.6, 0.85, layout="NCHW"),
    Goal("group_norm_backward", "32,256,56x56,32", 99.4, 0.80, layout="NHWC"),
    Goal(
        "group_norm_backward",
        "32,256,56x56,32",
        112.0,
        0.75,
        layout="NCHW",
        activation="silu",
        why="The derivative of SiLU is computed twice per element, for the sums and for dx: to keep it in the "
        "slab, it would have to be rounded to 16 bits.",
    ),
    Goal(
        "group_norm_backward",
        "1,128,512x512,32",
        298.0,
        0.75,
        layout="NCHW",
        why="dx waits until the sums of its group are folded. With more tiles ahead fewer blocks would wait, but "
        "the second reads might no longer be in the L2 cache (`GroupGrid.reach`).",
    ),
    Goal("group_norm_backward", "8,1280,8x8,32", 12.4, us=5.0, layout="NCHW"),
    Goal(
        "group_norm",
        "2,320,64x64,32",
        16.6,
        0.50,
        layout="NCHW",
        why="There are 64 groups for 132 multiprocessors. A load, two exchanges between the blocks of a cluster "
        "(one per pass of the statistics) and a store follow each other.",
    ),
    Goal(
        "group_norm",
        "32,256,56x56,32",
        49.2,
        0.85,
        layout="NCHW",
        why="Two passes for the statistics and one for y read the slab from shared memory three times; these "
        "instructions are not fully hidden behind the DRAM.",
    ),
    Goal("group_norm", "8,1280,8x8,32", 11.0, us=4.0, layout="NCHW"),
    Goal(
        "group_norm",
        "1,128,512x512,32",
        57.4,
        0.60,
        layout="NCHW",
        why="x has 67 MB, more than the L2 cache keeps, so the second sweep reads it from DRAM again.",
    ),
    Goal("layer_norm_backward", "16384,4096", 112.0, 0.92),
    Goal(
        "layer_norm_backward",
        "1024,12288",
        47.2,
        0.70,
        why="A multiprocessor has eight rows, one in use and one on its way. Beside the sums of the columns its "
        "shared memory has no room for a third.",
    ),
    Goal(
        "layer_norm_backward",
        "4096,768",
        15.3,
        0.60,
        why="A warp has four rows or fewer, so the first load and the last sums of a block overlap with nothing, "
        "and a second launch folds the sums of all blocks.",
    ),
    Goal(
        "layer_norm_backward",
        "50432,768",
        113.0,
        0.85,
        why="The default is chosen by times of an H100, where 12,544 rows take the same time with rows staged in "
        "shared memory as with rows in registers (benchmarks/results/measured_tiles-*). The simulator finds staged "
        "rows 10 % slower here.",
    ),
    Goal(
        "layer_norm_backward",
        "65536,128",
        22.5,
        0.85,
        why="Short rows: warps wait for the next row, and rows further ahead (`stages`) cost more instructions "
        "than they hide.",
    ),
    Goal("layer_norm", "16384,4096", 92.7, 0.90),
    Goal("layer_norm", "4096,768", 10.1, 0.60),
    Goal("layer_norm", "65536,128", 13.0, 0.85),
    Goal(
        "batch_norm_backward_reduce",
        "256,64,56x56",
        64.7,
        0.90,
        layout="NCHW",
        why="The first launch keeps the DRAM busy but for its start and its last wave; the second launch, which "
        "sums the chunks, adds the rest.",
    ),
    Goal("batch_norm_backward_reduce", "256,64,56x56", 75.3, 0.90, layout="NHWC"),
    Goal("batch_norm_backward_reduce", "32,2048,7x7", 14.2, 0.50, layout="NCHW"),
    Goal("batch_norm_backward_elemt", "256,64,56x56", 84.5, 0.93, layout="NCHW"),
)

"""Draw docs/pictures/first-call.svg: the way of a first call of `cunorm.group_norm_backward` through the rooms.

Run ``python docs/drawings/first_call.py``. The call is a real one, on the CPU executor in a new process, and it is
recorded: a step that the call does not take, or takes in another order, is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from docs.drawings.themes import in_both, save

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "first-call.svg"


class Step(NamedTuple):
    """A function that the call enters, and what it does there.

    Attributes
    ----------
    file : str
        Its file in cunorm/.
    function : str
        Its name, with the name of its class.
    does : str
        A few words for the picture. docs/contributing/architecture.md has the whole sentence.
    """

    file: str
    function: str
    does: str

    @property
    def room(self) -> str:
        """The folder of cunorm that contains the file."""
        return self.file.split("/")[0]


STEPS = [
    Step("ops/group_norm/api.py", "group_norm_backward", "the public function"),
    Step("runtime/op.py", "perform", "looks for a call like this one"),
    Step("ops/group_norm/op.py", "_check_backward", "arguments to a problem"),
    Step("runtime/plans.py", "plan_for", "the problem to a plan"),
    Step("tiling/choose_tile.py", "resolve", "looks for a tile in the tables"),
    Step("tiling/costmodel.py", "choose", "predicts the times of tiles"),
    Step("ops/group_norm/warp.py", "_WarpRuns.launches", "a tile to its launches"),
    Step("runtime/checked_call.py", "Calls.keep", "keeps the call for the next time"),
    Step("runtime/checked_call.py", "Call.__call__", "allocates the results"),
    Step("runtime/plans.py", "Plan.run", "at the first run: compile"),
    Step("jit/sources.py", "kernel_text", "a head, and the .cu files"),
    Step("executors/cpu/kernel.py", "compile", "the text to a kernel"),
    Step("jit/cpu_builds.py", "load", "from disk, or else"),
    Step("jit/cxx.py", "shared_object", "by the C++ compiler"),
    Step("executors/cpu/executor.py", "run", "runs the kernels"),
]
#: The rooms of the picture from left to right, which is from the top down in cunorm, with their colours.
ROOMS = {"ops": "#3d8fd1", "runtime": "#e8743b", "tiling": "#9a7fd1", "executors": "#d4a017", "jit": "#2fa572"}
TITLE = "The first cunorm.group_norm_backward of a process, on NumPy arrays"

#: Runs in a process of its own, so that nothing of the call is prepared.
RECORD = """
import json, sys
from pathlib import Path
import numpy as np
import cunorm

folder = str(Path(cunorm.__file__).parent) + "/"
x = np.random.default_rng(0).normal(size=(2, 8, 4, 4)).astype(np.float32)
y, mean, rstd = cunorm.group_norm(x, num_groups=4)
seen = {}

def enter(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(folder):
        owner = frame.f_locals.get("self")
        cls = next((cls for cls in type(owner).__mro__ if frame.f_code.co_name in vars(cls)), None)
        name = frame.f_code.co_name if owner is None or cls is None else f"{cls.__name__}.{frame.f_code.co_name}"
        seen.setdefault((frame.f_code.co_filename.removeprefix(folder), name))

sys.setprofile(enter)
cunorm.group_norm_backward(x, x, mean, rstd, num_groups=4)
sys.setprofile(None)
print(json.dumps(list(seen)))
"""


def recorded() -> list[tuple[str, str]]:
    """The functions of cunorm that a first call enters, by file and name, in the order of their first entry."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"CUNORM_CACHE_DIR": cache, "PYTHONPATH": path}
        environment.pop("CUNORM_TILING_TABLE", None)  # with the problem's entry, the cost model would not be asked
        command = [sys.executable, "-c", RECORD]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [(file, name) for file, name in json.loads(done.stdout)]


def places(calls: list[tuple[str, str]]) -> list[int]:
    """The place of each step among the recorded functions.

    Raises
    ------
    ValueError
        If the call does not take the steps in this order.
    """
    found = [calls.index((step.file, step.function)) for step in STEPS]
    if found != sorted(found):
        raise ValueError(f"the call takes the steps in another order: {found}")
    return found


def facts() -> list[list[str]]:
    """The file and the function of each step."""
    return [[step.file, step.function] for step in STEPS]


def draw(path: Path) -> None:
    """Write the picture: one column per room, one row per step."""
    from matplotlib import pyplot as plt
    from matplotlib import rcParams

    columns = list(ROOMS)
    figure = plt.figure(figsize=(5.8, 6.4))
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    for place, room in enumerate(columns):
        axis.plot([place, place], [-0.6, len(STEPS) - 0.4], color=rcParams["grid.color"], linewidth=9,
                  solid_capstyle="round", alpha=0.6, zorder=1)  # fmt: skip
        axis.text(place, -1.0, room, ha="center", va="bottom", fontsize=9.5, fontweight="bold", color=ROOMS[room],
                  rotation=35, rotation_mode="anchor", horizontalalignment="left")  # fmt: skip
    across = [columns.index(step.room) for step in STEPS]
    axis.plot(across, range(len(STEPS)), color=rcParams["text.color"], linewidth=1.3, zorder=2)
    for row, (step, place) in enumerate(zip(STEPS, across, strict=True)):
        axis.plot(place, row, "o", markersize=15, color=ROOMS[step.room], zorder=3)
        axis.text(place, row + 0.02, str(row + 1), ha="center", va="center", fontsize=8.5, fontweight="bold",
                  color="#10151b", zorder=4)  # fmt: skip
        axis.text(len(columns) - 0.3, row - 0.03, step.function, va="bottom", fontsize=9, fontweight="bold")
        axis.text(len(columns) - 0.3, row + 0.05, step.does, va="top", fontsize=8.5)
    axis.text(-0.4, -2.7, TITLE, fontsize=9.5, fontweight="bold")
    axis.set(xlim=(-0.6, len(columns) + 3.5), ylim=(len(STEPS) - 0.3, -3.1))
    axis.axis("off")
    save(figure, path, json.dumps(facts()))
    plt.close(figure)


def main() -> None:
    """Record a call, compare the steps with it, and draw."""
    places(recorded())
    in_both(draw, PICTURE)


if __name__ == "__main__":
    main()

"""Tune the norms of a training run
================================

This page records which GroupNorms a training run calls, tunes them once, and shows that later calls take their tiles
from the table. The run is the digits network of ``train_digits.py``: it is trained on scikit-learn's handwritten digits
and knows nothing of tuning.

**The page is built without a GPU, so nothing on it is measured.** The tuner then stores the tile that its cost model
prefers, and marks it "modelled, not measured". These are the tiles that calls would get anyway, so this run gets no
faster. On a machine with a GPU the same commands measure every tile that they try.

In a PyTorch model, ``cunorm.torch.replace`` comes first. The commands after it are the same:
:ref:`faster-group-norms`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from train_digits import run

import cunorm

folder = tempfile.TemporaryDirectory()
trace, table = Path(folder.name) / "run.trace", Path(folder.name) / "tiles.json"

# %%
# Record a run
# ------------
#
# Inside ``with cunorm.trace(path):`` every call is recorded with its sizes. A few steps are enough, because later steps
# repeat the same sizes. Include what is different: the last, smaller batch, and evaluation. Setting the variable
# ``CUNORM_TRACE`` to a path records a program without a change to it.

with cunorm.trace(trace):
    result = run("group", epochs=1, images=128)
print(f"{len(result.losses)} steps, {result.library.calls.total()} calls")

# %%
# The trace is a text file with one line per problem, and one more for the number of its later calls. A problem is an op
# with its dtypes, layout, sizes and results.

lines = trace.read_text().splitlines()
print(len(lines), "lines; the first one:")
print(json.dumps(json.loads(lines[0]), indent=1))

# %%
# Before
# ------
#
# The problem of the last GroupNorm, backward: 64 samples, 32 channels, 4 x 4 positions, 8 groups. No table has an entry
# for it, so the cost model chooses.


def plan_of_last_norm():
    """The plan of the backward of the third norm."""
    sizes = {"shape": (64, 32, 4, 4), "num_groups": 8, "gamma_dtype": "float32"}
    return cunorm.plan("group_norm_backward", dtype="float32", **sizes)


print(plan_of_last_norm().explain())

# %%
# Tune
# ----
#
# The function below runs a command as a shell does. In a shell this one is
# ``cunorm tune --from-trace run.trace --table tiles.json``.


def cunorm_command(*arguments):
    """Run a command of cunorm and print what it prints."""
    command = [sys.executable, "-m", "cunorm", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder.name, check=True, capture_output=True, text=True)
    print(done.stdout)


quick = ("--trials", 20, "--storage", "studies.journal")
cunorm_command("tune", "--from-trace", trace.name, "--table", table.name, *quick)

# %%
# There are two lines per problem: what it is, then the chosen tile. A time follows, and where it is from. "The default"
# means that the tuner found no better tile than the one that calls get without a table. On a GPU the time is measured,
# and another tile is stored only if it is at least 2 % faster than the default.
#
# Two options are for this page alone, so leave them out: ``--trials 20`` tries fewer tiles, and ``--storage`` keeps the
# tuner's notes in the temporary folder.
#
# After
# -----
#
# ``CUNORM_TILING_TABLE`` names the table that calls search first. In a shell, type
# ``export CUNORM_TILING_TABLE=$PWD/tiles.json`` before the training starts. ``chosen by`` now names the table.

os.environ["CUNORM_TILING_TABLE"] = str(table)
print(plan_of_last_norm().explain().replace(folder.name + os.sep, ""))

# %%
# The table has one entry per problem. ``"source": "model"`` says that its time was not measured.
# ``cunorm show --table tiles.json`` lists all of them.

entries = json.loads(table.read_text())["entries"]
print(len(entries), "entries; the last one:")
print(json.dumps(entries[-1], indent=1))

# %%
# Did it help?
# ------------
#
# On the GPU, ``cunorm bench --from-trace run.trace`` times each problem with the default tile and with the tile of the
# table, beside PyTorch's own function, on the same arrays. Without a GPU it ends with exit code 3 and times nothing.

del os.environ["CUNORM_TILING_TABLE"]
folder.cleanup()

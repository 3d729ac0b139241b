"""A first call
============

This page calls GroupNorm and its gradient, compares both with the formulas, and asks cunorm which kernels run and how
many bytes they move. It needs no GPU. The same kernels run on NumPy arrays through the CPU executor, whose results
agree with a GPU's up to the last bits, and whose time says nothing about speed.
"""

import numpy as np  # on a GPU: import cupy as np

import cunorm

# %%
# Forward
# -------
#
# ``x`` has 2 samples, 64 channels and 16 x 16 positions. With 8 groups, 8 channels of a sample share a mean and a
# standard deviation. The function returns ``y``, and the statistics that the gradient reads.

rng = np.random.default_rng(0)
x = rng.standard_normal((2, 64, 16, 16), dtype=np.float32)
gamma, beta = np.ones(64, np.float32), np.zeros(64, np.float32)

y, mean, rstd = cunorm.group_norm(x, 8, gamma, beta)
print(y.shape, y.dtype, mean.shape, rstd.shape)

# %%
# The formula in plain array code gives the same ``y``, up to rounding.

groups = x.reshape(2, 8, -1)
centred = groups - groups.mean(axis=2, keepdims=True)
expected = centred / np.sqrt(groups.var(axis=2, keepdims=True) + 1e-5)
print(bool(np.allclose(y, expected.reshape(x.shape), atol=1e-5)))

# %%
# Gradients
# ---------
#
# ``dy`` is the gradient of the loss by ``y``. The backward reads ``dy``, ``x`` and the statistics, and returns the
# gradients by ``x``, ``gamma`` and ``beta``.

dy = rng.standard_normal(x.shape, dtype=np.float32)
dx, dgamma, dbeta = cunorm.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=8)
print(dx.shape, dgamma.shape, dbeta.shape)

# %%
# A finite difference confirms ``dx``: the loss is the sum of ``dy * y``. ``x`` moves a small step to both sides, in
# float64. The loss changes as ``dx`` says.

step = 1e-4 * rng.standard_normal(x.shape)
above, below = (cunorm.group_norm(x + sign * step, 8)[0] for sign in (1, -1))
change = float((dy * (above - below)).sum())
predicted = 2 * float((dx * step).sum())
print(abs(change - predicted) < 1e-3 * abs(predicted))

# %%
# Which kernels run
# -----------------
#
# ``cunorm.plan`` prepares a call without arrays. ``explain()`` says what the call does. The shape is one of Stable
# Diffusion's U-Net.

plan = cunorm.plan("group_norm_backward", shape=(2, 320, 64, 64), dtype="bfloat16", num_groups=32)
print(plan.explain())

# %%
# Line by line:
#
# 1. The problem: op, dtype, layout, sizes, and the wanted results. ``HxW`` is the number of positions, 64 x 64.
# 2. ``device``: where the kernels run. Without a GPU this is the CPU executor, with the limits of an H200.
# 3. ``strategy``: how the problem is cut, and the tile, which is the numbers of the cut.
# 4. ``chosen by``: the reason for this tile. Here it is the cost model. *Predicted* is its estimate for an H200, not a
#    measurement.
# 5. ``workspace``: the memory that a call needs for partial sums.
# 6. ``kernels``: whether the kernels take sizes as arguments (*generic*) or have them compiled in (*specialised*).
# 7. ``launch``, one line per kernel: the number of blocks, their threads and their shared memory.
#
# How many bytes they move
# ------------------------
#
# The fewest bytes that this problem has to move are those of ``dy`` and ``x``, read once, and of ``dx``, written once.
# ``traffic()`` runs the kernels on the CPU executor and counts every access. The column ``/floor`` is the bytes of a
# row over those fewest bytes.

traffic = plan.traffic()
print(f"{traffic.floor_bytes:,} bytes at least")
print(traffic)

# %%
# Another tile
# ------------
#
# ``tile=`` takes another strategy or tile than the chosen one. ``split`` sweeps over the tensors twice: it reads ``dy``
# and ``x`` twice and writes ``dx`` once. These are five passes instead of three.

split = cunorm.Tile("split", chunk=1024, threads=128)
again = cunorm.plan("group_norm_backward", shape=(2, 320, 64, 64), dtype="bfloat16", num_groups=32, tile=split)
for counted in (traffic, again.traffic()):
    print(f"{counted.tensor_ratio:.2f} times the fewest bytes: {counted.choice}")

# %%
# Every function takes ``tile=`` too. Another tile adds in another order, so the last bits may differ. A tile that does
# not fit the problem is an error that says why.

other, _, _ = cunorm.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=8, tile=split)
print(bool(np.allclose(dx, other, atol=1e-5)))
try:
    cunorm.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=8, tile=cunorm.Tile("split", chunk=1, threads=7))
except cunorm.UnsupportedTile as error:
    print(error)

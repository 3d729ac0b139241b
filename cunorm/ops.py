"""The ops of cunorm by name, and `plan`: a prepared call of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .devices import known
from .group_norm_checks import place_for
from .group_norm_plan import plan_group_norm
from .launch import Place, Plan, executor
from .strategy import Tile

__all__ = ["OPS", "gpu_present", "plan"]

#: Every op and what makes its plans.
OPS: dict[str, Callable[..., Plan]] = {
    "group_norm": plan_group_norm,
    "group_norm_backward": plan_group_norm,
}


def gpu_present() -> bool:
    """Whether CuPy imports and sees a GPU."""
    try:
        import_cupy = executor("gpu")
    except ImportError:
        return False
    return bool(import_cupy.present())


def _place(device: object) -> Place:
    """Where a plan runs: None is the current GPU where there is one, else the CPU executor."""
    if device is None:
        return place_for("gpu", executor("gpu").current()) if gpu_present() else place_for("cpu", 0)
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        raise TypeError(f'device: {device!r}, expected None, "cpu", the number of a GPU, or the name of a known one')
    if isinstance(device, int):
        if not gpu_present():
            raise ValueError(f"device: GPU {device}, but CuPy sees none; see `cunorm doctor`")
        return place_for("gpu", device)
    return place_for("cpu", 0) if device == "cpu" else Place("cpu", 0, known(device))


def plan(
    op: str,
    *,
    shape: Sequence[int],
    dtype: object,
    num_groups: int | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    gamma_dtype: object = None,
    beta_dtype: object = None,
    output_mask: Sequence[bool] = (True, True, True),
    data_format: str = "NCHW",
    activation: str | None = None,
    device: int | str | None = None,
    tile: Tile | Mapping[str, object] | None = None,
) -> Plan:
    """A prepared call of an op: what will run, how much workspace it needs, and why. No arrays needed.

    Parameters
    ----------
    op : str
        ``"group_norm"`` or ``"group_norm_backward"``.
    shape : sequence of int
        Of x, in ``data_format``, contiguous. (A tensor with channels-last strides in an NCHW shape is planned as
        its NHWC shape.)
    dtype : str or dtype
        Of x.
    num_groups : int
    normalized_shape : None
        For layer normalisation, which this version does not have.
    gamma_dtype, beta_dtype : str or dtype, optional
        None: whatever the call brings, or nothing.
    output_mask : sequence of bool
        Of a backward.
    data_format : {"NCHW", "NHWC"}
    activation : None
    device : None, "cpu", int or str, optional
        None: the current GPU where there is one, else the CPU executor. An int is CuPy's number of a GPU. The name of
        a known device (``"A100"``) plans for the CPU executor posing as it.
    tile : Tile or mapping, optional
        Instead of the chosen one.

    Returns
    -------
    Plan
        With ``problem``, ``strategy``, ``tile``, ``workspace_nbytes``, ``explain()``; call it with the op's arrays.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile
        As the op.
    """
    make = OPS.get(op) if isinstance(op, str) else None
    if make is None:
        raise ValueError(f"op: {op!r}, expected one of {', '.join(OPS)}")
    if normalized_shape is not None:
        raise ValueError(f"normalized_shape: {normalized_shape!r}, expected None for {op}")
    if num_groups is None:
        raise TypeError(f"num_groups: None, expected an int for {op}")
    return make(
        op,
        _place(device),
        shape=shape,
        dtype=dtype,
        num_groups=num_groups,
        gamma_dtype=gamma_dtype,
        beta_dtype=beta_dtype,
        output_mask=output_mask,
        data_format=data_format,
        activation=activation,
        tile=None if tile is None else Tile.of(tile),
    )

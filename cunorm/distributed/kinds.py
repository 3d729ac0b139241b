"""The word of a packet by which processes compare the dtype and the channels of their parts of a batch."""

from __future__ import annotations

from collections.abc import Iterable

from cunorm.core.arrays import DTYPES

_DTYPES = tuple(DTYPES)


def kind_word(dtype: str, C: int) -> int:
    """The word for x with that dtype and number of channels."""
    return C * len(_DTYPES) + _DTYPES.index(dtype)


def check_kinds(words: Iterable[int], name: str, dtype: str, C: int) -> None:
    """Check that all processes, in the order of their ranks, sent the word of this process's x (ValueError).

    ``name`` is the user-facing name of x.
    """
    own = kind_word(dtype, C)
    for rank, found in enumerate(words):
        if found != own:
            channels, index = divmod(found, len(_DTYPES))
            raise ValueError(
                f"{name}: {dtype} with {C} channels, but process {rank} has {_DTYPES[index]} with {channels}; "
                "expected the same dtype and number of channels on all processes"
            )

"""The packet: the message of a process in the forward of a synchronised BatchNorm, in 64-bit words.

The first word is the number of elements per channel, which is exact in it. On the CPU, a second word encodes the dtype
and the channels of x, and the receivers compare it: to read it from a GPU, they would have to wait for the GPU. After
these words come C means and C invstds as bits, in the accumulator of x's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

from cunorm.core.arrays import DTYPES
from cunorm.core.problem import ITEMSIZE, accumulator

#: Bytes of a word.
WORD_BYTES = 8
_DTYPES = tuple(DTYPES)


class PacketFormat:
    """The format of the packets for an x.

    Parameters
    ----------
    on_cpu : bool
        Whether x is in host memory.
    dtype : str
        Dtype of x.
    C : int
        Channels of x.

    Attributes
    ----------
    head : int
        Words before the statistics.
    words : int
        Words of a packet.
    first : int
        Accumulators before the first mean, if the words are read as accumulators.
    """

    def __init__(self, on_cpu: bool, dtype: str, C: int) -> None:
        self.dtype, self.C = dtype, C
        itemsize = ITEMSIZE[accumulator(dtype)]
        self.head = 2 if on_cpu else 1
        self.words = self.head + 2 * C * itemsize // WORD_BYTES
        self.first = self.head * WORD_BYTES // itemsize

    @property
    def kind(self) -> int | None:
        """The second word; None on a GPU."""
        return self.C * len(_DTYPES) + _DTYPES.index(self.dtype) if self.head > 1 else None

    def check_kinds(self, kinds: Iterable[int], name: str) -> None:
        """Check that all processes, in the order of their ranks, sent the kind of this process's x (ValueError).

        ``name`` is the user-facing name of x.
        """
        for rank, found in enumerate(kinds):
            if found != self.kind:
                channels, index = divmod(found, len(_DTYPES))
                raise ValueError(
                    f"{name}: {self.dtype} with {self.C} channels, but process {rank} has {_DTYPES[index]} with "
                    f"{channels}; expected the same dtype and number of channels on all processes"
                )

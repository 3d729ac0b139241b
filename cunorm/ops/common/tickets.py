"""The words by which the blocks of a `grid` kernel share out their work: where they stand, and who clears them."""

from __future__ import annotations

from cunorm.core.strategy import Launch, ceil_div

from .building_blocks import blocks_for, round_up

__all__ = ["LINE_WORDS", "WORD", "clear_launch", "words_at"]

WORD = 4  # bytes of a counter
LINE_WORDS = 32  # the tickets have a line of the L2 cache to themselves: ticket_words in turns.cuh
CLEAR_THREADS = 256


def words_at(pairs: int, pair_bytes: int) -> int:
    """The pair of the workspace from which the words stand, behind ``pairs`` others."""
    return round_up(pairs, LINE_WORDS * WORD // pair_bytes)


def clear_launch(at: int, words: int) -> Launch:
    """The launch that zeroes them."""
    return Launch(
        "clear_words",
        "clear_words",
        blocks_for(ceil_div(words, CLEAR_THREADS)),
        CLEAR_THREADS,
        ("workspace", at, words),
        traffic=words * WORD,
        registers=32,
        takes_tile=False,
        layout="NCHW",  # which it does not look at
        prepares=True,
    )

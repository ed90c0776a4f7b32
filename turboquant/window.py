"""The exact recent window: how large it is, how a user says so, and what it costs in a paged cache.

A token's K and V stay exact while it is one of the newest W of its sequence, and so do those of the first few; all
tokens are in the packed pages, too. `kernels/interface.py` has the rule that every kernel keeps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from turboquant.formats import BF16_BYTES, KVFormat

WINDOW_ENV = "TURBOQUANT_WINDOW"
DEFAULT_WINDOW = 64
COST_LENGTHS = {"4k": 4096, "32k": 32768, "128k": 131072}  # where the cost is shown
FIRST_TOKENS = 4  # at the start of a sequence, exact with any window: attention sinks


def window_size(given: int | None = None) -> int:
    """W in tokens: as given, else by TURBOQUANT_WINDOW, else 64. With 0 there is no window and no exact first token.

    Raises:
        ValueError: not a whole number of tokens, or a negative one.
    """
    text = str(os.environ.get(WINDOW_ENV, DEFAULT_WINDOW) if given is None else given)
    if not text.isdecimal():
        raise ValueError(f"window {text!r} is not a number of tokens: give 0 for none, or a number such as 64.")
    return int(text)


@dataclass(frozen=True)
class CacheLayout:
    """Pages of one KV head of one layer: packed ones, and exact ones of no more than their size.

    Attributes:
        fmt: of the packed pages.
        head_dim: D.
        block_size: tokens in a packed page.
        window: W in tokens; 0 for none.
        exact_bytes: of one exact element.
    """

    fmt: KVFormat
    head_dim: int
    block_size: int
    window: int
    exact_bytes: int = BF16_BYTES

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.fmt.slot_bytes(self.head_dim)

    @property
    def exact_token_bytes(self) -> int:
        """K and V of one exact token."""
        return 2 * self.head_dim * self.exact_bytes

    def window_block_size(self, page_bytes: int | None = None) -> int:
        """Tokens in an exact page: the largest divisor of block_size that fits into a packed page.

        A larger page would pad all packed pages to its size, and a block size that is no divisor would make prefix
        hits coarser.

        Args:
            page_bytes: of a page, where other layers have made it larger than the format asks for.

        Raises:
            ValueError: too few exact tokens fit.
        """
        fits = (page_bytes or self.page_bytes) // self.exact_token_bytes
        size = next((n for n in range(min(self.block_size, fits), 0, -1) if self.block_size % n == 0), 0)
        if size < FIRST_TOKENS:
            raise ValueError(
                f"block size {self.block_size} is too small for an exact window: {fits} exact tokens fit into a "
                f"packed page, {FIRST_TOKENS} at least are needed. Use a larger --block-size (160 fits well), or turn "
                f"the window off with {WINDOW_ENV}=0."
            )
        return size

    def sequence_pages(self, num_tokens: int) -> int:
        """Pages that one sequence of this length holds while it decodes."""
        packed = -(-num_tokens // self.block_size)
        if not self.window:
            return packed
        return packed + window_blocks(num_tokens, self.window, self.window_block_size())

    def ratio_vs_bf16(self, num_tokens: int) -> float:
        """How many times smaller than a bf16 cache of this many tokens: all pages counted, part-filled ones in full."""
        return 2 * self.head_dim * BF16_BYTES * num_tokens / (self.sequence_pages(num_tokens) * self.page_bytes)


def window_blocks(num_tokens: int, held_tokens: int, block_size: int, tails: int = 1) -> int:
    """Exact blocks of a sequence of num_tokens: the first, and those of its newest held_tokens, `tails` times over."""
    tail = -(-held_tokens // block_size) + 1
    return min(1 + tails * tail, -(-num_tokens // block_size))

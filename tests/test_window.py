"""The exact window's size and what it costs in a paged cache."""

from __future__ import annotations

import pytest

from turboquant.formats import PRESETS
from turboquant.window import DEFAULT_WINDOW, WINDOW_ENV, CacheLayout, window_blocks, window_size

FMT = PRESETS["turboquant3.5"]


def layout(block_size: int, head_dim: int = 128, window: int = 64, exact_bytes: int = 2) -> CacheLayout:
    return CacheLayout(FMT, head_dim, block_size, window, exact_bytes)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "exact_bytes", "expected"),
    [(160, 128, 2, 32), (160, 256, 2, 32), (128, 128, 2, 16), (128, 64, 4, 8), (32, 128, 2, 4), (4624, 256, 2, 578)],
)
def test_a_window_block_divides_the_packed_one_and_fits_its_page(block_size, head_dim, exact_bytes, expected):
    """The last is a hybrid's: its page is as large as a recurrent state, 16 x 17 x 17 tokens."""
    paged = layout(block_size, head_dim, exact_bytes=exact_bytes)
    size = paged.window_block_size()
    assert size == expected
    assert block_size % size == 0
    assert size * paged.exact_token_bytes <= paged.page_bytes


def test_a_page_that_other_layers_enlarge_holds_more_exact_tokens():
    paged = layout(32)
    assert paged.window_block_size(page_bytes=32 * paged.exact_token_bytes) == 32


def test_a_block_too_small_for_a_window_is_named():
    with pytest.raises(ValueError, match=r"block size 16 .* 3 exact tokens .*--block-size.*TURBOQUANT_WINDOW=0"):
        layout(16).window_block_size()


@pytest.mark.parametrize(
    ("window", "num_tokens", "ratio"),
    [(64, 1024, 2.57), (64, 4096, 3.77), (64, 32768, 4.33), (64, 131072, 4.39), (128, 4096, 3.53), (128, 32768, 4.28)],
)
def test_compression_of_a_whole_sequence(window, num_tokens, ratio):
    """Of the 4.41x of the format at head_dim 128, what whole pages of 160 tokens and the window leave."""
    assert layout(160, window=window).ratio_vs_bf16(num_tokens) == pytest.approx(ratio, abs=0.005)


def test_blocks_of_a_sequence():
    """The first one, and those that the newest tokens can touch; a short sequence has no more than it fills."""
    assert window_blocks(4096, 64, 32) == 1 + 3
    assert window_blocks(4096, 64, 32, tails=2) == 1 + 2 * 3
    assert window_blocks(40, 64, 32) == 2


def test_no_window_costs_nothing():
    assert layout(160, window=0).sequence_pages(4096) == 26


def test_the_window_by_default_by_environment_and_as_given(monkeypatch):
    monkeypatch.delenv(WINDOW_ENV, raising=False)
    assert window_size() == DEFAULT_WINDOW == 64
    monkeypatch.setenv(WINDOW_ENV, "0")
    assert window_size() == 0
    assert window_size(128) == 128

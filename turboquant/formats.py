"""The cache formats: one frozen dataclass that owns every byte of every preset.

A slot is what one token costs in one KV head: the K codes, the V codes and one fp16 scale for each of the two.

    slot_bytes = ceil(D·key_bits / 8) + ceil(D·value_bits / 8) + 2 + 2

A page holds `block_size` slots of one KV head, not as slots in a row but as four planes, so that a kernel reads each
kind of data in one contiguous run:

    | K codes of all tokens | V codes of all tokens | K scales of all tokens | V scales of all tokens |

The number in a preset's name counts code bits per element ((4 + 3) / 2 = 3.5); `bits_per_element` is the all-inclusive
figure, scales and all.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

SCALE_BYTES = 2
BF16_BYTES = 2
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 1024


@dataclass(frozen=True)
class PagePlanes:
    """Byte offsets of the four planes inside one page (one block of one KV head) and the length of the page."""

    value_codes: int
    key_scales: int
    value_scales: int
    end: int


@dataclass(frozen=True)
class KVFormat:
    """How K and V of one token and one KV head are stored.

    Attributes:
        name: what a user passes as `kv_cache_dtype`.
        key_bits: bits of one K code.
        value_bits: bits of one V code.
    """

    name: str
    key_bits: int
    value_bits: int

    @classmethod
    def from_name(cls, name: str) -> KVFormat:
        """The preset of this name or alias.

        Raises:
            ValueError: no preset has this name; the message lists them and guesses which one was meant.
        """
        canonical = ALIASES.get(name, name)
        if canonical in PRESETS:
            return PRESETS[canonical]
        close = difflib.get_close_matches(name.lower(), [*PRESETS, *ALIASES], n=1)
        hint = f" Did you mean {ALIASES.get(close[0], close[0])!r}?" if close else ""
        raise ValueError(f"unknown KV cache format {name!r}.{hint} Allowed: {', '.join(PRESETS)}.")

    def key_code_bytes(self, head_dim: int) -> int:
        """Bytes of one token's K codes in one KV head."""
        return code_bytes(head_dim, self.key_bits)

    def value_code_bytes(self, head_dim: int) -> int:
        """Bytes of one token's V codes in one KV head."""
        return code_bytes(head_dim, self.value_bits)

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of one token in one KV head: codes and scales of K and V."""
        check_head_dim(head_dim)
        return self.key_code_bytes(head_dim) + self.value_code_bytes(head_dim) + 2 * SCALE_BYTES

    def bits_per_element(self, head_dim: int) -> float:
        """All-inclusive bits per stored element (2·D elements in a slot)."""
        return 8 * self.slot_bytes(head_dim) / (2 * head_dim)

    def ratio_vs_bf16(self, head_dim: int) -> float:
        """How many times smaller than a bf16 cache."""
        return 2 * head_dim * BF16_BYTES / self.slot_bytes(head_dim)

    def planes(self, block_size: int, head_dim: int) -> PagePlanes:
        """Where the planes of a page of `block_size` tokens lie."""
        value_codes = block_size * self.key_code_bytes(head_dim)
        key_scales = value_codes + block_size * self.value_code_bytes(head_dim)
        value_scales = key_scales + block_size * SCALE_BYTES
        return PagePlanes(value_codes, key_scales, value_scales, value_scales + block_size * SCALE_BYTES)


PRESETS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat("turboquant2.5", key_bits=3, value_bits=2),
        KVFormat("turboquant3", key_bits=3, value_bits=3),
        KVFormat("turboquant3.5", key_bits=4, value_bits=3),
        KVFormat("turboquant4", key_bits=4, value_bits=4),
    )
}

# Shells and file names like names without a dot.
ALIASES: dict[str, str] = {name.replace(".", ""): name for name in PRESETS if "." in name}


def code_bytes(head_dim: int, bits: int) -> int:
    """Bytes that hold `head_dim` codes of `bits` bits, the last byte padded with zeros."""
    return (head_dim * bits + 7) // 8


def check_head_dim(head_dim: int) -> None:
    """Refuse a head_dim that no format can hold.

    Raises:
        ValueError: head_dim is not a multiple of 8 (codes of a token must fill whole bytes), or out of range.
    """
    if head_dim % 8 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} cannot be stored: allowed are multiples of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}. "
            "Keep this layer in its own precision (in vLLM: --kv-cache-dtype-skip-layers)."
        )

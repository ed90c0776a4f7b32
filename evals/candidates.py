"""What is compared: a cache by name, with or without an exact window, written `turboquant3.5` or `fp8@64`."""

from __future__ import annotations

from dataclasses import dataclass

from turboquant.environment import installed_version
from turboquant.evals.rivals import RIVALS, Rival
from turboquant.formats import ALIASES, PRESETS, KVFormat
from turboquant.window import FIRST_TOKENS, window_size

EXACT = ("auto", "exact")


@dataclass(frozen=True)
class Candidate:
    """One cache to measure.

    Attributes:
        cache: one of our formats, a rival, or None for the exact cache.
        window: newest tokens that are read exactly, the first few with them; 0 for none.
    """

    cache: KVFormat | Rival | None
    window: int

    @classmethod
    def parse(cls, text: str, window: int | None = None) -> Candidate:
        """From NAME or NAME@WINDOW.

        Args:
            window: for a format of ours that names none; by `turboquant.window.window_size` if None. A rival that
                names none has none.

        Raises:
            ValueError: an unknown name, a wrong window, or a rival whose package is not installed.
        """
        name, at, own = text.strip().partition("@")
        if name in EXACT:
            return cls(None, 0)
        if name in RIVALS:
            _check_installed(RIVALS[name])
            return cls(RIVALS[name], window_size(int(own)) if own.isdecimal() else _none_but(at, text))
        try:
            fmt = KVFormat.from_name(name)
        except ValueError as error:
            known = ", ".join([*PRESETS, *ALIASES, *RIVALS, EXACT[0]])
            raise ValueError(f"unknown cache {text!r}: {error} Known here: {known}; NAME@64 adds a window.") from error
        return cls(fmt, window_size(own) if at else window_size(window))

    @property
    def name(self) -> str:
        return EXACT[0] if self.cache is None else self.cache.name

    @property
    def label(self) -> str:
        """As one would write it."""
        return f"{self.name}@{self.window}" if self.window else self.name

    @property
    def simulated(self) -> bool:
        """Are K and V quantised and dequantised in place of being kept in this format?"""
        return isinstance(self.cache, Rival)

    def bits_per_element(self, head_dim: int, exact_bytes: int) -> float:
        """Of a packed token, scales included."""
        return 8.0 * exact_bytes if self.cache is None else self.cache.bits_per_element(head_dim)

    def bits_with_window(self, head_dim: int, exact_bytes: int, num_tokens: int) -> float:
        """Of all that the next query reads of num_tokens: the exact ones come on top of the packed ones."""
        held = min(num_tokens, self.window - 1 + FIRST_TOKENS) if self.window else 0
        return self.bits_per_element(head_dim, exact_bytes) + 8 * exact_bytes * held / num_tokens


def _check_installed(rival: Rival) -> None:
    if rival.requires and installed_version(rival.requires) is None:
        raise ValueError(
            f"{rival.name} needs {rival.requires}, which is not installed: pip install {rival.requires}, or "
            "'turboquant-toolkit[rivals]' for all such packages."
        )


def _none_but(at: str, text: str) -> int:
    if at:
        raise ValueError(f"{text!r}: the window behind @ is a number of tokens, such as 64.")
    return 0

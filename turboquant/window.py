"""The exact recent window: how large it is, and how a user says so.

A token's K and V stay exact while it is one of the newest W of its sequence, and so do those of the first few; all
tokens are in the packed pages, too. `kernels/interface.py` has the rule that every kernel keeps.
"""

from __future__ import annotations

import os

WINDOW_ENV = "TURBOQUANT_WINDOW"
FIRST_TOKENS = 4  # at the start of a sequence, exact with any window: attention sinks


def window_size(given: int | None = None) -> int:
    """W in tokens: as given, else by TURBOQUANT_WINDOW, else 0. With 0 there is no window and no exact first token.

    Raises:
        ValueError: not a whole number of tokens, or a negative one.
    """
    text = os.environ.get(WINDOW_ENV, "0") if given is None else str(given)
    if not text.isdecimal():
        raise ValueError(f"window {text!r} is not a number of tokens: give 0 for none, or a number such as 64.")
    return int(text)

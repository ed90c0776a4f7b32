"""Sizes and counts as people write them: 64MiB, 35GB, 4.7M."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9}


def parse_bytes(option: str, text: str | None) -> int | None:
    """Bytes; None stays None.

    Raises:
        ValueError: no size, or none above 0.
    """
    if text is None:
        return None
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size <= 0:
        raise ValueError(f"{option} {text!r} is no size: give bytes, or a number with a unit, such as 64MiB or 35GB.")
    return size


def parse_count(option: str, text: str) -> int:
    """A whole number of tokens.

    Raises:
        ValueError: no number, or none above 0.
    """
    number, factor = (text[:-1], COUNTS[text[-1].lower()]) if text[-1:].lower() in COUNTS else (text, 1)
    try:
        count = round(float(number.replace(",", "").replace("_", "")) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise ValueError(f"{option} {text!r} is no number: give tokens, such as 32768, 128k or 4.7M (decimal units).")
    return count

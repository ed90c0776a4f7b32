"""Text to calibrate and evaluate on, in every installation."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

SOURCE_MODULES = ("argparse", "asyncio.base_events", "inspect", "tarfile", "typing", "zipfile")


def load_text(source: str) -> str:
    """The text called `source`.

    Args:
        source: "pydoc" for the topics of Python's own help (about 450 kB of English), "source" for the code of some of
            Python's own modules (about 600 kB), both in every installation, or the path of a UTF-8 file.

    Raises:
        ValueError: no such file, or an empty one.
    """
    if source == "pydoc":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    if source == "source":
        return "\n\n".join(inspect.getsource(import_module(name)) for name in SOURCE_MODULES)
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"text {source!r} is neither 'pydoc' nor 'source' nor a file: give the path of a UTF-8 text file."
        )
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"text file {source!r} is empty: give one with at least a few thousand words.")
    return text

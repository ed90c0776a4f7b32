"""Is this package all ours? Several other distributions install a package called `turboquant`, too.

Two of them in one environment overwrite each other file by file, and whichever wrote last answers. That must be an
error at import, by name, not a strange failure later.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

DISTRIBUTION = "turboquant-toolkit"
PACKAGE = "turboquant"


class MixedInstallationError(ImportError):
    """Another distribution's `turboquant` is mixed with, or stands in front of, this one."""


def other_owners() -> list[str]:
    """Installed distributions, other than ours, that own files of a top-level package `turboquant`."""
    # Parsing every distribution's file list would cost seconds; searching its text costs milliseconds.
    owners = {
        dist.metadata["Name"]
        for dist in metadata.distributions()
        if f"\n{PACKAGE}/" in f"\n{dist.read_text('RECORD') or dist.read_text('SOURCES.txt') or ''}"
    }
    return sorted(name for name in owners if name and canonicalize_name(name) != DISTRIBUTION)


def check_origin() -> None:
    """Refuse a mixed package.

    Raises:
        MixedInstallationError: naming the other distributions and how to remove them.
    """
    others = other_owners()
    if others:
        names = " ".join(others)
        raise MixedInstallationError(
            f"the package {PACKAGE!r} at {Path(__file__).parent} is also installed by: {', '.join(others)}. "
            f"The two overwrite each other's files. Remove both and install one: "
            f"pip uninstall -y {names} {DISTRIBUTION} && pip install {DISTRIBUTION}"
        )

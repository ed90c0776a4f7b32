"""Triton kernels: see `kernels/interface.py` for what they compute and `docs/kernels.md` for how and why."""

from turboquant.kernels.triton.attend import attend
from turboquant.kernels.triton.store import store_kv
from turboquant.kernels.triton.store_window import store_window
from turboquant.kernels.triton.tables import prepare
from turboquant.kernels.triton.workspace import reserve

__all__ = ["attend", "prepare", "reserve", "store_kv", "store_window"]

"""Which layer, in which module, an attention impl belongs to.

vLLM builds an impl without telling it its layer's name, and never shows it the projection whose bias is K's mean. Both
are known the moment the layer becomes a child of the model's attention module, which torch announces to a global hook.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook


@dataclass(frozen=True)
class OwnedLayer:
    """vLLM's attention layer and, where it is one's child, the module around it (projections, norms, RoPE)."""

    name: str
    layer: Any
    parent: torch.nn.Module | None


@dataclass
class Ownership:
    """What is known of an impl's surroundings so far; kept on the impl, so that it goes when the model goes."""

    static_forward_context: dict[str, Any]
    parent: weakref.ref[torch.nn.Module] | None = None


_hook: Any = None


def expect(impl: Any, static_forward_context: dict[str, Any]) -> None:
    """Note the parent of this impl's layer as soon as it has one, and refuse `impl.unsupported` there."""
    global _hook
    impl.ownership = Ownership(static_forward_context)
    if _hook is None:
        _hook = register_module_module_registration_hook(_on_registration)


def find(impl: Any) -> OwnedLayer:
    """The layer that `impl` works for.

    Raises:
        RuntimeError: vLLM's forward context has no such layer.
        NotImplementedError: the layer asks for something unsupported.
    """
    layers = impl.ownership.static_forward_context.values()
    layer = next((layer for layer in layers if getattr(layer, "impl", None) is impl), None)
    if layer is None:
        raise RuntimeError("no attention layer of this model uses the turboquant impl that vLLM asks to finish.")
    _refuse_unsupported(impl, layer.layer_name)
    parent = impl.ownership.parent
    return OwnedLayer(layer.layer_name, layer, parent() if parent else None)


def _on_registration(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    impl = getattr(child, "impl", None)
    if isinstance(getattr(impl, "ownership", None), Ownership):
        impl.ownership.parent = weakref.ref(parent)
        _refuse_unsupported(impl, child.layer_name)


def _refuse_unsupported(impl: Any, layer_name: str) -> None:
    if impl.unsupported:
        missing = ", ".join(impl.unsupported)
        raise NotImplementedError(
            f"layer {layer_name}: kv_cache_dtype={impl.kv_cache_dtype!r} does not support {missing}. "
            "Serve this model with kv_cache_dtype='auto', or leave the layer out with --kv-cache-dtype-skip-layers."
        )

"""Send layers with a turboquant cache to our backend, whatever the platform would choose.

vLLM picks a backend by platform, and some platforms never look at the cache dtype (the CPU one would write K and V
into a uint8 cache and answer with noise). Here the dtype decides, and what our backend does not do is refused before
any weight is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from turboquant.formats import ALIASES, PRESETS

BACKENDS = {
    "turboquant2.5": "turboquant.vllm.backend.TurboQuant25Backend",
    "turboquant3": "turboquant.vllm.backend.TurboQuant3Backend",
    "turboquant3.5": "turboquant.vllm.backend.TurboQuant35Backend",
    "turboquant4": "turboquant.vllm.backend.TurboQuant4Backend",
}

# Fields of vLLM's AttentionSelectorConfig that ask for what we do not have.
UNSUPPORTED = {
    "use_mla": "MLA (multi-head latent attention)",
    "use_sparse": "sparse attention",
    "use_mm_prefix": "bidirectional multimodal prefixes",
    "use_per_head_quant_scales": "per-head FP8 scales from the checkpoint",
    "use_non_causal": "non-causal attention",
    "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism",
    "use_rswa": "reference sliding window attention",
    "use_adaptive_verification": "adaptive speculative verification",
}


def install() -> None:
    """Register the backends and wrap vLLM's selection. Idempotent."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import register_backend

    if hasattr(selector._cached_get_attn_backend, "turboquant"):
        return
    assert BACKENDS.keys() == PRESETS.keys(), "every preset needs a backend"
    for name, path in BACKENDS.items():
        register_backend(enum_name(name), path)
    platform_choice = selector._cached_get_attn_backend

    def choose(backend: Any, attn_selector_config: Any, num_heads: int | None = None, **kwargs: Any) -> type:
        name = attn_selector_config.kv_cache_dtype
        name = ALIASES.get(name, name)
        if name not in BACKENDS:
            return platform_choice(
                backend=backend, attn_selector_config=attn_selector_config, num_heads=num_heads, **kwargs
            )
        check_supported(name, attn_selector_config)
        from vllm.utils.import_utils import resolve_obj_by_qualname

        return resolve_obj_by_qualname(BACKENDS[name])

    choose.turboquant = True
    # Tests and re-initialisation clear the cache of the function that stands here.
    choose.cache_clear = platform_choice.cache_clear
    selector._cached_get_attn_backend = choose


def enum_name(preset: str) -> str:
    """The preset's member of vLLM's AttentionBackendEnum."""
    return preset.upper().replace(".", "_")


def check_supported(name: str, config: Any) -> None:
    """Refuse attention that our backend does not do.

    Raises:
        NotImplementedError: naming the features, and what to do instead.
    """
    missing = [what for field, what in UNSUPPORTED.items() if getattr(config, field, False)]
    attn_type = getattr(config.attn_type, "value", config.attn_type)
    if attn_type != "decoder":
        missing.append(f"{attn_type} attention (only causal self-attention has a turboquant cache)")
    if missing:
        raise NotImplementedError(
            f"{_asking_layer()}: kv_cache_dtype={name!r} does not support {', '.join(missing)}. Serve this model with "
            "kv_cache_dtype='auto', or leave such layers out with --kv-cache-dtype-skip-layers."
        )


def _asking_layer() -> str:
    """Name of the layer under construction, for an error message: vLLM's selection is not told it."""
    frame = sys._getframe()
    while frame is not None:
        prefix = frame.f_locals.get("prefix")
        if frame.f_code.co_name == "__init__" and isinstance(prefix, str) and prefix:
            return f"layer {prefix}"
        frame = frame.f_back
    return "an attention layer of this model"

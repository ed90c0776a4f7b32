"""One line in the log, once the pool stands: what is compressed, with which calibration, in how many bytes."""

from __future__ import annotations

from typing import Any

import wrapt
from vllm.logger import init_logger

from turboquant.artifact import find_artifact
from turboquant.formats import ALIASES, BF16_BYTES, PRESETS, KVFormat
from turboquant.vllm.options import Options

logger = init_logger("vllm.turboquant")

CORE = "vllm.v1.engine.core"


def log_when_sized() -> None:
    """Wrap vLLM's own report of its pool, now or when its module is imported. Idempotent."""
    wrapt.register_post_import_hook(_wrap, CORE)


def _wrap(core: Any) -> None:
    report = core.update_kv_cache_capacity
    if hasattr(report, "turboquant"):
        return

    def update_kv_cache_capacity(vllm_config: Any, kv_cache_config: Any) -> None:
        report(vllm_config, kv_cache_config)
        if vllm_config.cache_config.cache_dtype in {*PRESETS, *ALIASES}:
            logger.info("%s", summary(vllm_config, kv_cache_config))

    update_kv_cache_capacity.turboquant = True
    core.update_kv_cache_capacity = update_kv_cache_capacity


def summary(vllm_config: Any, kv_cache_config: Any) -> str:
    """The line, from vLLM's configurations after the pool has been sized. Bytes are those of one rank."""
    config = vllm_config.cache_config
    fmt = KVFormat.from_name(config.cache_dtype)
    specs = layer_specs(kv_cache_config)
    windows = [name for name in specs if name.endswith(".window")]
    attention = {name: spec for name, spec in specs.items() if hasattr(spec, "head_size") and name not in windows}
    packed = {name: spec for name, spec in attention.items() if _is_packed(spec, fmt)}
    skipped = [name for name in attention if name not in packed]
    content = sum(spec.num_kv_heads * _token_bytes(spec) for spec in attention.values())
    held = sum(spec.page_size_bytes / spec.block_size for spec in attention.values())
    bf16 = sum(spec.num_kv_heads * 2 * spec.head_size * BF16_BYTES for spec in attention.values())
    options = Options.load(vllm_config.additional_config)
    artifact = find_artifact(vllm_config.model_config.model, options.artifact, vllm_config.model_config.revision)
    parts = [
        f"{fmt.name} in {len(packed)} of {len(attention)} attention layers "
        f"(in their own precision: {', '.join(skipped) or 'none'})",
        f"{content:,.0f} bytes a token in {held:,.0f} bytes of pages (bf16: {bf16:,})",
        f"calibration: {artifact or 'none'}",
        f"exact window: {f'{options.window} tokens' if windows else 'none'}",
        f"the pool holds {config.kv_cache_size_tokens:,} tokens in {kv_cache_config.num_blocks:,} blocks",
    ]
    return f"TurboQuant serves {'; '.join(parts)}."


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """Every layer's own spec, whatever the groups share."""
    found = {}
    for group in kv_cache_config.kv_cache_groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        found |= {name: each.get(name, group.kv_cache_spec) for name in group.layer_names}
    return found


def _is_packed(spec: Any, fmt: KVFormat) -> bool:
    return spec.state_content_bytes == fmt.slot_bytes(spec.head_size)


def _token_bytes(spec: Any) -> int:
    """Of one token and KV head, padding of pages left out."""
    return spec.state_content_size_bytes

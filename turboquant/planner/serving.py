"""How a model is served: vLLM's settings that decide what its cache takes, and the dtypes that a cache can have."""

from __future__ import annotations

from dataclasses import dataclass

from turboquant.formats import ALIASES, PRESETS, KVFormat
from turboquant.planner import PlanError
from turboquant.planner.shape import DTYPE_BYTES

# Bytes of an element of K or V in vLLM's own caches; "auto" is the model's dtype.
EXACT_DTYPES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Default --block-size, smallest block of vLLM's own kernels, and of ours.
BLOCK_SIZES = {"cpu": (128, 32), "cuda": (16, 16)}
OUR_KERNEL_BLOCK = 16
OUR_BLOCK_ON_CUDA = 160


@dataclass(frozen=True)
class CacheDtype:
    """A `--kv-cache-dtype`: a TurboQuant preset, or one of vLLM's own."""

    name: str
    fmt: KVFormat | None
    element_bytes: int

    def slot_bytes(self, head_dim: int) -> int:
        """One token in one KV head, K and V, scales included."""
        return self.fmt.slot_bytes(head_dim) if self.fmt else 2 * head_dim * self.element_bytes


def cache_dtype(name: str, model_dtype: str, fp8_checkpoint: bool = False) -> CacheDtype:
    """The cache dtype of this name.

    Args:
        fp8_checkpoint: the checkpoint brings scales of an fp8 cache, which vLLM takes for "auto".

    Raises:
        PlanError: unknown; the message lists the known ones.
    """
    if ALIASES.get(name, name) in PRESETS:
        fmt = KVFormat.from_name(name)
        return CacheDtype(fmt.name, fmt, DTYPE_BYTES[model_dtype])
    if name not in EXACT_DTYPES:
        raise PlanError(f"unknown kv_cache_dtype {name!r}. Allowed: {', '.join([*EXACT_DTYPES, *PRESETS])}.")
    auto = 1 if fp8_checkpoint else DTYPE_BYTES[model_dtype]
    return CacheDtype(name, None, EXACT_DTYPES[name] or auto)


@dataclass(frozen=True)
class Serving:
    """How the model is served; names are vLLM's.

    Attributes:
        device: "cuda" or "cpu".
        window: W of the exact window of TurboQuant caches, in tokens; 0 for none.
        batches_in_flight: steps at a time, 2 with asynchronous scheduling, vLLM's default.
        mamba_ssm_dtype: of recurrent states; None for what vLLM takes.
    """

    dtype: str
    max_model_len: int
    tp: int = 1
    device: str = "cuda"
    block_size: int | None = None
    window: int = 64
    prefix_caching: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    batches_in_flight: int = 2
    mamba_ssm_dtype: str | None = None

    def __post_init__(self) -> None:
        for what, value, known in (
            ("dtype", self.dtype, DTYPE_BYTES),
            ("device", self.device, BLOCK_SIZES),
            ("mamba_ssm_dtype", self.mamba_ssm_dtype, {None: 0, **DTYPE_BYTES}),
        ):
            if value not in known:
                raise PlanError(f"{what} {value!r} is not known. Allowed: {', '.join(filter(None, known))}.")

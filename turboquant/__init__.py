"""TurboQuant: an LLM's KV cache at about 3.5 bits (arXiv 2504.19874), and serving from it.

Needs torch, numpy and scipy; Transformers and vLLM are imported by the parts that serve them. The names below are
loaded on first use, so that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from turboquant._origin import check_origin

check_origin()

# A wheel holds kernels/ and evals/ inside this package; in a checkout they stand beside it.
if not Path(__file__).with_name("kernels").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

__version__ = "0.1.0"

_HOMES = {
    "Codebook": "turboquant.codebook",
    "lloyd_max": "turboquant.codebook",
    "PRESETS": "turboquant.formats",
    "KVFormat": "turboquant.formats",
    "KVQuantizer": "turboquant.kv_quantizer",
    "TurboQuantMSE": "turboquant.quantizer",
    "TurboQuantProd": "turboquant.quantizer",
    "turboquant_cache": "turboquant.cache",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'turboquant' has no attribute {name!r}; it has: {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)

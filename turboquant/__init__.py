"""TurboQuant: an LLM's KV cache at about 3.5 bits (arXiv 2504.19874), and serving from it.

Importing needs torch, numpy and scipy only; Transformers and vLLM are imported by the parts that serve them.
"""

from pathlib import Path

from turboquant._origin import check_origin

check_origin()

# A wheel holds kernels/, calibration/ and evals/ inside this package; in a checkout they stand beside it.
if not Path(__file__).with_name("kernels").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from turboquant.codebook import Codebook, lloyd_max  # noqa: E402
from turboquant.formats import PRESETS, KVFormat  # noqa: E402
from turboquant.kv_quantizer import KVQuantizer  # noqa: E402
from turboquant.quantizer import TurboQuantMSE, TurboQuantProd  # noqa: E402

__version__ = "0.1.0"

__all__ = ["PRESETS", "Codebook", "KVFormat", "KVQuantizer", "TurboQuantMSE", "TurboQuantProd", "lloyd_max"]

"""What is left of a device for the KV cache: its memory, less weights, activations and what the runtime takes.

vLLM measures this with a dry run at start-up; here it is a rule, and `--reserve` or `--kv-cache-memory` puts a measured
figure in its place:

    pool = memory · gpu_memory_utilization − weights / tp − activations − runtime
    activations = max_num_batched_tokens · (4·hidden + 3·widest / tp) · bytes   residual, norm, and one layer's widest
                + max_num_seqs · vocabulary · (bytes + 8)                       logits, and two copies in float32

with the widest of one layer: query, key and value together; gate and up of the MLP; gate and up of all experts that a
token takes. The runtime (CUDA context, libraries, NCCL, captured graphs) is taken as 2.5 GiB: an assumption, not a
measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from turboquant.planner.serving import Serving
from turboquant.planner.shape import DTYPE_BYTES, Shape
from turboquant.planner.weights import Weights

GIB = 2**30
RUNTIME_BYTES = int(2.5 * GIB)


@dataclass(frozen=True)
class Budget:
    """Bytes of each device.

    Attributes:
        pool: for the KV cache; negative where the weights alone do not fit.
        memory: of the device; None where the pool was given.
    """

    pool: int
    memory: int | None = None
    utilization: float = 1.0
    weights: int = 0
    activations: int = 0
    runtime: int = 0


def make_budget(
    shape: Shape, serving: Serving, weights: Weights, memory: int, utilization: float, reserve: int | None
) -> Budget:
    """The rule above.

    Args:
        memory: of one device, bytes.
        utilization: share of it that vLLM may take.
        reserve: bytes in place of activations and runtime together.
    """
    activations, runtime = (activation_bytes(shape, serving), RUNTIME_BYTES) if reserve is None else (0, reserve)
    local = weights.total_bytes // serving.tp
    pool = int(memory * utilization) - local - activations - runtime
    return Budget(pool, memory, utilization, local, activations, runtime)


def activation_bytes(shape: Shape, serving: Serving) -> int:
    """Peak of a step over max_num_batched_tokens tokens."""
    width = DTYPE_BYTES[serving.dtype]
    of_tokens = serving.max_num_batched_tokens * (4 * shape.hidden_size + 3 * _widest(shape) // serving.tp) * width
    return of_tokens + serving.max_num_seqs * shape.vocab_size * (width + 8)


def _widest(shape: Shape) -> int:
    text = shape.text
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    of_expert = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
    chosen = (text.get("num_experts_per_tok") or 0) * of_expert if experts else text.get("intermediate_size") or 0
    return max((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, 2 * chosen)

"""Back ends by name."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from turboquant.evals.candidates import Candidate
from turboquant.evals.serving import UNBOUNDED, Backend

BACKENDS = ("hf", "vllm", "server")


def make_backend(
    name: str,
    model: Path,
    candidates: list[Candidate],
    *,
    dtype: str = "float32",
    key_mean: str = "auto",
    position_offset: int = 0,
    base_urls: list[str] | None = None,
) -> Backend:
    """A back end, which loads or boots nothing before it serves.

    Args:
        name: one of BACKENDS.
        base_urls: of the servers, one for each candidate; for "server" only.

    Raises:
        ValueError: another name, an option that this back end does not have, or a server that does not answer.
    """
    if position_offset and name != "hf":
        raise ValueError(f"--backend {name} reads a text at its own positions: use hf for --position-offset.")
    if base_urls and name != "server":
        raise ValueError(f"--backend {name} needs no --base-url: leave it out, or use --backend server.")
    max_length = model_length(model)
    if name == "hf":
        from turboquant.evals.hf_backend import HFBackend

        return HFBackend(
            model, dtype=dtype, key_mean=key_mean, position_offset=position_offset, max_length=max_length
        )  # fmt: skip
    if name == "vllm":
        from turboquant.evals.vllm_backend import VllmBackend

        return VllmBackend(model, dtype=dtype, key_mean=key_mean, max_length=max_length)
    if name == "server":
        from turboquant.evals.server_backend import ServerBackend

        if len(base_urls or []) != len(candidates):
            raise ValueError(
                f"--backend server needs one --base-url for each cache, {len(candidates)} of them, separated by "
                f"commas, in the order of --kv-cache-dtype; there are {len(base_urls or [])}."
            )
        return ServerBackend(model, dict(zip(candidates, base_urls, strict=True)), dtype=dtype, max_length=max_length)
    raise ValueError(f"backend {name!r} is not known: allowed are {', '.join(BACKENDS)}.")


def model_length(model: Path) -> int:
    """Tokens that a model can read, by its config."""
    config = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or UNBOUNDED

"""Transformers as a back end: forward passes in which every query reads the cache, never what came in."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from turboquant.cache import CacheSession
from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import holding, load_model
from turboquant.evals.scores import ROWS
from turboquant.evals.serving import UNBOUNDED, Scored
from turboquant.formats import BF16_BYTES
from turboquant.hf_model import text_config

CHUNK = 512  # tokens read at once: a query's work is that of the tokens held so far
# A cache of these can be copied and gone on with, several tokens at a time.
RESUMABLE = {"full_attention", "sliding_attention", "chunked_attention"}


class HFBackend:
    """A Transformers model under one cache after the other.

    Args:
        model: a folder, loaded on first use; or a model.
        position_offset: added to all positions.

    The rest as in `turboquant.evals.divergence.holding` and `load_model`.
    """

    name = "hf"
    has_states = True

    def __init__(
        self,
        model: Path | PreTrainedModel,
        *,
        dtype: str = "float32",
        key_mean: str = "auto",
        position_offset: int = 0,
        max_length: int = UNBOUNDED,
    ) -> None:
        self._model, self._dtype, self._key_mean, self._offset = model, dtype, key_mean, position_offset
        self.max_length = max_length
        self.settings: dict[str, Any] = {"dtype": dtype, "key_mean": key_mean, "position_offset": position_offset}

    def check(self, candidates: list[Candidate]) -> None:
        """Every cache can be had here."""

    def has(self, candidate: Candidate) -> bool:
        return True

    @contextmanager
    def serve(self, candidate: Candidate, max_tokens: int) -> Iterator[HFServed]:
        if not isinstance(self._model, PreTrainedModel):
            self._model = load_model(self._model, self._dtype)
        with holding(self._model, candidate, self._key_mean) as session:
            yield HFServed(self._model, candidate, session, self._offset)


class HFServed:
    """A model inside `holding`; see `serving.Served` for the methods.

    Attributes:
        session: of its cache; None for the exact one.
    """

    def __init__(
        self, model: PreTrainedModel, candidate: Candidate, session: CacheSession | None, position_offset: int = 0
    ) -> None:
        self.model, self.candidate, self.session = model, candidate, session
        self._offset = position_offset
        self._config = text_config(model)
        self._resumable = not set(get_layer_types_and_kwargs(self._config)[0]) - RESUMABLE
        self._decoder = model.get_decoder()
        self._output_class: type | None = None
        self._held: tuple[list[int], DynamicCache] | None = None
        self._bits: tuple[int, dict[str, float]] = (0, {})

    def hold(self, prefix: list[int]) -> None:
        if not prefix or not self._resumable or (self._held and self._held[0] == prefix):
            return
        cache = DynamicCache(config=self._config)
        self._read(prefix, cache, 0)
        self._held = (prefix, cache)

    @torch.inference_mode()
    def score(self, prompt: list[int], continuation: list[int]) -> Scored:
        cache, past = self._begun(prompt)
        states = self._read([*prompt[past:], *continuation[:-1]], cache, past)[-len(continuation) :]
        targets = torch.tensor(continuation, device=states.device)
        parts = []
        for tile, target in zip(states.split(ROWS), targets.split(ROWS), strict=True):
            logprobs = self.logits(tile).double().log_softmax(-1)
            parts.append((logprobs.gather(-1, target[:, None])[:, 0], logprobs.argmax(-1)))
        return Scored(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], max_tokens: int, *, stop: tuple[str, ...] = (), ignore_eos: bool = False
    ) -> list[int]:
        cache, past = self._begun(prompt)
        if self._resumable and len(prompt) - past > CHUNK:
            self._read(prompt[past:-1], cache, past)
        ids = torch.tensor([prompt], device=self.model.device)
        # None would be taken for the model's own; no token has this id.
        ends = self._config.vocab_size if ignore_eos else self.model.generation_config.eos_token_id
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, use_cache=True, eos_token_id=ends, pad_token_id=0,
            stop_strings=list(stop) or None,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(self.model.config.name_or_path) if stop else None
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, generation_config=config,
            tokenizer=tokenizer,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Of all positions: [T, hidden]."""
        return self._read(ids.tolist(), DynamicCache(config=self._config), 0)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """By the model's own way from its decoder's output: scaling and soft caps are its own."""
        output = self._output_class(last_hidden_state=states[None])
        # An attribute of the object stands before the class's method.
        self._decoder.forward = lambda *args, **kwargs: output
        try:
            ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
            return self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._decoder.forward

    def bits(self, num_tokens: int) -> dict[str, float]:
        """Measured from the bytes that the cache held at the longest sequence so far."""
        return self._bits[1]

    def _begun(self, prompt: list[int]) -> tuple[DynamicCache, int]:
        """A cache to read this prompt into, and how many of its tokens it holds already."""
        if self._held is not None:
            prefix, cache = self._held
            if len(prefix) < len(prompt) and prompt[: len(prefix)] == prefix:
                return copy.deepcopy(cache), len(prefix)
        return DynamicCache(config=self._config), 0

    def _read(self, ids: list[int], cache: DynamicCache, past: int) -> torch.Tensor:
        """Final hidden states [len(ids), hidden] of tokens behind those that the cache holds."""
        size = CHUNK if self._resumable else len(ids)
        starts = range(0, len(ids), size)
        return torch.cat([self._forward(ids[start : start + size], cache, past + start) for start in starts])

    @torch.inference_mode()
    def _forward(self, ids: list[int], cache: DynamicCache, past: int) -> torch.Tensor:
        """One forward pass."""
        device = self.model.device
        positions = torch.arange(self._offset + past, self._offset + past + len(ids), device=device)
        caught = []
        handle = self._decoder.register_forward_hook(lambda _module, _args, output: caught.append(output))
        try:
            self.model(
                input_ids=torch.tensor([ids], device=device), position_ids=positions[None], past_key_values=cache,
                use_cache=True, **self._few_logits(),
            )  # fmt: skip
        finally:
            handle.remove()
        self._output_class = type(caught[0])
        if past + len(ids) >= self._bits[0]:
            self._bits = (past + len(ids), measured_bits(self.session, self.model.dtype))
        return caught[0].last_hidden_state[0]

    def _few_logits(self) -> dict[str, int]:
        """Logits of a whole prompt are not asked for where a model can leave them out."""
        names = inspect.signature(self.model.forward).parameters
        return {"logits_to_keep": 1} if "logits_to_keep" in names else {}


def measured_bits(session: CacheSession | None, dtype: torch.dtype) -> dict[str, float]:
    """As `serving.Served.bits`, from the bytes of the session's last cache."""
    if session is None:
        bits = 8.0 * dtype.itemsize
        return {"bits_per_element": bits, "bits_per_element_with_window": bits, "bits_at_16": 8.0 * BF16_BYTES}
    elements = sum(layer.num_elements for layer in session.layers)
    at_16 = session.nbytes - session.exact_nbytes * (1 - BF16_BYTES / dtype.itemsize)
    return {
        "bits_per_element": 8 * session.packed_nbytes / elements,
        "bits_per_element_with_window": 8 * session.nbytes / elements,
        "bits_at_16": 8 * at_16 / elements,
    }

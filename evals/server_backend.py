"""A running OpenAI-compatible vLLM server as a back end, asked over HTTP for log-probabilities and greedy answers.

It measures what is served. Its prompts are read strictly only if it was started for that:

    vllm serve MODEL --kv-cache-dtype turboquant3.5 --additional-config '{"turboquant": {"prefill_reads": "packed"}}'

Else a prefill chunk reads its own tokens exactly, as serving does by default, and perplexity over prompts shorter than
a chunk is that of an exact cache; greedy answers come from packed tokens either way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from openai import APIConnectionError, APIStatusError, OpenAI
from transformers import AutoConfig

from turboquant.artifact import config_fingerprint
from turboquant.evals.candidates import Candidate
from turboquant.evals.serving import UNBOUNDED, Scored
from turboquant.formats import BF16_BYTES, KVFormat

REQUEST_LIMIT_S = 3600.0
LOCAL = ("127.0.0.1", "localhost", "::1")


class ServerBackend:
    """Servers that run already, one for each cache.

    Args:
        model: folder of the same model, for its tokenizer and shape.
        servers: base URL (`http://host:8000/v1`) of the server of each cache.
        dtype: of the servers' models.
        max_length: tokens that the model can read; the servers' own limit if that is smaller.
    """

    name = "server"
    has_states = False

    def __init__(
        self, model: Path, servers: dict[Candidate, str], *, dtype: str = "float32", max_length: int = UNBOUNDED
    ) -> None:
        self._model, self._dtype = model, dtype
        self._servers = {candidate: _connect(url) for candidate, url in servers.items()}
        self._names: dict[Candidate, str] = {}
        self.max_length = max_length
        for candidate, client in self._servers.items():
            served = _ask(client, lambda client=client: client.models.list()).data[0]
            self._names[candidate] = served.id
            limit = (served.model_extra or {}).get("max_model_len")
            self.max_length = min(self.max_length, limit or self.max_length)
            _check_cache(servers[candidate], candidate)
        # How it reads a prompt, and K's mean, are the server's own affair.
        self.settings: dict[str, Any] = {"dtype": dtype, "key_mean": "the server's", "position_offset": 0}

    def check(self, candidates: list[Candidate]) -> None:
        simulated = [c.label for c in candidates if c.simulated and c.cache.name not in SERVED_ELSEWHERE]
        if simulated:
            raise ValueError(f"{', '.join(simulated)}: no server holds such a cache: use --backend hf for these.")
        missing = [c.label for c in candidates if c not in self._servers]
        if missing:
            raise ValueError(f"no server for {', '.join(missing)}: --base-url names one for each cache, in order.")

    def has(self, candidate: Candidate) -> bool:
        return candidate in self._servers

    @contextmanager
    def serve(self, candidate: Candidate, max_tokens: int) -> Iterator[HTTPServed]:
        if max_tokens >= self.max_length:
            raise ValueError(
                f"the server of {candidate.label} scores {self.max_length - 1} tokens, and {max_tokens} are asked for: "
                "start it with a larger --max-model-len, or ask for less."
            )
        client = self._servers[candidate]
        yield HTTPServed(client, self._names[candidate], candidate, self._model, self._dtype)


# What vLLM calls the caches of these.
SERVED_ELSEWHERE = {"fp8", "nvfp4", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"}


class HTTPServed:
    """A server that runs; see `serving.Served` for the methods."""

    def __init__(self, client: OpenAI, name: str, candidate: Candidate, model: Path, dtype: str) -> None:
        self._client, self._name, self.candidate = client, name, candidate
        self._head_dim = config_fingerprint(AutoConfig.from_pretrained(model).get_text_config())["head_dim"]
        self._exact_bytes = getattr(torch, dtype).itemsize

    def hold(self, prefix: list[int]) -> None:
        """Nothing: a server has its own prefix cache."""

    def score(self, prompt: list[int], continuation: list[int]) -> Scored:
        choice = self._complete([*prompt, *continuation], 1, prompt_logprobs=1)
        found = (choice.model_extra or {}).get("prompt_logprobs")
        if found is None:
            raise ValueError(f"{self._client.base_url} gives no prompt_logprobs: it must be a vLLM server.")
        at = list(zip(continuation, found[len(prompt) :], strict=True))
        return Scored(
            torch.tensor([entries[str(token)]["logprob"] for token, entries in at], dtype=torch.float64),
            torch.tensor([next(int(i) for i, e in entries.items() if e["rank"] == 1) for _, entries in at]),
        )

    def generate(
        self, prompt: list[int], max_tokens: int, *, stop: tuple[str, ...] = (), ignore_eos: bool = False
    ) -> list[int]:
        choice = self._complete(
            prompt, max_tokens, stop=stop, return_token_ids=True, ignore_eos=ignore_eos
        )  # fmt: skip
        tokens = (choice.model_extra or {}).get("token_ids")
        if tokens is None:
            raise ValueError(f"{self._client.base_url} gives no token_ids: it must be a vLLM server.")
        return list(tokens)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an API gives no hidden states")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an API gives no hidden states")

    def bits(self, num_tokens: int) -> dict[str, float]:
        of = self.candidate
        return {
            "bits_per_element": of.bits_per_element(self._head_dim, self._exact_bytes),
            "bits_per_element_with_window": of.bits_with_window(self._head_dim, self._exact_bytes, num_tokens),
            "bits_at_16": of.bits_with_window(self._head_dim, BF16_BYTES, num_tokens),
        }

    def _complete(self, prompt: list[int], max_tokens: int, stop: tuple[str, ...] = (), **vllm_only: Any):
        """The only choice of a greedy completion."""
        return _ask(
            self._client,
            lambda: self._client.completions.create(
                model=self._name, prompt=prompt, max_tokens=max_tokens, temperature=0.0, stop=list(stop) or None,
                extra_body=vllm_only,
            ),
        ).choices[0]  # fmt: skip


def _connect(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, http_client=_http(url))


def _http(url: str) -> httpx.Client:
    # A proxy for the outside must not get requests for this machine.
    return httpx.Client(trust_env=urlsplit(url).hostname not in LOCAL, timeout=REQUEST_LIMIT_S)


def _ask(client: OpenAI, request):
    """What a request returns.

    Raises:
        ValueError: no server there, or it refuses; with what to do.
    """
    try:
        return request()
    except APIConnectionError as error:
        raise ValueError(
            f"no server answers at {client.base_url} ({error.__cause__ or error}): start `vllm serve`, or name another "
            "--base-url, such as http://127.0.0.1:8000/v1."
        ) from error
    except APIStatusError as error:
        raise ValueError(f"the server at {client.base_url} refused a request: {error.message}") from error


def _check_cache(url: str, candidate: Candidate) -> None:
    """vLLM's metrics name the cache of a server; other servers have none.

    Raises:
        ValueError: it is another one than this candidate's.
    """
    try:
        with _http(url) as client:
            metrics = client.get(f"{url.rstrip('/').removesuffix('/v1')}/metrics").text
    except httpx.HTTPError:
        return
    found = re.search(r'vllm:cache_config_info\{[^}]*\bcache_dtype="([^"]*)"', metrics)
    if found and _name(found[1]) != candidate.name:
        raise ValueError(
            f"the server at {url} holds a {_name(found[1])!r} cache, and {candidate.label!r} was asked for: name the "
            "servers in the order of --kv-cache-dtype."
        )


def _name(cache_dtype: str) -> str:
    """Without aliases."""
    try:
        return KVFormat.from_name(cache_dtype).name
    except ValueError:
        return cache_dtype

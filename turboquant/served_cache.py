"""What KV cache a running vLLM server really has, by its own metrics.

Read from GET /metrics (Prometheus text), /v1/models and /version. The cache's settings are the labels of the metric
`vllm:cache_config_info`, one line for each engine of a data-parallel server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turboquant.formats import ALIASES, PRESETS

INFO = "vllm:cache_config_info"
# What vLLM's own dtypes are, for the message that TurboQuant is not on.
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head")


class ServerNotReadable(ValueError):
    """No vLLM server answers there, or its metrics do not describe a KV cache."""


@dataclass(frozen=True)
class ServedCache:
    """A server's cache.

    Attributes:
        url: of the server.
        models: names that it serves.
        version: of vLLM; None where it does not say.
        kv_cache_dtype: as it was started.
        max_model_len: longest sequence; None where it does not say.
        tokens: that fit, over all engines, as vLLM counts them; None where it does not say.
        memory_bytes: of the pools, where it was given by size; None else.
        blocks, block_size: of one engine.
        usage: share of blocks in use, 0 to 1, mean of the engines.
        prefix_queries, prefix_hits: tokens since the start.
        preemptions, running, waiting: requests; preemptions since the start.
    """

    url: str
    models: tuple[str, ...]
    version: str | None
    kv_cache_dtype: str
    max_model_len: int | None
    tokens: int | None
    memory_bytes: int | None
    blocks: int | None
    block_size: int | None
    usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    running: int
    waiting: int

    @property
    def compressed(self) -> bool:
        """Is it one of our formats?"""
        return ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype) in PRESETS

    @property
    def hit_rate(self) -> float | None:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        if self.compressed:
            return f"compressed: {self.kv_cache_dtype}"
        how = "8 bits, by vLLM itself" if self.kv_cache_dtype in FP8 else "vLLM's own cache"
        if self.kv_cache_dtype == "auto":
            how = "the model's own precision"
        return f"NOT compressed by TurboQuant: kv_cache_dtype is {self.kv_cache_dtype!r}, {how}"


def ask(url: str, timeout_s: float = 10.0) -> ServedCache:
    """Ask a server.

    Args:
        url: of the server, with or without /v1, such as http://localhost:8000.

    Raises:
        ServerNotReadable: nothing answers, or not vLLM.
        ImportError: httpx or prometheus_client is not installed.
    """
    import httpx

    base = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    try:
        # Proxies of the environment would hide a server on this machine.
        local = httpx.URL(base).host in ("localhost", "127.0.0.1", "::1", "0.0.0.0")
        with httpx.Client(base_url=base, timeout=timeout_s, trust_env=not local) as client:
            metrics, models, version = (client.get(path) for path in ("/metrics", "/v1/models", "/version"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerNotReadable(
            f"no server answers at {base}: {type(error).__name__}: {error}. Give the address that `vllm serve` listens "
            "on, such as http://localhost:8000."
        ) from error
    if metrics.status_code != 200:
        raise ServerNotReadable(
            f"{base}/metrics answers {metrics.status_code}: no vLLM server, or its metrics are at another address."
        )
    return read(
        base, metrics.text, models.json() if models.status_code == 200 else {},
        version.json().get("version") if version.status_code == 200 else None,
    )  # fmt: skip


def read(url: str, metrics: str, models: Mapping | None = None, version: str | None = None) -> ServedCache:
    """Read what a server answered.

    Args:
        metrics: Prometheus text.
        models: the body of /v1/models.

    Raises:
        ServerNotReadable: the metrics do not describe a KV cache.
    """
    infos, sums, counts = _samples(metrics)
    if not infos:
        raise ServerNotReadable(f"the metrics of {url} have no {INFO}: no vLLM server, or one without a KV cache.")
    entries = (models or {}).get("data") or []
    first = infos[0]
    engines = counts.get("vllm:kv_cache_usage_perc", 1)
    return ServedCache(
        url=url,
        models=tuple(entry["id"] for entry in entries),
        version=version,
        kv_cache_dtype=first.get("cache_dtype", "unknown"),
        max_model_len=entries[0].get("max_model_len") if entries else None,
        tokens=_sum(infos, "kv_cache_size_tokens"),
        memory_bytes=_sum(infos, "kv_cache_memory_bytes"),
        blocks=_whole(first.get("num_gpu_blocks")),
        block_size=_whole(first.get("block_size")),
        usage=sums.get("vllm:kv_cache_usage_perc", 0.0) / engines,
        prefix_queries=int(sums.get("vllm:prefix_cache_queries_total", 0)),
        prefix_hits=int(sums.get("vllm:prefix_cache_hits_total", 0)),
        preemptions=int(sums.get("vllm:num_preemptions_total", 0)),
        running=int(sums.get("vllm:num_requests_running", 0)),
        waiting=int(sums.get("vllm:num_requests_waiting", 0)),
    )


def _samples(metrics: str) -> tuple[list[dict[str, str]], dict[str, float], dict[str, int]]:
    """Labels of every engine's cache; sum and number of the samples of every metric."""
    from prometheus_client.parser import text_string_to_metric_families

    infos: list[dict[str, str]] = []
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == INFO:
                    infos.append(sample.labels)
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                counts[sample.name] = counts.get(sample.name, 0) + 1
    except ValueError as error:
        raise ServerNotReadable(f"what answers is no Prometheus text: {error}") from error
    return infos, sums, counts


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _sum(infos: list[dict[str, str]], label: str) -> int | None:
    values = [_whole(info.get(label)) for info in infos]
    return None if None in values else sum(values)

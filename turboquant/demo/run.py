"""The demonstration: one model, served once with each of two KV caches, asked the same, compared.

Both servers get the same memory for the cache. What is shown comes from the servers: how many tokens fit (their
metrics), which tokens they chose (ids, greedy decoding), how long they took (measured here).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from openai import OpenAIError
from rich.console import Console

from turboquant.demo import DemoError
from turboquant.demo.client import Answers, Reply, agreement, ask_all, connect, equal_tokens
from turboquant.demo.launch import MIB, ServerError, ServerOptions
from turboquant.demo.prompts import Prompt, demo_prompts, draw_passkey
from turboquant.demo.server import KVPool, VllmServer
from turboquant.environment import environment_report

AGREEMENT_DEFINITION = (
    "positions where both greedy outputs hold the same token id, divided by the positions of the longer output"
)
BYTES_DEFINITION = "kv_memory_bytes / kv_tokens, both as the server's vllm:cache_config_info reports them"
SPEED_DEFINITION = "generated tokens / seconds, all prompts, reading them included; short: those sent at once only"
FLOAT32_NOTE = "On a CPU the exact cache is float32; a 16-bit cache would hold twice as many tokens."


@dataclass(frozen=True)
class DemoSettings:
    """What to run. `kv_cache_dtypes`: the exact cache first, the compressed one second."""

    model: Path
    output: Path = Path("out/demo.json")
    kv_cache_dtypes: tuple[str, str] = ("auto", "turboquant3.5")
    port: int = 8000
    kv_memory_mib: int = 256
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One server's figures and answers."""

    kv_cache_dtype: str
    pool: KVPool
    answers: Answers
    boot_seconds: float
    passkey_found: bool
    arguments: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As written to the report."""
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_tokens": self.pool.tokens,
            "kv_memory_bytes": self.pool.memory_bytes,
            "kv_bytes_per_token": self.pool.bytes_per_token,
            "tokens_per_second": self.answers.tokens_per_second,
            "short_tokens_per_second": self.answers.short_tokens_per_second,
            "seconds": self.answers.seconds,
            "boot_seconds": self.boot_seconds,
            "passkey_found": self.passkey_found,
            "outputs": [asdict(reply) for reply in self.answers.replies],
            "arguments": self.arguments,
        }


def run_demo(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Serve, ask, compare; write the report to `settings.output` and return it."""
    passkey = draw_passkey(settings.seed)
    prompts = demo_prompts(passkey)
    runs = [serve_and_ask(settings, dtype, prompts, passkey, console) for dtype in settings.kv_cache_dtypes]
    report = make_report(settings, prompts, runs, passkey)
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    settings.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def serve_and_ask(
    settings: DemoSettings, kv_cache_dtype: str, prompts: list[Prompt], passkey: str, console: Console
) -> Run:
    """One server from start to end."""
    options = ServerOptions(
        model=settings.model,
        kv_cache_dtype=kv_cache_dtype,
        port=settings.port,
        kv_cache_memory_bytes=settings.kv_memory_mib * MIB,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    console.rule(f"kv-cache-dtype {kv_cache_dtype}", style="dim")
    log_path = settings.output.with_name(f"{settings.output.stem}-{kv_cache_dtype}.log")
    with VllmServer(options, log_path, console) as server, console.status("Asking") as status:
        try:
            answers = ask_all(
                connect(server.base_url), prompts, settings.max_tokens, settings.seed, lambda step: status.update(step)
            )
        except OpenAIError as error:
            raise ServerError(server.failure(f"A request failed: {error}")) from error
        pool = server.kv_pool()
    check_replies(prompts, answers.replies)
    found = passkey in next(reply.text for reply in answers.replies if reply.name == "passkey")
    return Run(kv_cache_dtype, pool, answers, server.boot_seconds, found, options.arguments())


def check_replies(prompts: list[Prompt], replies: list[Reply]) -> None:
    """The long prompt must be long for the model's tokeniser, and every answer must hold something."""
    for prompt, reply in zip(prompts, replies, strict=True):
        if reply.prompt_tokens < prompt.min_tokens:
            raise DemoError(
                f"The prompt {prompt.name!r} has {reply.prompt_tokens} tokens with this model's tokeniser; "
                f"the demonstration wants {prompt.min_tokens} at least."
            )
        if not reply.token_ids:
            raise DemoError(f"The server answered the prompt {prompt.name!r} with nothing.")


def make_report(settings: DemoSettings, prompts: list[Prompt], runs: list[Run], passkey: str) -> dict[str, Any]:
    """Everything that was measured, with the definitions of the figures."""
    exact, compressed = runs
    both = zip(exact.answers.replies, compressed.answers.replies, strict=True)
    pairs = [equal_tokens(left.token_ids, right.token_ids) for left, right in both]
    return {
        "model": settings.model.name,
        "runs": [run.to_dict() for run in runs],
        "greedy_agreement": agreement(pairs),
        "greedy_agreement_by_prompt": {
            prompt.name: agreement([pair]) for prompt, pair in zip(prompts, pairs, strict=True)
        },
        "kv_tokens_ratio": compressed.pool.tokens / exact.pool.tokens,
        "passkey": passkey,
        "passkey_found": compressed.passkey_found,
        "settings": {"max_tokens": settings.max_tokens, "temperature": 0.0, "seed": settings.seed},
        "definitions": {
            "greedy_agreement": AGREEMENT_DEFINITION,
            "kv_bytes_per_token": BYTES_DEFINITION,
            "tokens_per_second": SPEED_DEFINITION,
        },
        "notes": [FLOAT32_NOTE] if "float32" in exact.arguments else [],
        "environment": environment_report(),
    }

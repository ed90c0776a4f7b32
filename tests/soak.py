"""Random traffic against a real server, and a fresh engine's answers to a tenth of it.

    PYTHONPATH=tests python -m soak --minutes 20

Clients send prompts of random lengths, most of them with a prefix that was seen before, to a server whose pool is too
small for all; some leave in the middle. Prompts read their own tokens from packed pages, too, so that answers do not
depend on how a prompt came to be computed. They do depend a little on the company: a batch of another size rounds K and
V otherwise, and now and then that moves a code over its boundary. So a token may differ where the fresh engine's two
best are closer than --tie, and how many of all tokens are that close is written down. In the end the engine is killed
under a client. Writes what happened as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import models
import openai
import psutil
from engine import engine, first_difference, greedy_with_gaps
from matrix import environment
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from test_matrix_shapes import FLIP
from test_vllm_serve import free_port

from turboquant.demo.launch import SERVED_NAME, ServerOptions
from turboquant.demo.model import ensure_demo_model
from turboquant.demo.server import VllmServer, _direct
from turboquant.window import DEFAULT_WINDOW

FMT, MAX_MODEL_LEN, CLIENTS, POOL_BYTES = "turboquant3.5", 512, 24, 1 << 20
SAMPLED, LEAVE, REUSE, STREAM = 0.1, 0.1, 0.6, 0.5
TIMEOUT_S, RSS_PERIOD_S = 180, 10
# Of the mean of its second fifth: allocators settle in the first.
RSS_GROWTH = 0.05


@dataclass
class Traffic:
    """What the clients do, in an order that depends on the seed alone, and what came of it."""

    seed: int
    counts: Counter = field(default_factory=Counter)
    kept: list[tuple[list[int], list[int]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.bases = [self.tokens(480) for _ in range(12)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2, models.VOCAB) for _ in range(count)]

    def prompt(self) -> list[int]:
        if self.random.random() < REUSE:
            cut = self.random.randrange(1, 440)
            return self.random.choice(self.bases)[:cut] + self.tokens(self.random.randrange(1, 20))
        return self.tokens(self.random.randrange(1, 460))

    async def one(self, client: openai.AsyncOpenAI) -> None:
        """One request, to its end or left in the middle."""
        draw = self.random
        prompt, max_tokens = self.prompt(), draw.randrange(1, 25)
        stream, leave, sampled = draw.random() < STREAM, draw.random() < LEAVE, draw.random() < SAMPLED
        self.counts["requests"] += 1
        made = await client.completions.create(
            model=SERVED_NAME, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=stream or leave,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        if leave:
            await anext(aiter(made))
            await made.close()
            self.counts["aborts"] += 1
            return
        choices = [chunk.choices[0] async for chunk in made if chunk.choices] if stream else [made.choices[0]]
        tokens = [token for choice in choices for token in choice.model_extra.get("token_ids") or []]
        if len(tokens) != max_tokens:
            self.errors.append(f"{len(tokens)} tokens of {max_tokens}")
        self.counts["tokens"] += len(tokens)
        self.counts["completed"] += 1
        if sampled:
            self.kept.append((prompt, tokens))

    async def client(self, client: openai.AsyncOpenAI, end: float) -> None:
        while time.monotonic() < end:
            try:
                await asyncio.wait_for(self.one(client), TIMEOUT_S)
            except TimeoutError:
                self.counts["hangs"] += 1
            except openai.APIError as error:
                self.errors.append(f"{type(error).__name__}: {str(error)[:200]}")


def tree(server: VllmServer) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


async def watch_memory(server: VllmServer, end: float, seen: list[int]) -> None:
    while time.monotonic() < end:
        seen.append(sum(process.memory_info().rss for process in tree(server)) >> 20)
        await asyncio.sleep(RSS_PERIOD_S)


async def drive(server: VllmServer, traffic: Traffic, seconds: float, rss: list[int]) -> str:
    """Let all clients run; then kill the engine under one. Returns what that one saw."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        end = time.monotonic() + seconds
        await asyncio.gather(watch_memory(server, end, rss), *(traffic.client(client, end) for _ in range(CLIENTS)))
        traffic.counts.update(counters(server))
        stream = await client.completions.create(
            model=SERVED_NAME,
            prompt=traffic.bases[0][:20],
            max_tokens=480,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        for process in tree(server):
            if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline()):
                process.kill()
        try:
            async for _ in stream:
                pass
        except (openai.APIError, OSError) as error:
            return f"{type(error).__name__}: {str(error)[:120]}"
        return "no error"


def counters(server: VllmServer) -> dict[str, int]:
    wanted = {"num_preemptions": "preemptions", "prefix_cache_hits": "prefix_hit_tokens"}
    with _direct.open(f"{server.url}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {
            wanted[family.name[5:]]: int(sum(s.value for s in family.samples if s.name.endswith("_total")))
            for family in families
            if family.name[5:] in wanted
        }


def compare(model_dir: Path, kept: list[tuple[list[int], list[int]]], tie: float, cache: dict) -> dict:
    """Answers of a fresh engine, one at a time: equal, tied, or a mismatch."""
    at_differences, every = [], []
    with engine(model_dir, FMT, skip_tokenizer_init=True, additional_config=cache, max_num_seqs=1) as llm:
        for prompt, tokens in kept:
            ((fresh, _, gaps),) = greedy_with_gaps(llm, [prompt], len(tokens))
            every += gaps
            first = first_difference(tokens, fresh)
            if first is not None:
                at_differences.append(round(gaps[first], 4))
    return {
        "sampled": len(kept),
        "sampled_tokens": len(every),
        "share_of_tokens_that_could_tie": round(sum(gap < tie for gap in every) / max(1, len(every)), 4),
        "gaps_at_differences": sorted(at_differences),
        "ties": sum(gap < tie for gap in at_differences),
        "mismatches": sum(gap >= tie for gap in at_differences),
    }


def flat(rss: list[int]) -> bool:
    fifth = max(1, len(rss) // 5)
    settled = sum(rss[fifth : 2 * fifth] or rss) / max(1, len(rss[fifth : 2 * fifth] or rss))
    return sum(rss[-fifth:]) / fifth <= (1 + RSS_GROWTH) * settled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie", type=float, default=FLIP)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW)
    parser.add_argument("--output", type=Path, default=Path("docs/results/soak.json"))
    arguments = parser.parse_args()
    cache = {"turboquant": {"window": arguments.window, "prefill_reads": "packed"}}
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = models.save_worded_llama(Path(scratch) / "model", ensure_demo_model())
        options = ServerOptions(
            model_dir, FMT, port=free_port(), max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=POOL_BYTES,
            extra_args=("--additional-config", json.dumps(cache), "--max-num-seqs", str(CLIENTS)),
        )  # fmt: skip
        traffic, rss = Traffic(arguments.seed), []
        with VllmServer(options, Path(scratch) / "log", Console(stderr=True)) as server:
            killed = asyncio.run(drive(server, traffic, 60 * arguments.minutes, rss))
        result = {
            "minutes": arguments.minutes,
            "seed": arguments.seed,
            "window": arguments.window,
            "tie": arguments.tie,
            **{name: traffic.counts[name] for name in ("requests", "completed", "tokens", "aborts", "hangs")},
            **{name: traffic.counts[name] for name in ("preemptions", "prefix_hit_tokens")},
            **compare(model_dir, traffic.kept, arguments.tie, cache),
            "errors": traffic.errors,
            "after_kill_9_the_client_saw": killed,
            "rss_mib": rss,
            "rss_flat": flat(rss),
            "environment": environment(),
        }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({name: value for name, value in result.items() if name not in ("rss_mib", "environment")}, indent=1)
    )
    good = result["rss_flat"] and not traffic.errors and killed != "no error"
    return int(not good or bool(result["mismatches"] or result["hangs"]))


if __name__ == "__main__":
    sys.exit(main())

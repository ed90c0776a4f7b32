"""A real server on loopback: many clients at once, clients that leave, metrics, benchmarks, and a killed engine."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request

import httpx
import psutil
import pytest
from rich.console import Console

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

from engine import ALL_PACKED, assert_same_answers, engine, greedy_with_gaps, random_prompts  # noqa: E402
from test_vllm_serve import free_port  # noqa: E402

from turboquant.demo.launch import SERVED_NAME, ServerOptions  # noqa: E402
from turboquant.demo.server import VllmServer  # noqa: E402

pytestmark = pytest.mark.engine

FMT, NEW = "turboquant3.5", 24
PROMPTS = random_prompts(*[1 + (53 * i) % 401 for i in range(64)])


@pytest.fixture(scope="module")
def answers(worded_llama_dir):
    """Of every prompt alone, in an engine of this process."""
    with engine(worded_llama_dir, FMT, skip_tokenizer_init=True, additional_config=ALL_PACKED, max_num_seqs=1) as llm:
        return greedy_with_gaps(llm, PROMPTS, NEW)


@pytest.fixture(scope="module")
def server(worded_llama_dir, answers, tmp_path_factory):
    options = ServerOptions(
        worded_llama_dir, FMT, port=free_port(), max_model_len=512, kv_cache_memory_bytes=1 << 20,
        extra_args=("--additional-config", json.dumps(ALL_PACKED), "--max-num-seqs", "64"),
    )  # fmt: skip
    with VllmServer(options, tmp_path_factory.mktemp("server") / "log", Console(quiet=True)) as server:
        yield server


def metrics(server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        return response.read().decode()


def counter(server, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)", metrics(server), re.M))


def client(server):
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)


async def ask(client, prompt: list[int], stream: bool) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, as `engine.greedy` gives them."""
    made = await client.completions.create(
        model=SERVED_NAME, prompt=prompt, max_tokens=NEW, temperature=0, logprobs=1, stream=stream,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    choices = [chunk.choices[0] async for chunk in made if chunk.choices] if stream else [made.choices[0]]
    tokens = [token for choice in choices for token in choice.model_extra.get("token_ids") or []]
    return tokens, [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]


@pytest.mark.matrix(feature="`vllm serve`: 64 concurrent requests, every other one streaming", shape="llama")
@pytest.mark.matrix(feature="`vllm serve`: preemption in a pool too small", shape="llama")
def test_many_clients(server, answers):
    async def all_of_them():
        async with client(server) as asking:
            return await asyncio.gather(*(ask(asking, p, stream=i % 2 == 0) for i, p in enumerate(PROMPTS)))

    assert_same_answers(asyncio.run(all_of_them()), answers)
    assert counter(server, "num_preemptions_total") > 0


@pytest.mark.matrix(feature="`vllm serve`: clients that leave in the middle of a stream", shape="llama")
def test_clients_that_leave(server, answers):
    async def leave_early():
        async with client(server) as asking:
            streams = [
                await asking.completions.create(
                    model=SERVED_NAME, prompt=prompt, max_tokens=400 - len(prompt), stream=True, temperature=0
                )
                for prompt in PROMPTS[:8]
                if len(prompt) < 300
            ]
            for stream in streams:
                await anext(aiter(stream))
                await stream.close()
            return await asyncio.gather(*(ask(asking, p, stream=False) for p in PROMPTS[8:16]))

    assert_same_answers(asyncio.run(leave_early()), answers[8:16])
    deadline = time.monotonic() + 60
    while counter(server, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert counter(server, "num_requests_running") == 0


@pytest.mark.matrix(feature="Prometheus: vllm:cache_config_info names the format and its pool", shape="llama")
def test_metrics_name_the_format(server):
    (labels,) = re.findall(r"^vllm:cache_config_info{(.*)} 1.0", metrics(server), re.M)
    assert f'cache_dtype="{FMT}"' in labels
    assert re.search(r'kv_cache_size_tokens="[1-9]\d*"', labels)


@pytest.mark.engine_full
@pytest.mark.matrix(feature="`vllm bench serve`", shape="llama")
def test_bench_serve(server, worded_llama_dir):
    said = bench(
        "serve", "--base-url", server.url, "--model", SERVED_NAME, "--tokenizer", str(worded_llama_dir),
        "--num-prompts", "6", "--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "6",
    )  # fmt: skip
    assert re.search(r"Successful requests:\s+6", said)


@pytest.mark.matrix(feature="`vllm serve`: kill -9 of the engine gives clients an error", shape="llama")
def test_a_killed_engine(server):
    """The last test of this server."""

    async def die_in_the_middle():
        async with client(server) as asking:
            stream = await asking.completions.create(
                model=SERVED_NAME, prompt=PROMPTS[1], max_tokens=440, stream=True, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            await anext(aiter(stream))
            for child in psutil.Process(server.process.pid).children(recursive=True):
                if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                    child.kill()
            async for _ in stream:
                pass

    with pytest.raises((openai.APIError, httpx.HTTPError)):
        asyncio.run(die_in_the_middle())


def bench(*arguments: str) -> str:
    """What `vllm bench` prints."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.engine_full
@pytest.mark.parametrize("kind", ["latency", "throughput"])
@pytest.mark.matrix(feature="`vllm bench {kind}`", shape="llama")
def test_bench_offline(worded_llama_dir, kind):
    lengths = {
        "latency": "--num-iters-warmup 1 --num-iters 2 --input-len 32 --output-len 8",
        "throughput": "--num-prompts 4 --dataset-name random --random-input-len 32 --random-output-len 8",
    }
    said = bench(
        kind, "--model", str(worded_llama_dir), "--kv-cache-dtype", FMT, "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20), *lengths[kind].split(),
    )  # fmt: skip
    assert re.search({"latency": r"Avg latency: \d", "throughput": r"Throughput: \d"}[kind], said)


@pytest.mark.engine_full
@pytest.mark.matrix(feature="AsyncLLM, with an abort", shape="llama")
def test_async_llm(worded_llama_dir, answers):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, ignore_eos=True, detokenize=False)

    async def one(llm, i: int):
        async for output in llm.generate({"prompt_token_ids": PROMPTS[i]}, params, request_id=str(i)):
            if i == 3:
                await llm.abort("3")
                return None
            last = output.outputs[0]
        return list(last.token_ids), [at[t].logprob for t, at in zip(last.token_ids, last.logprobs, strict=True)]

    async def run():
        arguments = AsyncEngineArgs(
            str(worded_llama_dir), kv_cache_dtype=FMT, dtype="float32", enforce_eager=True, max_model_len=512,
            kv_cache_memory_bytes=64 << 20, additional_config=ALL_PACKED,
        )  # fmt: skip
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            return await asyncio.gather(*(one(llm, i) for i in range(16)))
        finally:
            llm.shutdown()

    seen = asyncio.run(run())
    kept = [i for i in range(16) if i != 3]
    assert_same_answers([seen[i] for i in kept], [answers[i] for i in kept])

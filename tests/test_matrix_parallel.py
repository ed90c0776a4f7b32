"""Several ranks on one machine: a calibrated cache under tensor parallelism, and what vLLM's CPU platform cannot do."""

from __future__ import annotations

import asyncio
import json

import pytest
from rich.console import Console

pytest.importorskip("vllm")

from engine import ALL_PACKED, assert_same_answers, engine, greedy, greedy_with_gaps, random_prompts
from test_calibration_serving import calibrate
from test_matrix_refusals import evidence
from test_matrix_server import NEW, PROMPTS, ask, client, metrics
from test_matrix_shapes import FLIP
from test_vllm_serve import free_port

from turboquant.demo.launch import ServerOptions
from turboquant.demo.server import VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

FMT = "turboquant3.5"
LENGTHS = (1, 6, 41, 130, 201)


@pytest.fixture
def ranks(monkeypatch):
    """One core for each of two ranks; functions may be sent to them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return {"distributed_executor_backend": "mp", "skip_tokenizer_init": True}


def means(worker) -> list:
    """K's mean of every layer of a rank."""
    layers = worker.get_model().modules()
    params = [m.impl.params for m in layers if getattr(getattr(m, "impl", None), "params", None)]
    return [None if p.key_mean is None else p.key_mean.tolist() for p in params]


@pytest.mark.matrix(feature="tensor parallelism 2, calibrated", shape="llama, 2 KV heads")
def test_two_ranks_share_the_heads(llama_dir, tmp_path, monkeypatch, ranks):
    artifact = calibrate(llama_dir, tmp_path)
    monkeypatch.setenv("TURBOQUANT_ARTIFACT", str(tmp_path))
    prompts = random_prompts(*LENGTHS)
    with engine(llama_dir, FMT, skip_tokenizer_init=True) as llm:
        alone = greedy_with_gaps(llm, prompts, 12)
    with engine(llama_dir, FMT, tensor_parallel_size=2, **ranks) as llm:
        shards = llm.collective_rpc(means)
        ours = greedy(llm, prompts, 12)
    assert any(mean is not None for shard in shards for mean in shard)
    for rank, shard in enumerate(shards):
        for layer, mean in enumerate(shard):
            half = artifact.key_means[layer][rank : rank + 1]
            # A mean of zeros is none.
            assert mean == (half.tolist() if half.any() else None)
    assert_same_answers(ours, alone, tolerance=FLIP)


@pytest.mark.matrix(feature="data parallelism 2 (`vllm serve`)", shape="llama")
def test_two_engines_behind_one_server(worded_llama_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(worded_llama_dir, FMT, skip_tokenizer_init=True, additional_config=ALL_PACKED) as llm:
        expected = greedy_with_gaps(llm, PROMPTS[:16], NEW)
    options = ServerOptions(
        worded_llama_dir, FMT, port=free_port(), max_model_len=512, kv_cache_memory_bytes=16 << 20,
        extra_args=(
            "--additional-config", json.dumps(ALL_PACKED), "--data-parallel-size", "2", "--api-server-count", "1",
        ),
    )  # fmt: skip
    with VllmServer(options, tmp_path / "log", Console(quiet=True)) as server:

        async def all_of_them():
            async with client(server) as asking:
                return await asyncio.gather(*(ask(asking, prompt, stream=False) for prompt in PROMPTS[:16]))

        assert_same_answers(asyncio.run(all_of_them()), expected)
        used = [line for line in metrics(server).splitlines() if line.startswith("vllm:prompt_tokens_total")]
    assert len(used) == 2
    assert all(float(line.split()[-1]) > 0 for line in used)


@pytest.mark.parametrize("dtype", ["auto", FMT])
@pytest.mark.matrix(feature="pipeline parallelism 2", shape="llama on CPU ranks, cache {dtype}", verdict="vllm")
def test_pipeline_of_two_ranks(llama_dir, dtype, ranks, record_property):
    with (
        pytest.raises(Exception) as error,
        engine(llama_dir, dtype, pipeline_parallel_size=2, **ranks) as llm,
    ):
        greedy(llm, random_prompts(6), 4)
    record_property("evidence", evidence(error))

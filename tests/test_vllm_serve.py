"""The way that users take: a real `vllm serve` with nothing but the cache dtype, asked over HTTP."""

from __future__ import annotations

import json
import socket

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

from turboquant.cli.main import app  # noqa: E402
from turboquant.demo.launch import HOST, SERVED_NAME, ServerOptions  # noqa: E402
from turboquant.demo.server import VllmServer  # noqa: E402

pytestmark = pytest.mark.engine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def on_this_server(inspected, tokens: int, memory: int) -> None:
    """`turboquant inspect URL` of a running server."""
    assert inspected.exit_code == 0, inspected.output
    found = json.loads(inspected.stdout)
    assert (found["kv_cache_dtype"], found["compressed"]) == ("turboquant35", True)
    assert (found["tokens"], found["memory_bytes"], found["max_model_len"]) == (tokens, memory, 1024)
    assert (found["models"], found["preemptions"], found["running"]) == ([SERVED_NAME], 0, 0)
    assert found["prefix_queries"] > 0
    assert found["version"].startswith("0.3")


@pytest.mark.matrix(feature="`vllm serve`", shape="SmolLM2-135M")
def test_a_served_model_answers_from_a_packed_cache(demo_model_dir, tmp_path):
    memory = 64 << 20
    options = ServerOptions(
        demo_model_dir, "turboquant35", port=free_port(), max_model_len=1024, kv_cache_memory_bytes=memory
    )
    log = tmp_path / "serve.log"
    with VllmServer(options, log, Console(quiet=True)) as server:
        tokens = server.kv_pool().tokens
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        answer = client.chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0.0,
        )
        inspected = CliRunner().invoke(app, ["inspect", server.base_url, "--json"])
        on_this_server(inspected, tokens, memory)
    assert "Paris" in answer.choices[0].message.content
    # Pages of 128 tokens, one more than it can use; of a sequence of 1,024 tokens, the window takes 1 + 64 / 8 + 1.
    pages = memory // (30 * 3 * 60 * 128)
    assert tokens == pages * 1024 // (1024 // 128 + 10)
    arguments = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory", str(memory)]
    planned = CliRunner().invoke(
        app, ["plan", str(demo_model_dir), *arguments, "--kv-cache-dtype", "turboquant35", "--json"]
    )
    assert json.loads(planned.stdout)["formats"][0]["tokens_that_fit"] == tokens
    assert "TurboQuant: turboquant3.5, 60 bytes a token and KV head" in log.read_text()

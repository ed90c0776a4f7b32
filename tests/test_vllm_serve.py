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
from turboquant.evals.results import Results  # noqa: E402

pytestmark = pytest.mark.engine

MEMORY = 64 << 20


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


@pytest.fixture(scope="module")
def server(demo_model_dir, tmp_path_factory):
    options = ServerOptions(
        demo_model_dir, "turboquant35", port=free_port(), max_model_len=1024, kv_cache_memory_bytes=MEMORY
    )
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    with pytest.MonkeyPatch.context() as patch:
        # What evaluations over its API need, and no other test here minds.
        patch.setenv("TURBOQUANT_PREFILL_READS", "packed")
        server = VllmServer(options, log, Console(quiet=True))
        with server:
            yield server


@pytest.mark.matrix(feature="`vllm serve`", shape="SmolLM2-135M")
def test_a_served_model_answers_from_a_packed_cache(server, demo_model_dir):
    tokens = server.kv_pool().tokens
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    answer = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0.0,
    )
    inspected = CliRunner().invoke(app, ["inspect", server.base_url, "--json"])
    on_this_server(inspected, tokens, MEMORY)
    assert "Paris" in answer.choices[0].message.content
    # Pages of 128 tokens, one more than it can use; of a sequence of 1,024 tokens, the window takes 1 + 64 / 8 + 1.
    pages = MEMORY // (30 * 3 * 60 * 128)
    assert tokens == pages * 1024 // (1024 // 128 + 10)
    arguments = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory", str(MEMORY)]
    planned = CliRunner().invoke(
        app, ["plan", str(demo_model_dir), *arguments, "--kv-cache-dtype", "turboquant35", "--json"]
    )
    assert json.loads(planned.stdout)["formats"][0]["tokens_that_fit"] == tokens
    assert "TurboQuant: turboquant3.5, 60 bytes a token and KV head" in server.log_path.read_text()


def evaluate(model, caches: str, tasks: str, *more: object):
    arguments = (
        "eval", "--model", model, "--kv-cache-dtype", caches, "--tasks", tasks, "--limit", 2, "--context-length", 128,
        "--lengths", 256, "--depths", "0.2,0.7", *more, "--json",
    )  # fmt: skip
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_an_evaluation_over_the_api_is_that_of_transformers(server, demo_model_dir, tmp_path, one_thread):
    """Until a key lies so close to a codebook boundary that rounding flips its code, which moves little on the mean."""
    cells = {}
    for backend, more in {"hf": (), "server": ("--base-url", server.base_url)}.items():
        result = evaluate(
            demo_model_dir, "turboquant3.5", "perplexity,needle", "--backend", backend, "--output", tmp_path, *more
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        found = (cell for cell in Results(tmp_path).all() if cell.config["backend"] == backend)
        cells[backend] = {(cell.config["task"], cell.config["cache"]): cell for cell in found}
    here, there = (cells[name]["perplexity", "turboquant3.5@64"] for name in ("hf", "server"))
    assert there.metrics["perplexity"] == pytest.approx(here.metrics["perplexity"], rel=0.01)
    # A server of the exact cache was not named.
    assert "exact_perplexity" in here.metrics
    assert "exact_perplexity" not in there.metrics
    here, there = (cells[name]["needle", "turboquant3.5@64"] for name in ("hf", "server"))
    assert [one["text"] for one in there.samples] == [one["text"] for one in here.samples]
    assert there.metrics["accuracy"] == 1.0
    assert there.metrics["answer_logprob"] == pytest.approx(here.metrics["answer_logprob"], abs=0.1)
    assert there.metrics["bits_per_element"] == here.metrics["bits_per_element"] == 3.75


@pytest.mark.parametrize(
    ("caches", "task", "told"),
    [
        ("turboquant3.5", "divergence", "whole distributions"),
        ("turboquant3.5", "longgen", "add auto"),
        ("auto", "perplexity", "holds a 'turboquant3.5' cache"),
        ("turboquant3.5,auto", "perplexity", "one --base-url for each cache"),
        ("int4", "perplexity", "holds a 'turboquant3.5' cache"),
    ],
)
def test_what_this_server_cannot_tell_is_refused(server, demo_model_dir, caches, task, told):
    result = evaluate(demo_model_dir, caches, task, "--backend", "server", "--base-url", server.base_url)
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())


def test_no_server_is_told(demo_model_dir):
    url = f"http://{HOST}:{free_port()}/v1"
    result = evaluate(demo_model_dir, "turboquant3.5", "perplexity", "--backend", "server", "--base-url", url)
    assert result.exit_code == 2
    assert "no server answers at" in " ".join(result.output.replace("│", " ").split())

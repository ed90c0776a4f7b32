"""`turboquant inspect URL`: what a server's own metrics say of its cache. Asked of a real server in test_vllm_serve.py.

tests/data/vllm-0.32-auto-metrics.txt is what `vllm serve --kv-cache-dtype auto` of 0.32.0 answered, cut to the metrics
that are read, after two requests with a common beginning.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from turboquant.cli.main import app
from turboquant.served_cache import ServerNotReadable, ask, read

RECORDED = (Path(__file__).parent / "data" / "vllm-0.32-auto-metrics.txt").read_text()
MODELS = {"data": [{"id": "demo", "max_model_len": 1024}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.server.answers.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serving():
    """A function: a local server with these answers; its address."""
    servers = []

    def start(metrics: str | None) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answers = {"/v1/models": json.dumps(MODELS), "/version": '{"version": "0.32.0"}'}
        if metrics is not None:
            server.answers["/metrics"] = metrics
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def inspect(*arguments: str):
    return CliRunner().invoke(app, ["inspect", *arguments])


def plain(result) -> str:
    """Output without frames and line breaks."""
    return " ".join(result.output.replace("│", "").split())


def test_a_server_that_does_not_compress(serving):
    url = serving(RECORDED)
    result = inspect(url, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found | {
        "url": url, "models": ["demo"], "version": "0.32.0", "kv_cache_dtype": "auto", "max_model_len": 1024,
        "tokens": 1408, "memory_bytes": 64 << 20, "blocks": 11, "block_size": 128, "usage": 0.0,
        "prefix_queries": 794, "prefix_hits": 384, "preemptions": 0, "running": 0, "waiting": 0, "compressed": False,
    } == found  # fmt: skip
    assert found["hit_rate"] == pytest.approx(384 / 794)
    for address in (url, url + "/", url + "/v1"):
        result = inspect(address)
        assert result.exit_code == 1
        assert "NOT compressed by TurboQuant: kv_cache_dtype is 'auto', the model's own precision" in plain(result)


@pytest.mark.parametrize("name", ["turboquant3.5", "turboquant35"])
def test_a_server_that_does(serving, name):
    url = serving(RECORDED.replace('cache_dtype="auto"', f'cache_dtype="{name}"', 1))
    result = inspect(url)
    assert result.exit_code == 0
    assert f"compressed: {name}" in result.output


def test_fp8_is_not_turboquant():
    cache = read("x", RECORDED.replace('cache_dtype="auto"', 'cache_dtype="fp8"', 1))
    assert not cache.compressed
    assert "8 bits, by vLLM itself" in cache.verdict


def test_engines_of_a_data_parallel_server_are_added_up():
    """One line of every metric for each engine; usage is their mean."""
    busy = RECORDED.replace(
        'kv_cache_usage_perc{engine="0",model_name="demo"} 0.0', 'kv_cache_usage_perc{engine="0"} 0.5'
    )
    lines = [line for line in busy.splitlines() if not line.startswith("#")]
    both = "\n".join([*lines, *(line.replace('engine="0"', 'engine="1"') for line in lines), ""])
    cache = read("x", both, MODELS)
    assert (cache.tokens, cache.memory_bytes, cache.blocks) == (2 * 1408, 2 * (64 << 20), 11)
    assert (cache.usage, cache.prefix_queries) == (0.5, 2 * 794)


def test_a_pool_that_was_not_given_by_size(serving):
    """On GPUs vLLM finds the size itself, and the label is "None"."""
    text = RECORDED.replace('kv_cache_memory_bytes="67108864"', 'kv_cache_memory_bytes="None"')
    assert read("x", text).memory_bytes is None
    assert inspect(serving(text)).exit_code == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [(None, "answers 404"), ("up 1\n", "have no vllm:cache_config_info"), ("<html>\n", "no Prometheus text")],
)
def test_what_is_no_vllm_server(serving, metrics, message):
    url = serving(metrics)
    with pytest.raises(ServerNotReadable, match=message):
        ask(url)
    result = inspect(url)
    assert result.exit_code == 2
    assert message in plain(result)


def test_nothing_there():
    result = inspect("http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "no server answers at http://127.0.0.1:9" in plain(result)
    assert "vllm serve" in plain(result)


def test_an_artifact_that_is_not_there(tmp_path):
    result = inspect(str(tmp_path))
    assert result.exit_code == 2
    assert "no artifact at" in result.output
    result = inspect("http://127.0.0.1:9", "--plot", "x.png")
    assert result.exit_code == 2
    assert "a server has nothing to draw" in plain(result)

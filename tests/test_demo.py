"""The demonstration from end to end against a stand-in for vLLM, and the life of the server's processes."""

# The demonstration's own dependencies come with the vLLM extras: without them these tests are skipped.
# ruff: noqa: E402

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("openai")
psutil = pytest.importorskip("psutil")

from typer.testing import CliRunner

from turboquant.cli.main import app
from turboquant.demo import launch, prompts, server
from turboquant.demo.client import agreement, equal_tokens
from turboquant.demo.launch import ServerError, ServerOptions
from turboquant.demo.processes import end_group, termination_as_exception
from turboquant.demo.server import KVPool, VllmServer, parse_pool

FAKE = [sys.executable, str(Path(__file__).with_name("fake_vllm.py"))]
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def make_server(tmp_path, port):
    """Builds servers that run the stand-in."""
    options = ServerOptions(tmp_path, "auto", port)
    return lambda *flags: VllmServer(options, tmp_path / "log", command=[*FAKE, "--port", str(port), *flags])


def runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def child_of(started):
    return int(re.search(r"child (\d+)", started.log_path.read_text())[1])


def run_command(tmp_path, port, monkeypatch, *flags):
    """`turboquant demo` with the stand-in as server."""
    monkeypatch.setattr(server, "serve_command", lambda options: [*FAKE, *options.arguments(), *flags])
    output = tmp_path / "out" / "demo.json"
    return CliRunner().invoke(app, ["demo", "--port", str(port), "--model", str(tmp_path), "--output", str(output)])


def test_whole_demonstration(tmp_path, port, monkeypatch):
    result = run_command(tmp_path, port, monkeypatch)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    exact, compressed = report["runs"]
    assert [exact["kv_cache_dtype"], compressed["kv_cache_dtype"]] == ["auto", "turboquant3.5"]
    assert [exact["kv_tokens"], compressed["kv_tokens"]] == [2**28 // 46080, 2**28 // 5400]
    assert exact["kv_memory_bytes"] == compressed["kv_memory_bytes"] == 2**28
    assert compressed["kv_bytes_per_token"] == pytest.approx(5400, rel=1e-3)
    assert report["greedy_agreement"] == 0.75
    assert report["passkey_found"] is True
    assert all(run["tokens_per_second"] > 0 and len(run["outputs"]) == 5 for run in report["runs"])
    long = next(output for output in exact["outputs"] if output["name"] == "long text")
    assert long["prompt_tokens"] >= 2000
    assert {"model", "greedy_agreement_by_prompt", "definitions", "environment", "settings"} <= report.keys()
    assert "75.0%" in result.output and "tokens that fit" in result.output


def test_failing_requests_end_the_command_and_the_server(tmp_path, port, monkeypatch):
    result = run_command(tmp_path, port, monkeypatch, "--fail-requests")
    assert result.exit_code == 1
    assert "error: A request failed" in result.output
    pid = int(re.search(r"child (\d+)", (tmp_path / "out" / "demo-auto.log").read_text())[1])
    assert not runs(pid)


def test_busy_port_is_named_before_the_start(tmp_path, port, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        result = run_command(tmp_path, port, monkeypatch)
    assert result.exit_code == 1
    assert f"Port {port}" in result.output and "--port" in result.output
    assert not (tmp_path / "out").exists()


def test_two_caches_are_wanted(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--kv-cache-dtypes", "auto"])
    assert result.exit_code == 2


def test_pool_is_read_and_everything_ends(make_server):
    with make_server() as started:
        assert started.kv_pool() == KVPool(tokens=2**28 // 46080, memory_bytes=2**28)
        pids = started.process.pid, child_of(started)
        assert all(runs(pid) for pid in pids)
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_everything_ends_on_an_exception(make_server, error):
    with pytest.raises(error), make_server() as started:
        pids = started.process.pid, child_of(started)
        raise error
    assert not any(runs(pid) for pid in pids)


def test_everything_ends_on_sigterm(make_server):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_info, make_server() as started:
        pids = started.process.pid, child_of(started)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(5)
    assert exit_info.value.code == 128 + signal.SIGTERM
    assert not any(runs(pid) for pid in pids)
    assert signal.getsignal(signal.SIGTERM) is before


def test_dead_server_shows_its_log(make_server):
    with pytest.raises(ServerError, match=r"(?s)ended with code 1 while starting.*no such model"), make_server("--die"):
        pass


def test_stubborn_group_is_killed():
    stubborn = subprocess.Popen([sys.executable, "-c", IGNORES_TERM], start_new_session=True, stdout=subprocess.PIPE)
    assert stubborn.stdout.readline() == b"up\n"
    end_group(stubborn, grace_s=0.3)
    assert stubborn.wait(1) == -signal.SIGKILL


def test_orphans_of_a_dead_leader_are_ended():
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {IGNORES_TERM!r}]).pid, flush=True)"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    orphan = int(leader.stdout.readline())
    leader.wait()
    assert runs(orphan)
    end_group(leader, grace_s=0.3)
    assert not runs(orphan)


def test_handlers_are_left_alone_outside_the_main_thread():
    def enter():
        with termination_as_exception():
            done.append(signal.getsignal(signal.SIGTERM))

    done = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGTERM)]


def test_too_little_memory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * 2**30))
    with pytest.raises(ServerError, match=r"needs about 3\.2 GiB .* 2\.0 GiB are available.*--kv-cache-memory"):
        launch.check_memory(ServerOptions(tmp_path, "auto"))


def test_serve_command_without_a_distribution_called_vllm(tmp_path, monkeypatch):
    def missing(name):
        raise launch.metadata.PackageNotFoundError(name)

    options = ServerOptions(tmp_path, "turboquant3.5", device="cpu")
    monkeypatch.setattr(launch.metadata, "version", missing)
    command = launch.serve_command(options)
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)]
    monkeypatch.setattr(launch.metadata, "version", lambda name: "0.32.0")
    command = launch.serve_command(options)
    assert command[command.index("serve") + 1] == str(tmp_path)
    assert command[command.index("--kv-cache-dtype") + 1] == "turboquant3.5"
    assert command[command.index("--dtype") + 1] == "float32"
    assert "--dtype" not in ServerOptions(tmp_path, "auto", device="cuda").arguments()


def test_environment_lets_the_flag_set_the_cache_size(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env = launch.environment()
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_metrics_without_the_pool_are_refused():
    with pytest.raises(ServerError, match="no such metric"):
        parse_pool("vllm:other 1.0\n")
    with pytest.raises(ServerError, match="kv_cache_size_tokens"):
        parse_pool('vllm:cache_config_info{kv_cache_size_tokens="None"} 1.0')


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (3, 3)),
        ([1, 2, 3], [1, 9, 3], (2, 3)),
        ([1, 2, 3, 4], [1, 2], (2, 4)),
        ([], [1], (0, 1)),
        ([], [], (0, 0)),
    ],
    ids=["same", "one differs", "shorter", "empty", "both empty"],
)
def test_equal_tokens(left, right, expected):
    assert equal_tokens(left, right) == equal_tokens(right, left) == expected


def test_agreement_weights_by_length():
    assert agreement([(4, 4), (0, 12)]) == 0.25
    assert agreement([(0, 0)]) == 1.0


def test_needle_is_in_the_middle_once():
    text = prompts.passkey_prompt("48213")
    place = text.index("48213") / len(text)
    assert 0.3 < place < 0.7
    assert text.count("48213") == 1
    assert text.endswith(prompts.NEEDLE_QUESTION)


def test_texts_are_long_enough_and_the_same_every_time():
    first, second = prompts.demo_prompts("12345"), prompts.demo_prompts("12345")
    assert first == second
    long = next(prompt for prompt in first if prompt.min_tokens)
    assert 9_000 < len(long.text) < 11_000
    assert prompts.draw_passkey(0) != prompts.draw_passkey(1)

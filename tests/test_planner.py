"""`turboquant plan`: pages against worked examples, the public figures, the roofline, the command.

What is read from a config: tests/test_planner_models.py. Against a running engine: tests/test_planner_engine.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from planner_cases import QWEN35, saved
from typer.testing import CliRunner

from turboquant.cli.main import app
from turboquant.cli.sizes import parse_bytes, parse_count
from turboquant.planner import PlanError
from turboquant.planner.gpus import GPUS, LANES_PER_ELEMENT, find_gpu, lanes_per_element
from turboquant.planner.memory import GIB
from turboquant.planner.needs import default_batch
from turboquant.planner.pages import make_paging, state_bytes
from turboquant.planner.plan import PAYS
from turboquant.planner.roofline import Roofline
from turboquant.planner.serving import Serving, cache_dtype
from turboquant.planner.shape import FULL, SLIDING, read_shape
from turboquant.planner.source import load
from turboquant.planner.weights import count_weights
from turboquant.window import CacheLayout


@pytest.fixture
def plan():
    """The command's JSON."""

    def run(*arguments: object) -> dict:
        result = CliRunner().invoke(app, ["plan", *map(str, arguments), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def by_name(result: dict) -> dict[str, dict]:
    return {row["kv_cache_dtype"]: row for row in result["formats"]}


def test_the_public_figures_of_qwen35(plan):
    """20,480 bytes a token in bf16, 10 layers with a cache, 64.4 MB of state a sequence: 62.9 recurrent, 1.5 conv."""
    result = plan(QWEN35, "--gpu", "B300", "--kv-cache-dtype", "auto,fp8,turboquant3.5")
    assert result["kv_layers"] == 10
    assert result["state"] == {
        "kind": "GDN",
        "layers": 30,
        "bytes_per_sequence": 64_389_120,
        "conv_bytes_per_layer": 3 * 8192 * 2,
        "recurrent_bytes_per_layer": 32 * 128 * 128 * 4,
        "recurrent_dtype": "float32",
    }
    rows = by_name(result)
    assert {name: row["kv_bytes_per_token"] for name, row in rows.items()} == {
        "auto": 20480, "fp8": 10240, "turboquant3.5": 4560,
    }  # fmt: skip
    # A page holds a layer's state of 2,146,304 bytes, in whole kernel blocks: 16 tokens, and ours of 160.
    assert {name: row["block_size"] for name, row in rows.items()} == {
        "auto": 1056, "fp8": 2096, "turboquant3.5": 4800,
    }  # fmt: skip
    # 35 B parameters with 3 B active, in 16 bits.
    assert result["weights"]["parameters"] == pytest.approx(35e9, rel=0.02)
    assert [row["starts"] for row in rows.values()] == [True] * 3


def test_the_public_pool_of_qwen35(plan):
    """4.7 million tokens: 96.3 GB of bare bf16 K and V, 21.4 GB of ours; pages, states and windows come on top."""
    result = plan(QWEN35, "--gpu", "B300", "--kv-cache-dtype", "auto,turboquant3.5", "--pool-tokens", "4.7M")
    auto, ours = result["pool"]["formats"]
    for row, bare in ((auto, 4.7e6 * 20480), (ours, 4.7e6 * 4560)):
        assert bare < row["pool_bytes"] < 1.2 * bare
    assert (auto["devices"]["B300"], auto["devices"]["H200"], auto["devices"]["H100"]) == (1, 2, 4)
    assert (ours["devices"]["B300"], ours["devices"]["H200"], ours["devices"]["H100"]) == (1, 1, 2)
    # What was said to be enough reports the pool, and half of it does not start or reports less.
    for tp, enough in ((2, True), (1, False)):
        result = plan(QWEN35, "--gpu", "H200", "--tp", tp, "--kv-cache-dtype", "auto", "--max-num-batched-tokens", 8192)
        assert (by_name(result)["auto"]["tokens_that_fit"] >= 4.7e6) == enough


def test_a_dense_model_is_what_the_window_s_own_arithmetic_says(tmp_path):
    of_file = saved(tmp_path, "qwen3")
    shape = replace(read_shape(of_file), head_dim=128)
    serving = Serving("bfloat16", 32768)
    paging = make_paging(shape, cache_dtype("turboquant3.5", "bfloat16"), serving)
    layout = CacheLayout(cache_dtype("turboquant3.5", "bfloat16").fmt, 128, 160, 64)
    assert paging.block_size == 160
    for tokens in (1, 159, 161, 1000, 32768):
        assert paging.blocks(tokens) == layout.sequence_pages(tokens)
        assert paging.sequence_bytes(tokens) == layout.sequence_pages(tokens) * 2 * layout.page_bytes * 4


def test_gemma3_of_its_real_shape(tmp_path):
    """27B: 10 global and 52 local layers make groups of 10: one global, six local (the last one padded)."""
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=21504, sliding_window=1024, max_position_embeddings=131072,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_shape(load(str(tmp_path)))
    serving = Serving("bfloat16", 131072, max_num_batched_tokens=8192)
    paging = make_paging(shape, cache_dtype("auto", "bfloat16"), serving)
    counts = {group.kind: (group.count, group.counted_pages(serving)) for group in paging.groups}
    assert paging.layers_per_group == 10
    # The last group of local layers would hold two; a step in flight and the next keep 2 · 8192 tokens more.
    assert counts == {FULL: (1, 131072 // 16), SLIDING: (6, (1023 + 2 * 8192 + 15) // 16 + 1)}


def test_prefix_caching_keeps_a_second_state():
    shape = read_shape(load(str(QWEN35)))
    cache = cache_dtype("auto", "bfloat16")
    on, off = (make_paging(shape, cache, Serving("bfloat16", 4096, prefix_caching=p)) for p in (True, False))
    assert on.blocks(4096) - off.blocks(4096) == 3


def test_tensor_parallelism_splits_heads_and_states():
    shape = read_shape(load(str(QWEN35)))
    one, two, eight = (Serving("bfloat16", 4096, tp=tp) for tp in (1, 2, 8))
    assert sum(state_bytes(shape, one)) == 2 * sum(state_bytes(shape, two))
    assert [shape.local_kv_heads(tp) for tp in (1, 2, 8)] == [2, 1, 1]
    cache = cache_dtype("auto", "bfloat16")
    pages = [make_paging(shape, cache, serving).page_bytes for serving in (one, two, eight)]
    assert pages[0] == 2 * pages[1] > 2 * pages[2]
    with pytest.raises(PlanError, match="--tp 3 does not divide"):
        shape.check_tp(3)


def test_recurrent_states_in_another_dtype():
    shape = read_shape(load(str(QWEN35)))
    half = Serving("bfloat16", 4096, mamba_ssm_dtype="bfloat16")
    assert state_bytes(shape, half) == (49152, 1048576)
    unstated = replace(shape, text={**shape.text, "mamba_ssm_dtype": None})
    assert state_bytes(unstated, Serving("bfloat16", 4096)) == (49152, 1048576)


def test_the_budget_adds_up(plan):
    result = plan(QWEN35, "--gpu", "H200", "--kv-cache-dtype", "auto")
    budget = result["budget"]
    assert budget["memory"] == 143_771 * 2**20
    assert budget["pool"] == int(budget["memory"] * 0.92) - sum(
        budget[k] for k in ("weights", "activations", "runtime")
    )
    given = plan(QWEN35, "--memory", "288GiB", "--reserve", "6GiB", "--weights", "70GB", "--kv-cache-dtype", "auto")
    assert given["budget"]["pool"] == int(288 * GIB * 0.92) - 6 * GIB - sum(given["weights"]["bytes_by_part"].values())
    assert given["gpu"] is None and given["formats"][0]["contexts"][0]["decode_ms"] is None


def test_where_compression_pays(plan):
    """On both sides of the lengths that are named."""
    arguments = (QWEN35, "--gpu", "H200", "--kv-cache-dtype", "auto,turboquant3.5", "--concurrency", 16)
    row = by_name(plan(*arguments))["turboquant3.5"]
    memory, speed = row["memory_pays_from_tokens"], row["decode_pays_from_tokens"]
    lengths = [str(n) for n in (memory - 1, memory, speed - 1, speed)]
    result = by_name(plan(*arguments, *(part for n in lengths for part in ("--context", n))))
    saves = {c["context"]: c["saved_against_auto"] for c in result["turboquant3.5"]["contexts"]}
    assert saves[memory] > 0 >= saves[memory - 1]
    faster = {
        ours["context"]: 1 - ours["decode_ms"] / auto["decode_ms"]
        for ours, auto in zip(result["turboquant3.5"]["contexts"], result["auto"]["contexts"], strict=True)
    }
    assert faster[speed] >= PAYS > faster[speed - 1]


def test_the_roofline_of_a_step():
    """At 262,144 tokens and one sequence: weights of 8 experts of 256, K and V of 20,480 bytes a token, two states."""
    of_file = load(str(QWEN35))
    shape, gpu, serving = read_shape(of_file), GPUS["H200"], Serving("bfloat16", 262144, window=0)
    weights = count_weights(of_file, shape, "bfloat16")
    auto = Roofline(shape, serving, cache_dtype("auto", "bfloat16"), weights, gpu)
    experts = weights.bytes_by_part["experts"] * 8 / 256
    left_out = sum(weights.bytes_by_part[part] for part in ("experts", "embeddings", "vision"))
    bytes_read = weights.total_bytes - left_out + experts + 262144 * 20480 + 2 * 64_389_120
    assert auto.decode_seconds(1, 262144) == pytest.approx(bytes_read / 4.8e12, rel=1e-9)
    slower = replace(auto, efficiency=0.5, overhead_s=1e-3)
    assert slower.decode_seconds(1, 262144) == pytest.approx(2 * bytes_read / 4.8e12 + 1e-3, rel=1e-9)
    # Packed pages: bound by instructions on a B300, whose bandwidth has grown more than its issue rate.
    b300 = replace(auto, cache=cache_dtype("turboquant3.5", "bfloat16"), gpu=GPUS["B300"])
    of_kv = b300.decode_seconds(1, 200_001) - b300.decode_seconds(1, 1)
    elements = 200_000 * 10 * 2 * 2 * 256
    assert of_kv == pytest.approx(elements * 3.316 / GPUS["B300"].lane_instructions, rel=1e-9)
    assert of_kv > 200_000 * 4560 / 8e12


def test_instruction_counts_are_the_committed_ones():
    figures = json.loads((Path(__file__).parents[1] / "docs" / "results" / "kernels-sass.json").read_text())["figures"]
    counted = {(f["format"], f["head_dim"], f["target"]): f["lane_instructions_per_element"] for f in figures}
    for name, targets in LANES_PER_ELEMENT.items():
        for target, pair in targets.items():
            for head_dim, lanes in zip((128, 256), pair, strict=True):
                assert lanes == pytest.approx(counted[name, head_dim, f"sm_{target}"], abs=5e-4)
    fmt = cache_dtype("turboquant4", "bfloat16").fmt
    assert lanes_per_element(fmt, 64, GPUS["A100"]) == LANES_PER_ELEMENT["turboquant4"][90][0]


def test_vllm_s_default_batches():
    assert default_batch(GPUS["B300"]) == (16384, 1024)
    assert default_batch(GPUS["H100"]) == (8192, 1024)
    assert default_batch(GPUS["A100"]) == default_batch(GPUS["L4"]) == default_batch(None) == (2048, 256)


def test_explained_and_as_a_table():
    arguments = ["plan", str(QWEN35), "--gpu", "b300", "--pool-tokens", "4.7M", "--explain"]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"}).output
    for step in (
        "32 heads · 16,384 elements · 4 B (float32) = 2,097,152 B a layer",
        "30 layers · (2,097,152 + 49,152) = 64,389,120 B",
        "KV: 10 layers · 2 heads · 1024 B = 20,480 B a token",
        "8 of 256 experts",
        "⌈262,144 / 1,056⌉",
        "What a pool of 4,700,000 tokens takes",
    ):
        assert step in text, step


REFUSED = {
    "no size": ((), "give --gpu, --memory of a device, or --kv-cache-memory"),
    "an unknown GPU": (("--gpu", "B3000"), "Did you mean B300?"),
    "an unknown dtype": (("--gpu", "B300", "--kv-cache-dtype", "turboqant3.5"), "Allowed: auto, bfloat16"),
    "a wrong size": (("--kv-cache-memory", "many"), "'many' is no size"),
    "a card that is too small": (("--gpu", "L4"), "nothing is left for the KV cache"),
    "an unknown device": (("--gpu", "B300", "--device", "tpu"), "Allowed: cpu, cuda"),
    "heads that do not divide": (("--gpu", "B300", "--tp", "3"), "--tp 3 does not divide the heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_said(case):
    arguments, message = REFUSED[case]
    result = CliRunner().invoke(app, ["plan", str(QWEN35), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())


def test_a_block_too_small_for_a_window(tmp_path):
    shape = replace(read_shape(saved(tmp_path, "llama")), head_dim=128)
    serving = Serving("bfloat16", 1024, block_size=16)
    with pytest.raises(PlanError, match="too small for an exact window"):
        make_paging(shape, cache_dtype("turboquant3.5", "bfloat16"), serving)


def test_sizes_and_counts():
    assert parse_bytes("--x", "64MiB") == 64 << 20
    assert parse_bytes("--x", "35GB") == 35_000_000_000
    assert parse_bytes("--x", "123") == 123
    assert parse_count("--x", "4.7M") == 4_700_000
    assert parse_count("--x", "32,768") == 32768
    for text in ("", "many", "-1", "0", "inf"):
        with pytest.raises(ValueError, match="--x"):
            parse_count("--x", text)
    assert find_gpu("rtx4090").name == "RTX4090"

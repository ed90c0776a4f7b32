"""`turboquant simulate`: the scheduler's rules on traces small enough to follow by hand.

Against the real engine: benchmarks/simulate_validation.py, figures in docs/results/simulate-validation.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from turboquant.cli.main import app
from turboquant.planner.pages import FULL, Group, Paging
from turboquant.planner.roofline import Work
from turboquant.planner.serving import Serving
from turboquant.simulator.costs import FEATURES, MeasuredCosts, costs_dict, fit, read_costs
from turboquant.simulator.replay import PoolTooSmall, Replay, block_table
from turboquant.simulator.trace import Lengths, Trace, check_lengths, generate, read_trace

QWEN35 = Path(__file__).parent / "data" / "qwen3.5-35b-a3b.json"
SECOND_A_STEP = MeasuredCosts(1.0, 0.0, 0.0, 0.0, 0.0)
BLOCK = 4


def paging(**settings) -> Paging:
    """Blocks of four tokens, one layer."""
    serving = Serving("bfloat16", 1000, **{"max_num_batched_tokens": 8, "max_num_seqs": 8, **settings})
    return Paging(BLOCK, 4096, 1, (Group(FULL, 1, BLOCK, 4096),), serving)


def trace(*requests: tuple[float, int, int]) -> Trace:
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(np.array(arrivals, float), np.array(prompts), np.array(outputs))


def run(requests: Trace, blocks: int = 1000, costs=SECOND_A_STEP, concurrency=None, **settings):
    return Replay(requests, paging(**settings), blocks, costs, concurrency).run()


class OneByOne:
    """Costs that count their steps."""

    def __init__(self) -> None:
        self.steps: list[Work] = []

    def step_seconds(self, work: Work) -> float:
        self.steps.append(work)
        return 1.0


def test_one_request():
    """A prompt of 20 tokens in chunks of 8, 8 and 4, whose last brings the first token; then one a step."""
    outcome = run(trace((0, 20, 5)))
    assert (outcome.first_token_s[0], outcome.finish_s[0]) == (3, 7)
    assert outcome.tokens_per_s == pytest.approx(5 / 7)


def test_a_late_request_starts_the_clock_anew():
    outcome = run(trace((0, 4, 2), (100, 4, 2)))
    assert outcome.finish_s.tolist() == [2, 102]
    assert outcome.figures()["ttft_mean_s"] == 1


def test_decoding_goes_before_prompts():
    """Budget 8: a prompt of 14 takes 7 tokens of a step beside one that decodes."""
    costs = OneByOne()
    outcome = run(trace((0, 4, 6), (0.5, 14, 1)), costs=costs)
    assert outcome.first_token_s.tolist() == [1, 3]
    mixed = [(len(work.decodes), list(work.prefills)) for work in costs.steps if work.prefills]
    assert mixed == [(0, [(0, 4)]), (1, [(0, 7)]), (1, [(7, 7)])]


def test_no_more_sequences_than_allowed():
    outcome = run(trace(*[(0, 2, 3)] * 4), max_num_seqs=2)
    assert outcome.finish_s.tolist() == [3, 3, 6, 6]
    assert max(outcome.timeline.batch) == 2


def test_a_request_waits_until_all_that_is_known_of_it_fits():
    """Of 5 blocks the first request holds 3; the second's 12 known tokens want 3 and get them when it has ended."""
    outcome = run(trace((0, 9, 3), (0, 12, 1)), blocks=5, max_num_batched_tokens=100)
    assert outcome.finish_s.tolist() == [3, 4]
    assert outcome.preemptions == 0


def test_the_last_admitted_is_preempted_and_computed_again():
    """Four blocks: both prompts take two; the first needs a third at its 9th token, and the second gives way."""
    costs = OneByOne()
    outcome = run(trace((0, 8, 4), (0, 8, 4)), blocks=4, costs=costs, max_num_batched_tokens=100)
    assert outcome.preemptions == 1
    assert outcome.finish_s.tolist() == [4, 7]
    assert outcome.first_token_s.tolist() == [1, 1]
    # It had 8 tokens and one generated: 9 known, computed again in one chunk.
    assert [list(work.prefills) for work in costs.steps if work.prefills] == [[(0, 8), (0, 8)], [(0, 9)]]


def test_steps_taken_together_are_the_steps_one_by_one():
    """Costs that grow with the context, requests of all lengths, a pool that is too small: the same times."""
    costs = MeasuredCosts(0.01, 1e-3, 1e-6, 2e-3, 1e-5)
    requests = generate(40, Lengths.parse("uniform:1:60"), Lengths.parse("uniform:1:80"), 3.0, 0.5, seed=1)
    fast = Replay(requests, paging(max_num_batched_tokens=64), 60, costs)
    slow = Replay(requests, paging(max_num_batched_tokens=64), 60, costs)
    slow._steps_without_event = lambda ids, seconds: 1
    ours, exact = fast.run(), slow.run()
    assert ours.preemptions == exact.preemptions > 0
    assert len(ours.timeline.time_s) < len(exact.timeline.time_s)
    # An arrival within steps that were taken together is seen at their end, which the next step would have been.
    np.testing.assert_allclose(ours.finish_s, exact.finish_s, rtol=0.02)
    assert sum(ours.timeline.tokens) == sum(exact.timeline.tokens) == requests.output_tokens.sum()


def test_everything_is_conserved():
    requests = generate(30, Lengths.parse("lognormal:20:1.0"), Lengths.parse("uniform:1:30"), None, 1.0, seed=2)
    replay = Replay(requests, paging(), 200, SECOND_A_STEP)
    outcome = replay.run()
    assert replay.free == replay.blocks and not replay.held.any()
    assert (outcome.finish_s >= outcome.first_token_s).all() and (outcome.first_token_s > outcome.arrival_s).all()
    assert sum(outcome.timeline.tokens) == requests.output_tokens.sum()


def test_so_many_requests_in_the_system():
    """Closed loop: the next one arrives when one ends, and waits from then on only."""
    outcome = run(trace(*[(0, 2, 4)] * 6), concurrency=2)
    assert outcome.arrival_s.tolist() == [0, 0, 4, 4, 8, 8]
    assert outcome.figures()["ttft_mean_s"] == 1
    assert outcome.steady_tokens_per_s() == pytest.approx(2)


def test_a_request_larger_than_the_pool_is_named():
    with pytest.raises(PoolTooSmall, match=r"24 tokens takes 6 blocks .* pool has 5"):
        run(trace((0, 20, 4)), blocks=5)
    with pytest.raises(ValueError, match=r"1,001 tokens.*longest sequence is 1,000"):
        check_lengths(trace((0, 1000, 1)), 1000)


def test_the_table_of_blocks_is_the_paging_s():
    of_paging = replace(
        paging(), groups=(Group(FULL, 1, 4, 1), Group("window", 1, 3, 1, 5), Group("sliding", 1, 7, 1, 9))
    )
    table = block_table(of_paging, 100)
    assert table.tolist() == [0, *(of_paging.blocks(n) for n in range(1, 101))]


def test_arrivals_and_lengths():
    steady, bursts = (
        generate(4000, Lengths.parse("lognormal:100:0.5"), Lengths.parse("uniform:3:5"), 2.0, burst, seed=0)
        for burst in (1.0, 0.1)
    )
    gaps = np.diff(steady.arrival_s)
    assert gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.1)  # Poisson
    assert np.diff(bursts.arrival_s).std() > 2.5 * gaps.std()
    assert np.median(steady.prompt_tokens) == pytest.approx(100, rel=0.05)
    assert {*steady.output_tokens} == {3, 4, 5}
    again = generate(4000, Lengths.parse("lognormal:100:0.5"), Lengths.parse("uniform:3:5"), 2.0, 1.0, seed=0)
    assert (again.prompt_tokens == steady.prompt_tokens).all()


@pytest.mark.parametrize("text", ["", "0", "-3", "normal:1:2", "uniform:5:2", "uniform:5", "lognormal:x:1"])
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError, match="lognormal:MEDIAN:SIGMA"):
        Lengths.parse(text)


def test_a_trace_from_a_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_tokens": 7, "output_tokens": 3}\n\n'
        '{"arrival_s": 0.5, "prompt_tokens": 9, "output_tokens": 1, "id": "x"}\n'
    )
    read = read_trace(path)
    assert (read.arrival_s.tolist(), read.prompt_tokens.tolist(), read.output_tokens.tolist()) == (
        [0.5, 2],
        [9, 7],
        [1, 3],
    )
    for line, message in (
        ('{"arrival_s": 1}', "line 1: no request"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "must not be negative"),
        ("", "holds no requests"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            read_trace(path)


def test_costs_are_found_again_from_steps(tmp_path):
    """Five weights from noisy steps, with outliers as a busy machine makes them."""
    true = MeasuredCosts(0.02, 5e-3, 2e-6, 8e-3, 3e-5)
    rng = np.random.default_rng(0)
    works = [
        Work(
            rng.integers(10, 900, rng.integers(0, 9)),
            [(int(c), int(n)) for c, n in rng.integers(1, 400, (rng.integers(0, 3), 2))],
        )
        for _ in range(400)
    ]
    works = [work for work in works if work.tokens]
    seconds = [true.step_seconds(work) * rng.normal(1, 0.03) * (5 if rng.random() < 0.03 else 1) for work in works]
    found = fit(works, seconds)
    for work in works[:50]:
        assert found.step_seconds(work) == pytest.approx(true.step_seconds(work), rel=0.05)
    (tmp_path / "costs.json").write_text(json.dumps(costs_dict({"auto": found})))
    assert read_costs(tmp_path / "costs.json") == {"auto": found}
    assert [*FEATURES] == ["step", "prefill_token", "prefill_product", "decode", "decode_token"]
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ValueError, match="no file of step costs"):
        read_costs(tmp_path / "costs.json")


def simulate(*arguments: object) -> dict:
    result = CliRunner().invoke(app, ["simulate", str(QWEN35), *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_peak_moves_with_the_bytes_of_the_cache(tmp_path):
    """Long prompts on an H200: bf16 runs out of blocks first, at fewer requests and a lower throughput."""
    pytest.importorskip("matplotlib")
    result = simulate(
        "--gpu", "H200", "--max-concurrency", "16,160", "--input-len", 32768, "--output-len", 1024, "--num-prompts",
        220, "--plot", tmp_path / "sweep.png",
    )  # fmt: skip
    assert result["simulation"] is True
    assert "nothing here was measured" in result["assumptions"][0]
    peaks = result["peaks"]
    speeds = [peaks[name]["steady_tokens_per_s"] for name in ("auto", "fp8", "turboquant3.5")]
    assert speeds == sorted(speeds)
    assert peaks["auto"]["batch_max"] < peaks["turboquant3.5"]["batch_max"]
    at_160 = {row["kv_cache_dtype"]: row for row in result["runs"] if row["max_concurrency"] == 160}
    assert at_160["auto"]["ttft_p50_s"] > at_160["turboquant3.5"]["ttft_p50_s"]
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_measured_costs_in_place_of_the_roofline(tmp_path):
    """No GPU is needed then, but the pool is; a cache dtype that was not measured is refused."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(costs_dict({"auto": SECOND_A_STEP})))
    trace_file = tmp_path / "trace.jsonl"
    trace_file.write_text('{"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 10}\n')
    common = ("--costs", costs, "--trace", trace_file, "--kv-cache-memory", "4GiB", "--kv-cache-dtype")
    pytest.importorskip("matplotlib")
    (row,) = simulate(*common, "auto", "--plot", tmp_path / "course.png")["runs"]
    assert (row["seconds"], row["tokens_per_s"], row["ttft_p50_s"]) == (10, 1, 1)
    assert (tmp_path / "course.png").stat().st_size > 10_000
    result = CliRunner().invoke(app, ["simulate", str(QWEN35), *map(str, (*common, "fp8"))])
    assert result.exit_code == 2
    assert "but not 'fp8'" in " ".join(result.output.replace("│", "").split())


def test_as_a_table_that_says_what_it_is():
    arguments = ["simulate", str(QWEN35), "--gpu", "H200", "--num-prompts", "8", "--max-concurrency", "1,4"]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"}).output
    assert "A simulation: nothing here was measured" in text
    assert "turboquant3.5: highest at" in text


def test_a_request_that_does_not_fit_is_a_row_not_an_end():
    result = simulate(
        "--gpu", "B300", "--kv-cache-memory", "3GiB", "--input-len", 200000, "--output-len", 8, "--num-prompts", 2
    )
    small = {row["kv_cache_dtype"]: row.get("too_small", False) for row in result["runs"]}
    assert small == {"auto": True, "fp8": False, "turboquant3.5": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-cache-memory", "8GiB"), "give --gpu for the roofline, or --costs"),
        (("--gpu", "B300", "--max-concurrency", "few"), "is no list of numbers"),
        (("--gpu", "B300", "--input-len", "normal:3"), "lognormal:MEDIAN:SIGMA"),
        (("--gpu", "B300", "--input-len", "262144"), "raise --max-model-len"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments, message):
    result = CliRunner().invoke(app, ["simulate", str(QWEN35), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())

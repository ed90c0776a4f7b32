"""Run by test_vllm_speculation.py in a process of its own: vLLM cannot start another engine after speculation.

    PYTHONPATH=tests python -m speculate MODEL KV_CACHE_DTYPE WINDOW SPECULATIVE_CONFIG [ENGINE_SETTINGS]

Both configurations are JSON. Prints one JSON object: greedy answers with speculation, drafts proposed and accepted, and
what the oracle saw.
"""

from __future__ import annotations

import json
import sys

import pytest
from engine import engine, greedy
from window_oracle import Oracle, assert_nothing_leaked

PERIODS = (5, 11, 17)
MAX_TOKENS = 40


def prompts() -> list[list[int]]:
    """Texts that repeat themselves, so that n-grams are found, and then go on differently, so that drafts fail."""
    return [[0, *([2 + i * 7 + j for j in range(period)] * (140 // period))] for i, period in enumerate(PERIODS)]


def main(model: str, fmt: str, window: str, speculation: str, settings: str = "{}") -> None:
    with pytest.MonkeyPatch.context() as patch:
        oracle = Oracle(patch)
        with engine(
            model, fmt, skip_tokenizer_init=True, speculative_config=json.loads(speculation), disable_log_stats=False,
            additional_config={"turboquant": {"window": int(window), "prefill_reads": "packed"}},
            **json.loads(settings),
        ) as llm:  # fmt: skip
            oracle.watch_blocks(llm)
            answers = greedy(llm, prompts(), MAX_TOKENS)
            assert_nothing_leaked(llm)
            counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    print(json.dumps({
        "answers": answers, "reads": oracle.reads, "bad": oracle.bad, "freed": oracle.freed,
        "drafted": counters["vllm:spec_decode_num_draft_tokens"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])

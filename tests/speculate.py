"""Run by test_vllm_speculation.py in a process of its own: vLLM cannot start another engine after speculation.

    PYTHONPATH=tests python -m speculate MODEL KV_CACHE_DTYPE WINDOW

Prints one JSON object: greedy answers with n-gram speculation, drafts proposed and accepted, and what the oracle saw.
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


def main(model: str, fmt: str, window: int) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with pytest.MonkeyPatch.context() as patch:
        oracle = Oracle(patch)
        with engine(
            model, fmt, skip_tokenizer_init=True, speculative_config=speculation, disable_log_stats=False,
            additional_config={"turboquant": {"window": window, "prefill_reads": "packed"}},
        ) as llm:  # fmt: skip
            oracle.watch_blocks(llm)
            answers = [tokens for tokens, _ in greedy(llm, prompts(), MAX_TOKENS)]
            assert_nothing_leaked(llm)
            counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    print(json.dumps({
        "answers": answers, "reads": oracle.reads, "bad": oracle.bad, "freed": oracle.freed,
        "drafted": counters["vllm:spec_decode_num_draft_tokens"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

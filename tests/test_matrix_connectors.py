"""KV connectors that move opaque pages: save, start anew, load, and go on with the same tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engine import ALL_PACKED, assert_same_answers, engine, greedy, greedy_with_gaps, random_prompts
from vllm import SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

FMT = "turboquant3.5"
LENGTHS = (300, 201, 150)


@pytest.mark.matrix(
    feature="KV connector (ExampleConnector: save, restart, load; it turns the hybrid manager, and so the window, off)",
    shape="llama",
)
def test_pages_survive_a_restart(llama_dir, tmp_path):
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    settings = {"skip_tokenizer_init": True, "additional_config": {"turboquant": {"prefill_reads": "packed"}}}
    prompts = random_prompts(*LENGTHS)
    with engine(llama_dir, FMT, skip_tokenizer_init=True, additional_config=ALL_PACKED) as llm:
        expected = greedy_with_gaps(llm, prompts, 8)
    try:
        with engine(llama_dir, FMT, kv_transfer_config=transfer, **settings) as llm:
            assert_same_answers(greedy(llm, prompts, 8), expected)
        ensure_kv_transfer_shutdown()
        with engine(llama_dir, FMT, kv_transfer_config=transfer, **settings) as llm:
            assert_same_answers(greedy(llm, prompts, 8), expected)
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    finally:
        ensure_kv_transfer_shutdown()
    assert [output.num_cached_tokens for output in outputs] == [(n - 1) // 128 * 128 for n in LENGTHS]

"""Attention of every shape, against vLLM's own attention over the values that our pages hold.

The reference is a stock engine with an exact cache into which K and V are written as our quantiser returns them. Our
engine must then give the same answers from packed pages: sinks, softcaps, sliding windows and head sizes included.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import shapes
from engine import ALL_PACKED, assert_same_answers, engine, greedy, greedy_with_gaps, random_prompts

from turboquant.evals.vllm_backend import reading_back
from turboquant.kv_quantizer import KVQuantizer

pytestmark = pytest.mark.engine

FMT = "turboquant2.5"
LENGTHS = (1, 6, 41, 130, 201)
# One code that another rounding moves over its boundary was seen to move a log-probability by .0097.
FLIP = 0.03


class ReadBack:
    """What a packed cache would return."""

    def read_back(self, key, value):
        quantizer = KVQuantizer(FMT, key.shape[-1])
        return quantizer.dequantize(quantizer.quantize(key, value))


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[] if s in shapes.QUICK else pytest.mark.engine_full) for s in shapes.SAVERS]
)
@pytest.mark.matrix(feature="attention", shape="{shape}")
def test_the_answers_of_vllm_s_attention_over_the_same_values(tmp_path, shape, reference_kernels):
    model_dir = shapes.SAVERS[shape](tmp_path)
    prompts = random_prompts(*LENGTHS)
    with engine(model_dir, "auto", skip_tokenizer_init=True) as llm:
        exact = greedy(llm, prompts, 12)
        with reading_back(ReadBack()):
            expected = greedy_with_gaps(llm, prompts, 12)
    with engine(model_dir, FMT, skip_tokenizer_init=True, additional_config=ALL_PACKED) as llm:
        assert_same_answers(greedy(llm, prompts, 12), expected, tolerance=FLIP)
    with engine(model_dir, FMT, skip_tokenizer_init=True) as llm:
        default = greedy(llm, prompts, 12)
    # A whole prompt reads its own tokens exactly by default.
    assert [logprobs[0] for _, logprobs in default] == pytest.approx([e[1][0] for e in exact], abs=1e-3)

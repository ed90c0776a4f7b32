"""What vLLM's scheduler does to a compressed cache: one busy engine, against the same requests alone.

With every token read from its packed page, however its step came about, the answers must be the same ones.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("vllm")

from engine import ALL_PACKED, assert_same_answers, engine, greedy, greedy_with_gaps, random_prompts
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reference_kernels")]

FMT = "turboquant3.5"
BLOCK, NEW = 32, 8
BASE = random_prompts(7 * BLOCK + 5)[0]
# A hit ends at a block's edge, one token before it, or one after it.
EDGES = [[*BASE[: k * BLOCK + d], 7, 9] for k, d in itertools.product(range(1, 8), (-1, 0, 1))]
MIXED = random_prompts(*[1 + (37 * i) % 331 for i in range(64)])
SHARED = [[*BASE[: 2 * BLOCK], 11 + i] for i in range(8)]
FRESH = random_prompts(470, 465)


@pytest.fixture(scope="module")
def alone(worded_llama_dir):
    """Every prompt by itself: whole, fresh, nothing beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURBOQUANT_KERNELS", "reference")
        with engine(worded_llama_dir, FMT, additional_config=ALL_PACKED, max_num_seqs=1, block_size=BLOCK) as llm:
            groups = {"base": [BASE], "edges": EDGES, "mixed": MIXED, "shared": SHARED, "fresh": FRESH}
            return {name: greedy_with_gaps(llm, prompts, NEW) for name, prompts in groups.items()}


@pytest.fixture(scope="module")
def busy(worded_llama_dir, alone):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURBOQUANT_KERNELS", "reference")
        with engine(
            worded_llama_dir, FMT, additional_config=ALL_PACKED, max_num_seqs=64, block_size=BLOCK,
            enable_prefix_caching=True, max_num_batched_tokens=2048,
        ) as llm:  # fmt: skip
            yield llm


def cached_tokens(llm, prompts: list[list[int]]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.num_cached_tokens or 0 for output in outputs]


@pytest.mark.matrix(feature="64 concurrent requests of mixed lengths", shape="llama")
def test_many_at_once(busy, alone):
    assert_same_answers(greedy(busy, MIXED, NEW), alone["mixed"])


@pytest.mark.matrix(feature="prefix hits at every block boundary", shape="llama")
def test_hits_at_every_edge(busy, alone):
    busy.reset_prefix_cache()
    assert_same_answers(greedy(busy, [BASE], NEW), alone["base"])
    for prompt, expected in zip(EDGES, alone["edges"], strict=True):
        shared = next((i for i, pair in enumerate(zip(prompt, BASE, strict=False)) if pair[0] != pair[1]), len(BASE))
        assert cached_tokens(busy, [prompt]) == [shared // BLOCK * BLOCK]
        assert_same_answers(greedy(busy, [prompt], NEW), [expected])
    assert_same_answers(greedy(busy, EDGES, NEW), alone["edges"])


@pytest.mark.matrix(feature="prefix hits in a batch with longer fresh prompts (vLLM bug 46460)", shape="llama")
def test_hits_beside_longer_fresh_prompts(busy, alone):
    """The longest request of the batch is fresh: kernels that look at it alone drop the others' prefixes."""
    busy.reset_prefix_cache()
    greedy(busy, [BASE], 1)
    assert cached_tokens(busy, SHARED) == [2 * BLOCK] * len(SHARED)
    mixed = [FRESH[0], *SHARED, FRESH[1]]
    expected = [alone["fresh"][0], *alone["shared"], alone["fresh"][1]]
    assert_same_answers(greedy(busy, mixed, NEW), expected)


@pytest.mark.matrix(feature="common prefix of a whole batch", shape="llama")
def test_a_prefix_that_all_share(busy, alone):
    """vLLM 0.32 has no cascade attention any more: a shared prefix is the same blocks in every table."""
    busy.reset_prefix_cache()
    greedy(busy, [BASE], 1)
    assert cached_tokens(busy, SHARED) == [2 * BLOCK] * len(SHARED)
    assert_same_answers(greedy(busy, SHARED, NEW), alone["shared"])


@pytest.mark.matrix(feature="prompt_logprobs and logprobs", shape="llama")
def test_log_probabilities_of_prompts_are_those_of_decoding(busy, alone):
    """A prompt that holds an answer is scored as the answer was, when it was made token by token."""
    index = next(i for i, prompt in enumerate(MIXED) if len(prompt) > 100)
    tokens, logprobs, _ = alone["mixed"][index]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, logprobs=20, detokenize=False)
    (output,) = busy.generate([{"prompt_token_ids": MIXED[index] + tokens}], params, use_tqdm=False)
    scored = [at[token].logprob for token, at in zip(tokens, output.prompt_logprobs[-len(tokens) :], strict=True)]
    assert scored == pytest.approx(logprobs, abs=1e-3)
    assert len(output.outputs[0].logprobs[0]) >= 20


@pytest.mark.matrix(feature="n > 1", shape="llama")
def test_several_samples_of_one_prompt(busy, alone):
    prompt = {"prompt_token_ids": MIXED[5]}
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=NEW, detokenize=False, logprobs=0)
    (output,) = busy.generate([prompt], params, use_tqdm=False)
    samples = [list(sample.token_ids) for sample in output.outputs]
    assert len({*map(tuple, samples)}) == 4
    (again,) = busy.generate([prompt], params, use_tqdm=False)
    assert [list(sample.token_ids) for sample in again.outputs] == samples
    for sample in output.outputs:
        made = sum(at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True))
        assert made == pytest.approx(scored(busy, MIXED[5], list(sample.token_ids)), abs=5e-3)


@pytest.mark.matrix(feature="beam search", shape="llama")
def test_beams(busy, alone):
    params = BeamSearchParams(beam_width=3, max_tokens=NEW, ignore_eos=True)
    (output,) = busy.beam_search([{"prompt_token_ids": MIXED[9]}], params)
    beams = [beam.tokens[len(MIXED[9]) :] for beam in output.sequences]
    assert len({*map(tuple, beams)}) == 3
    for beam, tokens in zip(output.sequences, beams, strict=True):
        assert beam.cum_logprob == pytest.approx(scored(busy, MIXED[9], tokens), abs=5e-3)
    assert output.sequences[0].cum_logprob >= sum(alone["mixed"][9][1]) - 5e-3


@pytest.mark.matrix(feature="structured output", shape="llama")
def test_a_grammar_takes_the_likeliest_of_what_it_allows(busy):
    """The first token is the one that this cache finds likeliest of all that begin an allowed answer."""
    tokenizer, choices = busy.get_tokenizer(), ["Paris", "London", "7"]
    starts = {tokenizer.convert_tokens_to_ids(choice[:n]) for choice in choices for n in range(1, len(choice) + 1)}
    allowed = sorted(starts - {tokenizer.unk_token_id, None})
    prompts = [MIXED[i] for i in (3, 9, 20, 33)]
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=choices))
    outputs = busy.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokenizer.decode(tokens, skip_special_tokens=True) in choices
        assert tokens[0] == max(allowed, key=lambda token, p=prompt: scored(busy, p, [token]))


def scored(llm, prompt: list[int], tokens: list[int]) -> float:
    """Log-probability of `tokens` after `prompt`, read in one piece."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt + tokens}], params, use_tqdm=False)
    steps = output.prompt_logprobs[-len(tokens) :]
    return sum(at[token].logprob for token, at in zip(tokens, steps, strict=True))

"""The tasks' data and arithmetic, and that the Transformers back end says what the model itself says."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from turboquant.cache import turboquant_cache
from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import divergence
from turboquant.evals.hf_backend import CHUNK, HFBackend
from turboquant.evals.serving import EXACT_CACHE
from turboquant.evals.tasks import Request
from turboquant.evals.tasks.copying import Copying
from turboquant.evals.tasks.longgen import equal_share, first_difference, loop, repetition
from turboquant.evals.tasks.needle import MultiNeedle, Needle, _hide, _number

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, 2, 3, 4], 0), ([9, 1, 2, 1, 2], 4), ([1, 2, 1, 2, 3], 0), ([5, 5, 5], 3), ([1, 2, 3, 9, *[1, 2, 3] * 2], 6)],
)
def test_loops_at_the_end(tokens, expected):
    assert loop(tokens) == expected


def test_answers_side_by_side():
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2]) == 2
    assert equal_share([1, 2, 3, 4], [1, 9, 3, 9]) == 0.5
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4], n=4) == pytest.approx(1 / 5)
    assert repetition([1, 2]) == 0.0


@pytest.mark.parametrize(("text", "number"), [(" 123,456.", "123456"), ("It is 7 or 8", "7"), ("none", None)])
def test_numbers_of_answers(text, number):
    assert _number(text) == number


def test_needles_stand_behind_the_sentence_nearest_to_their_depth():
    text = "One. Two. Three. Four. "
    hidden = _hide(text, {0.0: ("a", "1"), 0.5: ("b", "2"), 1.0: ("c", "3")})
    found = [hidden.index(word) for word in (" a is: 1", "One", " b is: 2", "Three", "Four", " c is: 3")]
    assert found == sorted(found)


def test_needles_fill_their_length_and_are_asked_for_in_the_chat_format(worded_llama_dir):
    request = Request(worded_llama_dir, 1024, lengths=(512, 1024, 2048), depths=(0.0, 0.5, 1.0))
    samples = Needle().samples(request, "pydoc")
    assert len(samples) == 2 * 3  # the model cannot read 2,048 tokens
    again = Needle().samples(request, "pydoc")
    assert [s.prompt for s in samples] == [s.prompt for s in again]
    for sample in samples:
        text = request.tokenizer.decode(sample.prompt)
        assert 0.9 * sample.about["length"] < len(sample.prompt) <= sample.about["length"] - 32
        fact = f"The special magic number for {sample.about['key']} is: {sample.about['value']}."
        assert text.count(fact) == 1
        place = text.index(fact) / len(text)
        assert abs(place - sample.about["depth"]) < 0.35
        assert "<|im_start|>assistant" in text
        assert text.endswith(f"The special magic number for {sample.about['key']} is:")
        assert request.tokenizer.decode(sample.answer).strip() == sample.about["value"]


def test_needles_of_one_haystack_share_their_prompts_beginning(worded_llama_dir):
    request = Request(worded_llama_dir, 1024, lengths=(512,), depths=(0.0, 0.5, 1.0))
    samples = MultiNeedle().samples(request, "pydoc")
    assert len(samples) == len({s.about["key"] for s in samples}) == 3
    assert len({tuple(s.prompt[: s.shared]) for s in samples}) == 1
    assert all(len(s.prompt) - 20 < s.shared < len(s.prompt) for s in samples)


@pytest.mark.parametrize("lengths", [(4096,), (512,)], ids=["model", "text"])
def test_a_haystack_that_cannot_be_is_refused(worded_llama_dir, tmp_path, lengths):
    short = tmp_path / "short.txt"
    short.write_text("A short text. " * 5)
    with pytest.raises(ValueError, match="--lengths"):
        Needle().samples(Request(worded_llama_dir, 1024, lengths=lengths), str(short))


CACHES = pytest.mark.parametrize("cache", ["auto", "turboquant3@32", "turboquant3@0", "int4@32", "kivi4"])


@CACHES
def test_transformers_scores_and_generates_as_the_model_does(llama_dir, cache):
    """Held prefixes, chunks and the way back from hidden states change nothing."""
    candidate = Candidate.parse(cache)
    ids = torch.randint(2, 512, (CHUNK + 80,), generator=torch.Generator().manual_seed(3)).tolist()
    prompt, rest = ids[: CHUNK + 40], ids[CHUNK + 40 :]
    backend = HFBackend(llama_dir)
    with backend.serve(candidate, 1024) as served:
        whole = served.model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(served.logits(served.states(torch.tensor(ids))), whole, atol=1e-4, rtol=1e-4)
        expected = whole[len(prompt) - 1 : -1].double().log_softmax(-1)
        fresh = served.score(prompt, rest)
        greedy = served.generate(prompt, 12, ignore_eos=True)
        served.hold(prompt[:-3])
        held = served.score(prompt, rest)
        assert served.generate(prompt, 12, ignore_eos=True) == greedy
        assert served.generate(prompt, 12, ignore_eos=True) == greedy  # what is held stays as it is
    wanted = expected.gather(-1, torch.tensor(rest)[:, None])[:, 0]
    for scored in (fresh, held):
        torch.testing.assert_close(scored.logprobs, wanted, atol=1e-4, rtol=1e-4)
        assert (scored.top == expected.argmax(-1)).double().mean() > 0.95
    first = served.model.generation_config
    assert first.eos_token_id is None  # nothing was left behind


def test_transformers_generates_as_generate_does(llama_dir):
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    ids = torch.randint(2, 512, (1, 60), generator=torch.Generator().manual_seed(4))
    config = GenerationConfig(max_new_tokens=10, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(ids)
    exact = model.generate(ids, attention_mask=mask, generation_config=config)[0, 60:].tolist()
    with turboquant_cache(model, "turboquant3", window=16):
        packed = model.generate(ids, attention_mask=mask, generation_config=config)[0, 60:].tolist()
    for candidate, expected in ((EXACT_CACHE, exact), (Candidate.parse("turboquant3@16"), packed)):
        with HFBackend(model).serve(candidate, 100) as served:
            assert served.generate(ids[0].tolist(), 10, ignore_eos=True) == expected
            model.generation_config.eos_token_id = expected[3]
            try:
                short = served.generate(ids[0].tolist(), 10)
                assert short == expected[: expected.index(expected[3]) + 1]
                assert served.generate(ids[0].tolist(), 10, ignore_eos=True) == expected
            finally:
                model.generation_config.eos_token_id = None


@pytest.mark.parametrize("cache", ["turboquant2.5@32", "fp8"])
def test_the_task_and_the_function_measure_the_same_divergence(llama_dir, cache):
    ids = torch.randint(2, 512, (2, 200), generator=torch.Generator().manual_seed(5))
    backend, candidate = HFBackend(llama_dir), Candidate.parse(cache)
    request = Request(llama_dir, 1024)
    request.__dict__["contexts"] = lambda text: ids
    task = Copying()
    samples = task.samples(request, "")
    with backend.serve(EXACT_CACHE, 200) as served:
        exact = [task.observe(served, sample, request) for sample in samples]
    with backend.serve(candidate, 200) as served:
        measured = task.judge(samples, exact, [task.observe(served, s, request) for s in samples], served)
        bits = served.bits(200)
    doubled = torch.cat((ids[:, :100], ids[:, :100]), dim=1)
    function = divergence(served.model, candidate, doubled, score_from=100)
    torch.testing.assert_close(measured.scores, function.scores, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert measured.figures["kl_mean"] == pytest.approx(function.kl_mean, rel=1e-4)
    assert bits["bits_at_16"] == pytest.approx(function.bits_at_16)
    assert bits["bits_per_element_with_window"] == pytest.approx(function.bits_per_element_with_window)

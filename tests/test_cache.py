"""The Transformers cache: what it holds, what it returns, what generation makes of it, and which models it refuses.

The tiny models are in `models.py`. Dense ones run in float64 here: quantisation is a step function, and a rounding
error of 1e-16 hardly ever carries a coordinate across a step.
"""

from __future__ import annotations

import contextlib

import models
import pytest
import torch
import transformers
from models import BOS, VOCAB
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, QuantizedCache

from turboquant.cache import TurboQuantLayer, turboquant_cache
from turboquant.formats import PRESETS
from turboquant.key_bias import MissingKeyMeanError, check_no_hidden_bias
from turboquant.kv_quantizer import KVQuantizer, make_params
from turboquant.rope import Rope

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

FMT = "turboquant3.5"
# What one token costs in all layers of the dense models: 2 layers, 2 KV heads, head_dim 64.
DENSE_TOKEN_BYTES = 2 * 2 * PRESETS[FMT].slot_bytes(64)
SAME = 1e-4
ONE_CODE = 5e-3  # what one code or scale may do that falls to the other side of a boundary in another matrix product


@pytest.fixture(scope="module")
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def llama(llama_dir):
    return AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float64)


@pytest.fixture(scope="module")
def qwen2(qwen2_dir):
    return AutoModelForCausalLM.from_pretrained(qwen2_dir, dtype=torch.float64)


@pytest.fixture(scope="module")
def qwen35(qwen35_moe_dir):
    # Its experts have no float64.
    return AutoModelForCausalLM.from_pretrained(qwen35_moe_dir, dtype=torch.float32)


@pytest.fixture
def model(request):
    return request.getfixturevalue(request.param)


EVERY_MODEL = pytest.mark.parametrize("model", ["llama", "qwen2", "qwen35"], indirect=True)
DENSE_MODELS = pytest.mark.parametrize("model", ["llama", "qwen2"], indirect=True)


def prompt(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """BOS and random tokens, [batch, length]."""
    ids = torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = BOS
    return ids


def pad_left(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts [1, L] of different lengths to one batch, padded with BOS, which a mask must hide."""
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), BOS)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :], mask[i, width - row.shape[1] :] = row[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def kl(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Mean divergence of next-token distributions, in nats."""
    p, q = exact.double().log_softmax(-1), approximate.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def generate(model, **kwargs) -> torch.Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, **kwargs}
    if "attention_mask" not in options:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
    return model.generate(**options)


def stepwise_logits(model, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of a sequence fed in pieces of these sizes."""
    cache, logits = None, []
    for piece in ids.split(sizes, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


# The layer alone.


def layer_states(length: int, heads: int = 2, batch: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, length, 64, generator=generator) for _ in range(2))


def layer_with_mean() -> TurboQuantLayer:
    generator = torch.Generator().manual_seed(9)
    rope = Rope(torch.tensor([10000.0 ** (-i / 32) for i in range(32)], dtype=torch.float64))
    mean = 10 * torch.randn(2, 64, generator=generator)
    return TurboQuantLayer(make_params(PRESETS[FMT], 64, key_mean=mean, rope=rope))


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 1, 12], [0, 20]], ids=str)
def test_update_returns_dequantised_states_of_all_tokens(sizes):
    """The newest among them: none passes by the quantiser."""
    layer, (key, value) = layer_with_mean(), layer_states(20)
    params = layer.params
    quantizer = KVQuantizer(FMT, 64, key_mean=params.key_mean, rope=params.rope)
    expected = [
        quantizer.dequantize(quantizer.quantize(k.transpose(0, 1), v.transpose(0, 1)))
        for k, v in zip(key, value, strict=True)
    ]
    seen = 0
    for key_piece, value_piece in zip(key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True):
        seen += key_piece.shape[2]
        returned = layer.update(key_piece, value_piece)
        for which, states in enumerate(returned):
            assert states.shape == (3, 2, seen, 64)
            for row, pair in zip(states, expected, strict=True):
                torch.testing.assert_close(row.transpose(0, 1), pair[which][:seen], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(returned[0][:, :, -1], key[:, :, -1], atol=1e-2)
    assert not torch.allclose(returned[1][:, :, -1], value[:, :, -1], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_update_answers_in_the_model_s_dtype(dtype):
    layer, (key, value) = layer_with_mean(), layer_states(5)
    returned = layer.update(key.to(dtype), value.to(dtype))
    assert [x.dtype for x in returned] == [dtype, dtype]


def test_bookkeeping_of_a_layer():
    layer, (key, value) = layer_with_mean(), layer_states(20)
    assert (layer.nbytes, layer.get_seq_length(), layer.get_mask_sizes(5)) == (0, 0, (5, 0))
    layer.update(key, value)
    assert layer.nbytes == 3 * 20 * 2 * PRESETS[FMT].slot_bytes(64)
    assert (layer.get_seq_length(), layer.get_mask_sizes(5), layer.get_max_length()) == (20, (25, 0), -1)
    layer.reset()
    assert (layer.nbytes, layer.get_seq_length()) == (0, 0)
    assert layer.update(key, value)[0].shape == (3, 2, 20, 64)


def test_nothing_is_kept_beside_the_packed_planes():
    """`nbytes` would be a lie if the layer held its exact tokens, too."""
    layer = layer_with_mean()
    layer.update(*layer_states(20))
    held = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert [(x.shape, x.dtype) for x in held] == [((3, 20), torch.int32)]  # where the mean was taken out
    assert all(plane.untyped_storage().nbytes() == plane.nbytes for plane in layer.encoded)


@pytest.mark.parametrize("keep", [19, 13, 1], ids="keep{}".format)
@pytest.mark.parametrize("way", ["negative", "positive"])
def test_crop_keeps_the_first_tokens(keep, way):
    layer, short, (key, value) = layer_with_mean(), layer_with_mean(), layer_states(20)
    layer.update(key, value)
    layer.crop(keep - 20 if way == "negative" else keep)
    short.update(key[:, :, :keep], value[:, :, :keep])
    assert layer.get_seq_length() == keep
    more = layer_states(4, seed=1)
    for ours, theirs in zip(layer.update(*more), short.update(*more), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("argument", [0, 20, 25, 1000, -20, -21, -25, -1000])
def test_crop_at_its_limits_is_transformers_own(argument):
    layer, exact, states = layer_with_mean(), DynamicLayer(), layer_states(20)
    for each in (layer, exact):
        each.update(*states)
        each.crop(argument)
    assert layer.get_seq_length() == exact.get_seq_length()


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "select-mask", "repeat"],
)
def test_changes_of_the_batch_carry_codes_and_padding(change, rows):
    layer, (key, value) = layer_with_mean(), layer_states(20)
    positions = torch.arange(20) - torch.tensor([[0], [3], [7]])
    layer.next_positions = positions
    before = layer.update(key, value)
    change(layer)
    more = layer_states(4, batch=len(rows), seed=1)
    for ours, theirs in zip(layer.update(*more), before, strict=True):
        assert torch.equal(ours[:, :, :20], theirs[rows])
    alone = layer_with_mean()
    alone.next_positions = positions[rows]
    alone.update(key[rows], value[rows])
    torch.testing.assert_close(layer.update(*more)[0], [alone.update(*more)[0] for _ in range(2)][1])


def test_changes_before_the_first_token_are_harmless():
    layer = layer_with_mean()
    layer.crop(-1)
    layer.reorder_cache(torch.tensor([0, 0]))
    layer.batch_repeat_interleave(2)
    layer.offload()
    layer.prefetch()
    assert layer.update(*layer_states(3))[0].shape == (3, 2, 3, 64)


@pytest.mark.parametrize("dims", [(80, 80), (64, 32)], ids=str)
def test_a_layer_of_another_head_dim(dims):
    layer = layer_with_mean()
    with pytest.raises(ValueError, match=rf"head_dim {dims[0]} and {dims[1]}, the cache was built for 64"):
        layer.update(torch.zeros(1, 2, 3, dims[0]), torch.zeros(1, 2, 3, dims[1]))


# Models.


@EVERY_MODEL
def test_attention_matters_in_the_test_models(model):
    """Otherwise no test here could fail: earlier tokens must change what comes later, and the cache is not exact."""
    ids = prompt(60)
    other = ids.clone()
    other[:, 1:30] = ids[:, 1:30].flip(1)
    exact = model(ids).logits
    assert kl(exact[:, 40:], model(other).logits[:, 40:]) > 0.01
    with turboquant_cache(model, FMT):
        assert kl(exact, model(ids).logits) > 1e-4


def test_the_key_bias_of_the_test_model_is_large(qwen2):
    keys = model_keys(qwen2, prompt(60))[:, :, 1:]
    bias = qwen2.model.layers[0].self_attn.k_proj.bias.view(2, 64).norm(dim=-1)
    # The bias has the same norm at every position, whatever RoPE does to it.
    rest = qwen2.model.layers[0].self_attn.k_proj.weight[:, 1:].norm() / 2**0.5
    assert (bias > 20 * rest).all()
    assert (keys.norm(dim=-1) > 0.8 * bias[:, None]).all()


def model_keys(model, ids: torch.Tensor, layer: int = 0, **kwargs) -> torch.Tensor:
    """Exact keys of a layer."""
    return model(ids, use_cache=True, **kwargs).past_key_values.layers[layer].keys


@EVERY_MODEL
@pytest.mark.parametrize("sizes", [[1] * 40, [25, 1, 1, 13], [39, 1]], ids=["tokens", "chunks", "all-but-one"])
def test_one_forward_is_many(model, sizes):
    """The same tokens in the cache give the same logits, however they came in."""
    ids = prompt(40)
    with turboquant_cache(model, FMT):
        torch.testing.assert_close(stepwise_logits(model, ids, sizes), model(ids).logits, atol=ONE_CODE, rtol=0)


@EVERY_MODEL
def test_every_format_is_closer_than_the_one_below(model):
    ids = torch.cat([prompt(64, seed=seed) for seed in range(3)])
    exact = model(ids).logits
    distances = []
    for name in PRESETS:
        with turboquant_cache(model, name) as session:
            distances.append(kl(exact, model(ids).logits))
        assert session.fmt.name == name
    print(f"\nKL {type(model).__name__}: " + ", ".join(f"{n} {d:.4f}" for n, d in zip(PRESETS, distances, strict=True)))
    # The middle two differ in K's bits only, which routing to experts can hide.
    assert distances[0] > max(distances[1:3])
    assert min(distances[1:3]) > distances[3]
    assert distances[3] < 0.05


@DENSE_MODELS
@pytest.mark.parametrize("name", PRESETS)
def test_bytes_are_tokens_layers_heads_and_slots(model, name):
    slot = PRESETS[name].slot_bytes(64)
    with turboquant_cache(model, PRESETS[name]) as session:
        assert session.nbytes == 0
        model(prompt(33, batch=3))
        assert session.nbytes == 3 * 33 * 2 * 2 * slot
        generate(model, input_ids=prompt(10), max_new_tokens=5)
        # The last token is never fed back.
        assert session.nbytes == (10 + 4) * 2 * 2 * slot
    assert len(session.layers) == 2


@EVERY_MODEL
def test_use_cache_false_still_measures_the_cache(model):
    ids = prompt(40)
    exact = model(ids, use_cache=False).logits
    with turboquant_cache(model, FMT) as session:
        without = model(ids, use_cache=False).logits
        assert session.nbytes > 0
        assert torch.equal(without, model(ids, use_cache=True).logits)
    assert (without - exact).abs().max() > 1e-2


@DENSE_MODELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes(model, dtype, request):
    path = request.getfixturevalue("llama_dir" if model.config.model_type == "llama" else "qwen2_dir")
    narrow, ids = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), prompt(40)
    with turboquant_cache(model, FMT), turboquant_cache(narrow, FMT):
        assert kl(model(ids).logits, narrow(ids).logits) < (0.03 if dtype == torch.bfloat16 else 1e-6)


# Generation.


@EVERY_MODEL
def test_greedy_generation_is_the_argmax_of_full_forwards(model):
    ids = prompt(30)
    with turboquant_cache(model, FMT):
        generated = generate(model, input_ids=ids)
        for _ in range(12):
            ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generated, ids)


@EVERY_MODEL
def test_generation_leaves_the_exact_path_at_some_point(model):
    """Else nothing that generation tests compare would come from the compressed cache."""
    rows = [prompt(30, seed=seed) for seed in range(4)]
    exact = [generate(model, input_ids=row, max_new_tokens=24) for row in rows]
    with turboquant_cache(model, "turboquant2.5"):
        ours = [generate(model, input_ids=row, max_new_tokens=24) for row in rows]
    assert any(not torch.equal(a, b) for a, b in zip(exact, ours, strict=True))


STRATEGIES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "beam-3-answers": {"num_beams": 4, "num_return_sequences": 3},
    "prefill-chunks": {"prefill_chunk_size": 7},
}


@EVERY_MODEL
@pytest.mark.parametrize("strategy", [k for k in STRATEGIES if k != "prefill-chunks"])
def test_a_padded_batch_generates_what_single_prompts_do(model, strategy):
    rows = [prompt(length, seed=length) for length in (23, 9, 30)]
    options = STRATEGIES[strategy]
    with turboquant_cache(model, FMT):
        batch = generate(model, **pad_left(rows), **options)
        alone = [generate(model, input_ids=row, **options) for row in rows]
    answers = options.get("num_return_sequences", 1)
    for i, row in enumerate(rows):
        expected = alone[i][:, row.shape[1] :]
        assert torch.equal(batch[i * answers : (i + 1) * answers, 30:], expected)


@DENSE_MODELS
@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 3}, STRATEGIES["prefill-chunks"]], ids=["lookup", "chunks"]
)
def test_other_ways_to_the_same_tokens(model, options):
    """Prompt lookup proposes tokens and crops those that are refused; chunked prefill fills the cache in pieces."""
    ids = prompt(12).repeat(1, 3)
    with turboquant_cache(model, FMT) as session:
        greedy = generate(model, input_ids=ids, max_new_tokens=16)
        assert torch.equal(generate(model, input_ids=ids, max_new_tokens=16, **options), greedy)
        assert session.nbytes % DENSE_TOKEN_BYTES == 0


@DENSE_MODELS
def test_a_padded_forward_is_the_unpadded_one(model):
    rows = [prompt(length, seed=length) for length in (40, 23)]
    batch = pad_left(rows)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with turboquant_cache(model, FMT):
        logits = model(**batch, position_ids=positions).logits
        for padded, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(padded[40 - row.shape[1] :], model(row).logits[0], atol=SAME, rtol=0)


@DENSE_MODELS
def test_right_padding_changes_nothing(model):
    ids = prompt(40)
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    with turboquant_cache(model, FMT):
        torch.testing.assert_close(
            model(ids, attention_mask=mask).logits[:, :30], model(ids[:, :30]).logits, atol=SAME, rtol=0
        )


@DENSE_MODELS
@pytest.mark.parametrize("case", ["padded", "shifted"])
def test_the_mean_follows_the_model_s_own_positions(model, case):
    """RoPE is relative, so an exact cache does not mind left padding without position_ids, nor a shift of them.

    Neither must ours: the mean sits where the model's RoPE put it, which is `position_ids`, or else the index in the
    padded row. From the index of the token in its own sequence, it is off by the padding or the shift.
    """
    ids, shift = prompt(60), 50
    exact = model(ids).logits
    if case == "padded":
        filler = torch.full((1, shift), BOS)
        inputs = {"input_ids": torch.cat((filler, ids), dim=1)}
        inputs["attention_mask"] = torch.cat((torch.zeros_like(filler), torch.ones_like(ids)), dim=1)
    else:
        inputs = {"input_ids": ids, "position_ids": torch.arange(shift, shift + 60)[None]}
    assert kl(exact, model(**inputs).logits[:, -60:]) < 1e-6
    with turboquant_cache(model, FMT):
        usual, moved = kl(exact, model(ids).logits), kl(exact, model(**inputs).logits[:, -60:])
    assert moved < 1.5 * usual


@DENSE_MODELS
def test_hiding_old_tokens_later_does_not_move_their_means(model):
    """A mask may hide tokens that were stored as visible: they are read at the positions they were stored at."""
    ids = prompt(60)
    mask = torch.ones_like(ids)
    mask[:, :10] = 0

    def second_half() -> torch.Tensor:
        cache = model(ids[:, :40], use_cache=True).past_key_values
        return model(ids[:, 40:], past_key_values=cache, attention_mask=mask).logits

    exact, usual = second_half(), model(ids).logits[:, 40:]
    with turboquant_cache(model, FMT):
        distance, usual = kl(exact, second_half()), kl(usual, model(ids).logits[:, 40:])
    assert distance < 2 * usual


@DENSE_MODELS
def test_a_conversation_goes_on_in_its_cache(model):
    """Two turns with one cache of the user's: the second turn feeds its new tokens only."""
    first, second = prompt(20), prompt(15, seed=1)
    with turboquant_cache(model, FMT) as session:
        cache = DynamicCache(config=model.config)
        answer = generate(model, input_ids=first, past_key_values=cache)
        assert session.cache is cache
        assert session.nbytes == DENSE_TOKEN_BYTES * (20 + 11)
        both = torch.cat((answer, second), dim=1)
        again = generate(model, input_ids=both, past_key_values=cache)
        assert torch.equal(again, generate(model, input_ids=both))


# The cache object.


@EVERY_MODEL
@pytest.mark.parametrize("with_config", [True, False], ids=["with-config", "bare"])
def test_an_empty_dynamic_cache_is_compressed_in_place(model, with_config):
    ids = prompt(20)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    if not with_config and model.config.model_type == "qwen3_5_moe_text":
        pytest.skip("Transformers itself needs the config to build a hybrid cache")
    with turboquant_cache(model, FMT) as session:
        output = model(ids, past_key_values=cache, use_cache=True)
        expected = model(ids).logits
        assert session.cache is not cache
    assert output.past_key_values is cache
    assert cache.get_seq_length() == 20
    assert [i for i, x in enumerate(cache.layers) if isinstance(x, TurboQuantLayer)] == list(session.params)
    assert torch.equal(output.logits, expected)


@EVERY_MODEL
def test_a_cache_with_exact_tokens_is_refused(model):
    cache = model(prompt(5), use_cache=True).past_key_values
    with turboquant_cache(model, FMT), pytest.raises(ValueError, match=r"DynamicLayer with 5 exact tokens: start with"):
        model(prompt(5), past_key_values=cache)


def quantized_cache(model) -> QuantizedCache:
    # Its constructor needs a quantisation package; what is refused is the class.
    return QuantizedCache.__new__(QuantizedCache)


def static_cache(model) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=64)


@DENSE_MODELS
@pytest.mark.parametrize("make", [static_cache, quantized_cache], ids=lambda make: make.__name__)
def test_other_caches_are_refused(model, make):
    cache = make(model)
    with (
        turboquant_cache(model, FMT),
        pytest.raises(TypeError, match=f"cannot compress a {type(cache).__name__}: call"),
    ):
        model(prompt(5), past_key_values=cache)


def test_generate_with_a_cache_implementation_is_refused(llama):
    with turboquant_cache(llama, FMT), pytest.raises(TypeError, match="cannot compress a StaticCache"):
        generate(llama, input_ids=prompt(5), cache_implementation="static")


def test_a_cache_of_another_format_is_refused(llama):
    """It would go on in its own format, and be reported as this one."""
    with turboquant_cache(llama, "turboquant2.5"):
        cache = llama(prompt(5), use_cache=True).past_key_values
    with turboquant_cache(llama, "turboquant4"), pytest.raises(ValueError, match=r"turboquant2\.5"):
        llama(prompt(5), past_key_values=cache)


@EVERY_MODEL
def test_crop_of_the_whole_cache(model):
    """Take back tokens and go on with others. A linear-attention state cannot be taken back, exact or not."""
    if model.config.model_type == "qwen3_5_moe_text":
        pytest.skip("Transformers crops no linear-attention state without a recording")
    ids, other = prompt(30), prompt(12, seed=1)
    with turboquant_cache(model, FMT):
        cache = model(ids, use_cache=True).past_key_values
        assert cache.is_croppable
        cache.crop(-10)
        cropped = model(other, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat((ids[:, :20], other), dim=1)).logits[:, 20:]
    torch.testing.assert_close(cropped, expected, atol=SAME, rtol=0)


@EVERY_MODEL
def test_reordering_the_whole_cache(model):
    """As beam search does: rows change places in every layer, linear attention's states too."""
    ids, other = prompt(20, batch=3), prompt(6, seed=1, batch=3)
    rows = torch.tensor([2, 2, 0])
    with turboquant_cache(model, FMT):
        cache = model(ids, use_cache=True).past_key_values
        cache.reorder_cache(rows)
        after = model(other, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat((ids[rows], other), dim=1)).logits[:, 20:]
    torch.testing.assert_close(after, expected, atol=SAME, rtol=0)


@DENSE_MODELS
def test_repeating_and_selecting_the_whole_cache(model):
    ids, other = prompt(20, batch=2), prompt(6, seed=1, batch=2)
    with turboquant_cache(model, FMT):
        cache = model(ids, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 1]))
        after = model(other, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat((ids[[1, 0]], other), dim=1)).logits[:, 20:]
    torch.testing.assert_close(after, expected, atol=SAME, rtol=0)


def test_a_hybrid_keeps_its_linear_states(qwen35):
    ids = prompt(40)
    exact = qwen35(ids, use_cache=True).past_key_values
    with turboquant_cache(qwen35, FMT) as session:
        cache = qwen35(ids, use_cache=True).past_key_values
    kinds = qwen35.config.layer_types
    assert list(session.params) == [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]
    for kind, layer in zip(kinds, cache.layers, strict=True):
        assert type(layer) is (TurboQuantLayer if kind == "full_attention" else LinearAttentionLayer)
    assert session.nbytes == 40 * 2 * 2 * PRESETS[FMT].slot_bytes(256)
    # Nothing compressed stands before the first full-attention layer.
    for index in range(3):
        assert torch.equal(cache.layers[index].recurrent_states[0], exact.layers[index].recurrent_states[0])


@DENSE_MODELS
def test_the_cache_outlives_the_block(model):
    """Its layers do the work; the block only puts them in."""
    ids = prompt(30)
    with turboquant_cache(model, FMT):
        cache = model(ids[:, :20], use_cache=True).past_key_values
        inside = stepwise_logits(model, ids, [20, 10])[:, 20:]
    outside = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(outside, inside, atol=SAME, rtol=0)


# The block.


class Interrupted(Exception):
    pass


@EVERY_MODEL
@pytest.mark.parametrize("raises", [False, True], ids=["normal", "exception"])
def test_the_block_leaves_no_trace(model, raises):
    ids = prompt(20)
    hooks = len(model.get_decoder()._forward_pre_hooks)
    exact = model(ids, use_cache=True)
    with contextlib.suppress(Interrupted), turboquant_cache(model, FMT):
        assert not torch.equal(model(ids).logits, exact.logits)
        if raises:
            raise Interrupted
    assert len(model.get_decoder()._forward_pre_hooks) == hooks
    again = model(ids, use_cache=True)
    assert torch.equal(again.logits, exact.logits)
    assert not any(isinstance(layer, TurboQuantLayer) for layer in again.past_key_values.layers)


def test_a_refused_model_gets_no_hook(qwen2):
    hooks = len(qwen2.get_decoder()._forward_pre_hooks)
    with pytest.raises(MissingKeyMeanError), turboquant_cache(qwen2, FMT, key_mean="none"):
        pass
    assert len(qwen2.get_decoder()._forward_pre_hooks) == hooks


def test_two_models_at_once(llama, qwen2):
    ids = prompt(20)
    with turboquant_cache(llama, FMT) as one, turboquant_cache(qwen2, "turboquant4") as two:
        both = llama(ids).logits, qwen2(ids).logits
    assert (one.nbytes, two.nbytes) == (20 * DENSE_TOKEN_BYTES, 20 * 4 * PRESETS["turboquant4"].slot_bytes(64))
    with turboquant_cache(llama, FMT):
        assert torch.equal(llama(ids).logits, both[0])
    with turboquant_cache(qwen2, "turboquant4"):
        assert torch.equal(qwen2(ids).logits, both[1])


def test_two_blocks_on_one_model(llama):
    """The inner one counts, or is refused; what must not be: it says 4 bits and measures 2.5."""
    ids = prompt(20)
    with turboquant_cache(llama, "turboquant4"):
        expected = llama(ids).logits
    with turboquant_cache(llama, "turboquant2.5"):
        try:
            with turboquant_cache(llama, "turboquant4") as inner:
                logits = llama(ids).logits
        except (RuntimeError, ValueError) as error:
            assert "turboquant_cache" in str(error)
            return
    assert inner.nbytes == 20 * 4 * PRESETS["turboquant4"].slot_bytes(64)
    assert torch.equal(logits, expected)


def test_the_bare_decoder_is_a_model_too(llama):
    ids = prompt(20)
    with turboquant_cache(llama.model, FMT) as session:
        hidden = llama.model(ids).last_hidden_state
    assert session.nbytes == 20 * DENSE_TOKEN_BYTES
    with turboquant_cache(llama, FMT):
        assert torch.equal(llama(ids).logits, llama.lm_head(hidden))


def test_the_seed_is_the_rotation_s(llama):
    ids, logits = prompt(20), []
    for seed in (0, 0, 1):
        with turboquant_cache(llama, FMT, seed=seed):
            logits.append(llama(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": "turboqant4"}, "Did you mean 'turboquant4'"),
        ({"fmt": FMT, "key_mean": "calibrated"}, "key_mean.*calibrated.*auto.*none"),
    ],
    ids=["format", "key-mean"],
)
def test_wrong_arguments(qwen2, arguments, message):
    with pytest.raises(ValueError, match=message), turboquant_cache(qwen2, **arguments):
        pass


# K's bias.

THETA = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
QUARTER = {**THETA, "partial_rotary_factor": 0.25}
# Their head_dim is hidden_size / heads.
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# id: (class name, changes of its config). All of them have a k_proj; with_key_bias gives it its bias.
BIASED = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"attention_bias": True}),
    "llama-yarn": ("Llama", {"attention_bias": True, "rope_parameters": YARN}),
    "glm-interleaved": ("Glm", {"attention_bias": True, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "glm4-interleaved": ("Glm4", {"attention_bias": True, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "starcoder2": ("Starcoder2", {}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING}),
    "phi-partial": ("Phi", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}, **TWO_HEADS}),
    "stablelm-partial": ("StableLm", {"use_qkv_bias": True, "rope_parameters": QUARTER, **TWO_HEADS}),
    "smollm3-without-rope": ("SmolLM3", {"attention_bias": True, "no_rope_layers": [0, 0]}),
    "cohere2-without-rope": ("Cohere2", {"attention_bias": True, "logit_scale": 1.0, **ALTERNATING}),
    "qwen2-dynamic-rope": ("Qwen2", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}),
}  # fmt: skip


def biased_model(kind: str, changes: dict) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**{**models.COMMON, **models.DENSE, **changes})
    config.head_dim = models.DENSE["head_dim"]
    return models.with_key_bias(models.build(getattr(transformers, f"{kind}ForCausalLM"), config))


@pytest.mark.parametrize(("kind", "changes"), BIASED.values(), ids=BIASED.keys())
def test_a_key_bias_is_taken_out_or_the_model_is_refused(monkeypatch, kind, changes):
    """In every layer what is quantised is the rest of K: a tenth of that is lost, times YaRN's scaling of up to 1.4.

    A mean that is not rotated as the model rotates K stays in it, and costs a tenth of something 20 times as large.
    """
    model, ids = biased_model(kind, changes), prompt(100)
    exact = model(ids).logits
    errors = watch_key_errors(model, monkeypatch)
    try:
        with turboquant_cache(model, FMT) as session:
            logits = model(ids).logits
    except ValueError as error:
        assert "default cache" in str(error) or "key_mean" in str(error)
        return
    distance = kl(exact, logits)
    print(f"\nKL {kind}: {distance:.4f}; error of K a layer: {', '.join(f'{error:.3f}' for error in errors)}")
    assert all(params.key_mean is not None for params in session.params.values())
    assert len(errors) == len(session.params)
    assert max(errors) < 0.2
    assert distance < 0.1


def watch_key_errors(model, monkeypatch) -> list[float]:
    """Fills while a model runs: for each compressed layer, the error in K against K without its bias."""
    rest, errors, update = [], [], TurboQuantLayer.update
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            module.register_forward_hook(lambda module, _, output: rest.append(output - module.bias))

    def watched(self, key, value, *args, **kwargs):
        returned = update(self, key, value, *args, **kwargs)
        error = (returned[0] - key).transpose(1, 2).flatten(2)
        errors.append((error[:, 1:].norm() / rest[-1][:, 1:].norm()).item())
        return returned

    monkeypatch.setattr(TurboQuantLayer, "update", watched)
    return errors


def test_without_the_mean_such_a_model_collapses(qwen2, monkeypatch):
    """The mean is what keeps it: this is what is refused when no mean can be had."""
    ids = prompt(100)
    exact = qwen2(ids).logits
    with turboquant_cache(qwen2, FMT) as session:
        with_mean = kl(exact, qwen2(ids).logits)
    monkeypatch.setattr("turboquant.cache.layer_params", lambda *args, **kwargs: {
        i: make_params(PRESETS[FMT], 64) for i in session.params
    })  # fmt: skip
    with turboquant_cache(qwen2, FMT):
        without = kl(exact, qwen2(ids).logits)
    print(f"\nKL with the mean {with_mean:.4f}, without {without:.4f}")
    assert with_mean < 0.1
    assert without > 4 * with_mean


@pytest.mark.parametrize("sinks", [[], [0], [0, 20, 21, 63]], ids=str)
def test_sinks_may_stand_anywhere(qwen2, sinks):
    """A key without the bias in it, first, later or nowhere: each is quantised at its own length."""
    ids = torch.randint(2, VOCAB, (1, 64), generator=torch.Generator().manual_seed(5))
    ids[:, sinks] = BOS
    exact = qwen2(ids).logits
    with turboquant_cache(qwen2, FMT):
        distance = kl(exact, qwen2(ids).logits)
    print(f"\nKL with sinks at {sinks}: {distance:.4f}")
    assert distance < 0.1


def test_the_mean_is_the_bias(qwen2):
    with turboquant_cache(qwen2, FMT) as session:
        for index, params in session.params.items():
            bias = qwen2.model.layers[index].self_attn.k_proj.bias
            assert torch.equal(params.key_mean, bias.float().view(2, 64))
            assert not params.rope.interleaved


def test_a_model_without_a_bias_has_no_mean(llama):
    for key_mean in ("auto", "none"):
        with turboquant_cache(llama, FMT, key_mean=key_mean) as session:
            assert all(params.key_mean is None for params in session.params.values())


def test_a_bias_of_zeros_is_no_bias():
    model = models.build(transformers.Qwen2ForCausalLM, models.qwen2_config())
    with turboquant_cache(model, FMT, key_mean="none") as session:
        model(prompt(10))
    assert all(params.key_mean is None for params in session.params.values())


def test_a_bias_without_its_mean_is_refused(qwen2):
    message = r"Qwen2Attention 0 adds a bias to K, and key_mean='none' forbids.*key_mean='auto'"
    with pytest.raises(MissingKeyMeanError, match=message), turboquant_cache(qwen2, FMT, key_mean="none"):
        pass


def test_a_norm_after_the_bias_is_refused():
    model = biased_model("Qwen3", {"attention_bias": True})
    with pytest.raises(MissingKeyMeanError, match="k_norm comes after it"), turboquant_cache(model, FMT):
        pass


def test_a_norm_that_adds_a_bias_itself_is_refused():
    """Nothing in the projection, a large constant in every key all the same."""
    changes = {"qk_layernorm": True, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}, **TWO_HEADS}
    config = transformers.PhiConfig(**{**models.COMMON, **models.DENSE, **changes})
    model = models.build(transformers.PhiForCausalLM, config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_layernorm.bias, std=20.0)
    with pytest.raises(ValueError, match="k_layernorm"), turboquant_cache(model, FMT):
        pass


def fused(model: transformers.PreTrainedModel, bias: bool) -> transformers.PreTrainedModel:
    """Phi-3's fused projection, with a bias as none of the published ones has it."""
    for layer in model.model.layers:
        old = layer.self_attn.qkv_proj
        layer.self_attn.qkv_proj = torch.nn.Linear(old.in_features, old.out_features, bias=bias)
    return model


@pytest.mark.parametrize("bias", [True, False], ids=["biased", "unbiased"])
def test_a_fused_projection(bias):
    config = transformers.Phi3Config(**{**models.COMMON, **models.DENSE, "rope_parameters": THETA})
    config.head_dim = 64
    model = fused(models.build(transformers.Phi3ForCausalLM, config), bias)
    if not bias:
        with turboquant_cache(model, FMT) as session:
            model(prompt(10))
        assert session.nbytes == 10 * DENSE_TOKEN_BYTES
        return
    with pytest.raises(MissingKeyMeanError, match="its projection 'qkv_proj'"), turboquant_cache(model, FMT):
        pass


SMALL = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
# id: (class name, config). Each adds a bias to K somewhere out of reach, or positions that are no RoPE, or no K at all.
UNKNOWN = {
    "gpt-neox": ("GPTNeoX", {**SMALL, "intermediate_size": 128}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 2}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 128}),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 128, "n_layer": 2, "n_head": 2}),
    "falcon-alibi": ("Falcon", {**SMALL, "bias": True, "alibi": True}),
    "mamba": ("Mamba", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}),
    "mistral-all-sliding": ("Mistral", {**SMALL, "num_key_value_heads": 2, "sliding_window": 8}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_model_out_of_reach_is_refused_in_words(kind, config):
    suffix = {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{suffix}")(getattr(transformers, f"{kind}Config")(**config)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    with pytest.raises(ValueError, match=r"default cache|key_mean|cannot place K's mean"), turboquant_cache(model, FMT):
        pass


@pytest.mark.parametrize(
    ("children", "refused"),
    [
        ({"qkv_proj": torch.nn.Linear(8, 24)}, "qkv_proj"),
        ({"c_attn": transformers.pytorch_utils.Conv1D(24, 8)}, "c_attn"),
        ({"query_key_value": torch.nn.Linear(8, 24), "dense": torch.nn.Linear(8, 8)}, "query_key_value"),
        ({"key": torch.nn.Linear(8, 8)}, "key"),
        ({"attention": torch.nn.Sequential(torch.nn.Linear(8, 24))}, "attention"),
        ({"qkv_proj": torch.nn.Linear(8, 24, bias=False), "dense": torch.nn.Linear(8, 8)}, None),
        ({"o_proj": torch.nn.Linear(8, 8), "q_proj": torch.nn.Linear(8, 8), "norm": torch.nn.LayerNorm(8)}, None),
    ],
    ids=["fused", "conv1d", "neox", "separate-key", "one-level-down", "unbiased", "output-and-norm"],
)
def test_hidden_biases(children, refused):
    module = torch.nn.ModuleDict(children)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    with pytest.raises(MissingKeyMeanError, match=refused) if refused else contextlib.nullcontext():
        check_no_hidden_bias("layer 0", module)


def test_sliding_layers_stay_as_they_are():
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING}
    model, ids = biased_model("GptOss", changes), prompt(40)
    with turboquant_cache(model, FMT) as session:
        cache = model(ids, use_cache=True).past_key_values
        whole = model(ids).logits
        torch.testing.assert_close(stepwise_logits(model, ids, [1] * 40), whole, atol=1e-3, rtol=0)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "TurboQuantLayer"]
    assert cache.layers[0].keys.shape[2] == 15
    assert session.nbytes == 40 * 2 * PRESETS[FMT].slot_bytes(64)

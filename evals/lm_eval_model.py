"""lm-evaluation-harness on a compressed cache, with no fork: the model types `turboquant` and, inside, a served model.

    turboquant lm-eval --model turboquant --tasks hellaswag \\
        --model_args pretrained=DIR,kv_cache_dtype=turboquant3.5,dtype=float32

is lm-eval's own command line after this module has been imported, which registers the type. Its log-likelihoods are
those of the compressed cache: in our Transformers cache every query of a forward pass reads packed tokens and its exact
window, never all that came in, as decoding does.

On vLLM lm-eval's own type is enough, as the format is a cache dtype there:

    TURBOQUANT_PREFILL_READS=packed lm-eval --model vllm --tasks hellaswag \\
        --model_args pretrained=DIR,kv_cache_dtype=turboquant3.5,dtype=float32

Without TURBOQUANT_PREFILL_READS=packed a prefill chunk reads its own tokens exactly, and a log-likelihood, which is all
prefill, would measure next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from turboquant.evals.candidates import Candidate
from turboquant.evals.divergence import holding
from turboquant.evals.serving import Served

MAX_NEW_TOKENS = 256  # lm-eval's own default


@register_model("turboquant")
class TurboQuantLM(HFLM):
    """lm-eval's Transformers model with K and V in one of our caches, or a rival's.

    Args:
        pretrained: folder, name on the hub or model, as in lm-eval's `hf`.
        kv_cache_dtype: a format or a rival, `NAME@64` with an exact window, or `auto` for the exact cache.
        window: newest tokens that are read exactly; TURBOQUANT_WINDOW, or 64, if None.
        key_mean: see `turboquant.cache.turboquant_cache`.

    The rest goes to `HFLM`.

    Raises:
        ValueError: an unknown cache, or a model that cannot have it; before any task runs.
    """

    def __init__(
        self,
        pretrained: Any,
        kv_cache_dtype: str = "turboquant3.5",
        window: int | None = None,
        key_mean: str = "auto",
        **kwargs: Any,
    ) -> None:
        self.candidate, self.key_mean = Candidate.parse(str(kv_cache_dtype), window), key_mean
        super().__init__(pretrained, **kwargs)
        with self._cache():
            pass

    def _cache(self):
        return holding(self.model, self.candidate, self.key_mean)

    def _model_call(self, *args: Any, **kwargs: Any):
        with self._cache():
            return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any):
        with self._cache():
            return super()._model_generate(*args, **kwargs)


class ServedLM(TemplateLM):
    """A served model, of any back end, as lm-eval sees models. Greedy answers only.

    Args:
        max_length: tokens that it can read; longer prompts lose their beginning, as in lm-eval's `hf`.
        on_request: told how many requests are answered.
    """

    def __init__(
        self,
        served: Served,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        on_request: Callable[[int], None] = lambda done: None,
    ) -> None:
        super().__init__()
        self._served, self.tokenizer, self.max_length = served, tokenizer, max_length
        self._on_request, self._done = on_request, 0

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            # A rendered chat has its own.
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any):
        return [self._loglikelihood(context, continuation) for _, context, continuation in requests]

    def _loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        room = self.max_length - len(continuation)
        if room < 1:
            raise ValueError(f"an answer of {len(continuation)} tokens is longer than the model reads.")
        scored = self._served.score(context[-room:], continuation)
        self._answered()
        return scored.logprobs.sum().item(), scored.top.tolist() == continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 1, context_len=1
            )
            sums.append(sum(self._loglikelihood(*make_disjoint_window(window))[0] for window in windows))
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, gen_kwargs: dict[str, Any]) -> str:
        wanted = normalize_gen_kwargs(gen_kwargs, MAX_NEW_TOKENS)
        if wanted.get("do_sample"):
            raise ValueError("this task samples its answers: only greedy ones can be compared between caches.")
        stop = [text for text in handle_stop_sequences(wanted.get("until"), eos=None) if text]
        room = self.max_length - wanted["max_gen_toks"]
        if room < 1:
            raise ValueError(f"an answer of {wanted['max_gen_toks']} tokens is longer than the model reads.")
        prompt = self.tok_encode(context)[-room:]
        tokens = self._served.generate(prompt, wanted["max_gen_toks"], stop=tuple(stop))
        self._answered()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return postprocess_generated_text(text, stop, think_end_token=None)

    def _answered(self) -> None:
        self._done += 1
        self._on_request(self._done)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

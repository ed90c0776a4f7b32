"""Chat requests through the OpenAI client, and how two runs of them compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from openai import OpenAI

from turboquant.demo.launch import SERVED_NAME
from turboquant.demo.prompts import Prompt

REQUEST_LIMIT_S = 600.0


@dataclass(frozen=True)
class Reply:
    """One answer, with the ids of its tokens as the server chose them."""

    name: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    seconds: float


@dataclass(frozen=True)
class Answers:
    """All replies of one server, in the order of the prompts, and how long they took."""

    replies: list[Reply]
    seconds: float
    together: int
    together_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Over everything: reading the prompts counts, too."""
        return sum(len(reply.token_ids) for reply in self.replies) / self.seconds

    @property
    def short_tokens_per_second(self) -> float:
        """Over the short prompts, which are sent at once: nearly all of it is decoding."""
        return sum(len(reply.token_ids) for reply in self.replies[: self.together]) / self.together_seconds


def connect(base_url: str) -> OpenAI:
    """A client for a server on this machine: no key, and no proxy from the environment."""
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False))


def ask(client: OpenAI, prompt: Prompt, max_tokens: int, seed: int) -> Reply:
    """Send one prompt, greedily decoded."""
    started = time.monotonic()
    response = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": prompt.text}],
        max_tokens=max_tokens,
        temperature=0.0,
        seed=seed,
        timeout=REQUEST_LIMIT_S,
        extra_body={"return_token_ids": True},  # of vLLM: text alone does not tell where the tokens end
    )
    choice = response.choices[0]
    return Reply(
        name=prompt.name,
        text=choice.message.content or "",
        token_ids=list(choice.token_ids),
        prompt_tokens=response.usage.prompt_tokens,
        finish_reason=choice.finish_reason,
        seconds=time.monotonic() - started,
    )


def ask_all(
    client: OpenAI, prompts: Sequence[Prompt], max_tokens: int, seed: int, progress: Callable[[str], None]
) -> Answers:
    """Send the prompts: those that are `together` at once, then the others one by one.

    One request goes first and is not counted: a server's first request pays for what is set up lazily.
    """
    progress("Warming up the server")
    ask(client, Prompt("warm-up", "Say hello."), 4, seed)
    together, single = [[p for p in prompts if p.together is value] for value in (True, False)]
    started = time.monotonic()
    progress(f"Asking {len(together)} prompts at once")
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        replies = list(pool.map(lambda prompt: ask(client, prompt, max_tokens, seed), together))
    together_seconds = time.monotonic() - started
    for prompt in single:
        progress(f"Asking: {prompt.name}")
        replies.append(ask(client, prompt, max_tokens, seed))
    return Answers(replies, time.monotonic() - started, len(together), together_seconds)


def equal_tokens(left: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """Positions where both hold the same token, and positions in all: those of the longer one."""
    return sum(a == b for a, b in zip(left, right, strict=False)), max(len(left), len(right))


def agreement(pairs: Sequence[tuple[int, int]]) -> float:
    """Share of equal positions over (equal, all) pairs; 1 where there is nothing to compare."""
    total = sum(positions for _, positions in pairs)
    return sum(equal for equal, _ in pairs) / total if total else 1.0

"""The prompts of the demonstration: short questions, a long text with a question, and a needle in a text.

The texts come from `pydoc_data.topics`, the language reference that every Python carries.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import accumulate

SHORT = {
    "hash table": "Explain in three sentences what a hash table is.",
    "lighthouse": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "copper": "List five uses of copper, each with one sentence of explanation.",
}
LONG_TOPICS = ("import", "execmodel", "typesseq")
LONG_CHARS = 10_500  # about 2,400 tokens of SmolLM2
LONG_MIN_TOKENS = 2_000
LONG_QUESTION = "What is the text above about? Answer in three sentences."
NEEDLE_TOPICS = ("objects", "exceptions", "typesmapping")
NEEDLE_CHARS = 4_000  # about 900 tokens, so that the needle is far outside any recent window
NEEDLE = "The access code of the archive room is {passkey}."
NEEDLE_INTRODUCTION = "Here is a text with one hidden fact in it."
NEEDLE_QUESTION = "What is the access code of the archive room?"


@dataclass(frozen=True)
class Prompt:
    """One chat request. Those that are `together` go to the server first and at once, the others one by one."""

    name: str
    text: str
    together: bool = False
    min_tokens: int = 0


def demo_prompts(passkey: str) -> list[Prompt]:
    """All prompts of one run."""
    short = [Prompt(name, text, together=True) for name, text in SHORT.items()]
    text = f"{reference_text(LONG_TOPICS, LONG_CHARS)}\n\n{LONG_QUESTION}"
    long = Prompt("long text", text, min_tokens=LONG_MIN_TOKENS)
    return [*short, long, Prompt("passkey", passkey_prompt(passkey))]


def draw_passkey(seed: int) -> str:
    """Five digits, none twice."""
    return "".join(random.Random(seed).sample("123456789", 5))


def passkey_prompt(passkey: str) -> str:
    """A text with the needle in its middle, then the question for it."""
    parts = reference_text(NEEDLE_TOPICS, NEEDLE_CHARS).split("\n\n")
    middle = len(parts) // 2
    parts.insert(middle, NEEDLE.format(passkey=passkey))
    return "\n\n".join([NEEDLE_INTRODUCTION, *parts, NEEDLE_QUESTION])


def reference_text(topics: tuple[str, ...], chars: int) -> str:
    """Paragraphs of prose from these topics, as many as fit into `chars` characters."""
    from pydoc_data.topics import topics as pages  # half a megabyte, needed by nobody else

    found = [text for name in topics for text in paragraphs(pages.get(name, ""))]
    sizes = accumulate(len(text) + 2 for text in found)
    return "\n\n".join(text for text, size in zip(found, sizes, strict=True) if size <= chars)


def paragraphs(page: str) -> list[str]:
    """The page's paragraphs, each on one line, without headings and code-like ones."""
    joined = (re.sub(r"\s+", " ", part).strip() for part in page.split("\n\n"))
    return [text for text in joined if len(text) > 120 and text.count('"') < 12]

"""Samples to calibrate on: token ids from built-in texts, local files or a data set of the hub."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turboquant.calibration.capture import CalibrationError
from turboquant.text import load_text

MIN_SAMPLE_TOKENS = 16
BUILT_IN = ("pydoc", "source")
FILE_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_samples(
    dataset: str, tokenizer: Any, *, num_samples: int, max_seq_len: int, seed: int, chat_template: bool = False
) -> list[list[int]]:
    """Token ids of the samples, in the order in which they are read.

    Long texts ("pydoc", "source", .txt) are cut into pieces of max_seq_len and drawn without replacement; records with
    "text" or "messages" (.jsonl, .parquet, hub data sets) are samples, cut off at max_seq_len.

    Args:
        dataset: a built-in text, a file, or the id of a data set on the hub (its "train" split).
        chat_template: put records' "messages" through the tokenizer's chat template; else their contents are joined.

    Raises:
        CalibrationError: no such data, or records without text.
    """
    path = Path(dataset)
    if dataset in BUILT_IN or path.suffix == ".txt":
        ids = tokenizer(load_text(dataset), verbose=False).input_ids
        pieces = [ids[i : i + max_seq_len] for i in range(0, len(ids), max_seq_len)]
        pieces = [piece for piece in pieces if len(piece) >= MIN_SAMPLE_TOKENS]
        random.Random(seed).shuffle(pieces)
        return pieces[:num_samples]
    samples = []
    for record in _records(dataset, path, seed):
        ids = _tokenize(record, tokenizer, chat_template, dataset)[:max_seq_len]
        if len(ids) >= MIN_SAMPLE_TOKENS:
            samples.append(ids)
        if len(samples) == num_samples:
            break
    return samples


def sample_hash(samples: Iterable[list[int]]) -> str:
    """SHA-256 of the samples' token ids, order included."""
    digest = hashlib.sha256()
    for ids in samples:
        digest.update((" ".join(map(str, ids)) + "\n").encode())
    return digest.hexdigest()


def _records(dataset: str, path: Path, seed: int) -> Iterator[dict]:
    from datasets import load_dataset

    if path.suffix in FILE_LOADERS:
        if not path.is_file():
            raise CalibrationError(
                f"dataset {dataset!r} is not there: give a file, a hub id, or {' or '.join(BUILT_IN)}."
            )
        records = load_dataset(FILE_LOADERS[path.suffix], data_files=str(path), split="train", streaming=True)
    elif path.exists():
        raise CalibrationError(
            f"dataset {dataset!r} is of no known kind: allowed are .txt, {', '.join(FILE_LOADERS)}, a hub id, "
            f"{' and '.join(BUILT_IN)}."
        )
    else:
        try:
            records = load_dataset(dataset, split="train", streaming=True)
        except Exception as error:  # the library raises a dozen kinds, most of them without a hint
            raise CalibrationError(
                f"dataset {dataset!r} is no file here, and the hub does not give it ({type(error).__name__}: {error}). "
                f"Give a file, or {' or '.join(BUILT_IN)}, which need no network."
            ) from error
    return iter(records.shuffle(seed=seed, buffer_size=10_000))


def _tokenize(record: dict, tokenizer: Any, chat_template: bool, dataset: str) -> list[int]:
    messages = record.get("messages") or record.get("conversations")
    if messages and chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    text = "\n\n".join(m.get("content") or "" for m in messages) if messages else record.get("text")
    if not isinstance(text, str):
        raise CalibrationError(f"records of {dataset!r} have {sorted(record)}: one of 'text' and 'messages' is needed.")
    return tokenizer(text, verbose=False).input_ids

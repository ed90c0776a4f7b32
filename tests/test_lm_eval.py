"""lm-evaluation-harness on compressed caches, offline: its own command, our model type, its tasks as tasks of ours."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("lm_eval")

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from turboquant.cli.main import app
from turboquant.evals.candidates import Candidate
from turboquant.evals.hf_backend import HFBackend
from turboquant.evals.lm_eval_model import ServedLM, TurboQuantLM
from turboquant.evals.tasks import Request
from turboquant.evals.tasks.lm_eval import lm_eval_tasks
from turboquant.text import load_text

pytestmark = pytest.mark.usefixtures("one_thread")

CACHE = "turboquant2.5@0"
KINDS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"},
    "answer": {
        "output_type": "generate_until", "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
    },
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{question}}", "doc_to_text": ""},
}  # fmt: skip
METRICS = {"choice": "acc", "answer": "exact_match", "rolling": "byte_perplexity"}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, str]:
    """Paths of tasks over the same five documents, by kind."""
    folder = tmp_path_factory.mktemp("lm_eval")
    text = load_text("source")
    documents = [
        {"question": text[at : at + 200], "choices": [text[at + 200 : at + 210], " red", " blue"], "gold": 0}
        for at in range(0, 5000, 1000)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    paths = {}
    for kind, fields in KINDS.items():
        config = {
            "task": f"local_{kind}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
            "doc_to_text": "{{question}}", "metric_list": [{"metric": METRICS[kind]}], "metadata": {"version": 1.0},
            **fields,
        }  # fmt: skip
        paths[kind] = str(folder / f"{kind}.yaml")
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump(config))
    return paths


def answers(lm, path: str) -> list:
    """What a model answers to every request of a task."""
    results = simple_evaluate(lm, tasks=[path], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)
    (records,) = results["samples"].values()
    return [reply for record in records for replies in record["resps"] for reply in replies]


@pytest.mark.parametrize("kind", KINDS)
def test_both_models_measure_the_compressed_cache(worded_llama_dir, tasks, kind):
    """lm-eval's Transformers model inside our cache, and ours on a served one; neither is the exact model."""
    type_of_ours = {"pretrained": str(worded_llama_dir), "dtype": "float32", "device": "cpu", "batch_size": 3}
    packed = TurboQuantLM(kv_cache_dtype=CACHE, **type_of_ours)
    inside = answers(packed, tasks[kind])
    exact = answers(TurboQuantLM(kv_cache_dtype="auto", **type_of_ours), tasks[kind])
    with HFBackend(worded_llama_dir).serve(Candidate.parse(CACHE), 1024) as served:
        outside = answers(ServedLM(served, packed.tokenizer, 1024), tasks[kind])
    if kind == "answer":
        assert inside == outside != exact
        return
    inside, outside, exact = (
        [x[0] if isinstance(x, tuple) else x for x in found] for found in (inside, outside, exact)
    )
    assert inside == pytest.approx(outside, rel=1e-4)
    assert max(abs(a - b) for a, b in zip(inside, exact, strict=True)) > 0.05


def test_the_command_knows_the_type(worded_llama_dir, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    arguments = f"pretrained={worded_llama_dir},kv_cache_dtype={CACHE},dtype=float32"
    result = CliRunner().invoke(
        app,
        ["lm-eval", "--model", "turboquant", "--model_args", arguments, "--tasks", tasks["choice"], "--limit", "4",
         "--device", "cpu", "--output_path", str(tmp_path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["n-samples"]["local_choice"]["effective"] == 4
    assert 0 <= found["results"]["local_choice"]["acc,none"] <= 1


def test_a_task_of_lm_eval_is_a_task_of_ours(worded_llama_dir, tasks, tmp_path):
    names = ",".join(f"lm_eval:{path}" for path in tasks.values())
    arguments = [
        "eval", "--model", worded_llama_dir, "--kv-cache-dtype", f"auto,{CACHE}", "--tasks", names, "--limit", 3,
        "--output", tmp_path, "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["primary"] for row in rows[::2]] == [*METRICS.values()]
    assert {row["num_samples"] for row in rows} == {3}
    assert [row["higher_is_better"] for row in rows[::2]] == [True, True, False]
    perplexities = [row["byte_perplexity"] for row in rows if row["primary"] == "byte_perplexity"]
    assert perplexities[0] != perplexities[1]
    assert len([*tmp_path.glob("*/samples.json")]) == 6


def test_an_unknown_cache_is_refused_before_anything_runs(worded_llama_dir):
    with pytest.raises(ValueError, match="turboqant"):
        TurboQuantLM(str(worded_llama_dir), kv_cache_dtype="turboqant", device="cpu")


def test_ruler_generates_its_data_without_a_network(worded_llama_dir):
    pytest.importorskip("wonderwords")
    request = Request(worded_llama_dir, 1024, limit=2, lengths=(1024, 2048))
    (task,) = lm_eval_tasks("ruler_vt", request)
    assert (task.primary, task.higher_is_better) == ("score", True)
    samples = task.samples(request, "")
    assert {sample.about["doc"]["max_length"] for sample in samples} == {1024}  # the model cannot read 2,048 tokens
    seen = [{**sample.about, "1024": score, "4096": -1.0} for sample, score in zip(samples, (1.0, 0.5), strict=True)]
    measured = task.judge(samples, None, seen, None)
    assert measured.figures["score"] == measured.figures["score_1024"] == 0.75
    assert measured.scores.tolist() == [[1.0, 0.5]]
    with pytest.raises(ValueError, match="--lengths"):
        lm_eval_tasks("ruler_vt", Request(worded_llama_dir, 1024, lengths=(512,)))


def test_data_that_cannot_be_had_is_named(worded_llama_dir, tmp_path):
    config = {"task": "absent", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "absent.jsonl"}}}
    path = tmp_path / "absent.yaml"
    path.write_text(yaml.safe_dump({**config, "test_split": "test", "output_type": "multiple_choice"}))
    with pytest.raises(ValueError, match=r"cannot load .*absent\.yaml: FileNotFoundError: .*ruler_offline"):
        lm_eval_tasks(str(path), Request(worded_llama_dir, 1024))

"""The vLLM engine on the Triton kernels in Triton's interpreter: the glue that a GPU needs, end to end, without one.

Metadata, strides, mixed batches, chunks, prefix hits and the exact window are the engine's own. In processes of their
own, since Triton chooses its interpreter when it is first imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("vllm", "triton"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

pytestmark = pytest.mark.engine

# Serves `prompts` twice, so that the second time hits the prefix cache, in small chunks beside running decodes.
SERVE = """
import json, sys
from engine import engine, greedy, random_prompts
path, window, tokens, lengths, dtype = json.loads(sys.argv[1])
prompts = random_prompts(*lengths)
prompts += [prompts[-1][:32] + [5, 6, 7]]
options = dict(additional_config={"turboquant": {"window": window}}, dtype=dtype)
options.update(skip_tokenizer_init=True, enable_prefix_caching=True, max_num_batched_tokens=48, max_num_seqs=4)
with engine(path, "turboquant3.5", block_size=16 if not window else 160, **options) as llm:
    answers = greedy(llm, prompts, tokens) + greedy(llm, prompts[-2:], tokens)
    print("ANSWERS" + json.dumps(answers))
"""


def answers(kernels: str, *request) -> list:
    """What a process that serves with these kernels answers: [tokens, log-probabilities] of every prompt."""
    env = {**os.environ, "TURBOQUANT_KERNELS": kernels, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", SERVE, json.dumps(request, default=str)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[0].removeprefix("ANSWERS"))


@pytest.mark.parametrize("window", [0, 24], ids="window{}".format)
def test_the_engine_answers_as_with_the_reference(llama_dir, window):
    request = (llama_dir, window, 4, [1, 7, 33, 60], "float32")
    for ours, reference in zip(answers("triton", *request), answers("reference", *request), strict=True):
        assert ours[0] == reference[0]
        assert ours[1] == pytest.approx(reference[1], abs=1e-3)


def test_the_demo_model(demo_model_dir):
    """30 layers, 9 query and 3 KV heads: group 3."""
    request = (demo_model_dir, 0, 2, [9, 20], "float32")
    for ours, reference in zip(answers("triton", *request), answers("reference", *request), strict=True):
        assert ours[0] == reference[0]
        assert ours[1] == pytest.approx(reference[1], abs=0.05)

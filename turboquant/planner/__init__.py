"""The capacity planner: how many tokens, sequences and tokens per second a model's config promises on a GPU.

Arithmetic alone: no weights, no vLLM, no GPU. `source.py` reads a config, `shape.py` what of it costs memory, and
`plan.py` puts together what `weights.py`, `pages.py`, `memory.py` and `roofline.py` compute.
"""


class PlanError(ValueError):
    """A model, or a wish, that cannot be planned; the message names the value and what to do."""

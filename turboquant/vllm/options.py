"""What a user can set, by `--additional-config '{"turboquant": {...}}'` or an environment variable."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turboquant.window import DEFAULT_WINDOW

ENV_PREFIX = "TURBOQUANT_"


class Options(BaseModel):
    """Options of the served cache.

    Attributes:
        prefill_reads: what a prefill chunk reads of its own tokens: "exact" (better, and free) or "packed", what a
            later decode step will read of them. Evaluations use "packed", so that nothing exact leaks in.
        key_mean: "auto" takes K's mean from the k_proj bias where the model has one; "none" never takes one, and
            refuses a model with a K bias.
        artifact: a calibration, file or folder, or "none"; found in the model's folder if not given.
        window: how many of the newest tokens of a sequence are read exactly, its first few with them; 0 for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill_reads: Literal["exact", "packed"] = "exact"
    key_mean: Literal["auto", "none"] = "auto"
    artifact: str | None = None
    window: int = Field(default=DEFAULT_WINDOW, ge=0)

    @classmethod
    def load(cls, additional_config: Any) -> Options:
        """Options from vLLM's additional_config; TURBOQUANT_<NAME> in the environment stands in for what it lacks.

        Raises:
            ValueError: an unknown option or value; the message lists the allowed ones.
        """
        given = additional_config.get("turboquant", {}) if isinstance(additional_config, dict) else {}
        from_env = {
            name: os.environ[variable]
            for name in cls.model_fields
            if (variable := ENV_PREFIX + name.upper()) in os.environ
        }
        try:
            return cls(**{**from_env, **given})
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ValueError(
                f"invalid turboquant options: {problems}. Allowed: {', '.join(cls.model_fields)} "
                "(see docs/architecture.md)."
            ) from error

"""The demonstration: one small real model, served by vLLM with the exact and with the compressed cache."""


class DemoError(RuntimeError):
    """The demonstration cannot go on; the message says why and what to do."""

"""Replays requests against a pool of KV cache blocks, step by step, as vLLM's scheduler would; a simulation.

`trace.py` has the requests, `costs.py` what a step takes, `replay.py` the scheduler's rules, `result.py` the figures.
Nothing here runs a model.
"""

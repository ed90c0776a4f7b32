"""The vLLM plugin. Nothing here is imported unless vLLM loads it."""

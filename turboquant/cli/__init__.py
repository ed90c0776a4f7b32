"""The `turboquant` command."""

"""A picture of an artifact: what μ takes away, and outliers, by layer and KV head."""

from __future__ import annotations

from pathlib import Path

from turboquant.artifact import Artifact


def draw(artifact: Artifact, path: Path) -> None:
    """Write an image (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the artifact has no figures (it was made from weights).
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'turboquant-toolkit[notebooks]'") from error
    layers = sorted(artifact.info.layers.items())
    if any(layer.energy_left is None for _, layer in layers):
        raise ValueError("this artifact was made from weights and holds no figures to draw.")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, values in (("fit", "energy_left"), ("held out", "held_out_energy_left")):
        points = [(i, x) for i, layer in layers for x in getattr(layer, values) or []]
        if points:
            left.plot(*zip(*points, strict=True), "o", markersize=3, label=name)
    left.set(xlabel="layer", ylabel="K energy left, E‖k − RoPE(μ)‖² / E‖k‖²", ylim=(0, 1.05))
    left.legend()
    for name in ("key", "value"):
        points = [
            (i, m / r if r else 0.0)
            for i, layer in layers
            for m, r in zip(getattr(layer, f"{name}_max"), getattr(layer, f"{name}_rms"), strict=True)
        ]
        right.plot(*zip(*points, strict=True), "o", markersize=3, label=name)
    right.set(xlabel="layer", ylabel="largest element / rms", yscale="log")
    right.legend()
    figure.suptitle(artifact.info.model)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

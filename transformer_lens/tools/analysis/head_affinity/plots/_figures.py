"""What all figures share: axes, colours and names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with colour vision deficiencies too.
BLUE, SKY_BLUE, VERMILION = "#0072B2", "#56B4E9", "#D55E00"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", SKY_BLUE, "#404040")
GREY = "#C8C8C8"


def new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        # pyplot, and not a bare Figure, because a notebook shows a figure of pyplot by itself.
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib, which is not installed: "
            'pip install "transformer-lens-projection-kernel[plots]"'
        ) from error
    return plt.subplots(figsize=size, layout="constrained")[1]


def metric_name(metric: str) -> str:
    """A result's ``metric`` as an axis calls it."""
    name = metric.removesuffix("_paper").replace("_", " ")
    for proper in ("Projection Kernel", "Composition Score", "CKA", "Procrustes"):
        name = name.replace(proper.lower(), proper)
    return f"{name} (paper's form)" if metric.endswith("_paper") else name


def pairing_name(source_role: str, target_role: str, *, directed: bool) -> str:
    """Both roles as a legend or a title calls them."""
    return f"{source_role}→{target_role}" if directed else f"{source_role} with {target_role}"

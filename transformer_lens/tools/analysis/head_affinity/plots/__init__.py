"""Figures of head affinities.

Every function draws on the axes it is given, or on a new figure, and returns the axes, so that
everything else is left to matplotlib: ``plot_affinity(result).figure.savefig("affinity.png")``.
Nothing global is changed. Colours are told apart with colour vision deficiencies too.

matplotlib is an optional dependency: ``pip install "transformer-lens-projection-kernel[plots]"``.
"""

from transformer_lens.tools.analysis.head_affinity.plots.affinity import (
    plot_affinity,
    plot_distribution,
)
from transformer_lens.tools.analysis.head_affinity.plots.comparison import (
    plot_detection,
    plot_informativeness,
    plot_scatter,
)
from transformer_lens.tools.analysis.head_affinity.plots.graph import plot_graph

__all__ = [
    "plot_affinity",
    "plot_detection",
    "plot_distribution",
    "plot_graph",
    "plot_informativeness",
    "plot_scatter",
]

"""Figures of the affinities of one result: the matrix of all pairs, and their distribution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from transformer_lens.tools.analysis._arguments import require_instance
from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult
from transformer_lens.tools.analysis.head_affinity.informativeness import (
    ambient_dimension,
    chance_components,
    rank_pairs,
)
from transformer_lens.tools.analysis.head_affinity.plots._figures import (
    BLUE,
    GREY,
    SKY_BLUE,
    VERMILION,
    metric_name,
    new_axes,
    pairing_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_affinity", "plot_distribution"]

#: Up to this many heads on an axis every head has its name there; beyond, layers have.
_NAMED_HEADS = 24
#: Most layers that have their number on an axis.
_NUMBERED_LAYERS = 16
#: Most cells along an axis. With less than a pixel each, strong pairs would fall between pixels.
_CELLS = 400
_MOST_BINS = 120
#: Share of the relative scores that the scale has room for.
_WITHIN_SCALE = 0.995


def plot_affinity(result: HeadAffinityResult, ax: Axes | None = None) -> Axes:
    """The affinities of all pairs as a matrix, source heads down and target heads across.

    Heads are sorted by layer, and lines part the layers. Pairs outside ``valid_mask`` are grey.
    Scores of either sign, as ``relative()`` gives, have a scale with white at zero, and one in two
    hundred may lie beyond its ends. Where there are more heads than can be told apart, neighbours
    within a layer share a cell, which has the highest score among them; the axis says so.

    Args:
        result: Affinities of any metric.
        ax: Where to draw. Default: a new figure.

    Returns:
        The axes.

    Raises:
        ArgumentTypeError: If ``result`` is something else.
        ValueError: If it has no valid pair.
        ImportError: If matplotlib is not installed.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> ax = plot_affinity(result)
        >>> ax.images[0].get_array().shape
        (6, 6)
    """
    values = _valid_scores(result)
    ax = new_axes(ax, (8.0, 7.0))
    from matplotlib.patches import Patch

    cells = result.scores.detach().double().masked_fill(~result.valid_mask, -torch.inf).cpu()
    source_group = _heads_per_cell(result.source_ranks.shape)
    target_group = _heads_per_cell(result.target_ranks.shape)
    cells = _highest_of_groups(_highest_of_groups(cells, 1, source_group), 3, target_group)
    matrix = np.ma.masked_invalid(cells.flatten(0, 1).flatten(1).numpy())
    low, high = float(values.min()), float(values.max())
    colours, beyond = "viridis", "neither"
    if low < 0:
        # Relative scores have long tails on both sides; their ends would leave the rest white.
        furthest = max(-low, high)
        high = float(np.quantile(np.abs(values), _WITHIN_SCALE, method="higher"))
        colours, low, beyond = "PuOr", -high, "both" if high < furthest else "neither"
    image = ax.imshow(
        matrix, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    ax.set_facecolor(GREY)  # shines through where the image is masked
    ax.figure.colorbar(image, ax=ax, label=metric_name(result.metric), extend=beyond)
    if bool(matrix.mask.any()):
        handle = Patch(facecolor=GREY, edgecolor="black", linewidth=0.5)
        ax.legend([handle], ["no pair"], loc="lower left", framealpha=1.0)
    _label_axis(ax, "y", result, source_group)
    _label_axis(ax, "x", result, target_group)
    directed = result.layer_order != "distinct"
    name = pairing_name(result.source_role, result.target_role, directed=directed)
    ax.set_title(f"{name}, {result.layer_order} pairs")
    return ax


def plot_distribution(result: HeadAffinityResult, ax: Axes | None = None) -> Axes:
    """Distribution of the valid Projection Kernels, against that of random subspaces.

    The reference is the normal density with the moments of
    :func:`~transformer_lens.tools.analysis.projection_kernel.random_projection_kernel_moments`,
    for the heads' own ranks. It shows what no structure at all would look like. Heads share
    directions of the residual stream, so real scores spread far wider, and lying outside of it says
    little about a pair. Densities have a logarithmic axis: the pairs of interest are few.

    Args:
        result: Projection Kernels, not of another metric and not ``relative()``.
        ax: Where to draw. Default: a new figure.

    Returns:
        The axes.

    Raises:
        ArgumentTypeError: If ``result`` is something else.
        ValueError: If the metric is another one, there is no valid pair, or the result does not
            know ``d_model``.
        ImportError: If matplotlib is not installed.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> ax = plot_distribution(result)
        >>> ax.get_xlabel()
        'Projection Kernel'
    """
    values = _valid_scores(result)
    if result.metric != "projection_kernel":
        raise ValueError(
            "the random reference is that of the Projection Kernel; the result's metric is "
            f"{result.metric!r}"
        )
    components = chance_components(
        rank_pairs(result)[result.valid_mask.cpu()], ambient_dimension(result)
    )
    ax = new_axes(ax, (7.0, 4.0))

    _, edges, _ = ax.hist(
        values,
        bins=min(_MOST_BINS, 2 * math.isqrt(len(values)) + 1),
        density=True,
        color=SKY_BLUE,
        label=f"heads ({len(values):,} {result.layer_order} pairs)",
    )
    width = edges[1] - edges[0]
    # Below the height of a bin with a single pair there is nothing to compare with.
    floor = 0.5 / (len(values) * width)

    mean = sum(share * component.mean for share, component in components)
    spread = max(math.sqrt(component.variance) for _, component in components)
    lowest = min(component.mean for _, component in components) - 6 * spread
    highest = max(component.mean for _, component in components) + 6 * spread
    grid = np.linspace(lowest, highest, 801)
    density = np.zeros_like(grid)
    for share, component in components:
        # A subspace that is the whole space has the same PK with all others: no width, no density.
        if component.variance > 0:
            scaled = (grid - component.mean) ** 2 / component.variance
            density += share * np.exp(-scaled / 2) / math.sqrt(2 * math.pi * component.variance)
    visible = density >= floor
    ax.plot(grid[visible], density[visible], color=VERMILION, label="random subspaces (normal)")

    for value, colour, name in (
        (float(values.mean()), BLUE, "heads"),
        (mean, VERMILION, "random subspaces"),
    ):
        ax.axvline(value, color=colour, linestyle="--", label=f"mean of {name}: {value:.2f}")
    ax.set_yscale("log")
    ax.set_ylim(bottom=floor)
    ax.set_xlabel(metric_name(result.metric))
    ax.set_ylabel("density of pairs (logarithmic)")
    ax.set_title(f"{result.source_role}→{result.target_role} against random subspaces")
    ax.legend()
    return ax


def _valid_scores(result: HeadAffinityResult) -> np.ndarray:
    require_instance(result, HeadAffinityResult, "result")
    values = result.scores[result.valid_mask].detach().double().cpu().numpy()
    if not len(values):
        raise ValueError(f"there is nothing to draw: {result!r} has no valid pair")
    return values


def _heads_per_cell(ranks_shape: torch.Size) -> int:
    layers, heads = ranks_shape
    return -(-heads // max(1, _CELLS // layers))


def _highest_of_groups(scores: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """``scores`` with every ``size`` neighbours along ``axis`` replaced by the highest of them."""
    groups = [group.amax(axis, keepdim=True) for group in scores.split(size, axis)]
    return torch.cat(groups, axis)


def _label_axis(
    ax: Axes, which: Literal["x", "y"], result: HeadAffinityResult, heads_per_cell: int
) -> None:
    """Lines between layers, and names of heads where there is room, else numbers of layers."""
    side = "source" if which == "y" else "target"
    layer_indices = getattr(result, f"{side}_layer_indices")
    layers, heads = getattr(result, f"{side}_ranks").shape
    role, kind = getattr(result, f"{side}_role"), getattr(result, f"{side}_head_kind")

    axis = ax.yaxis if which == "y" else ax.xaxis
    line = ax.axhline if which == "y" else ax.axvline
    cells = -(-heads // heads_per_cell)
    for layer in range(1, layers):
        line(layer * cells - 0.5, color="white", linewidth=1.0 if layers <= 8 else 0.2)

    if layers * heads <= _NAMED_HEADS:
        names = [f"L{layer}H{head}" for layer in layer_indices for head in range(heads)]
        axis.set_ticks(range(layers * heads), names)
        if which == "x":
            axis.set_tick_params(rotation=90)
        label = f"{side} {kind} head ({role})"
    else:
        step = -(-layers // _NUMBERED_LAYERS)
        centres = np.arange(layers) * cells + (cells - 1) / 2
        axis.set_ticks(centres[::step], layer_indices[::step])
        label = f"{side} layer, {heads} {kind} heads each ({role})"
        if heads_per_cell > 1:
            label += f"; cells show the highest of {heads_per_cell} heads"
    axis.set_label_text(label)

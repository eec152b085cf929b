"""Figures that compare: metrics with each other, heads with labels, pairings with chance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from transformer_lens.tools.analysis._arguments import (
    require_instance,
    warn_if_states_differ,
)
from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult
from transformer_lens.tools.analysis._head_weights import ALL_ROLES
from transformer_lens.tools.analysis._pairings import roles_of
from transformer_lens.tools.analysis.head_affinity.evaluation import HeadDetection
from transformer_lens.tools.analysis.head_affinity.plots._figures import (
    COLOURS,
    GREY,
    VERMILION,
    metric_name,
    new_axes,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["plot_detection", "plot_informativeness", "plot_scatter"]


def plot_scatter(
    result: HeadAffinityResult,
    other: HeadAffinityResult,
    ax: Axes | None = None,
    *,
    top_share: float = 0.03,
) -> Axes:
    """Two metrics of the same pairs against each other (arXiv 2601.10266, figure 5).

    Pairs in the top share of either metric are marked. Metrics that agree over all pairs can
    disagree there, where one looks.

    Args:
        result: Scores of the horizontal axis.
        other: Scores of the vertical axis, of the same model, roles and valid pairs.
        ax: Where to draw. Default: a new figure.
        top_share: Share of the pairs that counts as the top of a metric.

    Returns:
        The axes.

    Raises:
        ArgumentTypeError: If a result is something else.
        ValueError: If the two do not score the same pairs, or ``top_share`` is not between 0 and 1.
        ImportError: If matplotlib is not installed.

    Warns:
        UserWarning: If one was computed from raw and the other from folded weights.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> plot_scatter(result, result.relative()).get_xlabel()
        'Projection Kernel'
    """
    for name, value in (("result", result), ("other", other)):
        require_instance(value, HeadAffinityResult, name)
    warn_if_states_differ([result.weights, other.weights])
    if not 0 < top_share < 1:
        raise ValueError(f"top_share must lie between 0 and 1, got {top_share!r}")
    valid = result.valid_mask.cpu()
    axes = (result.pairing, result.stream), (other.pairing, other.stream)
    if axes[0] != axes[1] or not valid.equal(other.valid_mask.cpu()):
        raise ValueError(f"the two results must score the same pairs, got {result!r} and {other!r}")
    x, y = (r.scores.cpu()[valid].double().numpy() for r in (result, other))
    if not len(x):
        raise ValueError(f"there is nothing to draw: {result!r} has no valid pair")
    ax = new_axes(ax, (6.0, 5.0))
    count = math.ceil(top_share * len(x))
    top = (x >= np.partition(x, -count)[-count]) | (y >= np.partition(y, -count)[-count])
    ax.scatter(x[~top], y[~top], s=4, color=GREY, rasterized=True, label="other pairs")
    ax.scatter(
        x[top],
        y[top],
        s=7,
        color=VERMILION,
        rasterized=True,
        label=f"top {100 * top_share:g} % of either ({int(top.sum()):,} pairs)",
    )
    ax.set_xlabel(metric_name(result.metric))
    ax.set_ylabel(metric_name(other.metric))
    arrow = "→".join(roles_of(result.pairing))
    ax.set_title(f"{arrow}, {len(x):,} {result.layer_order} pairs")
    # Below the axes: inside there is no corner without pairs.
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    return ax


def plot_detection(
    detections: HeadDetection | Iterable[HeadDetection], ax: Axes | None = None
) -> Axes:
    """Precision and recall of head detection, a curve per metric or pairing.

    Args:
        detections: From ``head_detection``. One, or several to compare.
        ax: Where to draw. Default: a new figure.

    Returns:
        The axes. The legend gives average precisions; the dashed line is the first one's chance
        level.

    Raises:
        ArgumentTypeError: If a detection is something else.
        ValueError: If there is none.
        ImportError: If matplotlib or scikit-learn is not installed.

    Warns:
        UserWarning: If some were computed from raw and some from folded weights.

    Example:
        >>> from transformer_lens.tools.analysis.head_affinity.evaluation import HeadLabels
        >>> from transformer_lens.tools.analysis.head_affinity.evaluation import head_detection
        >>> labels = HeadLabels.from_dict({"Writer": ["0.0", "0.1"]})
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> plot_detection(head_detection(result, labels)).get_title()
        'O→K, 2 of 6 heads labelled'
    """
    several = [detections] if isinstance(detections, HeadDetection) else list(detections)
    if not several:
        raise ValueError("there is nothing to draw: no detections were given")
    for detection in several:
        require_instance(detection, HeadDetection, "a detection")
    warn_if_states_differ(detection.weight_state for detection in several)
    ax = new_axes(ax, (6.0, 4.5))
    first = several[0]
    one_pairing = all(detection.pairing == first.pairing for detection in several)
    for position, detection in enumerate(several):
        curve = detection.curve()
        name = metric_name(detection.metric)
        if not one_pairing:
            name = f"{'→'.join(roles_of(detection.pairing))} {name}"
        ax.plot(
            curve["recall"],
            curve["precision"],
            color=COLOURS[position % len(COLOURS)],
            linestyle=("-", "--", ":")[position // len(COLOURS) % 3],
            label=f"{name}: {detection.average_precision:.3f}",
        )
    ax.axhline(first.chance, color="black", linestyle="--", linewidth=0.8)
    ax.text(1.0, first.chance, "chance", ha="right", va="top")
    ax.set_xlim(0, 1.02)
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("recall of labelled heads")
    ax.set_ylabel("precision")
    positives = int(first.positive.sum())
    title = f"{positives} of {len(first.heads)} heads labelled"
    if one_pairing:
        title = f"{'→'.join(roles_of(first.pairing))}, {title}"
    ax.set_title(title)
    ax.legend(title="average precision", fontsize="small", title_fontsize="small")
    return ax


def plot_informativeness(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Heat map of how far each pair of roles is from chance (arXiv 2601.10266, figure 8).

    Args:
        table: From ``informativeness_table``.
        ax: Where to draw. Default: a new figure.

    Returns:
        The axes; source roles down, target roles across, divergences in nats in the cells. Infinite
        ones, of pairings with too few pairs for their bins, are grey.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame(
        ...     {"source_role": ["O", "O"], "target_role": ["Q", "K"], "divergence": [2.1, 2.2]}
        ... )
        >>> [text.get_text() for text in plot_informativeness(table).texts]
        ['2.100', '2.200']
    """
    rows = [role for role in ALL_ROLES if role in set(table["source_role"])]
    columns = [role for role in ALL_ROLES if role in set(table["target_role"])]
    matrix = table.pivot(index="source_role", columns="target_role", values="divergence")
    values = matrix.loc[rows, columns].to_numpy()
    ax = new_axes(ax, (5.0, 4.2))
    finite = np.ma.masked_invalid(values)
    image = ax.imshow(finite, cmap="cividis")
    ax.set_facecolor(GREY)  # shines through where the image is masked
    middle = np.inf
    if finite.count():
        ax.figure.colorbar(image, ax=ax, label="KL(reference ‖ observed), nats")
        middle = (finite.min() + finite.max()) / 2
    for (row, column), value in np.ndenumerate(values):
        known = np.isfinite(value)
        colour = "white" if known and value <= middle else "black"
        text = f"{value:.3f}" if known else "∞"
        ax.text(column, row, text, ha="center", va="center", color=colour)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xlabel("target role")
    ax.set_ylabel("source role")
    ax.set_title("Distance from random subspaces")
    return ax

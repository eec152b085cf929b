"""Do high affinities find the heads that are known to do something?

:func:`head_detection` ranks heads and asks for the labelled ones; :func:`pair_retrieval` ranks
pairs and asks for those within a class, or from one class to another. Both take the result of any
metric. :func:`bootstrap_interval` says how sure the number is, :func:`paired_difference` whether
one metric is really above another. The protocols are those of arXiv 2601.10266, Tables 1 and 2.

Labels name query heads. A key-value head stands for every query head that reads it, so in a
grouped-query model its pairs count once for each of them.

What they do not show: that a metric is good. Labels are what somebody looked for and found, and an
unlabelled head is not one without a function.

The areas are scikit-learn's, an optional dependency:
``pip install "transformer-lens-projection-kernel[evaluation]"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from transformer_lens.tools.analysis._arguments import (
    ArgumentTypeError,
    require_choice,
    require_instance,
)
from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult
from transformer_lens.tools.analysis.head_affinity._areas import (
    STATISTICS,
    Evaluation,
    Statistic,
    area,
    sklearn_metrics,
)
from transformer_lens.tools.analysis.head_affinity.bootstrap import (
    Interval,
    bootstrap_interval,
    paired_difference,
)
from transformer_lens.tools.analysis.head_affinity.labels import (
    Head,
    HeadLabels,
    LabelledHead,
    gpt2_small_ioi_labels,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Head",
    "HeadDetection",
    "HeadLabels",
    "Interval",
    "LabelledHead",
    "PairRetrieval",
    "Statistic",
    "bootstrap_interval",
    "gpt2_small_ioi_labels",
    "head_detection",
    "pair_retrieval",
    "paired_difference",
]


@dataclass(frozen=True, eq=False, repr=False)
class HeadDetection(Evaluation):
    """Heads ranked by their highest affinity, and which of them are labelled.

    Attributes:
        metric, pairing, weight_state: Of the result that was evaluated.
        labels: The labels.
        heads: All heads that were ranked, ``(layer, query head)``.
        scores: Highest affinity of each head. Heads without a valid pair come last, tied.
        positive: Whether each head is labelled.
    """

    scores: np.ndarray
    positive: np.ndarray

    @property
    def chance(self) -> float:
        """Share of the labelled heads: average precision and trapezoid of arbitrary scores."""
        return float(self.positive.mean())

    def statistic(self, name: Statistic, weights: np.ndarray | None = None) -> float:
        require_choice(name, STATISTICS, "statistic")
        return area(name, self.positive, self.scores, weights)

    def curve(self) -> pd.DataFrame:
        """Points of the precision-recall curve, without an anchor: for every distinct score, what
        the heads of at least this score recall, and how precisely."""
        import pandas as pd

        precision, recall, thresholds = sklearn_metrics().precision_recall_curve(
            self.positive, self.scores
        )
        points = {"threshold": thresholds, "recall": recall[:-1], "precision": precision[:-1]}
        return pd.DataFrame(points)[::-1].reset_index(drop=True)

    def __repr__(self) -> str:
        return (
            f"HeadDetection({self.metric} {self.pairing}, {int(self.positive.sum())} of "
            f"{len(self.heads)} heads: average precision {self.average_precision:.3f}, trapezoid "
            f"{self.trapezoid:.3f}, chance {self.chance:.3f}; ROC-AUC {self.roc_auc:.3f})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class PairRetrieval(Evaluation):
    """Pairs ranked by affinity, and which of them belong together. Statistics are means over kinds.

    Attributes:
        metric, pairing, weight_state: Of the result that was evaluated.
        labels: The labels.
        heads: All heads, ``(layer, query head)``.
        pairs: Positions in ``heads`` of source and target, ``[pair, 2]``.
        scores: Affinities ``[pair]``.
        positives: Per kind of pair, a class or an edge between classes, a mask ``[pair]``.
    """

    pairs: np.ndarray
    scores: np.ndarray
    positives: Mapping[str, np.ndarray]

    @property
    def chance(self) -> float:
        """Share of the positives, mean over the kinds that have any."""
        shares = [float(positive.mean()) for positive in self.positives.values()]
        return float(np.mean([share for share in shares if share > 0]))

    def statistic(self, name: Statistic, weights: np.ndarray | None = None) -> float:
        require_choice(name, STATISTICS, "statistic")
        # A pair is in a resample as often as its two heads can meet there.
        pair_weights = None if weights is None else weights[self.pairs].prod(1)
        areas = [area(name, p, self.scores, pair_weights) for p in self.positives.values()]
        defined = [value for value in areas if not np.isnan(value)]
        return float(np.mean(defined)) if defined else float("nan")

    def by_kind(self) -> pd.DataFrame:
        """A row per kind: number of positives, the four statistics, and the chance level."""
        import pandas as pd

        rows = {
            kind: {
                "positives": int(positive.sum()),
                **{name: area(name, positive, self.scores) for name in STATISTICS},
                "chance": float(positive.mean()),
            }
            for kind, positive in self.positives.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    def __repr__(self) -> str:
        return (
            f"PairRetrieval({self.metric} {self.pairing}, {len(self.pairs):,} pairs, mean over "
            f"{len(self.positives)} kinds: average precision {self.average_precision:.3f}, "
            f"anchored trapezoid {self.anchored_trapezoid:.3f}, chance {self.chance:.3f}; "
            f"ROC-AUC {self.roc_auc:.3f})"
        )


def head_detection(
    result: HeadAffinityResult, labels: HeadLabels, *, exclude: Iterable[Head] = ()
) -> HeadDetection:
    """Are the labelled heads those with the highest affinities?

    A head's score is the highest affinity over all valid pairs that it is part of, as source or as
    target. That is the order in which heads turn up as the pairs are walked through from the best
    one down, the protocol of Table 1 of arXiv 2601.10266. Heads of equal score enter together.

    Args:
        result: Affinities by any metric.
        labels: All labelled heads are positives, all others are negatives.
        exclude: Heads to leave out of the ranking, neither positive nor negative. They still count
            as the others' partners.

    Raises:
        ArgumentTypeError: If the arguments are not of these types.
        ValueError: If labels or ``exclude`` name a head that the model does not have, if the
            result has no valid pairs, or if it is not of query heads of self-attention, nor of
            key-value heads that are known to be read by some.
        ImportError: On access to a statistic, if scikit-learn is missing.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> labels = HeadLabels.from_dict({"Writer": ["0.0", "0.1"], "Reader": ["1.1"]})
        >>> head_detection(result, labels)
        HeadDetection(projection_kernel OK, 3 of 6 heads: average precision 0.917, trapezoid 0.292,
        chance 0.500; ROC-AUC 0.944)
    """
    heads, pairs, scores = _query_head_pairs(result, labels)
    excluded = _positions(exclude, heads, "exclude")
    highest = np.full(len(heads), -np.inf)
    for side in (0, 1):
        np.maximum.at(highest, pairs[:, side], scores)
    # Just below the lowest affinity: scikit-learn takes finite scores only.
    highest = np.maximum(highest, np.nextafter(scores.min(), -np.inf))
    positive = np.zeros(len(heads), dtype=bool)
    positive[_positions(labels.heads, heads, "labels")] = True
    ranked = np.setdiff1d(np.arange(len(heads)), excluded)
    return HeadDetection(
        metric=result.metric,
        pairing=result.pairing,
        weight_state=result.weights,
        labels=labels,
        heads=tuple(heads[i] for i in ranked),
        scores=highest[ranked],
        positive=positive[ranked],
    )


def pair_retrieval(
    result: HeadAffinityResult,
    labels: HeadLabels,
    positives: Literal["same-class"] | Sequence[tuple[str, str]] = "same-class",
) -> PairRetrieval:
    """Are the pairs that belong together those with the highest affinities?

    Args:
        result: Affinities by any metric.
        labels: Classes of heads.
        positives: ``"same-class"``: a kind for every class, whose positives are the pairs with both
            heads in it (Table 2 of arXiv 2601.10266, for one role with itself). Or edges between
            classes such as ``("Previous Token", "Induction")``: a kind for every edge, whose
            positives are the pairs from the one class to the other; where the result's pairs are
            unordered, in either order. All other pairs are negatives.

    Raises:
        ArgumentTypeError: If the arguments are not of these types.
        ValueError: As :func:`head_detection`, if there is no such class, or if no kind has a
            positive pair.
        ImportError: On access to a statistic, if scikit-learn is missing.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> labels = HeadLabels.from_dict({"Writer": ["0.0", "0.1"], "Reader": ["1.1"]})
        >>> pair_retrieval(result, labels, [("Writer", "Reader")])
        PairRetrieval(projection_kernel OK, 12 pairs, mean over 1 kinds: average precision 0.583,
        anchored trapezoid 0.564, chance 0.167; ROC-AUC 0.500)
    """
    heads, pairs, scores = _query_head_pairs(result, labels)
    members = {}
    for name, of_class in labels.classes.items():
        members[name] = np.zeros(len(heads), dtype=bool)
        members[name][_positions(of_class, heads, "labels")] = True
    if isinstance(positives, str):
        require_choice(positives, ("same-class",), "positives")
        edges = {name: (name, name) for name in members}
    else:
        edges = {}
        for edge in positives:
            if isinstance(edge, str) or len(edge) != 2:
                raise ArgumentTypeError(
                    f"positives must be pairs of classes, (source, target), got {edge!r}"
                )
            source, target = edge
            edges[f"{source} -> {target}"] = (source, target)
    masks = {}
    for kind, (source, target) in edges.items():
        for name in (source, target):
            require_choice(name, tuple(members), "a class in positives")
        masks[kind] = members[source][pairs[:, 0]] & members[target][pairs[:, 1]]
        if result.layer_order == "distinct":
            masks[kind] |= members[target][pairs[:, 0]] & members[source][pairs[:, 1]]
    if not any(mask.any() for mask in masks.values()):
        raise ValueError(f"no valid {result.pairing} pair is of a kind asked for: {list(masks)}")
    return PairRetrieval(
        metric=result.metric,
        pairing=result.pairing,
        weight_state=result.weights,
        labels=labels,
        heads=heads,
        pairs=pairs,
        scores=scores,
        positives=masks,
    )


def _query_head_pairs(
    result: HeadAffinityResult, labels: HeadLabels
) -> tuple[tuple[Head, ...], np.ndarray, np.ndarray]:
    """All query heads, the valid pairs as positions among them ``[pair, 2]``, and their scores."""
    require_instance(result, HeadAffinityResult, "result")
    require_instance(labels, HeadLabels, "labels")
    if any(axis.role == "crossQ" for axis in result.axes):
        raise ValueError(
            f"{result.pairing} scores heads of cross-attention, and labels name heads of "
            "self-attention"
        )
    query_heads = _query_heads(result, labels)
    scores, valid = result.scores, result.valid_mask
    ranks = []
    for side, axis in enumerate(result.axes):
        heads = axis.ranks.shape[1]
        group, left_over = divmod(query_heads, heads)
        if left_over:
            raise ValueError(f"{query_heads} query heads cannot share {heads} heads evenly")
        shared = axis.kind == "kv" and group > 1 and axis.role != "rotaryK"
        if shared and axis.head_counts is not None:
            raise ValueError(
                f"a layer has fewer key-value heads (role {axis.role}) than others, so that the "
                "query heads that read one are not known, and labels name query heads"
            )
        scores = scores.repeat_interleave(group, dim=1 + 2 * side)
        valid = valid.repeat_interleave(group, dim=1 + 2 * side)
        ranks.append(axis.ranks.repeat_interleave(group, dim=1))
    if not bool(valid.any()):
        raise ValueError("the result has no valid pairs")

    layers = sorted({*result.source_layer_indices, *result.target_layer_indices})
    rows = [np.searchsorted(layers, axis.layer_indices) for axis in result.axes]
    # Heads that a layer does not have, or that were pruned to nothing, are left out.
    present = np.zeros((len(layers), query_heads), dtype=bool)
    for row, of_axis in zip(rows, ranks, strict=True):
        present[row] |= (of_axis > 0).cpu().numpy()
    named = tuple((layers[row], head) for row, head in np.argwhere(present).tolist())
    position = present.cumsum().reshape(present.shape) - 1
    source_layer, source_head, target_layer, target_head = valid.nonzero().cpu().numpy().T
    pairs = (
        position[rows[0][source_layer], source_head],
        position[rows[1][target_layer], target_head],
    )
    return named, np.stack(pairs, 1), scores[valid].to("cpu", torch.float64).numpy()


def _query_heads(result: HeadAffinityResult, labels: HeadLabels) -> int:
    """Query heads per layer."""
    for axis in result.axes:
        if axis.kind == "query":
            return axis.ranks.shape[1]
    if labels.heads_per_layer is None:
        raise ValueError(
            f"{result.pairing} scores pairs of key-value heads, and labels name query heads: set "
            "heads_per_layer in HeadLabels to the model's number of query heads per layer "
            f"({result.source_ranks.shape[1]} if it has no grouped-query attention)"
        )
    return labels.heads_per_layer


def _positions(wanted: Iterable[Head], heads: tuple[Head, ...], name: str) -> list[int]:
    position = {head: i for i, head in enumerate(heads)}
    wanted = list(wanted)
    unknown = sorted(set(wanted) - set(position))
    if unknown:
        raise ValueError(
            f"{name} names heads that the result does not have: "
            + ", ".join(f"L{layer}H{head}" for layer, head in unknown)
        )
    return [position[head] for head in wanted]

"""Areas under precision-recall and ROC curves, by scikit-learn, and what has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from transformer_lens.tools.analysis._weight_state import WeightState
from transformer_lens.tools.analysis.head_affinity.labels import Head, HeadLabels

#: What can be computed from scores and labels.
Statistic = Literal["average_precision", "trapezoid", "anchored_trapezoid", "roc_auc"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


def area(
    statistic: Statistic,
    positive: np.ndarray,
    scores: np.ndarray,
    weights: np.ndarray | None = None,
) -> float:
    """One of the statistics; NaN where there are no positives or no negatives.

    Args:
        statistic: ``"average_precision"``, ``"roc_auc"``, or the trapezoid rule through the points
            of the precision-recall curve: as they are, or anchored at recall 0 and precision 1.
        positive: Boolean ``[item]``.
        scores: Finite ``[item]``; equal ones share a point of the curve, so their order is nothing.
        weights: How many times each item counts. Items of weight 0 are left out.
    """
    metrics = sklearn_metrics()
    if weights is not None:
        drawn = weights > 0
        positive, scores, weights = positive[drawn], scores[drawn], weights[drawn]
    if positive.all() or not positive.any():
        return float("nan")
    if statistic == "average_precision":
        return float(metrics.average_precision_score(positive, scores, sample_weight=weights))
    if statistic == "roc_auc":
        return float(metrics.roc_auc_score(positive, scores, sample_weight=weights))
    precision, recall, _ = metrics.precision_recall_curve(positive, scores, sample_weight=weights)
    if statistic == "anchored_trapezoid":
        return float(metrics.auc(recall, precision))
    # The last point is the anchor. All scores equal leave one other, which has no width; what it
    # stands for is the precision of an arbitrary choice, the chance level.
    if len(recall) == 2:
        return float(precision[0])
    return float(metrics.auc(recall[:-1], precision[:-1]))


def sklearn_metrics() -> Any:
    """``sklearn.metrics``, or an error that says how to get it."""
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ImportError(
            "evaluation needs scikit-learn: pip install "
            '"transformer-lens-projection-kernel[evaluation]"'
        ) from error
    return metrics


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What both evaluations have in common.

    Attributes:
        metric, pairing, weight_state: Of the result that was evaluated.
        labels: The labels.
        heads: The heads that were evaluated, ``(layer, query head)``.
    """

    metric: str
    pairing: str
    weight_state: WeightState
    labels: HeadLabels
    heads: tuple[Head, ...]

    def statistic(self, name: Statistic, weights: np.ndarray | None = None) -> float:
        """The statistic, with every head counted ``weights[head]`` times; NaN if undefined."""
        raise NotImplementedError

    @property
    def average_precision(self) -> float:
        """Mean of the precision over the steps of recall. The one to use: it interpolates nothing,
        and scores without information get the chance level."""
        return self.statistic("average_precision")

    @property
    def trapezoid(self) -> float:
        """Trapezoid rule through the points of the precision-recall curve and no others.

        The estimator of the paper's head detection. The curve begins at the recall of its first
        point, so the area left of it is lost: a good metric gets less than its due.
        """
        return self.statistic("trapezoid")

    @property
    def anchored_trapezoid(self) -> float:
        """The same with the point of recall 0 and precision 1 that scikit-learn's curve adds.

        The estimator of the paper's retrieval. It interpolates towards a precision that was never
        reached: all scores equal give ``(1 + chance) / 2``.
        """
        return self.statistic("anchored_trapezoid")

    @property
    def roc_auc(self) -> float:
        """How often a positive scores above a negative, ties counted half. Chance is 0.5."""
        return self.statistic("roc_auc")

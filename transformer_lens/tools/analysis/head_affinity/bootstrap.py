"""How sure an evaluation is: bootstrap over heads, alone and paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transformer_lens.tools.analysis._arguments import (
    require_choice,
    require_instance,
    require_integer,
    warn_if_states_differ,
)
from transformer_lens.tools.analysis.head_affinity._areas import STATISTICS, Evaluation, Statistic

__all__ = ["Interval", "bootstrap_interval", "paired_difference"]


@dataclass(frozen=True, eq=False, repr=False)
class Interval:
    """An estimate and its bootstrap percentile interval.

    Attributes:
        estimate: The statistic of all heads.
        low, high: Ends of the interval.
        level: Its nominal coverage.
        resampled: The statistic of every resample in which it is defined.
    """

    estimate: float
    low: float
    high: float
    level: float
    resampled: np.ndarray

    @property
    def share_above_zero(self) -> float:
        """Share of the resamples above 0; of a difference, how often the first was ahead."""
        return float((self.resampled > 0).mean())

    def __repr__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.level:.0%})"


def bootstrap_interval(
    evaluation: Evaluation | Sequence[Evaluation],
    statistic: Statistic = "average_precision",
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """How much a statistic depends on which heads there happen to be.

    Heads are drawn with replacement, as many as there are, each with its label and its score (or,
    with pairs, with its affinities to the other heads drawn; a head is no partner of itself). A
    head's score stays what it is in the whole model. Covered is therefore the choice of heads, and
    neither the choice of labels, nor noise in the weights, nor other models.

    Args:
        evaluation: A :class:`HeadDetection` or :class:`PairRetrieval`, or several of the same heads
            and labels, of whose statistics the mean is taken.
        statistic: ``"average_precision"``, ``"trapezoid"``, ``"anchored_trapezoid"`` or
            ``"roc_auc"``.
        level: Coverage of the interval.
        resamples: How many. Those in which the statistic is undefined, for want of positives, are
            left out, and so are single kinds of pairs without any.
        seed: Of the draws; the same seed draws the same heads for every evaluation.

    Raises:
        ValueError: If an argument is out of range, if the evaluations differ in heads or labels, or
            if the statistic is undefined in every resample.

    Example:
        >>> from transformer_lens.tools.analysis.head_affinity.evaluation import *
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> labels = HeadLabels.from_dict({"Writer": ["0.0", "0.1"], "Reader": ["1.1"]})
        >>> interval = bootstrap_interval(head_detection(result, labels), resamples=100)
        >>> interval.low <= interval.estimate <= interval.high
        True
    """
    evaluations = _as_group(evaluation)
    return _interval([evaluations], statistic, level, resamples, seed)


def paired_difference(
    first: Evaluation | Sequence[Evaluation],
    second: Evaluation | Sequence[Evaluation],
    statistic: Statistic = "average_precision",
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Is one metric really above another: the difference, with both computed on the same resamples.

    Two metrics find much the same heads hard, so the difference is known far better than the
    overlap of the two separate intervals suggests.

    Args:
        first, second: As ``evaluation`` in :func:`bootstrap_interval`, of the same heads and
            labels.
        statistic, level, resamples, seed: As in :func:`bootstrap_interval`.

    Returns:
        The interval of first minus second.

    Raises:
        ValueError: As in :func:`bootstrap_interval`.

    Warns:
        UserWarning: If some were computed from raw and some from folded weights.

    Example:
        >>> from transformer_lens.tools.analysis.head_affinity.evaluation import *
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> labels = HeadLabels.from_dict({"Writer": ["0.0", "0.1"], "Reader": ["1.1"]})
        >>> detection = head_detection(result, labels)
        >>> paired_difference(detection, detection, resamples=100)
        0.000 [0.000, 0.000] (95%)
    """
    groups = [_as_group(first), _as_group(second)]
    warn_if_states_differ(evaluation.weight_state for group in groups for evaluation in group)
    return _interval(groups, statistic, level, resamples, seed)


def _interval(
    groups: list[Sequence[Evaluation]],
    statistic: Statistic,
    level: float,
    resamples: int,
    seed: int,
) -> Interval:
    require_choice(statistic, STATISTICS, "statistic")
    require_integer(resamples, "resamples")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}")
    reference = groups[0][0]
    for evaluation in (evaluation for group in groups for evaluation in group):
        if evaluation.heads != reference.heads or evaluation.labels != reference.labels:
            raise ValueError(
                f"{evaluation.metric} {evaluation.pairing} and {reference.metric} "
                f"{reference.pairing} were evaluated on different heads or labels, so they cannot "
                "share resamples"
            )

    def value(weights: np.ndarray | None) -> float:
        first, *rest = (
            np.mean([evaluation.statistic(statistic, weights) for evaluation in group])
            for group in groups
        )
        return float(first - sum(rest))

    count = len(reference.heads)
    draws = np.random.default_rng(seed).multinomial(
        count, np.full(count, 1 / count), size=resamples
    )
    resampled = np.array([value(weights) for weights in draws])
    resampled = resampled[~np.isnan(resampled)]
    if not len(resampled):
        raise ValueError(f"{statistic} is undefined in all {resamples} resamples")
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value(None), float(low), float(high), level, resampled)


def _as_group(evaluation: Evaluation | Sequence[Evaluation]) -> Sequence[Evaluation]:
    group = list(evaluation) if isinstance(evaluation, Sequence) else [evaluation]
    for member in group:
        require_instance(member, Evaluation, "evaluation")
    if not group:
        raise ValueError("there must be at least one evaluation")
    return group

"""Which affinities are more than chance, for three meanings of chance.

:func:`significance` asks of every valid pair how often a null model gives a score as high. The
three nulls keep more and more of what is known of the heads, so fewer and fewer pairs are beyond
them:

=================  ==========================================  =================================
null               keeps                                       destroys
=================  ==========================================  =================================
``"rotation"``     every head's rank and singular values       where in the residual stream any
                                                               head reads or writes
``"anisotropic"``  ranks, and how much each role as a whole    which head of a role has which of
                   uses each direction of the residual stream  the role's directions
``"degree"``       how much each head overlaps with all        which of its partners a head
                   others on average                           prefers
=================  ==========================================  =================================

A small p-value says that a pair is unusual under the null, not that its heads communicate, nor that
they do anything on any input. The p-values of pairs that share a head are dependent; the procedure
of Benjamini and Hochberg controls the false discovery rate for independent and for positively
dependent ones (Benjamini and Yekutieli 2001), which is plausible here but not proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._arguments import (
    require_choice,
    require_instance,
    require_integer,
    warn_if_states_differ,
)
from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult
from transformer_lens.tools.analysis._head_subspaces import HeadSubspaces, attention_head_subspaces
from transformer_lens.tools.analysis._head_weights import (
    HEAD_KINDS,
    HeadWeights,
    read_head_weights,
)
from transformer_lens.tools.analysis.head_affinity._nulls import (
    Verdicts,
    by_anisotropy,
    by_degree,
    by_rotation,
    rotated_roles,
)
from transformer_lens.tools.analysis.head_affinity.informativeness import ambient_dimension

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Null", "Significance", "benjamini_hochberg", "significance"]

Null = Literal["rotation", "anisotropic", "degree"]

_ROTATABLE = (
    "projection_kernel",
    "simple_composition_score",
    "composition_score",
    "linear_cka",
)


@dataclass(frozen=True, eq=False, repr=False)
class Significance:
    """How unusual the scores of a result are under a null.

    All tensors are in float64, on the CPU, and have the shape of the result's scores. Pairs that
    are not valid have z 0, p 1 and q 1.

    Attributes:
        result: Whose scores were judged.
        null: The null.
        z: Scores less the null's mean, over its standard deviation. For Composition Scores that of
            the squares, whose moments are known.
        p: Probability of a score at least as high under the null; one-sided.
        q: Smallest false discovery rate at which the pair counts as a discovery.
    """

    result: HeadAffinityResult
    null: Null
    z: Float[torch.Tensor, "source_layer source_head target_layer target_head"]
    p: Float[torch.Tensor, "source_layer source_head target_layer target_head"]
    q: Float[torch.Tensor, "source_layer source_head target_layer target_head"]

    def share_beyond(self, level: float = 0.01) -> float:
        """The share of valid pairs with a p-value of at most ``level``; ``level`` if chance holds.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> significance(result, null="rotation").share_beyond(0.05)
            0.25
        """
        return float((self.p[self.result.valid_mask.cpu()] <= level).double().mean())

    def to_dataframe(self, k: int | None = None) -> pd.DataFrame:
        """The result's table, best score first, with the columns ``z``, ``p`` and ``q``.

        Args:
            k: Only the ``k`` highest-scoring pairs; ``None`` for all.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> verdict = significance(result, null="rotation")
            >>> verdict.to_dataframe(1)[["source", "target", "score", "z"]].round(2)
              source target  score     z
            0   L0H0   L1H1    4.0  5.92
        """
        table = self.result.to_dataframe(k)
        if len(table):
            _, positions = self.result.topk(len(table))
            where = tuple(positions.cpu().T)
            for name in ("z", "p", "q"):
                table[name] = getattr(self, name)[where].numpy()
        return table

    def __repr__(self) -> str:
        discoveries = int((self.q <= 0.05).sum())
        return (
            f"Significance({self.result.metric} {self.result.pairing} against the {self.null} "
            f"null: {discoveries:,} of {int(self.result.valid_mask.sum()):,} pairs at a false "
            "discovery rate of 5 %)"
        )


def significance(
    result: HeadAffinityResult,
    model: Any = None,
    *,
    null: Null = "anisotropic",
    n_samples: int = 1_000,
    seed: int = 0,
    progress: bool | None = None,
) -> Significance:
    """z-scores, p-values and false discovery rates of a result's valid pairs.

    ``null="rotation"``: every head's matrix is turned by its own random rotation of the residual
    stream. Keeps ranks and singular values; destroys every preference for a direction. The law is
    known (see the module ``reference``) and nothing is sampled. For the Projection Kernel it is the
    Haar reference of random subspaces; for Composition Scores and the textbook linear CKA, which
    weigh directions by their gains, it allows for heads that have few strong ones. Trained heads of
    all kinds prefer the same directions, so it finds 29 to 91 % of all pairs surprising, by
    pairing and model, where chance would find 1 % (``demos/null_study.py``).

    ``null="anisotropic"``: source and target are independent random subspaces whose mean projectors
    are those of their roles: spans of Gaussian vectors (matrix angular central Gaussian; Chikuse
    1990) whose covariance is about ``C (1 - C)⁻¹`` for the mean projector ``C`` of a role's heads.
    Covariance ``C`` itself would show only 0.5 to 0.8 of the anisotropy it came from. Keeps ranks
    and how much the role uses each direction; destroys what tells its heads apart. There is one
    sample of independent draws per pair of ranks, and p-values are ``(b + 1)/(n_samples + 1)`` with
    ``b`` draws at least as high (Phipson and Smyth 2010). Projection Kernels only.

    ``null="degree"``: a score is the sum of what its source and what its target contributes, and of
    normal noise. Contributions come from least squares over the valid pairs, the noise's size from
    the median of the residuals, each over what the fit left of it. Keeps how promiscuous each head
    is; destroys preferences for particular partners. The additive model is that of
    :meth:`HeadAffinityResult.relative`, which differs by using plain means where pairs are missing.
    Noise of trained heads has longer tails than normal, hence more pairs beyond high levels than a
    normal law lets expect: read these p-values as a ranking. Any metric.

    Args:
        result: What to judge.
        model: The ``TransformerBridge`` that ``result`` came from; for the anisotropic null its
            :class:`HeadSubspaces` will do. The degree null needs none, nor does the rotation null
            of Projection Kernels.
        null: ``"rotation"``, ``"anisotropic"`` or ``"degree"``.
        n_samples: Draws of the anisotropic null per pair of ranks. No p-value is below
            ``1/(n_samples + 1)``; to find a single pair among ``N`` at a false discovery rate of
            5 % takes ``20 N``.
        seed: Of the draws, the same on all devices.
        progress: ``True`` for a progress bar, ``False`` for none, ``None`` for one that appears
            when sampling takes more than a few seconds.

    Returns:
        Tensors of the shape of ``result.scores``.

    Raises:
        ArgumentTypeError, ValueError: If an argument is out of range, if the null needs a model or
            another one, if the metric has no such null, or if ``model`` has other heads than the
            result's.
        ImportError: For the rotation null, if SciPy is not installed.

    Warns:
        UserWarning: If the model's weights were folded since, or the result's were and the model's
            are not.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> verdict = significance(result, null="rotation")
        >>> verdict
        Significance(projection_kernel OK against the rotation null: 3 of 12 pairs at a false \
discovery rate of 5 %)
    """
    require_instance(result, HeadAffinityResult, "result")
    require_choice(null, ("rotation", "anisotropic", "degree"), "null")
    n_samples = require_integer(n_samples, "n_samples")
    seed = require_integer(seed, "seed", minimum=0)
    z, p = _verdicts(result, model, null, n_samples, seed, progress)

    valid = result.valid_mask.cpu().numpy().reshape(p.shape)
    q = np.ones_like(p)
    q[valid] = benjamini_hochberg(p[valid])

    def shaped(values: np.ndarray, outside: float) -> torch.Tensor:
        return torch.from_numpy(np.where(valid, values, outside)).reshape(result.scores.shape)

    return Significance(result=result, null=null, z=shaped(z, 0), p=shaped(p, 1), q=shaped(q, 1))


def _verdicts(
    result: HeadAffinityResult,
    model: Any,
    null: Null,
    n_samples: int,
    seed: int,
    progress: bool | None,
) -> Verdicts:
    if null == "degree":
        return by_degree(result)
    metrics = _ROTATABLE if null == "rotation" else ("projection_kernel",)
    if result.metric not in metrics:
        raise ValueError(
            f"the {null} null is known for {', '.join(metrics)}, got {result.metric}; "
            "null='degree' takes any metric"
        )
    if model is None and (null, result.metric) != ("rotation", "projection_kernel"):
        raise ValueError(
            f"the {null} null of {result.metric} needs the model that the result came from"
        )
    if null == "rotation":
        if result.metric == "projection_kernel":
            return by_rotation(result, None)
        weights = read_head_weights(model, rotated_roles(result), stream=result.stream)
        _require_same_model(result, weights, weights.d_model)
        warn_if_states_differ([result.weights, weights.state], stacklevel=4)
        return by_rotation(result, weights)

    if isinstance(model, HeadSubspaces):
        subspaces = model
        if (subspaces.rank, subspaces.rtol) != (result.rank, result.rtol):
            raise ValueError(
                f"the subspaces were extracted with rank={subspaces.rank!r} and rtol="
                f"{subspaces.rtol:.3g}, the result with rank={result.rank!r} and rtol="
                f"{result.rtol:.3g}"
            )
    else:
        subspaces = attention_head_subspaces(
            model,
            (result.source_role, result.target_role),
            rank=result.rank,
            rtol=result.rtol,
            stream=result.stream,
        )
    _require_same_model(result, subspaces, subspaces.d_model)
    warn_if_states_differ([result.weights, subspaces.weights], stacklevel=4)
    source, target = subspaces[result.source_role], subspaces[result.target_role]
    return by_anisotropy(result, source, target, n_samples, seed, progress)


def _require_same_model(
    result: HeadAffinityResult, model: HeadSubspaces | HeadWeights, d_model: int
) -> None:
    """Refuse a model whose heads are others than those of the result."""
    if d_model != ambient_dimension(result):
        raise ValueError(
            f"the result's residual stream is {result.d_model} wide, the model's {d_model}: it "
            "came from another model"
        )
    if model.stream != result.stream:
        raise ValueError(
            f"the result is of the stream {result.stream!r}, the subspaces of {model.stream!r}"
        )
    for axis in result.axes:
        found, expected = model[axis.role], axis.ranks.shape[1]
        # Composition Scores count query heads where the model has key-value heads.
        heads = found.heads if HEAD_KINDS[axis.role] == axis.kind else expected
        if found.layer_indices != axis.layer_indices or heads != expected:
            raise ValueError(
                f"the result has {expected} heads of role {axis.role} in each of the layers "
                f"{list(axis.layer_indices)}, the model {heads} in {list(found.layer_indices)}: "
                "it came from another model"
            )


def benjamini_hochberg(p_values: Float[np.ndarray, "test"]) -> Float[np.ndarray, "test"]:
    """Adjusted p-values: the smallest false discovery rate at which each test is a discovery.

    Benjamini and Hochberg, *Controlling the false discovery rate*, 1995.

    Raises:
        ValueError: If ``p_values`` has several dimensions or holds what is no probability.

    Example:
        >>> benjamini_hochberg(np.array([0.01, 0.5, 0.02])).round(3)
        array([0.03, 0.5 , 0.03])
    """
    p_values = np.asarray(p_values, np.float64)
    if p_values.ndim != 1 or not ((p_values >= 0) & (p_values <= 1)).all():
        raise ValueError(
            "p_values must be one-dimensional and between 0 and 1, got shape "
            f"{p_values.shape} with values from {p_values.min(initial=1)} to "
            f"{p_values.max(initial=0)}"
        )
    order = np.argsort(p_values)
    count = len(p_values)
    adjusted = p_values[order] * count / np.arange(1, count + 1)
    # A test is not harder to discover than one with a larger p-value.
    adjusted = np.minimum.accumulate(adjusted[::-1])[::-1]
    q_values = np.empty(count)
    q_values[order] = adjusted
    return q_values

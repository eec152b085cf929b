"""How far a pairing's scores are from those of random subspaces, in one number.

:func:`informativeness` is the divergence that arXiv 2601.10266 calls so, and
:func:`informativeness_table` takes it of all pairs of roles. It sums up a whole pairing; for single
pairs see the module ``significance``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._arguments import require_instance
from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult
from transformer_lens.tools.analysis._head_subspaces import HeadSubspaces
from transformer_lens.tools.analysis._head_weights import ALL_ROLES, AttentionRole
from transformer_lens.tools.analysis._pairings import pair_mask
from transformer_lens.tools.analysis._subspace import (
    RandomSubspaceReference,
    random_projection_kernel_moments,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Informativeness", "informativeness", "informativeness_table"]

#: Equal bins from 0 to the smaller rank (arXiv 2601.10266, figure 8).
BINS = 255


@dataclass(frozen=True, eq=False, repr=False)
class Informativeness:
    """How far the scores of a pairing are from those of random subspaces.

    Attributes:
        divergence: Kullback-Leibler divergence of the observed scores from the reference,
            ``Σ reference · ln(reference / observed)``, in nats.
        edges: Edges of the bins.
        observed, reference: Share of the scores, and probability, of each bin.
        observed_mean, reference_mean: Means of scores and of reference.
        pairs: Number of pairs.
        pairing: Both roles in short, such as ``OQ``.
    """

    divergence: float
    edges: Float[np.ndarray, "edge"]
    observed: Float[np.ndarray, "bin"]
    reference: Float[np.ndarray, "bin"]
    observed_mean: float
    reference_mean: float
    pairs: int
    pairing: str

    def __repr__(self) -> str:
        return (
            f"Informativeness({self.pairing}: {self.divergence:.3f} nats from chance, mean "
            f"{self.observed_mean:.3f} where chance gives {self.reference_mean:.3f}, "
            f"{self.pairs:,} pairs)"
        )


def informativeness(result: HeadAffinityResult) -> Informativeness:
    """Divergence of a pairing's scores from those of random subspaces (arXiv 2601.10266, figure 8).

    The scores' histogram over 255 equal bins from 0 to the smaller rank is compared with the
    probabilities that the normal law with the exact moments gives to the bins; what it gives to
    impossible scores, much where ranks are of a few dimensions only, goes to the outermost bins.
    Where heads differ in rank the reference is the mixture over the pairs' ranks. Bins to which it
    gives less than float64 can tell from nothing count as impossible.

    The number depends on the bins and on the number of pairs, and is infinite where too few pairs
    leave a possible bin empty. It compares pairings of one model, not models.

    Args:
        result: Projection Kernels; the paper takes forward pairs.

    Returns:
        The divergence with both distributions and means.

    Raises:
        ArgumentTypeError: If ``result`` is something else.
        ValueError: If the scores are no Projection Kernels, or none is valid, or if the result does
            not know ``d_model``.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> informativeness(result)
        Informativeness(OK: inf nats from chance, mean 2.000 where chance gives 2.000, 12 pairs)
    """
    require_instance(result, HeadAffinityResult, "result")
    if result.metric != "projection_kernel":
        raise ValueError(f"informativeness is defined for projection_kernel, got {result.metric}")
    return _informativeness(
        result.scores[result.valid_mask],
        rank_pairs(result)[result.valid_mask.cpu()],
        ambient_dimension(result),
        result.pairing,
    )


def informativeness_table(
    subspaces: HeadSubspaces, *, progress: bool | None = None
) -> pd.DataFrame:
    """:func:`informativeness` of every pair of extracted roles, sixteen with all four.

    Args:
        subspaces: From :func:`attention_head_subspaces`.
        progress: ``True`` for a progress bar, ``False`` for none, ``None`` for one that appears
            when the work takes more than a few seconds.

    Returns:
        One row per pair of roles: ``source_role``, ``target_role``, ``divergence``, ``mean``,
        ``chance`` (the reference's mean) and ``pairs``. All are taken over forward pairs, source
        layer before target layer. ``table.pivot(index="source_role", columns="target_role",
        values="divergence")`` is the paper's heat map.

    Raises:
        ArgumentTypeError: If ``subspaces`` is something else.
        ValueError: If there is no forward pair.

    Example:
        >>> table = informativeness_table(attention_head_subspaces(model, roles=("O", "K")))
        >>> table[["source_role", "target_role", "mean", "chance"]].round(2)
          source_role target_role  mean  chance
        0           K           K  1.92     2.0
        1           K           O  2.00     2.0
        2           O           K  2.00     2.0
        3           O           O  2.00     2.0
    """
    import pandas as pd

    require_instance(subspaces, HeadSubspaces, "subspaces")
    roles = [role for role in ALL_ROLES if role in subspaces.by_role]
    rows = []
    for source_role in roles:
        for target_role in roles:
            found = _forward_informativeness(subspaces, source_role, target_role, progress)
            rows.append(
                {
                    "source_role": source_role,
                    "target_role": target_role,
                    "divergence": found.divergence,
                    "mean": found.observed_mean,
                    "chance": found.reference_mean,
                    "pairs": found.pairs,
                }
            )
    return pd.DataFrame(rows)


def _forward_informativeness(
    subspaces: HeadSubspaces,
    source_role: AttentionRole,
    target_role: AttentionRole,
    progress: bool | None,
) -> Informativeness:
    source, target = subspaces[source_role], subspaces[target_role]
    ranks = _all_pairs(source.retained_ranks.cpu(), target.retained_ranks.cpu())
    valid = pair_mask(source, target, "forward") & (ranks > 0).all(-1)
    scores = subspaces.overlap(
        source_role, target_role, keep=valid.to(source.bases.device), progress=progress
    )
    return _informativeness(
        scores[valid.to(scores.device)],
        ranks[valid],
        source.bases.shape[-2],
        source_role + target_role,
    )


def _informativeness(
    scores: torch.Tensor, ranks: torch.Tensor, d_model: int, pairing: str
) -> Informativeness:
    values = scores.cpu().double().numpy()
    if values.size == 0:
        raise ValueError(f"{pairing} has no valid pair to compare with chance")
    edges = np.linspace(0, int(ranks.amin(-1).max()), BINS + 1)
    observed = np.histogram(values.clip(edges[0], edges[-1]), edges)[0] / values.size

    components = chance_components(ranks, d_model)
    reference = np.zeros(BINS)
    for share, moments in components:
        reference += share * _normal_masses(edges, moments.mean, moments.variance)

    possible = reference > np.finfo(np.float64).eps
    with np.errstate(divide="ignore"):
        ratios = reference[possible] / observed[possible]
    return Informativeness(
        divergence=float((reference[possible] * np.log(ratios)).sum()),
        edges=edges,
        observed=observed,
        reference=reference,
        observed_mean=float(values.mean()),
        reference_mean=sum(share * moments.mean for share, moments in components),
        pairs=values.size,
        pairing=pairing,
    )


def _normal_masses(edges: np.ndarray, mean: float, variance: float) -> np.ndarray:
    if variance == 0:
        return np.histogram([mean], edges)[0].astype(np.float64)
    positions = torch.from_numpy((edges - mean) / math.sqrt(variance))
    positions[0], positions[-1] = -math.inf, math.inf
    return np.diff(torch.special.ndtr(positions).numpy())


def ambient_dimension(result: HeadAffinityResult) -> int:
    """Width of the residual stream that a result's heads live in."""
    if result.d_model is None:
        raise ValueError(
            "the result does not know the width of the residual stream. Pass "
            "dataclasses.replace(result, d_model=model.cfg.d_model)"
        )
    return result.d_model


def chance_components(
    ranks: torch.Tensor, d_model: int
) -> list[tuple[float, RandomSubspaceReference]]:
    """The laws that pairs of random subspaces follow, and the share of pairs that each has.

    Args:
        ranks: Ranks ``[pair, 2]`` of source and target.
        d_model: Ambient dimension.
    """
    kinds, counts = ranks.unique(dim=0, return_counts=True)
    return [
        (count / len(ranks), random_projection_kernel_moments(d_model, rank, other_rank))
        for (rank, other_rank), count in zip(kinds.tolist(), counts.tolist(), strict=True)
    ]


def rank_pairs(result: HeadAffinityResult) -> torch.Tensor:
    """Retained ranks of source and target, in the last axis of an int64 tensor on the CPU."""
    return _all_pairs(
        result.source_ranks.cpu().clamp(max=result.source_rank),
        result.target_ranks.cpu().clamp(max=result.target_rank),
    )


def _all_pairs(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    shape = source.shape + target.shape
    return torch.stack([source[:, :, None, None].expand(shape), target.expand(shape)], -1)

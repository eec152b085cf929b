"""The null models behind :mod:`significance`: per pair of heads, how unusual its score is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult
from transformer_lens.tools.analysis._head_subspaces import RoleSubspaces
from transformer_lens.tools.analysis._head_weights import AttentionRole, HeadWeights
from transformer_lens.tools.analysis._linalg import (
    exact_arithmetic,
    singular_values,
    thin_qr,
    thin_svd,
)
from transformer_lens.tools.analysis._pairwise_overlap import with_progress
from transformer_lens.tools.analysis.head_affinity._frames import CIRCUIT_PARTNERS, FrameReader
from transformer_lens.tools.analysis.head_affinity.informativeness import (
    ambient_dimension,
    rank_pairs,
)
from transformer_lens.tools.analysis.head_affinity.reference import (
    OverlapReference,
    random_overlap_reference,
)

#: Bound of the temporaries of one batch of sampled subspaces.
BATCH_BYTES = 64 * 1024**2

#: Within one role, how many times its heads are dealt into two halves.
SPLITS = 4

#: Ratio of standard deviation to median absolute deviation for the normal law.
_NORMAL_MAD = 1.4826022185056018

#: z-scores and p-values of all pairs; what stands at pairs that are not valid does not matter.
Verdicts = tuple[Float[np.ndarray, "source target"], Float[np.ndarray, "source target"]]


def rotated_roles(result: HeadAffinityResult) -> list[AttentionRole]:
    """The roles whose weights decide a result's spectra."""
    own = (result.source_role, result.target_role)
    circuits = result.metric == "composition_score"
    return list(dict.fromkeys(own + tuple(CIRCUIT_PARTNERS[role] for role in own) * circuits))


def by_rotation(result: HeadAffinityResult, weights: HeadWeights | None) -> Verdicts:
    """Every head turned at random; Projection Kernels do without the weights."""
    spectra = _rank_spectra(result) if weights is None else _spectra(result, weights)
    reference = random_overlap_reference(*spectra, ambient_dimension(result))
    overlaps = _flat(result.scores)
    if "composition" in result.metric:
        # Square roots of overlaps. Their moments have no closed form, those of the squares do.
        overlaps = overlaps**2
    return _standardised(overlaps, reference), reference.survival(overlaps)


def _standardised(overlaps: np.ndarray, reference: OverlapReference) -> np.ndarray:
    deviations = np.sqrt(reference.variance)
    varies = deviations > 0
    return np.where(varies, (overlaps - reference.mean) / np.where(varies, deviations, 1), 0)


def _rank_spectra(result: HeadAffinityResult) -> tuple[np.ndarray, np.ndarray]:
    """Squared singular values of orthonormal bases, ``[source, width]`` and ``[target, width]``."""
    source, target = (
        (np.arange(retained) < ranks.cpu().numpy().reshape(-1, 1)).astype(np.float64)
        for ranks, retained in (
            (result.source_ranks, result.source_rank),
            (result.target_ranks, result.target_rank),
        )
    )
    return source, target


def _spectra(result: HeadAffinityResult, weights: HeadWeights) -> tuple[np.ndarray, np.ndarray]:
    """Squared singular values ``[source, width]`` and ``[target, width]`` behind the overlaps."""
    circuits = result.metric == "composition_score"
    reader = FrameReader(weights)

    def spectrum(role: AttentionRole) -> np.ndarray:
        frames = reader.circuit(role) if circuits else reader.single(role)
        squares = singular_values(frames.factors.flatten(0, 1)).square().cpu().double().numpy()
        if result.metric != "linear_cka":
            return squares
        # CKA divides by the norms of the Gram matrices and not by those of the frames.
        norms = np.sqrt((squares**2).sum(1, keepdims=True))
        return squares / np.where(norms > 0, norms, 1)

    with exact_arithmetic(weights.device):
        return spectrum(result.source_role), spectrum(result.target_role)


def by_anisotropy(
    result: HeadAffinityResult,
    source: RoleSubspaces,
    target: RoleSubspaces,
    n_samples: int,
    seed: int,
    progress: bool | None,
) -> Verdicts:
    """Independent subspaces that prefer the directions that their roles' heads prefer."""
    scores, valid = _flat(result.scores), _flat(result.valid_mask)
    pairs = rank_pairs(result).flatten(2, 3).flatten(0, 1)
    kinds = pairs[torch.from_numpy(valid)].unique(dim=0)
    z, p = np.zeros_like(scores), np.ones_like(scores)
    if not len(kinds):
        return z, p
    generator = torch.Generator().manual_seed(seed)
    with exact_arithmetic(source.bases.device):
        samples = _sampled_overlaps(source, target, kinds, n_samples, generator, progress)
    for ranks, drawn in zip(kinds, samples, strict=True):
        these = (pairs == ranks).all(-1).numpy()
        deviation = drawn.std()
        if deviation > 0:
            z[these] = (scores[these] - drawn.mean()) / deviation
        beyond = n_samples - np.searchsorted(np.sort(drawn), scores[these])
        # Phipson and Smyth 2010: the observed score is one more draw from the null, so that no
        # p-value is 0.
        p[these] = (beyond + 1) / (n_samples + 1)
    return z, p


def _sampled_overlaps(
    source: RoleSubspaces,
    target: RoleSubspaces,
    kinds: torch.Tensor,
    n_samples: int,
    generator: torch.Generator,
    progress: bool | None,
) -> Float[np.ndarray, "kind sample"]:
    """Overlaps of independent pairs of subspaces, for every kind of rank pair.

    Every draw has a source and a target of its own. Crossing ``n`` sources with ``n`` targets would
    give ``n²`` overlaps for the price of ``2n`` subspaces, but dependent ones, and the p-value
    above counts on independent draws.
    """
    if source.role == target.role:
        # A direction that one head alone prefers is in its role's mean projector too. Two draws
        # from the same mean would share it, although the head forms no pair with itself. Draws
        # from disjoint halves of the heads do not; averaged over splits their mean overlap is that
        # of different heads.
        count = source.ranks.numel()
        halves = [
            torch.randperm(count, generator=generator).chunk(2)
            for _ in range(min(SPLITS, n_samples))
        ]
    else:
        halves = [(torch.arange(source.ranks.numel()), torch.arange(target.ranks.numel()))]
    splits = []
    for some, others in halves:
        first, second = _Prior.of(source, some), _Prior.of(target, others)
        splits.append((first, second, first.directions.mT @ second.directions))

    steps = []
    for kind, (rank, other_rank) in enumerate(kinds.tolist()):
        bytes_per_draw = 3 * source.bases[0, 0, :, 0].nbytes * (rank + other_rank)
        batch = max(1, BATCH_BYTES // bytes_per_draw)
        bounds = [n_samples * split // len(splits) for split in range(len(splits) + 1)]
        for split, start, stop in zip(splits, bounds[:-1], bounds[1:], strict=True):
            steps += [
                (kind, rank, other_rank, split, slice(first, min(first + batch, stop)))
                for first in range(start, stop, batch)
            ]
    samples = np.empty((len(kinds), n_samples))
    for kind, rank, other_rank, (first, second, between), where in with_progress(
        steps, progress, "random subspaces"
    ):
        count = where.stop - where.start
        left = first.draw(count, rank, generator)
        right = second.draw(count, other_rank, generator)
        products = left.mT @ (between @ right)
        samples[kind, where] = products.square().sum((-2, -1)).cpu().double().numpy()
    return samples


@dataclass(frozen=True, eq=False)
class _Prior:
    """Random subspaces with a given mean projector.

    Attributes:
        directions: Eigenvectors of the mean projector, in columns.
        scales: Standard deviations along them of the Gaussian vectors that span a subspace.
    """

    directions: Float[torch.Tensor, "d_model d_model"]
    scales: Float[torch.Tensor, "d_model"]

    @classmethod
    def of(cls, role: RoleSubspaces, heads: torch.Tensor) -> _Prior:
        """The prior of some of a role's heads.

        ``r`` Gaussian vectors of covariance ``Σ`` span a subspace whose projector has, in the
        limit of many, the mean ``Σ (Σ + τ)⁻¹`` with the ``τ`` for which its trace is ``r``
        (deterministic equivalent; Marchenko and Pastur 1967). A mean projector ``C`` hence asks for
        ``Σ = C (1 - C)⁻¹``. With ``Σ = C``, directions that many heads share would be drawn far too
        seldom. For finite ``r`` an eigenvalue is ``E[x s / (1 + x s)]`` with a random ``s`` of mean
        1 and a variance of about ``2/(r + 2)``; to second order that is less than ``x/(1 + x)`` by
        ``c² (1 - c)`` times the variance, which is made up for.
        """
        chosen = heads.to(role.ranks.device)
        frames = role.frames
        ranks = role.retained_ranks.flatten()[chosen]
        present = chosen[ranks > 0]
        mean = frames.new_zeros(frames.shape[1], frames.shape[1])
        for head in present:
            mean.addmm_(frames[head], frames[head].mT)
        count = max(1, len(present))
        directions, shares = thin_svd(mean / count)
        # What a role's heads all share, or all avoid, the next head may not: no direction's share
        # is believed closer to 1 than by one head in count + 1, nor to 0 than by an even part of
        # one.
        rank = float(ranks[ranks > 0].double().mean()) if len(present) else 1.0
        shares = shares.clamp(rank / len(mean) / (count + 1), 1 - 1 / (count + 1))
        shares = shares + 2 / (rank + 2) * shares.square() * (1 - shares)
        return cls(directions, (shares / (1 - shares)).sqrt())

    def draw(self, count: int, rank: int, generator: torch.Generator) -> torch.Tensor:
        """Orthonormal frames ``[count, d_model, rank]`` in coordinates along ``directions``."""
        # On the CPU, so that a seed means the same on every device.
        normal = torch.randn(
            count, len(self.scales), rank, generator=generator, dtype=self.scales.dtype
        )
        frames, _ = thin_qr(normal.to(self.scales.device) * self.scales[:, None])
        return frames


def by_degree(result: HeadAffinityResult) -> Verdicts:
    """A sum of what the source and what the target contributes, and normal noise."""
    scores, valid = _flat(result.scores), _flat(result.valid_mask)
    expected, leverage, unexplained = _additive_fit(
        scores, valid, unordered=result.layer_order == "distinct"
    )
    # A residual of a pair that decided its heads' contributions by itself is 0 whatever its score.
    free = valid & (leverage < 1 - 1e-9)
    z = np.zeros_like(scores)
    if unexplained > 0 and free.any():
        residuals = (scores - expected)[free] / np.sqrt(1 - leverage[free])
        # Their median: a standard deviation would grow with the very pairs that are looked for.
        deviation = _NORMAL_MAD * np.median(np.abs(residuals))
        if deviation > np.finfo(np.float32).eps * np.abs(scores).max():
            z[free] = residuals / deviation
    # Not ndtr, which torch computes as 1 + erf and so loses the far tail.
    p = torch.special.erfc(torch.from_numpy(z / math.sqrt(2))).numpy() / 2
    return z, np.where(free, p, 1.0)


def _additive_fit(
    scores: np.ndarray, valid: np.ndarray, *, unordered: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Least-squares fit of ``score = source + target`` over the valid pairs.

    With pairs missing, as they are from every forward pairing, differences from row and column
    means do not fit the model: the mean of a row depends on which columns it has.

    Returns:
        Fitted values and leverages (share of a pair's own noise that the fit takes up), for all
        pairs, and the number of degrees of freedom left.
    """
    weights = valid.astype(np.float64)
    values = scores * weights
    if unordered:
        # One contribution per head, whichever side of a pair it is on.
        normal = np.diag(weights.sum(0) + weights.sum(1)) + weights + weights.T
        totals = values.sum(0) + values.sum(1)
        source = target = np.arange(len(scores))
    else:
        normal = np.block(
            [
                [np.diag(weights.sum(1)), weights],
                [weights.T, np.diag(weights.sum(0))],
            ]
        )
        totals = np.concatenate([values.sum(1), values.sum(0)])
        source = np.arange(len(scores))
        target = len(scores) + np.arange(scores.shape[1])
    # What one side contributes may move to the other: the normal matrix is singular, and pinv's own
    # tolerance is below the rounding of its eigenvalues.
    tolerance = len(normal) * np.finfo(normal.dtype).eps
    inverse = np.linalg.pinv(normal, tolerance, hermitian=True)
    effects = inverse @ totals
    variances = np.diag(inverse)
    expected = effects[source][:, None] + effects[target]
    leverage = variances[source][:, None] + variances[target] + 2 * inverse[np.ix_(source, target)]
    unexplained = int(valid.sum()) - int(np.linalg.matrix_rank(normal, hermitian=True))
    return expected, leverage, unexplained


def _flat(pairs: torch.Tensor) -> np.ndarray:
    """A pair tensor as ``[source, target]``; floating-point ones in float64."""
    flat = pairs.flatten(2, 3).flatten(0, 1).cpu()
    return (flat.double() if flat.is_floating_point() else flat).numpy()

"""Projection Kernel: which subspaces overlap, and which attention heads talk to which.

The Projection Kernel (PK) of two subspaces with orthonormal bases ``U`` and ``V`` is
``‖Uᵀ V‖²_F``, the sum of the squared cosines of their principal angles: 0 for orthogonal subspaces,
the smaller rank when one contains the other, and the same for every choice of bases. Between what
one attention head writes to the residual stream (W_O) and what another reads from it (W_Q, W_K,
W_V) it measures from weights alone whether the two share directions. Magnitudes play no role, as
they do in composition scores. Yamagiwa, Takase and Shimodaira, arXiv 2601.10266.

From one pair of matrices up:

- :func:`orthonormal_subspace`, :func:`projection_kernel`, :func:`random_projection_kernel_moments`
  need no model.
- :func:`attention_head_subspaces` extracts the subspaces of all heads of a model once.
- :func:`attention_head_subspace_affinity` scores all pairs of heads of two roles,
  :func:`attention_head_affinities` several pairings from one extraction.

What it does not show: that information flows. Overlap says that a head can read what another
writes, not that it does so on any input, nor through which token positions; layer norms and the
MLPs between the two are left out. Weights are taken as the model holds them. A bridge from
``boot_transformers`` holds the checkpoint's; after ``enable_compatibility_mode()`` norms are folded
in and scores differ a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformer_lens.tools.analysis._arguments import (
    ArgumentTypeError,
    Rank,
)
from transformer_lens.tools.analysis._head_affinity_result import (
    AttentionHeadRef,
    HeadAffinityPair,
    HeadAffinityResult,
    LayerOrder,
)
from transformer_lens.tools.analysis._head_subspaces import (
    HeadSubspaces,
    RoleSubspaces,
    attention_head_subspaces,
    overlaps,
)
from transformer_lens.tools.analysis._head_weights import (
    AttentionRole,
    HeadKind,
    Stream,
)
from transformer_lens.tools.analysis._pairings import pair_mask, resolve_layer_order, roles_of
from transformer_lens.tools.analysis._subspace import (
    ProjectionKernelResult,
    RandomSubspaceReference,
    SubspaceBasis,
    orthonormal_subspace,
    projection_kernel,
    random_projection_kernel_moments,
)
from transformer_lens.tools.analysis._weight_state import WeightState

__all__ = [
    "AttentionHeadRef",
    "AttentionRole",
    "HeadAffinityPair",
    "HeadAffinityResult",
    "HeadKind",
    "HeadSubspaces",
    "LayerOrder",
    "ProjectionKernelResult",
    "RandomSubspaceReference",
    "RoleSubspaces",
    "Stream",
    "SubspaceBasis",
    "WeightState",
    "attention_head_affinities",
    "attention_head_subspace_affinity",
    "attention_head_subspaces",
    "orthonormal_subspace",
    "projection_kernel",
    "random_projection_kernel_moments",
]


def attention_head_subspace_affinity(
    model: Any,
    *,
    source_role: AttentionRole = "O",
    target_role: AttentionRole,
    layer_order: LayerOrder | None = None,
    rank: Rank = None,
    rtol: float | None = None,
    stream: Stream | None = None,
    progress: bool | None = None,
) -> HeadAffinityResult:
    """Projection Kernels between the heads of a model, for one pairing of roles.

    ``O`` with ``Q``, ``K`` or ``V`` asks how much of what a source head writes can be read by a
    target head: the Q-, K- and V-composition of arXiv 2601.10266. A role with itself asks which
    heads read, or write, alike.

    Args:
        model: A ``TransformerBridge``, or the :class:`HeadSubspaces` of one.
        source_role: ``"O"``, or the same as ``target_role``.
        target_role: ``"Q"``, ``"K"``, ``"V"`` or ``"O"``; ``"crossQ"`` and ``"rotaryK"`` in models
            that have them, as in :func:`attention_head_subspaces`.
        layer_order: Which pairs. ``"forward"``, the default from O to what reads: source layer
            strictly before target layer, and for ``"crossQ"``, which comes after O in a block, the
            same layer too. ``"distinct"``, the default within one role and possible
            only there: every unordered pair of different heads once, in the order of layer and
            head. ``"all"``: every pair; within one role, every ordered pair of different heads.
        rank: As in :func:`attention_head_subspaces`.
        rtol: As in :func:`attention_head_subspaces`.
        stream: As in :func:`attention_head_subspaces`.
        progress: ``True`` for a progress bar, ``False`` for none, ``None`` for one that appears
            when the work takes more than a few seconds.

    Returns:
        Scores ``[source_layer, source_head, target_layer, target_head]``, in float64 if any of the
        weights is, else float32, on the model's device. Axes of Q and O count query heads, axes of
        K and V key-value heads, which grouped-query models have fewer of.

    Raises:
        ArgumentTypeError, ValueError: If roles or order make no pairing, or as in
            :func:`attention_head_subspaces`.
        NotImplementedError: As in :func:`attention_head_subspaces`.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> result
        HeadAffinityResult(projection_kernel, O of 3x2 query heads -> K of 3x2 kv heads,
        12 forward pairs, best L0H0 -> L1H1 at 4)
    """
    order = resolve_layer_order(source_role, target_role, layer_order)
    subspaces = _subspaces_of(model, (source_role, target_role), rank, rtol, stream)
    roles = source_role, target_role
    return _affinities(subspaces, {roles: order}, progress)[roles]


def attention_head_affinities(
    model: Any,
    pairings: Sequence[str] = ("OQ", "OK", "OV"),
    *,
    layer_order: LayerOrder | None = None,
    rank: Rank = None,
    rtol: float | None = None,
    stream: Stream | None = None,
    progress: bool | None = None,
) -> dict[str, HeadAffinityResult]:
    """Several pairings of :func:`attention_head_subspace_affinity` from one extraction.

    Args:
        model: A ``TransformerBridge``, or the :class:`HeadSubspaces` of one.
        pairings: Source and target role in one word each: ``"OQ"``, ``"OK"``, ``"OV"``, ``"QQ"``,
            ``"KK"``, ``"VV"``, ``"OO"``; where there are such roles ``"OcrossQ"``, ``"OrotaryK"``
            and these two roles with themselves.
        layer_order, rank, rtol, stream, progress: As in :func:`attention_head_subspace_affinity`.

    Returns:
        A result per pairing, by its name and in the order given.

    Raises:
        ArgumentTypeError, ValueError, NotImplementedError: As in
            :func:`attention_head_subspace_affinity`.

    Example:
        >>> results = attention_head_affinities(model, pairings=("OK", "OO"))
        >>> [(name, int(result.valid_mask.sum())) for name, result in results.items()]
        [('OK', 12), ('OO', 15)]
    """
    if isinstance(pairings, str) or not pairings:
        raise ArgumentTypeError(
            f"pairings must be a sequence of pairings such as ('OQ', 'OK'), got {pairings!r}"
        )
    orders = {
        roles: resolve_layer_order(*roles, layer_order=layer_order)
        for roles in map(roles_of, pairings)
    }
    every_role = [role for roles in orders for role in roles]
    subspaces = _subspaces_of(model, every_role, rank, rtol, stream)
    results = _affinities(subspaces, orders, progress)
    return {source + target: results[source, target] for source, target in orders}


def _subspaces_of(
    model: Any,
    roles: Sequence[AttentionRole],
    rank: Rank,
    rtol: float | None,
    stream: Stream | None,
) -> HeadSubspaces:
    if not isinstance(model, HeadSubspaces):
        return attention_head_subspaces(model, roles, rank=rank, rtol=rtol, stream=stream)
    if rank is not None or rtol is not None or stream is not None:
        raise ValueError(
            "rank, rtol and stream were decided when the subspaces were extracted; pass them to "
            "attention_head_subspaces"
        )
    return model


def _affinities(
    subspaces: HeadSubspaces,
    orders: Mapping[tuple[AttentionRole, AttentionRole], LayerOrder],
    progress: bool | None,
) -> dict[tuple[AttentionRole, AttentionRole], HeadAffinityResult]:
    """A result for each pair of roles; pairs with the same source share the work on it."""
    valid = {}
    for (source_role, target_role), order in orders.items():
        source, target = subspaces[source_role], subspaces[target_role]
        mask = pair_mask(source, target, order).to(source.bases.device)
        mask &= (source.retained_ranks[:, :, None, None] > 0) & (target.retained_ranks > 0)
        valid[source_role, target_role] = mask
    results = {}
    for source_role in dict.fromkeys(source for source, _ in orders):
        keeps = {target: mask for (source, target), mask in valid.items() if source == source_role}
        for target_role, scores in overlaps(
            subspaces, source_role, keeps, progress=progress
        ).items():
            roles = source_role, target_role
            results[roles] = _result(subspaces, *roles, orders[roles], valid[roles], scores)
    return results


def _result(
    subspaces: HeadSubspaces,
    source_role: AttentionRole,
    target_role: AttentionRole,
    layer_order: LayerOrder,
    valid: torch.Tensor,
    scores: torch.Tensor,
) -> HeadAffinityResult:
    source, target = subspaces[source_role], subspaces[target_role]
    source_ranks, target_ranks = source.retained_ranks, target.retained_ranks
    rank_products = source_ranks[:, :, None, None] * target_ranks
    # Pairs without a rank are not valid and score 0; the clamp spares them 0 / 0.
    normalized = scores / rank_products.clamp(min=1).to(scores.dtype).sqrt()
    return HeadAffinityResult(
        scores=scores,
        normalized=normalized,
        valid_mask=valid,
        source_role=source_role,
        target_role=target_role,
        source_layer_indices=source.layer_indices,
        target_layer_indices=target.layer_indices,
        source_head_kind=source.kind,
        target_head_kind=target.kind,
        source_ranks=source.ranks,
        target_ranks=target.ranks,
        source_rank=int(source_ranks.max()),
        target_rank=int(target_ranks.max()),
        rank=subspaces.rank,
        rtol=subspaces.rtol,
        layer_order=layer_order,
        d_model=subspaces.d_model,
        weights=subspaces.weights,
        stream=subspaces.stream,
        source_head_counts=source.head_counts,
        target_head_counts=target.head_counts,
    )

"""Peers of the Projection Kernel: other numbers for how much two attention heads have in common.

:func:`composition_score`, :func:`simple_composition_score`, :func:`linear_cka` and
:func:`procrustes_similarity` take the roles and the order of
:func:`~transformer_lens.tools.analysis.projection_kernel.attention_head_subspace_affinity` and
return its result type, so whatever ranks, tabulates or draws Projection Kernels does so with them.

Let ``A`` and ``B``, ``[d_model, d_head]``, be ``W_Oᵀ`` of the source head and ``W_Q``, ``W_K`` or
``W_V`` of the target head (or one role's matrices of both):

=============================  ================================================================
Simple Composition Score       ``‖Aᵀ B‖_F / (‖A‖_F ‖B‖_F)``
Composition Score              the same ratio for the full OV map and the full QK or OV map
linear CKA                     ``‖Aᵀ B‖²_F / (‖Aᵀ A‖_F ‖Bᵀ B‖_F)``
linear CKA, ``form="paper"``   cosine between ``Aᵀ A`` and ``Bᵀ B``, both doubly centred
Procrustes                     ``‖Aᵀ B‖_* / (‖A‖_F ‖B‖_F)``
Procrustes, ``form="paper"``   ``2 ‖A Bᵀ‖_* / (‖A‖²_F + ‖B‖²_F)``
=============================  ================================================================

All of them lie between 0 and 1. In contrast to the Projection Kernel they weigh a head's directions
by their gains, so a few strong directions can decide a score.

*Forms.* The textbook forms compare heads in the residual stream that they share, whatever basis
each of them uses inside. The forms of arXiv 2601.10266 compare the heads' own coordinates one by
one, as if coordinate 3 of one head had to do with coordinate 3 of the other; they change when a
head's inner basis does, although the model does not. They are here to reproduce that paper.

*Key-value heads.* W_K and W_V of a grouped-query model are scored once per key-value head, for the
number is the same for all query heads that share it. Not so for the Composition Score: it is made
of a query head's whole circuit, so all of its axes count query heads; see there.

*Heads without weights.* None of these needs full rank. They treat heads like the Projection Kernel
does with ``rank="measured"``, which is what the results' ``rank`` says: a head whose matrix is zero
takes part in no valid pair, and non-finite weights are refused.

What they do not show is what the Projection Kernel does not show either: that information flows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from transformer_lens.tools.analysis._arguments import require_choice
from transformer_lens.tools.analysis._head_affinity_result import HeadAffinityResult, LayerOrder
from transformer_lens.tools.analysis._head_weights import (
    AttentionRole,
    HeadWeights,
    Stream,
    read_head_weights,
)
from transformer_lens.tools.analysis._linalg import clamped, exact_arithmetic
from transformer_lens.tools.analysis._pairings import pair_mask, resolve_layer_order
from transformer_lens.tools.analysis.head_affinity._frames import (
    CIRCUIT_PARTNERS,
    FrameReader,
    HeadFrames,
)
from transformer_lens.tools.analysis.head_affinity._scorers import (
    Scorer,
    alignment,
    cosine,
    gram_alignment,
    inner_rotation,
    outer_rotation,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Form",
    "compare_composition_scores",
    "composition_score",
    "linear_cka",
    "procrustes_similarity",
    "read_head_weights",
    "simple_composition_score",
]

Form = Literal["textbook", "paper"]


def composition_score(
    model: Any,
    *,
    source_role: AttentionRole = "O",
    target_role: AttentionRole,
    layer_order: LayerOrder | None = None,
    stream: Stream | None = None,
    progress: bool | None = None,
) -> HeadAffinityResult:
    """Composition Scores: norm of the product of two heads' full maps over their own norms.

    ``‖M N‖_F / (‖M‖_F ‖N‖_F)`` with ``M = W_V W_O`` of the source head and, of the target head,
    ``N = W_Q W_Kᵀ`` for Q-composition, ``W_K W_Qᵀ`` for K-composition and ``W_V W_O`` for
    V-composition (Elhage et al., *A Mathematical Framework for Transformer Circuits*, 2021; no
    baseline is subtracted). Equal to ``model.all_composition_scores(target_role)`` on every forward
    pair, much faster, and on request for other pairs.

    Both axes count query heads, in grouped-query models too. Query head ``h`` reads key-value head
    ``h // (query heads / key-value heads)``, and ``W_V[kv] W_O[h]`` and ``W_Q[h] W_K[kv]ᵀ`` differ
    between the query heads of a group: the score of a key-value head by itself does not exist. A
    result's target role ``K`` means the key side of a query head's QK map.

    Args:
        model: A ``TransformerBridge``, or its weights as :func:`read_head_weights` returns them,
            O and V with Q and K or alone as the target role requires.
        source_role: ``"O"``.
        target_role: ``"Q"``, ``"K"`` or ``"V"``.
        layer_order: ``"forward"`` (default) or ``"all"``, as in
            ``attention_head_subspace_affinity``.
        stream: Of an encoder-decoder model, ``"encoder"`` or ``"decoder"``.
        progress: ``True`` for a progress bar, ``False`` for none, ``None`` for one that appears
            when the work takes more than a few seconds.

    Returns:
        Scores ``[source_layer, source_head, target_layer, target_head]`` between 0 and 1, in
        float64 if any of the weights is, else float32, on the model's device. ``normalized`` equals
        ``scores``. Ranks are those of the full maps. A map that is zero up to rounding has rank 0
        and no valid pairs.

    Raises:
        ArgumentTypeError, ValueError: If roles or order make no pairing, if weights are missing,
            or if a head has non-finite weights. The message names role, layer and head.
        NotImplementedError: If the weights cannot be read per head, if the model has two residual
            streams and ``stream`` does not choose, or if queries and keys differ in width
            (multi-head latent attention), so that they make no map.

    Example:
        >>> composition_score(model, target_role="K")
        HeadAffinityResult(composition_score, O of 3x2 query heads -> K of 3x2 query heads,
        12 forward pairs, best L0H0 -> L1H1 at 0.5)
    """
    if source_role == target_role:
        raise ValueError(
            f"{source_role}->{target_role} multiplies no maps: a Composition Score needs a source "
            "head that writes (source_role='O') and a target head that reads (target_role 'Q', 'K' "
            "or 'V'). To compare one role's matrices use simple_composition_score"
        )
    if target_role in ("crossQ", "rotaryK"):
        raise ValueError(
            f"role {target_role} is no side of a map that reads and writes one residual stream. "
            "Use simple_composition_score"
        )
    return _affinity(
        "composition_score",
        model,
        source_role,
        target_role,
        layer_order,
        stream,
        progress,
        cosine,
        FrameReader.circuit,
    )


def simple_composition_score(
    model: Any,
    *,
    source_role: AttentionRole = "O",
    target_role: AttentionRole,
    layer_order: LayerOrder | None = None,
    stream: Stream | None = None,
    progress: bool | None = None,
) -> HeadAffinityResult:
    """Simple Composition Scores: ``‖Aᵀ B‖_F / (‖A‖_F ‖B‖_F)`` of the roles' own matrices.

    The Composition Score without the source head's W_V and without the target head's other matrix
    (Simple-CS of arXiv 2601.10266).

    Args:
        model: A ``TransformerBridge``, or its weights as :func:`read_head_weights` returns them.
        source_role: ``"O"``, or the same as ``target_role``.
        target_role: ``"Q"``, ``"K"``, ``"V"`` or ``"O"``; ``"crossQ"`` and ``"rotaryK"`` in models
            that have them.
        layer_order, stream, progress: As in ``attention_head_subspace_affinity``.

    Returns:
        Scores ``[source_layer, source_head, target_layer, target_head]`` between 0 and 1, in
        float64 if any of the weights is, else float32, on the model's device. ``normalized`` equals
        ``scores``. Axes of K and V count key-value heads. A zero matrix has no valid pairs.

    Raises:
        ArgumentTypeError, ValueError: If roles or order make no pairing, if weights are missing,
            or if a head has non-finite weights. The message names role, layer and head.
        NotImplementedError: If the weights cannot be read per head, or if the model has two
            residual streams and ``stream`` does not choose.

    Example:
        >>> result = simple_composition_score(model, target_role="K")
        >>> [(pair.source.label, pair.target.label, pair.score) for pair in result.top_pairs(1)]
        [('L0H0', 'L1H1', 0.5)]
    """
    return _affinity(
        "simple_composition_score",
        model,
        source_role,
        target_role,
        layer_order,
        stream,
        progress,
        cosine,
    )


def linear_cka(
    model: Any,
    *,
    source_role: AttentionRole = "O",
    target_role: AttentionRole,
    layer_order: LayerOrder | None = None,
    form: Form = "textbook",
    stream: Stream | None = None,
    progress: bool | None = None,
) -> HeadAffinityResult:
    """Linear centred kernel alignment of the roles' own matrices.

    ``form="textbook"``: the ``d_model`` dimensions that the heads share stand for the samples of
    Kornblith et al. (*Similarity of Neural Network Representations Revisited*, 2019), without
    centring, since the origin of the residual stream is meant: ``‖AᵀB‖²_F / (‖AᵀA‖_F ‖BᵀB‖_F)``,
    the cosine between ``A Aᵀ`` and ``B Bᵀ``. For orthonormal ``A`` and ``B`` that is the normalised
    Projection Kernel.

    ``form="paper"`` (arXiv 2601.10266): the ``d_head`` coordinates of each head are the samples.
    It is the cosine between the doubly centred Gram matrices ``AᵀA`` and ``BᵀB``, blind to any
    rotation of the residual stream and dependent on the basis inside each head.

    Args:
        model: A ``TransformerBridge``, or its weights as :func:`read_head_weights` returns them.
        source_role: ``"O"``, or the same as ``target_role``.
        target_role: ``"Q"``, ``"K"``, ``"V"`` or ``"O"``; ``"crossQ"`` and ``"rotaryK"`` in models
            that have them.
        layer_order, stream, progress: As in ``attention_head_subspace_affinity``.
        form: ``"textbook"`` or ``"paper"``.

    Returns:
        As in :func:`simple_composition_score`; ``metric`` is ``"linear_cka"`` or
        ``"linear_cka_paper"``. In the paper's form a head whose coordinates are all the same has
        nothing left after centring, hence rank 0 and no valid pairs.

    Raises:
        ArgumentTypeError, ValueError, NotImplementedError: As in :func:`simple_composition_score`,
            and if the paper's form is asked for roles whose heads differ in width.

    Example:
        >>> result = linear_cka(model, target_role="K")
        >>> [(pair.source.label, pair.target.label, pair.score) for pair in result.top_pairs(2)]
        [('L0H0', 'L1H1', 1.0), ('L0H1', 'L2H0', 0.75)]
    """
    require_choice(form, ("textbook", "paper"), "form")
    metric, scorer, read = {
        "textbook": ("linear_cka", alignment, FrameReader.single),
        "paper": ("linear_cka_paper", gram_alignment, FrameReader.centred),
    }[form]
    return _affinity(
        metric, model, source_role, target_role, layer_order, stream, progress, scorer, read
    )


def procrustes_similarity(
    model: Any,
    *,
    source_role: AttentionRole = "O",
    target_role: AttentionRole,
    layer_order: LayerOrder | None = None,
    form: Form = "textbook",
    stream: Stream | None = None,
    progress: bool | None = None,
) -> HeadAffinityResult:
    """How well a rotation carries one head's matrix onto the other's.

    ``form="textbook"``: the largest cosine ``⟨A R, B⟩ / (‖A‖_F ‖B‖_F)`` over matrices ``R`` with
    orthonormal rows or columns that rotate the heads' inner coordinates, the residual stream held
    fixed: ``‖AᵀB‖_* / (‖A‖_F ‖B‖_F)`` (Schönemann, *A generalized solution of the orthogonal
    Procrustes problem*, 1966).

    ``form="paper"`` (arXiv 2601.10266): the residual stream is rotated and the inner coordinates
    are held fixed; ``1 - min ‖Aᵀ - BᵀR‖²_F / (‖A‖²_F + ‖B‖²_F) = 2 ‖A Bᵀ‖_* / (‖A‖²_F + ‖B‖²_F)``.
    This form depends on the ratio of the two norms.

    The only metric here that needs a decomposition for every pair, a third of a millisecond for
    heads of width 64 on a CPU.

    Args:
        model: A ``TransformerBridge``, or its weights as :func:`read_head_weights` returns them.
        source_role: ``"O"``, or the same as ``target_role``.
        target_role: ``"Q"``, ``"K"``, ``"V"`` or ``"O"``; ``"crossQ"`` and ``"rotaryK"`` in models
            that have them.
        layer_order, stream, progress: As in ``attention_head_subspace_affinity``.
        form: ``"textbook"`` or ``"paper"``.

    Returns:
        As in :func:`simple_composition_score`; ``metric`` is ``"procrustes_similarity"`` or
        ``"procrustes_similarity_paper"``.

    Raises:
        ArgumentTypeError, ValueError, NotImplementedError: As in :func:`simple_composition_score`,
            and if the paper's form is asked for roles whose heads differ in width.

    Example:
        >>> result = procrustes_similarity(model, target_role="K")
        >>> [(pair.source.label, pair.target.label, pair.score) for pair in result.top_pairs(2)]
        [('L0H0', 'L1H1', 1.0), ('L0H1', 'L2H0', 0.75)]
    """
    require_choice(form, ("textbook", "paper"), "form")
    metric, scorer = {
        "textbook": ("procrustes_similarity", inner_rotation),
        "paper": ("procrustes_similarity_paper", outer_rotation),
    }[form]
    return _affinity(metric, model, source_role, target_role, layer_order, stream, progress, scorer)


def compare_composition_scores(model: Any, *, target_role: Literal["Q", "K", "V"]) -> pd.DataFrame:
    """:func:`composition_score` beside ``model.all_composition_scores``, pair by pair.

    Args:
        model: A ``TransformerBridge``. TransformerLens's own method takes its time, and memory for
            the products of all pairs.
        target_role: ``"Q"``, ``"K"`` or ``"V"``.

    Returns:
        One row per forward pair, best first: ``source``, ``target`` (labels of query heads),
        ``ours``, ``upstream`` and their ``relative_difference``.

    Example:
        >>> compare_composition_scores(model, target_role="Q").round(3).head(1)
          source target  ours  upstream  relative_difference
        0   L0H0   L1H0   0.5       0.5                  0.0
    """
    ours = composition_score(model, target_role=target_role)
    with torch.no_grad():
        theirs = model.all_composition_scores(target_role).scores
    table = ours.to_dataframe()[["source", "target", "score"]]
    _, positions = ours.topk(max(len(table), 1))
    table = table.rename(columns={"score": "ours"})
    table["upstream"] = theirs[tuple(positions.T)].double().cpu().numpy()
    table["relative_difference"] = (table["ours"] - table["upstream"]).abs() / table["upstream"]
    return table


def _affinity(
    metric: str,
    model: Any,
    source_role: AttentionRole,
    target_role: AttentionRole,
    layer_order: str | None,
    stream: Stream | None,
    progress: bool | None,
    scorer: Scorer,
    read: Callable[[FrameReader, AttentionRole], HeadFrames] = FrameReader.single,
) -> HeadAffinityResult:
    order = resolve_layer_order(source_role, target_role, layer_order)
    roles = [source_role, target_role]
    if read is FrameReader.circuit:
        roles += [CIRCUIT_PARTNERS[role] for role in roles]
    weights = _weights_of(model, list(dict.fromkeys(roles)), stream)
    reader = FrameReader(weights)

    with exact_arithmetic(weights.device):
        source = read(reader, source_role)
        target = source if source_role == target_role else read(reader, target_role)
        valid = pair_mask(source, target, order).to(weights.device)
        valid &= (source.ranks[:, :, None, None] > 0) & (target.ranks > 0)
        scores = scorer(
            source,
            None if target is source else target,
            valid.reshape(source.ranks.numel(), -1),
            progress,
        )
        scores = clamped(scores, 1.0, metric).reshape(valid.shape)
    return HeadAffinityResult(
        scores=scores,
        normalized=scores.clone(),
        valid_mask=valid,
        source_role=source_role,
        target_role=target_role,
        source_layer_indices=source.layer_indices,
        target_layer_indices=target.layer_indices,
        source_head_kind=source.kind,
        target_head_kind=target.kind,
        source_ranks=source.ranks,
        target_ranks=target.ranks,
        source_rank=int(source.ranks.max()),
        target_rank=int(target.ranks.max()),
        rank="measured",
        rtol=reader.rtol,
        layer_order=order,
        metric=metric,
        d_model=weights.d_model,
        weights=weights.state,
        stream=weights.stream,
    )


def _weights_of(model: Any, roles: list[AttentionRole], stream: Stream | None) -> HeadWeights:
    if not isinstance(model, Mapping):
        return read_head_weights(model, roles, stream=stream)
    if stream is not None:
        raise ValueError(
            "stream was decided when the weights were read; pass it to read_head_weights"
        )
    missing = [role for role in roles if role not in model]
    if missing:
        raise ValueError(f"the weights hold {list(model)}, but the score needs {missing} too")
    some = {role: model[role] for role in roles}
    if isinstance(model, HeadWeights):
        return replace(model, by_role=some)
    return HeadWeights(some, "weights", device=some[roles[0]].matrices[0].device)

"""The tokens whose unembedding vectors lie deepest in a head's subspace.

For a head's output subspace these are the tokens that it can write towards, for what it reads the
tokens whose directions it can see (arXiv 2601.10266, figure 6).

What it does not show: what a head writes on any input, nor the sign of it, since a subspace
contains a direction together with its opposite. Later layers may rewrite everything. A random
subspace of rank ``r`` in ``d`` dimensions scores about ``√(r/d)`` for every token.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int

from transformer_lens.tools.analysis._arguments import (
    require_head,
    require_instance,
    require_integer,
    warn_if_states_differ,
)
from transformer_lens.tools.analysis._attention_stacks import Stream, has_two_streams
from transformer_lens.tools.analysis._head_affinity_result import AttentionHeadRef
from transformer_lens.tools.analysis._head_subspaces import (
    HeadSubspaces,
    RoleSubspaces,
    attention_head_subspaces,
)
from transformer_lens.tools.analysis._head_weights import AttentionRole
from transformer_lens.tools.analysis._linalg import compute_dtype, exact_arithmetic, unit_scaled
from transformer_lens.tools.analysis._weight_state import norm_gain, weight_state

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SubspaceTokens", "subspace_tokens"]

#: Upper bound of the temporaries.
BYTE_BUDGET = 128 * 1024**2

#: Heads that are projected on at once; their frames make one matrix.
HEADS_PER_PRODUCT = 16


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceTokens:
    """The tokens nearest to each head's subspace, best first.

    Attributes:
        heads: The heads.
        token_ids: Their tokens (int64).
        scores: Norms of the projected unit vectors, between 0 and 1: cosines of the angles between
            the tokens' directions and the subspace.
        tokens: The tokens as text, if the model has a tokenizer.
    """

    heads: tuple[AttentionHeadRef, ...]
    token_ids: Int[torch.Tensor, "head token"]
    scores: Float[torch.Tensor, "head token"]
    tokens: tuple[tuple[str, ...], ...] | None

    def to_dataframe(self) -> pd.DataFrame:
        """One row per head and token: ``head``, ``role``, ``rank``, ``token_id``, ``token`` and
        ``score``.

        Example:
            >>> found = subspace_tokens(model, (1, 1), k=2, fold_final_norm=False)
            >>> list(found.to_dataframe().columns)
            ['head', 'role', 'rank', 'token_id', 'token', 'score']
        """
        import pandas as pd

        return pd.DataFrame(
            {
                "head": head.label,
                "role": head.role,
                "rank": rank + 1,
                "token_id": int(self.token_ids[row, rank]),
                "token": None if self.tokens is None else self.tokens[row][rank],
                "score": float(self.scores[row, rank]),
            }
            for row, head in enumerate(self.heads)
            for rank in range(self.token_ids.shape[1])
        )

    def __repr__(self) -> str:
        heads, k = self.token_ids.shape
        return f"SubspaceTokens({k} tokens for {heads} heads of role {self.heads[0].role})"


def subspace_tokens(
    model: Any,
    head: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    role: AttentionRole = "O",
    k: int = 10,
    *,
    fold_final_norm: bool | None = None,
    subspaces: HeadSubspaces | None = None,
) -> SubspaceTokens:
    """The ``k`` tokens whose unembedding vectors have the largest part in a head's subspace.

    Unembedding vectors are centred (less their mean over the vocabulary), scaled to unit length,
    and projected. A token whose vector is the mean, up to rounding, scores 0.

    Logits read the residual stream through the final norm's weight, which this leaves out unless
    told to fold it in; reading and ranking depend on that where the weight is not uniform. The
    paper, like everything here, takes weights as the model holds them. Tied and untied unembeddings
    are the same to this function: it takes ``model.W_U``.

    Args:
        model: A ``TransformerBridge``; of an encoder-decoder model the decoder's heads are read. If
            it has a tokenizer, tokens are given as text too.
        head: ``(layer, head)``, layers in the model's own numbering, or an ``AttentionHeadRef`` of
            this role, or several; ``None`` for all heads that have any direction. ``head`` counts
            key-value heads for the roles K and V.
        role: Which of a head's subspaces.
        k: How many tokens. Ties go to the smaller token id.
        fold_final_norm: Multiply unembedding vectors by the final norm's weight first. ``None``
            does not, and warns if that makes a difference.
        subspaces: Of the same model, if they are at hand already.

    Returns:
        Tokens and scores ``[head, token]`` on the bases' device; scores in float64 if any of the
        attention weights is, else float32. Temporaries are bounded, whatever vocabulary and number
        of heads.

    Raises:
        ArgumentTypeError, ValueError: If an argument is out of range, if a head has no direction at
            all, if an unembedding vector is not finite, if the subspaces are of an encoder, or as
            :func:`attention_head_subspaces` (with ``rank="measured"``) raises.
        KeyError: If there is no such head.
        NotImplementedError: As :func:`attention_head_subspaces`.

    Warns:
        UserWarning: If ``fold_final_norm`` is ``None`` and the final norm's weight is not uniform,
            or if the model's weights were folded after ``subspaces`` were extracted.

    Example:
        >>> found = subspace_tokens(model, [(0, 0), (0, 1)], k=3)
        >>> found
        SubspaceTokens(3 tokens for 2 heads of role O)
        >>> found.token_ids.shape, found.tokens is None
        (torch.Size([2, 3]), True)
    """
    if subspaces is None:
        # The unembedding reads the decoder's stream where there are two.
        stream: Stream | None = "decoder" if has_two_streams(model) else None
        subspaces = attention_head_subspaces(model, (role,), rank="measured", stream=stream)
    else:
        require_instance(subspaces, HeadSubspaces, "subspaces")
        if subspaces.stream == "encoder":
            raise ValueError(
                "the unembedding reads the decoder's residual stream, and these subspaces are of "
                "the encoder's. Extract them with stream='decoder'"
            )
        warn_if_states_differ([subspaces.weights, weight_state(model, subspaces.stream)])
    bases = subspaces[role]
    positions = _positions(bases, head)
    unembedding = model.W_U.detach()
    k = require_integer(k, "k", maximum=unembedding.shape[1])
    if unembedding.shape[0] != bases.bases.shape[-2]:
        raise ValueError(
            f"the unembedding is {unembedding.shape[0]} wide and the subspaces lie in "
            f"{bases.bases.shape[-2]} dimensions"
        )
    gain = norm_gain(
        getattr(model, "decoder_ln_final" if has_two_streams(model) else "ln_final", None)
    )
    if gain is not None and fold_final_norm is None and not bool((gain == gain[0]).all()):
        warnings.warn(
            "the final norm's weight is not uniform, so the tokens depend on whether it is folded "
            "into the unembedding; pass fold_final_norm=True or False to decide",
            UserWarning,
            stacklevel=2,
        )
    if fold_final_norm and gain is None:
        raise ValueError("the model has no final norm with a weight to fold in")

    rows = torch.tensor(
        [layer * bases.heads + number for layer, number in positions], device=bases.bases.device
    )
    with exact_arithmetic(bases.bases.device):
        scores, token_ids = _best_tokens(
            bases.frames, rows, unembedding, gain if fold_final_norm else None, k
        )
    tokenizer = getattr(model, "tokenizer", None)
    return SubspaceTokens(
        heads=tuple(
            AttentionHeadRef(bases.layer_indices[layer], number, role, bases.kind)
            for layer, number in positions
        ),
        token_ids=token_ids,
        scores=scores,
        tokens=None
        if tokenizer is None
        else tuple(tuple(tokenizer.decode([token]) for token in row) for row in token_ids.tolist()),
    )


def _positions(bases: RoleSubspaces, head: Any) -> list[tuple[int, int]]:
    """Positions of the wanted heads on the axes of ``bases``."""
    if head is None:
        return [(layer, number) for layer, number in bases.ranks.nonzero().tolist()]
    pair = isinstance(head, tuple) and len(head) == 2 and isinstance(head[0], Integral)
    if pair or not isinstance(head, Iterable):
        head = [head]
    entries = list(head)
    if not entries:
        raise ValueError("head must name at least one head, or be None for all")
    for entry in entries:
        if isinstance(entry, AttentionHeadRef) and entry.role != bases.role:
            raise ValueError(
                f"{entry} is not of role {bases.role}, which was asked for: pass "
                f"role={entry.role!r}"
            )
    wanted = [require_head(entry, "a head") for entry in entries]
    positions = [bases.axis.position(place) for place in wanted]
    for (layer, number), position in zip(wanted, positions, strict=True):
        if not bases.ranks[position]:
            raise ValueError(f"role {bases.role} of L{layer}H{number} has no direction at all")
    return positions


def _best_tokens(
    frames: torch.Tensor,
    rows: torch.Tensor,
    unembedding: torch.Tensor,
    gain: torch.Tensor | None,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and ids ``[head, k]`` of the best tokens of the heads ``frames[rows]``."""
    _, d_model, rank = frames.shape
    vocabulary = unembedding.shape[1]
    # The unembedding may be stored in half precision, and the bases in double.
    dtype = torch.promote_types(compute_dtype(unembedding.dtype), frames.dtype)
    at_once = min(len(rows), HEADS_PER_PRODUCT)
    # Two copies of the chunk of vectors, their projections, and scores twice while sorting.
    bytes_per_token = frames.element_size() * (2 * d_model + at_once * rank + 4 * len(rows))
    chunk = max(1, BYTE_BUDGET // bytes_per_token)
    chunks = [slice(start, min(start + chunk, vocabulary)) for start in range(0, vocabulary, chunk)]

    def vectors(where: slice) -> torch.Tensor:
        some = unembedding[:, where].to(device=frames.device, dtype=dtype)
        return some if gain is None else some * gain.to(some)[:, None]

    peaks = torch.cat([vectors(where).abs().amax(0) for where in chunks])
    finite = peaks.isfinite()
    if not bool(finite.all()):
        token = int(finite.int().argmin())
        raise ValueError(f"the unembedding vector of token {token} must hold finite values only")
    # Squares of entries far from 1 would overflow or vanish.
    _, scale = unit_scaled(peaks[None])
    mean = torch.stack([(vectors(where) / scale).sum(1) for where in chunks]).sum(0) / vocabulary
    # What a sum over the vocabulary, in a tree, may be off by; no direction is read from less.
    rounding = torch.finfo(dtype).eps * math.log2(2 * vocabulary) * math.sqrt(d_model)
    nothing = rounding * peaks.max() / scale.squeeze()
    best = frames.new_empty(len(rows), 0)
    ids = rows.new_empty(len(rows), 0)
    for where in chunks:
        directions = vectors(where) / scale - mean[:, None]
        norms = directions.square().sum(0).sqrt()
        scores = torch.cat(
            [
                _projected_norms(frames[some], directions) / norms
                for some in rows.split(HEADS_PER_PRODUCT)
            ]
        )
        # A vector that is the mean has no direction.
        scores = torch.where(norms > nothing, scores, 0).clamp(max=1).to(frames.dtype)
        new = torch.arange(where.start, where.stop, device=rows.device).expand(len(rows), -1)
        # Stable, and earlier tokens stand first: ties go to the smaller id.
        best, order = torch.cat([best, scores], 1).sort(dim=1, descending=True, stable=True)
        best = best[:, :k].clone()
        ids = torch.cat([ids, new], 1).gather(1, order[:, :k])
    return best, ids


def _projected_norms(frames: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Norms ``[head, token]`` of ``directions`` ``[d_model, token]`` projected on the frames."""
    heads, d_model, rank = frames.shape
    stacked = frames.mT.reshape(heads * rank, d_model).to(directions.dtype)
    return (stacked @ directions).view(heads, rank, -1).square().sum(1).sqrt()

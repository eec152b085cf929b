"""Nuclear norms ``‖Aᵢ Bⱼᵀ‖_*`` for all pairs of two stacks, in bounded memory."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float

from transformer_lens.tools.analysis._linalg import singular_values
from transformer_lens.tools.analysis._pairwise_overlap import BYTE_BUDGET, spans, with_progress


def pairwise_nuclear_norms(
    source: Float[torch.Tensor, "source rows inner"],
    target: Float[torch.Tensor, "target other_rows inner"] | None,
    *,
    keep: Bool[torch.Tensor, "source target"],
    byte_budget: int = BYTE_BUDGET,
    progress: bool | None = None,
) -> Float[torch.Tensor, "source target"]:
    """Sums of the singular values of ``source[i] @ target[j].T``.

    The singular values come from a decomposition of every product. Eigenvalues of its Gram matrix
    would take half of the time and lose half of the digits of the small ones.

    Args:
        source: Matrices, one per row of the result.
        target: Matrices, one per column; ``None`` compares ``source`` with itself, each unordered
            pair once.
        keep: Pairs that are wanted. Others are 0 in the result and mostly not computed.
        byte_budget: Bound of the temporaries. Exceeded only where one pair is larger.
        progress: As in the overlap engine.
    """
    symmetric = target is None
    other = source if target is None else target
    wanted = ((keep | keep.mT).triu() if symmetric else keep).cpu()
    scores = source.new_zeros(len(source), len(other))
    rows, inner = source.shape[1:]
    other_rows = other.shape[1]
    # Rearranged copy, product, and the copy of it that the decomposition overwrites.
    bytes_per_pair = source.element_size() * other_rows * (inner + 2 * rows)
    side = max(1, byte_budget // bytes_per_pair)
    for row, columns in with_progress(list(spans(wanted, 1)), progress, "nuclear norms"):
        left = source[row.start]
        for start in range(columns.start, columns.stop, side):
            tile = slice(start, min(start + side, columns.stop))
            # One tall product instead of a batch of small ones.
            products = other[tile].reshape(-1, inner) @ left.mT
            values = singular_values(products.unflatten(0, (-1, other_rows)))
            scores[row.start, tile] = values.sum(-1)
    if symmetric:
        scores = scores + scores.triu(1).mT
    return torch.where(keep, scores, 0)

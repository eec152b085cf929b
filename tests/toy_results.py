"""Results with random scores, for what does not care where scores come from."""

from __future__ import annotations

import torch

from transformer_lens.tools.analysis.projection_kernel import HeadAffinityResult


def random_result(
    layers: int, heads: int, rank: int = 8, *, seed: int = 0, **changes
) -> HeadAffinityResult:
    """Forward pairs with random scores."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, heads, layers, heads)
    order = torch.arange(layers)
    valid = (order[:, None, None, None] < order[None, None, :, None]).expand(shape).clone()
    scores = torch.rand(shape, generator=generator) * valid
    ranks = torch.full((layers, heads), rank)
    fields = {
        "scores": scores,
        "normalized": scores / rank,
        "valid_mask": valid,
        "source_role": "O",
        "target_role": "Q",
        "source_layer_indices": tuple(range(layers)),
        "target_layer_indices": tuple(range(layers)),
        "source_head_kind": "query",
        "target_head_kind": "query",
        "source_ranks": ranks,
        "target_ranks": ranks,
        "source_rank": rank,
        "target_rank": rank,
        "rank": None,
        "rtol": 1e-6,
        "d_model": 32,
    }
    return HeadAffinityResult(**(fields | changes))

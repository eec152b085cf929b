"""Real checkpoints in other precisions: the same ranks, the same pairs, nearly the same scores."""

from __future__ import annotations

import copy

import pytest
import torch

from transformer_lens.tools.analysis.projection_kernel import attention_head_affinities

pytestmark = pytest.mark.slow

PAIRINGS = ("OQ", "OK", "OV", "QQ", "KK", "VV", "OO")


@pytest.fixture(scope="module", params=["gpt2_small", "smollm2"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(model):
    return attention_head_affinities(model, PAIRINGS)


def top(result) -> set[tuple[str, str]]:
    return {(pair.source.label, pair.target.label) for pair in result.top_pairs(20)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions_agree(model, expected, dtype):
    """Storage in half precision moves a weight by up to 2^-9 of it (bfloat16), scores by up to
    4e-3; float32 differs from float64 by up to 2e-6 of a score (both measured)."""
    other = copy.deepcopy(model).to(dtype)
    assert other.blocks[0].attn.W_Q.dtype == dtype
    for pairing, found in attention_head_affinities(other, PAIRINGS).items():
        reference = expected[pairing]
        assert found.scores.dtype == torch.promote_types(dtype, torch.float32)
        assert found.source_ranks.equal(reference.source_ranks)
        assert found.target_ranks.equal(reference.target_ranks)
        assert top(found) == top(reference)
        there = reference.valid_mask
        errors = (found.scores[there].double() - reference.scores[there].double()).abs()
        if dtype == torch.float64:
            assert float((errors / found.scores[there]).max()) < 1e-5
        else:
            assert float(errors.max()) < 2e-2

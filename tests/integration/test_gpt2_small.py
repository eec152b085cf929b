"""The reference values of arXiv 2601.10266 on the trained weights of GPT-2 small."""

from __future__ import annotations

import numpy as np
import pytest

from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspaces,
)

import oracles

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subspaces(gpt2_small):
    return attention_head_subspaces(gpt2_small)


@pytest.fixture(scope="module")
def results(subspaces):
    return attention_head_affinities(subspaces, ("OQ", "OK", "OV", "QQ", "KK", "VV", "OO"))


def edges(text: str) -> set[tuple[str, str]]:
    """``"4.7>5.1,5.6 1.7>2.1"`` as pairs of labels."""
    pairs = (group.split(">") for group in text.split())
    return {(source, target) for source, targets in pairs for target in targets.split(",")}


def short(head) -> str:
    return f"{head.layer}.{head.head}"


TOP_20 = {
    "OQ": edges(
        "1.7>2.1 4.7>5.1,5.6,6.8,7.2 4.11>5.1,5.6,6.8 5.3>6.10 5.5>7.1 6.6>7.1 7.3>8.3 7.6>8.10 "
        "8.7>10.11 8.10>9.4,9.6,10.1,10.6 10.0>11.2 10.7>11.10"
    ),
    "OK": edges(
        "4.7>5.0,5.1,5.5,5.8,6.9,7.2,7.10,8.1 4.11>5.0,5.1,5.5,5.8,6.9,7.2,7.10,7.11,8.1 "
        "5.6>6.9,7.2,7.10"
    ),
}


@pytest.mark.parametrize("pairing", TOP_20)
def test_the_twenty_strongest_edges(results, pairing):
    assert len(TOP_20[pairing]) == 20
    found = {(short(p.source), short(p.target)) for p in results[pairing].top_pairs(20)}
    assert found == TOP_20[pairing]


def test_the_highest_scores(results):
    best = {pairing: results[pairing].top_pairs(1)[0] for pairing in ("OQ", "OK")}
    assert (short(best["OQ"].source), short(best["OQ"].target)) == ("4.7", "5.6")
    assert round(best["OQ"].score, 1) == 26.4
    assert (short(best["OK"].source), short(best["OK"].target)) == ("4.11", "5.1")
    assert round(best["OK"].score, 1) == 39.3


def test_pair_counts_and_ranks(results):
    counts = {pairing: int(result.valid_mask.sum()) for pairing, result in results.items()}
    assert counts == dict.fromkeys(("OQ", "OK", "OV"), 9504) | dict.fromkeys(
        ("QQ", "KK", "VV", "OO"), 10296
    )
    assert {int(result.source_ranks.min()) for result in results.values()} == {64}


def test_mean_scores_over_forward_pairs(subspaces, results):
    forward = results["OQ"].valid_mask
    means = {
        pairing: float(subspaces.overlap(*pairing)[forward].double().mean())
        for pairing in ("QQ", "VO")
    }
    assert means["QQ"] == pytest.approx(8.467, abs=0.0005)
    assert means["VO"] == pytest.approx(5.664, abs=0.0005)


def test_hubs_of_the_top_20(results):
    degree: dict[str, int] = {}
    for pairing in ("OQ", "OK", "OV"):
        for pair in results[pairing].top_pairs(20):
            for head in (pair.source, pair.target):
                degree[short(head)] = degree.get(short(head), 0) + 1
    assert len(degree) == 52
    assert sorted(degree, key=degree.get, reverse=True)[:2] == ["4.7", "4.11"]


def test_scores_agree_with_the_definition_in_float64(gpt2_small, results):
    """A seeded sample of pairs of every pairing, from the weights as they are."""
    generator = np.random.default_rng(0)
    for (source_role, target_role), result in results.items():
        pairs = result.valid_mask.nonzero()
        for a, b, c, d in pairs[generator.choice(len(pairs), 12, replace=False)].tolist():
            matrices = []
            for role, layer, head in ((source_role, a, b), (target_role, c, d)):
                weight = getattr(gpt2_small.blocks[layer].attn, f"W_{role}")[head]
                weight = weight.detach().double().numpy()
                matrices.append(weight.T if role == "O" else weight)
            expected = oracles.projection_kernel(*matrices)
            # Condition numbers here are below 1000; eps times that, times sqrt(64 * 64).
            assert result.scores[a, b, c, d].item() == pytest.approx(expected, abs=1e-3)

"""Tokens of subspaces, against the definition token by token in float64."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity import readout
from transformer_lens.tools.analysis.head_affinity.readout import subspace_tokens
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import toy_models


def expected_scores(model, role, layer, head, gain=None) -> np.ndarray:
    weight = getattr(model.blocks[layer].attn, f"W_{role}")[head].detach().double().numpy()
    basis = np.linalg.qr(weight.T if role == "O" else weight)[0]
    vectors = model.W_U.detach().double().numpy().T
    if gain is not None:
        vectors = vectors * gain
    vectors = vectors - vectors.mean(0)
    return np.array(
        [np.linalg.norm(basis.T @ (vector / np.linalg.norm(vector))) for vector in vectors]
    )


def check(found, row, expected, k):
    """The best k scores in order, each at its token.

    float32 at widths of 32 and condition numbers below 100: 32 * 100 * 6e-8 is 2e-4; scores of
    neighbours in rank may come in either order within that.
    """
    np.testing.assert_allclose(found.scores[row], np.sort(expected)[::-1][:k], atol=2e-4)
    np.testing.assert_allclose(expected[found.token_ids[row]], found.scores[row], atol=2e-4)


@pytest.mark.parametrize("make", [toy_models.gpt2, toy_models.llama])  # tied, untied
@pytest.mark.parametrize("role", ["O", "K", "Q"])
@pytest.mark.parametrize("budget", [1, 20_000, 10**9])
def test_all_heads_against_the_definition(make, role, budget, monkeypatch):
    monkeypatch.setattr(readout, "BYTE_BUDGET", budget)
    monkeypatch.setattr(readout, "HEADS_PER_PRODUCT", 5)
    model, _ = make()
    found = subspace_tokens(model, role=role, k=7)
    assert found.token_ids.shape == (len(found.heads), 7)
    assert len(found.heads) == 3 * getattr(model.blocks[0].attn, f"W_{role}").shape[0]
    for row, head in enumerate(found.heads):
        check(found, row, expected_scores(model, role, head.layer, head.head), 7)
    assert found.tokens is None


def test_tied_and_untied_are_what_they_are_called():
    tied, untied = toy_models.gpt2()[0], toy_models.llama()[0]
    assert torch.equal(tied.W_U.mT, tied.W_E)
    assert not torch.equal(untied.W_U.mT, untied.W_E)


def test_some_heads_in_the_order_asked_for():
    model, _ = toy_models.hybrid()
    found = subspace_tokens(model, [(3, 2), (1, 0)], k=4)
    assert [head.label for head in found.heads] == ["L3H2", "L1H0"]
    for row, head in enumerate(found.heads):
        check(found, row, expected_scores(model, "O", head.layer, head.head), 4)
    single = subspace_tokens(model, (1, 0), k=4)
    assert single.token_ids.tolist() == found.token_ids[1:].tolist()
    keys = subspace_tokens(model, (1, 1), "K", k=4)
    assert keys.heads[0].kind == "kv"


def test_all_tokens_and_double_precision():
    model, _ = toy_models.gpt2(torch.float64)
    found = subspace_tokens(model, (0, 0), k=toy_models.VOCABULARY)
    expected = expected_scores(model, "O", 0, 0)
    assert found.scores.dtype == torch.float64
    assert sorted(found.token_ids[0].tolist()) == list(range(toy_models.VOCABULARY))
    np.testing.assert_allclose(expected[found.token_ids[0]], found.scores[0], rtol=1e-12)


def test_half_precision_is_computed_in_float32():
    model, _ = toy_models.gpt2(torch.bfloat16)
    found = subspace_tokens(model, (0, 0), k=5)
    assert found.scores.dtype == torch.float32
    check(found, 0, expected_scores(model, "O", 0, 0), 5)


@pytest.mark.parametrize("budget", [1, 10**9])
def test_ties_go_to_the_smaller_id_and_the_mean_has_no_direction(budget, monkeypatch):
    monkeypatch.setattr(readout, "BYTE_BUDGET", budget)
    model, _ = toy_models.llama()
    axes = torch.eye(32)
    with torch.no_grad():
        # Token vectors in opposite pairs, so that their mean is exactly 0, and zeros.
        rows = torch.zeros(toy_models.VOCABULARY, 32)
        rows[10:30] = axes[3]
        rows[30:50] = -axes[3]
        model.W_U.copy_(rows.T)
        model.blocks[0].attn.o.weight.copy_(torch.eye(32))
    found = subspace_tokens(model, [(0, 0), (0, 1)], k=25)
    assert found.token_ids[0].tolist() == list(range(10, 35))
    assert found.scores[0].tolist() == [1.0] * 25
    assert found.token_ids[1].tolist() == list(range(25))
    assert found.scores[1].tolist() == [0.0] * 25


def test_the_final_norm():
    model, _ = toy_models.llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = subspace_tokens(model, (1, 2), k=5)
    with torch.no_grad():
        gain = torch.linspace(0.1, 3, 32)
        model.ln_final.weight.copy_(gain)
    with pytest.warns(UserWarning, match="fold_final_norm"):
        warned = subspace_tokens(model, (1, 2), k=5)
    assert warned.token_ids.tolist() == plain.token_ids.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raw = subspace_tokens(model, (1, 2), k=5, fold_final_norm=False)
        folded = subspace_tokens(model, (1, 2), k=5, fold_final_norm=True)
    assert raw.token_ids.tolist() == plain.token_ids.tolist()
    check(folded, 0, expected_scores(model, "O", 1, 2, gain.double().numpy()), 5)
    assert folded.token_ids.tolist() != plain.token_ids.tolist()


def test_a_norm_weight_stored_as_an_offset(monkeypatch):
    model, _ = toy_models.llama()
    with torch.no_grad():
        model.ln_final.weight.copy_(torch.linspace(-0.9, 2, 32))
    monkeypatch.setattr(type(model.ln_final), "uses_weight_offset", True, raising=False)
    folded = subspace_tokens(model, (1, 2), k=5, fold_final_norm=True)
    gain = np.linspace(0.1, 3, 32)
    check(folded, 0, expected_scores(model, "O", 1, 2, gain), 5)


class Letters:
    def decode(self, ids):
        return "".join(chr(ord("A") + token) for token in ids)


def test_a_tokenizer_makes_text(monkeypatch):
    model, _ = toy_models.gpt2()
    monkeypatch.setattr(model, "tokenizer", Letters())
    found = subspace_tokens(model, [(0, 0), (2, 1)], k=3)
    assert found.tokens == tuple(
        tuple(chr(65 + token) for token in row) for row in found.token_ids.tolist()
    )
    table = found.to_dataframe()
    assert table["token"].tolist() == [token for row in found.tokens for token in row]
    assert table["head"].tolist() == ["L0H0"] * 3 + ["L2H1"] * 3
    assert table["rank"].tolist() == [1, 2, 3] * 2


def test_subspaces_at_hand_are_used():
    model, _ = toy_models.gpt2()
    found = subspace_tokens(
        model, (0, 0), k=3, subspaces=attention_head_subspaces(model, ("O",), rank=2)
    )
    assert found.scores[0, 0] < subspace_tokens(model, (0, 0), k=3).scores[0, 0]


def test_refusals():
    model, _ = toy_models.llama()
    with pytest.raises(KeyError, match="layer 3 has no attention"):
        subspace_tokens(model, (3, 0))
    with pytest.raises(KeyError, match="2 kv heads"):
        subspace_tokens(model, (0, 2), "K")
    with pytest.raises(ValueError, match="between 1 and 60"):
        subspace_tokens(model, (0, 0), k=61)
    with pytest.raises(ValueError, match="at least one head"):
        subspace_tokens(model, [])
    with pytest.raises(TypeError, match=r"\(layer, head\)"):
        subspace_tokens(model, [0, 1])
    with torch.no_grad():
        model.blocks[1].attn.o.weight[:, :8] = 0
    with pytest.raises(ValueError, match="L1H0 has no direction"):
        subspace_tokens(model, (1, 0))


@pytest.fixture(scope="module")
def t5():
    model, weights = toy_models.t5()
    with torch.no_grad():
        model.decoder_ln_final.weight.copy_(torch.linspace(0.1, 3, model.cfg.d_model))
    return model, weights


class TestEncoderDecoder:
    def expected(self, weights, layer, head, gain=1.0):
        """From the checkpoint: the decoder's output map and the vectors of ``lm_head``."""
        weight = weights[f"decoder.block.{layer}.layer.0.SelfAttention.o.weight"].double().numpy()
        basis = np.linalg.qr(weight[:, 8 * head : 8 * (head + 1)])[0]
        vectors = weights["lm_head.weight"].double().numpy() * gain
        vectors = vectors - vectors.mean(0)
        return np.linalg.norm(vectors @ basis, axis=1) / np.linalg.norm(vectors, axis=1)

    def test_the_decoder_is_read(self, t5):
        model, weights = t5
        gain = np.linspace(0.1, 3, model.cfg.d_model)
        with pytest.warns(UserWarning, match="fold_final_norm"):
            raw = subspace_tokens(model, [(1, 2)], k=6)
        check(raw, 0, self.expected(weights, 1, 2), 6)
        folded = subspace_tokens(model, [(1, 2)], k=6, fold_final_norm=True)
        check(folded, 0, self.expected(weights, 1, 2, gain), 6)
        crossing = subspace_tokens(model, (0, 1), "crossQ", k=3, fold_final_norm=False)
        assert crossing.heads[0].role == "crossQ"

    def test_the_encoder_is_refused(self, t5):
        model, _ = t5
        subspaces = attention_head_subspaces(model, ("O",), stream="encoder")
        with pytest.raises(ValueError, match="reads the decoder's residual stream"):
            subspace_tokens(model, (0, 0), subspaces=subspaces)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_unembedding_vectors_that_are_not_finite(value, fold):
    model, _ = toy_models.llama()
    model.unembed.weight.data[7, 3] = value
    with pytest.raises(ValueError, match="unembedding vector of token 7 must hold finite values"):
        subspace_tokens(model, (1, 1), k=3, fold_final_norm=fold)


@pytest.mark.parametrize("exponent", [-100, -40, 40, 100])
def test_the_scale_of_the_unembedding_does_not_matter(exponent):
    model, _ = toy_models.llama()
    expected = subspace_tokens(model, (1, 1), k=5)
    model.unembed.weight.data *= 2.0**exponent
    found = subspace_tokens(model, (1, 1), k=5)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.scores, expected.scores)


def test_what_is_the_mean_up_to_rounding_has_no_direction():
    model, _ = toy_models.llama()
    weight = model.unembed.weight.data
    weight[5] = (weight.sum(0) - weight[5]) / (len(weight) - 1)
    found = subspace_tokens(model, (1, 1), k=len(weight))
    row = found.token_ids[0].tolist().index(5)
    assert found.scores[0, row] == 0
    assert (found.scores[0] > 0.05).sum() == len(weight) - 1
    weight[:] = weight[5].clone()
    assert subspace_tokens(model, (1, 1), k=3).scores.tolist() == [[0, 0, 0]]


def test_all_heads_are_those_that_there_are():
    model, _ = toy_models.gpt2()
    model.blocks[1].attn.o.weight.data[8:16] = 0
    found = subspace_tokens(model, k=1)
    expected = {(layer, head) for layer in range(3) for head in range(4)} - {(1, 1)}
    assert {(head.layer, head.head) for head in found.heads} == expected
    with pytest.raises(ValueError, match="role O of L1H1 has no direction at all"):
        subspace_tokens(model, (1, 1))
    with pytest.raises(TypeError, match="head of a head must be an integer, got True"):
        subspace_tokens(model, (1, True))
    with pytest.raises(TypeError, match="subspaces must be a HeadSubspaces, got int"):
        subspace_tokens(model, subspaces=5)


def test_a_head_of_a_result_will_do():
    model, _ = toy_models.llama()
    pair = attention_head_subspace_affinity(model, target_role="K").top_pairs(1)[0]
    place = pair.target.layer, pair.target.head
    expected = subspace_tokens(model, place, "K", k=3)
    for head in (pair.target, [pair.target]):
        assert torch.equal(subspace_tokens(model, head, "K", k=3).token_ids, expected.token_ids)
    with pytest.raises(ValueError, match="is not of role O, which was asked for: pass role='K'"):
        subspace_tokens(model, pair.target)
    with pytest.raises(TypeError, match=r"a head must be .layer, head., got 17"):
        subspace_tokens(model, 17)

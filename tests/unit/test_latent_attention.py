"""Multi-head latent attention: what its heads read, checked on the model's own modules."""

from __future__ import annotations

import pytest
import torch

from transformer_lens.tools.analysis.head_affinity.metrics import (
    composition_score,
    simple_composition_score,
)
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import oracles
import toy_models

D_NOPE, D_ROTARY, D_VALUE = 4, 2, 5
LAYER = 1


@pytest.fixture(params=[24, None], ids=["bottleneck", "plain queries"])
def bridge(request):
    return toy_models.deepseek(q_lora_rank=request.param)[0].to(torch.float64)


def outputs(bridge, x) -> dict[str, torch.Tensor]:
    """What the modules of a layer make of tokens ``[token, d_model]``: ``[head, token, width]``."""
    attention = bridge.original_model.model.layers[LAYER].self_attn
    attention = getattr(attention, "original_component", attention)
    if attention.q_lora_rank is None:
        queries = attention.q_proj(x)
    else:
        queries = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    latent, rotary = attention.kv_a_proj_with_mqa(x).split([20, D_ROTARY], dim=-1)
    both = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (4, -1))
    keys, values = both.transpose(0, 1).split([D_NOPE, D_VALUE], dim=-1)
    queries = queries.unflatten(-1, (4, -1)).transpose(0, 1)
    return {"Q": queries, "K": keys, "V": values, "rotaryK": rotary[None]}


def directions(vectors: torch.Tensor) -> torch.Tensor:
    """Without the scalar by which the norm divides a token, and which all heads share."""
    return vectors / vectors.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("role", ["Q", "K", "V", "rotaryK"])
@torch.no_grad()
def test_a_head_reads_its_subspace_and_nothing_else(bridge, role):
    """Up to 5e-7, for the norm computes in float32 whatever it is given; γ left out shows as 1."""
    bases = attention_head_subspaces(bridge, (role,))[role].bases[LAYER]
    x = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    push = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    before = directions(outputs(bridge, x)[role])
    for head, basis in enumerate(bases):
        inside = push @ basis @ basis.T
        unseen = directions(outputs(bridge, x + 10 * (push - inside))[role])[head]
        assert (unseen - before[head]).abs().max() < 5e-6
        for direction in basis.T:
            seen = directions(outputs(bridge, x + 3 * direction)[role])[head]
            assert (seen - before[head]).norm(dim=-1).min() > 1e-3


def test_shapes_and_kinds(bridge):
    subspaces = attention_head_subspaces(bridge, ("Q", "K", "V", "O", "rotaryK"))
    shapes = {role: tuple(found.bases.shape) for role, found in subspaces.by_role.items()}
    assert shapes == {
        "Q": (3, 4, 32, D_NOPE + D_ROTARY),
        "K": (3, 4, 32, D_NOPE),
        "V": (3, 4, 32, D_VALUE),
        "O": (3, 4, 32, D_VALUE),
        "rotaryK": (3, 1, 32, D_ROTARY),
    }
    assert subspaces["rotaryK"].kind == "kv"


def test_the_rotary_key_makes_pairings():
    bridge, weights = toy_models.deepseek()
    results = attention_head_affinities(bridge, ("OrotaryK", "rotaryKrotaryK"))
    down = weights["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"][20:].double()
    out = weights["model.layers.0.self_attn.o_proj.weight"][:, D_VALUE : 2 * D_VALUE].double()
    expected = oracles.projection_kernel(out.numpy(), down.T.numpy())
    assert results["OrotaryK"].score((0, 1), (2, 0)) == pytest.approx(expected, abs=1e-5)
    assert results["OrotaryK"].pairing == "OrotaryK"
    assert int(results["OrotaryK"].valid_mask.sum()) == 4 * 3
    assert int(results["rotaryKrotaryK"].valid_mask.sum()) == 3


def test_other_attention_has_no_rotary_key_of_its_own():
    with pytest.raises(ValueError, match="role rotaryK, layer 0: .* Use role K"):
        attention_head_subspaces(toy_models.llama()[0], ("rotaryK",))


def test_half_precision_is_multiplied_in_float32():
    """The product of two bfloat16 factors has rounding that neither checkpoint nor model has."""
    half = toy_models.deepseek()[0].to(torch.bfloat16)
    exact = toy_models.deepseek()[0].to(torch.bfloat16).to(torch.float64)
    for role in ("Q", "K", "V"):
        scores = attention_head_subspace_affinity(half, source_role=role, target_role=role).scores
        expected = attention_head_subspace_affinity(exact, source_role=role, target_role=role)
        assert scores.dtype == torch.float32
        assert (scores - expected.scores).abs().max() < 1e-4  # bfloat16 would be off by 0.01


def test_other_metrics_take_the_same_matrices():
    bridge, weights = toy_models.deepseek(q_lora_rank=None)
    out = weights["model.layers.0.self_attn.o_proj.weight"][:, D_VALUE : 2 * D_VALUE].double()
    query = weights["model.layers.2.self_attn.q_proj.weight"][: D_NOPE + D_ROTARY].double()
    expected = torch.linalg.norm(out.T @ query.T) / torch.linalg.norm(out) / query.norm()
    found = simple_composition_score(bridge, target_role="Q").score((0, 1), (2, 0))
    assert found == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("target_role", ["Q", "K"])
def test_queries_and_keys_of_different_widths_make_no_circuit(bridge, target_role):
    with pytest.raises(NotImplementedError, match=f"layer 0: heads of role {target_role} are ."):
        composition_score(bridge, target_role=target_role)
    assert composition_score(bridge, target_role="V").target_ranks.min() > 0


def test_the_rotary_key_has_no_composition_score(bridge):
    with pytest.raises(ValueError, match="role rotaryK is no side of a map"):
        composition_score(bridge, target_role="rotaryK")

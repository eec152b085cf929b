"""Extraction and affinity calls on small bridges, against the raw checkpoint weights."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import oracles
import toy_models

SAME_ROLE = ("QQ", "KK", "VV", "OO")
PAIRINGS = ("OQ", "OK", "OV", *SAME_ROLE)


def gpt2_heads(weights, layer: int, heads: int = 4):
    """Conv1D: ``[in, out]``, q, k and v in blocks."""
    prefix = f"transformer.h.{layer}.attn"
    q, k, v = weights[f"{prefix}.c_attn.weight"].chunk(3, dim=1)
    split = {
        role: w.reshape(len(w), heads, -1).movedim(1, 0)
        for role, w in zip("QKV", (q, k, v), strict=True)
    }
    o = weights[f"{prefix}.c_proj.weight"]
    return {**split, "O": o.reshape(heads, -1, o.shape[1]).mT}


def llama_heads(weights, layer: int, head_dim: int = 8):
    """Linear: ``[out, in]``, one matrix each."""
    prefix = f"model.layers.{layer}.self_attn"
    split = {}
    for role in "qkv":
        w = weights[f"{prefix}.{role}_proj.weight"]
        split[role.upper()] = w.reshape(-1, head_dim, w.shape[1]).mT
    o = weights[f"{prefix}.o_proj.weight"]
    return {**split, "O": o.reshape(o.shape[0], -1, head_dim).movedim(1, 0)}


def fused_by_head(prefix: str, dense: str):
    """Linear: ``[out, in]``, the rows of q, k and v beside each other within every head."""

    def heads(weights, layer: int, heads: int = 4):
        fused = weights[prefix.format(layer)]
        q, k, v = fused.reshape(heads, 3, -1, fused.shape[1]).unbind(1)
        o = weights[dense.format(layer)]
        split = {role: w.mT for role, w in zip("QKV", (q, k, v), strict=True)}
        return {**split, "O": o.reshape(o.shape[0], heads, -1).movedim(1, 0)}

    return heads


neox_heads = fused_by_head(
    "gpt_neox.layers.{}.attention.query_key_value.weight",
    "gpt_neox.layers.{}.attention.dense.weight",
)
bloom_heads = fused_by_head(
    "transformer.h.{}.self_attention.query_key_value.weight",
    "transformer.h.{}.self_attention.dense.weight",
)

MODELS = {
    "multi-head, Conv1D": (toy_models.gpt2, gpt2_heads, (0, 1, 2)),
    "grouped-query": (toy_models.llama, llama_heads, (0, 1, 2)),
    "multi-query": (lambda dtype: toy_models.llama(dtype, kv_heads=1), llama_heads, (0, 1, 2)),
    "wide heads": (
        lambda dtype: toy_models.llama(dtype, head_dim=12),
        lambda weights, layer: llama_heads(weights, layer, 12),
        (0, 1, 2),
    ),
    "fused by head": (toy_models.neox, neox_heads, (0, 1, 2)),
    "fused by head, ALiBi": (toy_models.bloom, bloom_heads, (0, 1, 2)),
    "hybrid": (toy_models.hybrid, llama_heads, (1, 3)),
}


def expected_pairs(pairing: str, order: str, sources, targets):
    """The definition of each order, pair by pair; heads are ``(layer, head)``."""
    same_role = pairing[0] == pairing[1]
    for source in sources:
        for target in targets:
            if order == "forward" and source[0] < target[0]:
                yield source, target
            if order == "distinct" and source < target:
                yield source, target
            if order == "all" and not (same_role and source == target):
                yield source, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_pair_of_every_pairing(name, dtype):
    make, heads_of, layers = MODELS[name]
    bridge, weights = make(dtype)
    heads = {layer: heads_of(weights, layer) for layer in layers}
    # Bases are good to eps times the condition number; these Gaussian heads stay below 100.
    result_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = 100 * 32 * torch.finfo(result_dtype).eps

    results = attention_head_affinities(bridge, PAIRINGS)
    assert tuple(results) == PAIRINGS
    for pairing, result in results.items():
        source_role, target_role = pairing
        axes = [
            [(layer, head) for layer in layers for head in range(len(heads[layer][role]))]
            for role in pairing
        ]
        assert result.source_layer_indices == result.target_layer_indices == layers
        assert result.scores.dtype == result_dtype
        assert result.source_head_kind == ("kv" if source_role in "KV" else "query")
        assert result.target_head_kind == ("kv" if target_role in "KV" else "query")
        assert result.layer_order == ("distinct" if pairing in SAME_ROLE else "forward")
        pairs = list(expected_pairs(pairing, result.layer_order, *axes))
        assert int(result.valid_mask.sum()) == len(pairs)
        for (layer, head), (other_layer, other_head) in pairs:
            a = heads[layer][source_role][head].double()
            b = heads[other_layer][target_role][other_head].double()
            where = (layers.index(layer), head, layers.index(other_layer), other_head)
            assert bool(result.valid_mask[where])
            expected = oracles.projection_kernel(a, b)
            assert result.scores[where].item() == pytest.approx(expected, abs=tolerance)
            assert result.normalized[where].item() == pytest.approx(
                expected / math.sqrt(a.shape[1] * b.shape[1]), abs=tolerance
            )
        assert not bool(result.scores[~result.valid_mask].any())
        assert not bool(result.normalized[~result.valid_mask].any())


@pytest.mark.parametrize(
    ("pairing", "order"),
    [
        (p, o)
        for p in PAIRINGS
        for o in ("forward", "all", "distinct")
        if not (o == "distinct" and p not in SAME_ROLE)
    ],
)
def test_layer_orders(pairing, order):
    bridge, _ = toy_models.hybrid()
    result = attention_head_subspace_affinity(
        bridge, source_role=pairing[0], target_role=pairing[1], layer_order=order
    )
    counts = [ranks.shape[1] for ranks in (result.source_ranks, result.target_ranks)]
    axes = [[(layer, head) for layer in (1, 3) for head in range(count)] for count in counts]
    found = [
        ((result.source_layer_indices[a], b), (result.target_layer_indices[c], d))
        for a, b, c, d in result.valid_mask.nonzero().tolist()
    ]
    assert found == list(expected_pairs(pairing, order, *axes))


def test_gpt2_small_has_the_pair_counts_of_the_paper():
    # Heads of width 2 instead of 64: only the counting is of the paper's size.
    bridge, _ = toy_models.gpt2(n_layer=12, n_head=12, n_embd=24)
    results = attention_head_affinities(bridge, ("OQ", "QQ"))
    assert int(results["OQ"].valid_mask.sum()) == 9504
    assert int(results["QQ"].valid_mask.sum()) == 10296
    forward = attention_head_subspace_affinity(
        bridge, source_role="Q", target_role="Q", layer_order="forward"
    )
    assert int(forward.valid_mask.sum()) == 9504


def test_subspaces_can_be_reused_and_overlap_any_two_roles():
    bridge, weights = toy_models.llama()
    subspaces = attention_head_subspaces(bridge)
    direct = attention_head_subspace_affinity(bridge, target_role="K")
    reused = attention_head_subspace_affinity(subspaces, target_role="K")
    assert torch.equal(direct.scores, reused.scores)
    assert subspaces["Q"].bases.shape == (3, 4, 32, 8)
    assert subspaces["K"].bases.shape == (3, 2, 32, 8)
    assert [subspaces[role].kind for role in "QKVO"] == ["query", "kv", "kv", "query"]

    overlap = subspaces.overlap("Q", "K")
    heads = [llama_heads(weights, layer) for layer in range(3)]
    for layer, head, other, kv_head in np.ndindex(3, 4, 3, 2):
        expected = oracles.projection_kernel(heads[layer]["Q"][head], heads[other]["K"][kv_head])
        assert overlap[layer, head, other, kv_head].item() == pytest.approx(expected, abs=1e-4)
    own = subspaces.overlap("V", "V").flatten(2).flatten(0, 1).diagonal()
    assert torch.allclose(own, torch.full_like(own, 8.0), atol=1e-5)

    only_k = attention_head_subspaces(bridge, roles=("K",))
    with pytest.raises(ValueError, match="role O was not extracted"):
        attention_head_subspace_affinity(only_k, target_role="K")
    for option in ({"rank": 2}, {"rtol": 1e-3}):
        with pytest.raises(ValueError, match="decided when the subspaces were extracted"):
            attention_head_subspace_affinity(subspaces, target_role="K", **option)


def with_deficient_head(*, pruned: bool = False):
    """K of layer 1, head 2 has rank 3 instead of 8, or none."""
    bridge, weights = toy_models.gpt2()
    with torch.no_grad():
        rows = bridge.blocks[1].attn.k.weight[16:24]
        rows[3:] = rows[:1]
        if pruned:
            rows.zero_()
    return bridge, weights


def test_subspaces_can_be_copied_and_sent_to_other_processes():
    subspaces = attention_head_subspaces(toy_models.gpt2()[0], ("O", "Q"))
    for copied in (copy.deepcopy(subspaces), pickle.loads(pickle.dumps(subspaces))):
        assert torch.equal(copied.overlap("O", "Q"), subspaces.overlap("O", "Q"))


def test_a_deficient_head_is_named_unless_ranks_are_measured():
    bridge, _ = with_deficient_head()
    with pytest.raises(
        ValueError,
        match=r"GPT2LMHeadModel, role K, layer 1, head 2: measured rank 3 is below 8.*'measured'",
    ):
        attention_head_subspace_affinity(bridge, target_role="K")
    # A role that does not have the head is not concerned.
    attention_head_subspace_affinity(bridge, target_role="Q")

    result = attention_head_subspace_affinity(bridge, target_role="K", rank="measured")
    assert result.target_ranks[1, 2] == 3 and result.rank == "measured"
    assert int((result.target_ranks != 8).sum()) == 1
    source = bridge.blocks[0].attn.W_O[0].T.detach().numpy()
    target = bridge.blocks[1].attn.W_K[2].detach().numpy()[:, :3]
    score = result.scores[0, 0, 1, 2].item()
    assert score == pytest.approx(oracles.projection_kernel(source, target), abs=1e-4)
    assert result.normalized[0, 0, 1, 2].item() == pytest.approx(score / math.sqrt(8 * 3))
    assert (result.source_rank, result.target_rank) == (8, 8)


def test_a_pruned_head_has_no_affinity_and_is_left_out():
    bridge, _ = with_deficient_head(pruned=True)
    with pytest.raises(ValueError, match="layer 1, head 2: measured rank 0"):
        attention_head_subspace_affinity(bridge, target_role="K")
    result = attention_head_subspace_affinity(bridge, target_role="K", rank="measured")
    assert not bool(result.valid_mask[:, :, 1, 2].any())
    assert int(result.valid_mask.sum()) == 48 - 4
    assert bool(result.normalized.isfinite().all())
    with pytest.raises(ValueError, match="no valid pair"):
        result.score((0, 0), (1, 2))


def test_a_rank_keeps_the_leading_singular_directions():
    bridge, weights = toy_models.gpt2()
    result = attention_head_subspace_affinity(bridge, target_role="V", rank=3)
    assert (result.rank, result.source_rank, result.target_rank) == (3, 3, 3)
    assert result.source_ranks.unique().tolist() == [8]
    source = np.linalg.svd(gpt2_heads(weights, 0)["O"][1].double())[0][:, :3]
    target = np.linalg.svd(gpt2_heads(weights, 2)["V"][3].double())[0][:, :3]
    expected = oracles.projection_kernel(source, target)
    assert result.score((0, 1), (2, 3)) == pytest.approx(expected, abs=1e-4)
    deficient, _ = with_deficient_head()
    with pytest.raises(ValueError, match="layer 1, head 2: measured rank 3 is below 4"):
        attention_head_subspace_affinity(deficient, target_role="K", rank=4)
    assert attention_head_subspace_affinity(deficient, target_role="K", rank=3).target_rank == 3


def test_an_rtol_decides_the_measured_rank():
    bridge, _ = toy_models.gpt2()
    result = attention_head_subspace_affinity(bridge, target_role="Q", rank="measured", rtol=0.5)
    for layer, head in np.ndindex(3, 4):
        for ranks, matrix in (
            (result.target_ranks, bridge.blocks[layer].attn.W_Q[head]),
            (result.source_ranks, bridge.blocks[layer].attn.W_O[head]),
        ):
            values = np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)
            assert ranks[layer, head] == (values > 0.5 * values[0]).sum()
    assert result.rtol == 0.5


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, 30), (torch.float64, 200)])
def test_scale_of_the_weights_does_not_matter(dtype, exponent):
    bridge, _ = toy_models.gpt2(dtype)
    reference = attention_head_subspace_affinity(bridge, target_role="Q")
    for sign in (1, -1):
        scaled, _ = toy_models.gpt2(dtype)
        with torch.no_grad():
            for block in scaled.blocks:
                for linear in (block.attn.q, block.attn.o):
                    linear.weight.mul_(10.0 ** (sign * exponent))
        result = attention_head_subspace_affinity(scaled, target_role="Q")
        assert torch.allclose(result.scores, reference.scores, atol=1e-4)


def test_the_model_is_not_changed_and_nothing_keeps_a_graph():
    bridge, _ = toy_models.gpt2()
    before = copy.deepcopy(bridge.state_dict())
    first = attention_head_affinities(bridge, PAIRINGS)
    second = attention_head_affinities(bridge, PAIRINGS)
    assert all(torch.equal(before[name], value) for name, value in bridge.state_dict().items())
    assert all(parameter.grad is None for parameter in bridge.parameters())
    for pairing in PAIRINGS:
        assert torch.equal(first[pairing].scores, second[pairing].scores), "deterministic"
        assert not first[pairing].scores.requires_grad


def test_autocast_does_not_lower_the_precision():
    bridge, _ = toy_models.gpt2()
    reference = attention_head_subspace_affinity(bridge, target_role="Q")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attention_head_subspace_affinity(bridge, target_role="Q")
    assert result.scores.dtype == torch.float32
    assert torch.equal(result.scores, reference.scores)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    bridge, _ = toy_models.llama()
    with torch.no_grad():
        bridge.blocks[2].attn.v.weight[9, 5] = bad
    with pytest.raises(
        ValueError, match="LlamaForCausalLM, role V, layer 2, head 1: .*finite values"
    ):
        attention_head_subspace_affinity(bridge, target_role="V")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target_role": "X"}, ValueError, "target_role must be one of"),
        ({"target_role": "Q", "source_role": "o"}, ValueError, "source_role must be one of"),
        ({"target_role": "K", "source_role": "Q"}, ValueError, r"overlap\('Q', 'K'\)"),
        ({"target_role": "O", "source_role": "V"}, ValueError, "transpose of O->V"),
        ({"target_role": "Q", "layer_order": "distinct"}, ValueError, "layer_order of O->Q"),
        ({"target_role": "Q", "layer_order": "back"}, ValueError, "layer_order of O->Q"),
        ({"target_role": "Q", "rank": 9}, ValueError, "rank must be between 1 and 8"),
        ({"target_role": "Q", "rank": 2.0}, TypeError, "rank must be an integer"),
        ({"target_role": "Q", "rank": "Measured"}, TypeError, "rank must be None, an integer or"),
        ({"target_role": "Q", "rtol": -1}, ValueError, "rtol must be a finite"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    bridge, _ = toy_models.gpt2()
    with pytest.raises(error, match=message):
        attention_head_subspace_affinity(bridge, **options)


@pytest.mark.parametrize("pairings", ["OQ", (), ("O",), ("OQX",), (1,), ("QK",)])
def test_bad_pairings_are_refused(pairings):
    bridge, _ = toy_models.gpt2()
    with pytest.raises(ValueError, match="pairing|composition"):
        attention_head_affinities(bridge, pairings)


def test_what_is_no_bridge_is_refused():
    with pytest.raises(TypeError, match=r"must be a TransformerBridge, got Linear.*boot_transform"):
        attention_head_subspace_affinity(torch.nn.Linear(2, 2), target_role="Q")
    with pytest.raises(NotImplementedError, match="two residual streams"):
        attention_head_subspace_affinity(toy_models.t5()[0], target_role="Q")


def test_head_weights_on_the_meta_device_are_refused():
    bridge, _ = toy_models.gpt2()
    bridge.blocks[1].attn.o.to("meta")
    with pytest.raises(NotImplementedError, match="role O, layer 1: .*meta"):
        attention_head_subspace_affinity(bridge, target_role="Q")

"""Which weights are read from a bridge, and what is said about those that cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.tools.analysis._head_weights import read_head_weights
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspaces,
)

import toy_models


def fake_bridge(attention: object, **block: object) -> SimpleNamespace:
    """A bridge of one block, down to what the reader looks at."""
    blocks = [SimpleNamespace(attn=attention, **block)]
    return SimpleNamespace(
        cfg=SimpleNamespace(original_architecture="TinyForCausalLM"),
        blocks_with=lambda name: list(enumerate(blocks)),
    )


def attention_with(weight: object) -> SimpleNamespace:
    return SimpleNamespace(q=SimpleNamespace(weight=weight), W_Q=weight)


@pytest.mark.parametrize(
    "weight, error, message",
    [
        (torch.zeros(2, 4, 3, device="meta"), NotImplementedError, "on the meta device"),
        (torch.zeros(24, 1, dtype=torch.uint8), NotImplementedError, "quantised, its dtype"),
        (torch.zeros(2, 4, 3, dtype=torch.float8_e4m3fn), NotImplementedError, "quantised"),
        (SimpleNamespace(), NotImplementedError, "must be a tensor, got SimpleNamespace"),
        (torch.zeros(4, 6), ValueError, "one matrix per head"),
        (torch.zeros(2, 4, 0), ValueError, "empty"),
    ],
)
def test_a_weight_without_readable_values_is_refused(weight, error, message):
    with pytest.raises(error, match=f"^TinyForCausalLM, role Q, layer 0: .*{message}"):
        read_head_weights(fake_bridge(attention_with(weight)), ["Q"])


def test_a_weight_under_an_adapter_is_refused():
    attention = attention_with(torch.ones(2, 4, 3))
    attention.q.base_layer = torch.nn.Linear(4, 6)
    with pytest.raises(NotImplementedError, match="role Q, layer 0: .* Merge the adapter"):
        read_head_weights(fake_bridge(attention), ["Q"])


def test_errors_of_the_bridge_are_translated():
    with pytest.raises(NotImplementedError) as caught:
        read_head_weights(fake_bridge(SimpleNamespace()), ["V"])
    assert str(caught.value) == (
        "TinyForCausalLM, role V, layer 0: SimpleNamespace has no matrix per head that the bridge "
        "could give. Choose pairings without this role"
    )


def test_a_model_without_attention_is_refused():
    bridge = fake_bridge(None)
    bridge.blocks_with = lambda name: []
    with pytest.raises(ValueError, match="No attention layers found in TinyForCausalLM"):
        read_head_weights(bridge, ["Q"])


def test_what_is_no_bridge_is_refused():
    with pytest.raises(TypeError, match="must be a TransformerBridge, got Linear"):
        read_head_weights(torch.nn.Linear(2, 2), ["Q"])


def test_stacks_that_take_turns_are_refused():
    class Block(torch.nn.Module):
        is_list_item = True

    bridge = fake_bridge(attention_with(torch.ones(2, 4, 3)))
    bridge._modules = {name: torch.nn.ModuleList([Block()]) for name in ("L_blocks", "H_blocks")}
    with pytest.raises(NotImplementedError, match="stacks L_blocks, H_blocks, which take turns"):
        read_head_weights(bridge, ["Q"])
    with pytest.raises(NotImplementedError, match="two residual streams"):
        read_head_weights(toy_models.t5()[0], ["Q"])


def test_a_role_that_cannot_be_read_stops_only_the_pairings_that_need_it():
    bridge, _ = toy_models.llama()
    bridge.blocks[2].attn.k.to("meta")

    results = attention_head_affinities(bridge, ("OQ", "OV", "QQ", "VV", "OO"))
    assert list(results) == ["OQ", "OV", "QQ", "VV", "OO"]
    for pairing in ("OK", "KK"):
        with pytest.raises(NotImplementedError, match="role K, layer 2: .* meta device"):
            attention_head_affinities(bridge, (pairing,))


def test_attention_is_found_whatever_the_block_calls_it():
    weight = torch.randn(2, 4, 3)
    bridge = fake_bridge(None)
    block = SimpleNamespace(self_attn=attention_with(weight))
    bridge.blocks_with = lambda name: [(5, block)]

    read = read_head_weights(bridge, ["Q"])["Q"]
    assert read.layer_indices == (5,)
    assert torch.equal(read.matrices[0], weight)


@pytest.mark.parametrize("name", ["mixer", "temporal_block"])
def test_attention_in_a_block_that_is_bridged_as_a_whole_is_read(name):
    d_model, heads, kv_heads, d_head = 8, 4, 2, 3

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim = d_head
            self.q_proj = torch.nn.Linear(d_model, heads * d_head)
            self.k_proj = torch.nn.Linear(d_model, kv_heads * d_head)
            self.v_proj = torch.nn.Linear(d_model, kv_heads * d_head)
            self.o_proj = torch.nn.Linear(heads * d_head, d_model)

    attention = Attention()
    bridge = fake_bridge(None)
    bridge.blocks_with = lambda name: []
    bridge.blocks = [SimpleNamespace(), SimpleNamespace(**{name: attention})]

    read = read_head_weights(bridge, ["Q", "K", "V", "O"])
    assert read["Q"].layer_indices == (1,)
    assert torch.equal(read["Q"].matrices[0][3], attention.q_proj.weight[9:12].T)
    assert torch.equal(read["K"].matrices[0][1], attention.k_proj.weight[3:6].T)
    assert torch.equal(read["V"].matrices[0][1], attention.v_proj.weight[3:6].T)
    assert torch.equal(read["O"].matrices[0][3], attention.o_proj.weight[:, 9:12])
    attention.head_dim = 5
    with pytest.raises(ValueError, match="cannot be heads of width 5"):
        read_head_weights(bridge, ["Q"])


def test_weights_are_read_as_views_and_in_their_own_dtype():
    bridge, _ = toy_models.llama(torch.bfloat16)
    read = read_head_weights(bridge, ["Q", "O"])
    for role, linear in (("Q", bridge.blocks[1].attn.q), ("O", bridge.blocks[1].attn.o)):
        matrix = read[role].matrices[1]
        assert matrix.dtype == torch.bfloat16
        assert matrix.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr()
        assert not matrix.requires_grad


@pytest.fixture
def new_falcon():
    config = FalconConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        multi_query=False,
    )
    torch.manual_seed(0)
    model = FalconForCausalLM(config).eval()
    fused = model.transformer.h[1].self_attention.query_key_value.weight.detach().clone()
    return build_bridge_from_module(model, "FalconForCausalLM", hf_config=config), fused


def test_new_falcon_is_read_from_the_fused_weight_that_the_bridge_splits_wrongly(new_falcon):
    bridge, fused = new_falcon
    query_0, query_1, key_0, value_0, query_2, query_3, key_1, value_1 = fused.split(8)
    read = read_head_weights(bridge, ["Q", "K", "V"])

    assert torch.equal(read["Q"].matrices[1].mT, torch.stack([query_0, query_1, query_2, query_3]))
    assert torch.equal(read["K"].matrices[1].mT, torch.stack([key_0, key_1]))
    assert torch.equal(read["V"].matrices[1].mT, torch.stack([value_0, value_1]))
    # What this guards against; once the bridge splits rightly, its own matrices may be used.
    assert not torch.equal(bridge.blocks[1].attn.W_K.mT, torch.stack([key_0, key_1]))


def test_new_falcon_is_refused_once_the_bridge_has_processed_its_wrong_split(new_falcon):
    bridge, _ = new_falcon
    bridge._weights_processed = True
    with pytest.raises(NotImplementedError, match="role K, layer 0: .* enable_compatibility_mode"):
        attention_head_subspaces(bridge, ("K",))

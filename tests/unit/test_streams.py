"""Encoder-decoder models: two residual streams, one at a time, and what crosses between them."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import networkx
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity.evaluation import HeadLabels, head_detection
from transformer_lens.tools.analysis.head_affinity.graph import head_graph
from transformer_lens.tools.analysis.head_affinity.metrics import (
    composition_score,
    linear_cka,
    procrustes_similarity,
    read_head_weights,
    simple_composition_score,
)
from transformer_lens.tools.analysis.head_affinity.plots import plot_graph
from transformer_lens.tools.analysis.head_affinity.significance import significance
from transformer_lens.tools.analysis.projection_kernel import (
    HeadAffinityResult,
    attention_head_affinities,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import oracles
import toy_models

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def bart():
    return toy_models.bart()


def matrix(weights, place: str, head: int, d_head: int):
    """``[d_model, d_head]`` of a head, from the checkpoint."""
    some = slice(head * d_head, (head + 1) * d_head)
    weight = weights[f"model.{place}.weight"].double().numpy()
    return weight[:, some] if place.endswith("out_proj") else weight[some].T


@pytest.mark.parametrize("stream", ["encoder", "decoder"])
def test_a_stream_has_heads_of_its_own(bart, stream):
    bridge, weights = bart
    result = attention_head_subspace_affinity(bridge, target_role="K", stream=stream)
    assert result.scores.shape == (3, 4, 3, 4)
    assert result.stream == stream
    place = f"{stream}.layers.{{}}.self_attn.{{}}_proj"
    expected = oracles.projection_kernel(
        matrix(weights, place.format(0, "out"), 1, 8),
        matrix(weights, place.format(1, "k"), 0, 8),
    )
    assert result.score((0, 1), (1, 0)) == pytest.approx(expected, abs=1e-5)


def test_cross_attention_reads_the_decoder_with_its_queries(bart):
    bridge, weights = bart
    results = attention_head_affinities(bridge, ("OcrossQ", "crossQcrossQ"), stream="decoder")
    for source, target in (((0, 3), (0, 1)), ((0, 3), (2, 1)), ((2, 0), (2, 2))):
        expected = oracles.projection_kernel(
            matrix(weights, f"decoder.layers.{source[0]}.self_attn.out_proj", source[1], 8),
            matrix(weights, f"decoder.layers.{target[0]}.encoder_attn.q_proj", target[1], 8),
        )
        found = results["OcrossQ"].score(source, target)
        assert found == pytest.approx(expected, abs=1e-5)
    # Self-attention, then cross-attention: a head is heard in its own block already.
    assert int(results["OcrossQ"].valid_mask.sum()) == 4 * 4 * (3 + 2 + 1)
    with pytest.raises(ValueError, match="no valid pair"):
        results["OcrossQ"].score((1, 0), (0, 0))
    assert int(results["crossQcrossQ"].valid_mask.sum()) == 12 * 11 // 2


@pytest.mark.parametrize("call", [attention_head_subspaces, attention_head_affinities])
def test_without_a_choice_the_call_names_it(bart, call):
    with pytest.raises(
        NotImplementedError,
        match="^BartForConditionalGeneration is an encoder-decoder model: its heads live in two "
        "residual streams.* stream='encoder' or stream='decoder'$",
    ):
        call(bart[0])


@pytest.mark.parametrize("role", ["crossK", "crossV"])
def test_what_cross_attention_reads_from_the_encoder_is_refused(bart, role):
    reason = "read the encoder's final output and not the residual stream"
    with pytest.raises(ValueError, match=reason):
        attention_head_subspace_affinity(bart[0], target_role=role, stream="decoder")
    with pytest.raises(ValueError, match=reason):
        attention_head_affinities(bart[0], (f"O{role}",), stream="decoder")
    with pytest.raises(ValueError, match=reason):
        attention_head_subspaces(bart[0], (role,), stream="decoder")


def test_refusals(bart):
    bridge, _ = bart
    with pytest.raises(ValueError, match="Conditional.*, encoder: no block has a cross-attention"):
        attention_head_subspaces(bridge, ("crossQ",), stream="encoder")
    with pytest.raises(ValueError, match="stream must be one of .*, got 'both'"):
        attention_head_subspaces(bridge, stream="both")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has one residual stream"):
        attention_head_subspaces(toy_models.gpt2()[0], stream="decoder")
    with pytest.raises(ValueError, match="GPT2LMHeadModel: no block has a cross-attention"):
        attention_head_subspaces(toy_models.gpt2()[0], ("crossQ",))
    subspaces = attention_head_subspaces(bridge, stream="decoder")
    with pytest.raises(ValueError, match="stream were decided when the subspaces"):
        attention_head_affinities(subspaces, stream="decoder")
    with pytest.raises(ValueError, match="a pairing is two roles in a row"):
        attention_head_affinities(subspaces, ("Ocross",))


def test_a_stream_is_remembered(bart, tmp_path):
    bridge, _ = bart
    subspaces = attention_head_subspaces(bridge, stream="decoder")
    result = attention_head_subspace_affinity(subspaces, target_role="V")
    result.save(tmp_path / "decoder.safetensors")
    loaded = HeadAffinityResult.load(tmp_path / "decoder.safetensors")
    assert (loaded.stream, loaded.d_model) == ("decoder", 32)
    from_model = significance(loaded, bridge, n_samples=50)
    assert from_model.p.equal(significance(loaded, subspaces, n_samples=50).p)

    other = attention_head_subspace_affinity(bridge, target_role="Q", stream="encoder")
    with pytest.raises(ValueError, match="one stream, got .'decoder', 'encoder'."):
        head_graph([result, other])


def test_heads_of_cross_attention_are_not_those_of_self_attention(bart):
    """Head 2 of layer 0 writes to the cross-attention of its own layer, whose head 2 is another."""
    results = attention_head_affinities(bart[0], ("OQ", "OcrossQ"), stream="decoder")
    graph = head_graph(results, k=200, classes={"Copying": [(0, 2)]})
    assert not list(networkx.selfloop_edges(graph))
    assert graph.nodes["L0H2"] == {"layer": 0, "head": 2, "kind": "query", "head_class": "Copying"}
    assert graph.nodes["L0X2"] == {"layer": 0, "head": 2, "kind": "cross", "head_class": ""}
    score = graph["L0H2"]["L0X2"]["OcrossQ"]["score"]
    assert score == results["OcrossQ"].score((0, 2), (0, 2))
    names = {text.get_text() for text in plot_graph(graph).texts}
    assert {"0.2", "0.x2"} <= names
    plt.close("all")

    labels = HeadLabels.from_dict({"Copying": ["0.2"]})
    with pytest.raises(ValueError, match="OcrossQ scores heads of cross-attention"):
        head_detection(results["OcrossQ"], labels)


def test_other_metrics_take_the_weights_of_a_stream(bart):
    bridge, _ = bart
    with pytest.raises(NotImplementedError, match="stream='encoder' or stream='decoder'"):
        simple_composition_score(bridge, target_role="K")
    weights = read_head_weights(bridge, ("O", "K", "crossQ"), stream="decoder")
    for role in ("K", "crossQ"):
        result = simple_composition_score(weights, target_role=role)
        assert (result.stream, result.d_model) == ("decoder", 32)
        assert result.scores.shape == (3, 4, 3, 4)


@pytest.mark.parametrize("make", [toy_models.bart, toy_models.t5])
def test_a_compiled_model_has_two_streams_as_well(make):
    model, _ = make()
    compiled = torch.compile(model)
    with pytest.raises(NotImplementedError, match="Choose one with"):
        attention_head_subspace_affinity(compiled, target_role="Q")
    expected = attention_head_subspace_affinity(model, target_role="Q", stream="decoder")
    found = attention_head_subspace_affinity(compiled, target_role="Q", stream="decoder")
    assert torch.equal(found.scores, expected.scores) and found.stream == "decoder"


def test_other_metrics_take_a_stream(bart):
    model, _ = bart
    for metric in (
        composition_score,
        simple_composition_score,
        linear_cka,
        procrustes_similarity,
    ):
        read = read_head_weights(model, ("O", "V", "Q", "K"), stream="decoder")
        expected = metric(read, target_role="K")
        found = metric(model, target_role="K", stream="decoder")
        assert torch.equal(found.scores, expected.scores) and found.stream == "decoder"
        with pytest.raises(ValueError, match="stream was decided when the weights were read"):
            metric(read, target_role="K", stream="decoder")
    assert simple_composition_score(model, target_role="crossQ", stream="decoder").stream
    with pytest.raises(ValueError, match="role crossQ is no side of a map"):
        composition_score(model, target_role="crossQ", stream="decoder")

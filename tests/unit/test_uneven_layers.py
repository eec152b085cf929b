"""Layers that differ in the number or width of their heads, or have none of a role."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transformer_lens.model_bridge.generalized_components.attention import PerLayerGeometryError
from transformer_lens.tools.analysis._head_weights import read_head_weights
from transformer_lens.tools.analysis.head_affinity.evaluation import HeadLabels, head_detection
from transformer_lens.tools.analysis.head_affinity.graph import head_graph
from transformer_lens.tools.analysis.head_affinity.metrics import simple_composition_score
from transformer_lens.tools.analysis.head_affinity.plots import plot_affinity
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import oracles

D_MODEL = 16
#: Query heads, key-value heads and width of every layer; the last reuses keys and values.
LAYERS = ((4, 2, 3), (6, 2, 3), (4, 1, 5), (4, None, 3))


class Attention(torch.nn.Module):
    """An attention module as Hugging Face has it."""

    def __init__(self, heads: int, kv_heads: int | None, d_head: int) -> None:
        super().__init__()
        self.head_dim = d_head
        self.is_kv_shared_layer = kv_heads is None
        kv = d_head * (kv_heads or 2)
        self.q_proj = torch.nn.Linear(D_MODEL, heads * d_head)
        self.k_proj = torch.nn.Linear(D_MODEL, kv)
        self.v_proj = torch.nn.Linear(D_MODEL, kv)
        self.o_proj = torch.nn.Linear(heads * d_head, D_MODEL)


class BridgedAttention:
    """Goes by the configuration, 4 query and 2 key-value heads of width 3, and cuts whatever has as
    many entries that way."""

    def __init__(self, module: Attention) -> None:
        self.original_component = module
        for role in "qkvo":
            setattr(self, role, getattr(module, f"{role}_proj"))

    def __getattr__(self, name: str) -> torch.Tensor:
        if not name.startswith("W_"):
            raise AttributeError(name)
        role = name[2:]
        weight = getattr(self, role.lower()).weight
        flat = weight.T if role == "O" else weight
        heads = 4 if role in "QO" else 2
        if len(flat) % heads:
            raise PerLayerGeometryError("another geometry")
        cut = flat.reshape(heads, -1, D_MODEL)
        return cut if role == "O" else cut.mT


@pytest.fixture
def bridge():
    torch.manual_seed(0)
    blocks = [SimpleNamespace(attn=BridgedAttention(Attention(*layer))) for layer in LAYERS]
    return SimpleNamespace(
        cfg=SimpleNamespace(original_architecture="Uneven"),
        blocks=blocks,
        blocks_with=lambda name: list(enumerate(blocks)),
    )


def matrix(bridge, role: str, layer: int, head: int) -> np.ndarray:
    """``[d_model, d_head]``, by the geometry of the layer itself."""
    module = bridge.blocks[layer].attn.original_component
    weight = getattr(module, f"{role.lower()}_proj").weight.detach().double().numpy()
    some = slice(head * module.head_dim, (head + 1) * module.head_dim)
    return weight[:, some] if role == "O" else weight[some].T


def there(role: str) -> set[tuple[int, int]]:
    """The heads that exist."""
    counts = [heads if role in "QO" else kv_heads or 0 for heads, kv_heads, _ in LAYERS]
    return {(layer, head) for layer, count in enumerate(counts) for head in range(count)}


@pytest.mark.parametrize("pairing", ["OQ", "OK", "OV", "QQ", "KK", "OO"])
def test_scores_of_the_heads_that_there_are(bridge, pairing):
    result = attention_head_affinities(bridge, (pairing,))[pairing]
    source_role, target_role = pairing
    expected = {
        (*source, *target): oracles.projection_kernel(
            matrix(bridge, source_role, *source), matrix(bridge, target_role, *target)
        )
        for source in there(source_role)
        for target in there(target_role)
        if (source[0] < target[0] if source_role != target_role else source < target)
    }
    assert {tuple(where) for where in result.valid_mask.nonzero().tolist()} == set(expected)
    for where, score in expected.items():
        assert float(result.scores[where]) == pytest.approx(score, abs=1e-5)
    assert not bool(result.scores[~result.valid_mask].any())


def test_the_normalisation_is_by_each_pairs_own_widths(bridge):
    result = attention_head_subspace_affinity(bridge, target_role="K")
    wide = result.scores[0, 1, 2, 0] / np.sqrt(3 * 5)
    assert float(result.normalized[0, 1, 2, 0]) == pytest.approx(float(wide), rel=1e-6)


def test_two_wide_heads_do_not_pass_for_four_narrow_ones():
    """The bridge would cut this layer into the configuration's number of heads."""
    torch.manual_seed(0)
    wide = Attention(2, 2, 6)
    attention = BridgedAttention(wide)
    assert attention.W_Q.shape == (4, D_MODEL, 3)
    block = SimpleNamespace(attn=attention)
    bridge = SimpleNamespace(blocks_with=lambda name: [(0, block)])
    (read,) = read_head_weights(bridge, ["Q"])["Q"].matrices
    assert torch.equal(read, wide.q_proj.weight.unflatten(0, (2, 6)).mT)


def test_ranks_are_per_head(bridge):
    subspaces = attention_head_subspaces(bridge)
    assert subspaces["Q"].bases.shape == (4, 6, D_MODEL, 5)
    assert subspaces["Q"].ranks.tolist() == [
        [3] * 4 + [0] * 2,
        [3] * 6,
        [5] * 4 + [0] * 2,
        [3] * 4 + [0] * 2,
    ]
    assert subspaces["K"].ranks.tolist() == [[3, 3], [3, 3], [5, 0], [0, 0]]
    # The narrowest head bounds the number of directions that all can keep.
    assert attention_head_subspaces(bridge, rank=2)["Q"].ranks.max() == 5
    with pytest.raises(ValueError, match="rank must be between 1 and 3"):
        attention_head_subspaces(bridge, rank=4)


def test_a_deficient_head_is_found_in_a_wider_layer(bridge):
    with torch.no_grad():
        weight = bridge.blocks[2].attn.original_component.q_proj.weight
        weight[5 * 3 + 4] = weight[5 * 3]
    with pytest.raises(ValueError, match="role Q, layer 2, head 3: measured rank 4 is below 5"):
        attention_head_subspaces(bridge, ("Q",))


def test_a_role_that_no_layer_has(bridge):
    bridge.blocks_with = lambda name: [(3, bridge.blocks[3])]
    attention_head_subspaces(bridge, ("Q", "O"))
    with pytest.raises(ValueError, match="Uneven, role K: no layer has such heads of its own"):
        attention_head_subspaces(bridge, ("Q", "K"))


def test_other_metrics_refuse(bridge):
    with pytest.raises(NotImplementedError, match="Uneven, role O: layers differ in the number or"):
        simple_composition_score(bridge, target_role="Q")


def test_graphs_keep_key_value_heads_that_they_cannot_assign(bridge):
    results = attention_head_affinities(bridge, ("OQ", "OK"))
    graph = head_graph(results, k=1000)
    kinds = {name: attributes["kind"] for name, attributes in graph.nodes(data=True)}
    assert {name for name, kind in kinds.items() if kind == "kv"} == {
        f"L{layer}KV{head}" for layer, head in there("K") if layer > 0
    }
    with pytest.raises(ValueError, match="as many heads in every layer"):
        head_graph(results, kv_heads="expand")


def test_labels_are_of_heads_that_there_are(bridge):
    queries = attention_head_subspace_affinity(bridge, target_role="Q")
    detection = head_detection(queries, HeadLabels.from_dict({"Wide": ["1.5", "2.3"]}))
    assert set(detection.heads) == there("Q")
    assert detection.chance == 2 / len(there("Q"))
    for head, score in zip(detection.heads, detection.scores, strict=True):
        best = [p.score for p in queries.top_pairs(10_000) if head in located(p)]
        assert score == (max(best) if best else pytest.approx(queries.top_pairs(10_000)[-1].score))
    with pytest.raises(ValueError, match="does not have: L2H4"):
        head_detection(queries, HeadLabels.from_dict({"Absent": ["2.4"]}))
    # Query heads 0 and 1 read key-value head 0 of layer 0, but 0 to 3 that of layer 2.
    keys = attention_head_subspace_affinity(bridge, target_role="K")
    with pytest.raises(ValueError, match="fewer key-value heads .role K. than others"):
        head_detection(keys, HeadLabels.from_dict({"Wide": ["1.5"]}))


def located(pair) -> set[tuple[int, int]]:
    return {(head.layer, head.head) for head in (pair.source, pair.target)}


def test_a_figure_leaves_absent_heads_grey(bridge):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = attention_head_subspace_affinity(bridge, target_role="Q")
    shown = plot_affinity(result).images[0].get_array()
    assert shown.shape == (24, 24)
    assert int((~shown.mask).sum()) == int(result.valid_mask.sum())

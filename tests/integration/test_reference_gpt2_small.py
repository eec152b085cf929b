"""References, graph and readout on trained weights, against the values of arXiv 2601.10266."""

from __future__ import annotations

import numpy as np
import pytest

from transformer_lens.tools.analysis.head_affinity.graph import head_graph, hubs
from transformer_lens.tools.analysis.head_affinity.informativeness import informativeness_table
from transformer_lens.tools.analysis.head_affinity.labels import gpt2_small_ioi_labels
from transformer_lens.tools.analysis.head_affinity.readout import subspace_tokens
from transformer_lens.tools.analysis.head_affinity.significance import significance
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspaces,
)

pytestmark = pytest.mark.slow

IDENTITY = [(1, 11), (4, 7)]


@pytest.fixture(scope="module")
def subspaces(gpt2_small):
    return attention_head_subspaces(gpt2_small)


@pytest.fixture(scope="module")
def results(subspaces):
    return attention_head_affinities(subspaces, ("OQ", "OK", "OV"))


def test_informativeness(subspaces):
    table = informativeness_table(subspaces)
    assert len(table) == 16
    table = table.set_index(table["source_role"] + table["target_role"])
    for pairing, printed in (("OQ", 2.129), ("OK", 2.194), ("QQ", 2.876), ("VO", 1.149)):
        assert table.loc[pairing, "divergence"] == pytest.approx(printed, abs=0.002)
    assert table.loc["QQ", "mean"] == pytest.approx(8.467, abs=0.001)
    assert table.loc["VO", "mean"] == pytest.approx(5.664, abs=0.001)
    assert table["divergence"].idxmax() == "QQ"
    assert table["divergence"].idxmin() == "VO"
    assert set(table["pairs"]) == {9504}


def test_graph_and_hubs(results):
    classes = {**gpt2_small_ioi_labels().classes, "Identity": IDENTITY}
    graph = head_graph(results, classes=classes)
    assert graph.number_of_edges() == 60
    labelled = [node for node, name in graph.nodes(data="head_class") if name]
    assert (len(graph), len(labelled)) == (52, 24)
    table = hubs(graph)
    assert table["node"][:2].tolist() == ["L4H7", "L4H11"]
    assert table.sort_values("degree", ascending=False)["node"].iloc[0] == "L4H7"


def test_each_null_leaves_fewer_pairs_beyond_it(subspaces, results):
    shares = [
        significance(results["OK"], subspaces, null=null, n_samples=200).share_beyond(0.01)
        for null in ("rotation", "anisotropic", "degree")
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6
    assert shares[2] < 0.1


def test_readout_of_smollm2(smollm2):
    """Head by head against the definition, for one tied model with a vocabulary of 49,152."""
    heads = [(0, 0), (14, 5), (29, 8)]
    found = subspace_tokens(smollm2, heads, fold_final_norm=False)
    vectors = smollm2.W_U.detach().double().numpy().T
    vectors = vectors - vectors.mean(0)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row, (layer, head) in enumerate(heads):
        weight = smollm2.blocks[layer].attn.W_O[head].detach().double().numpy()
        basis = np.linalg.qr(weight.T)[0]
        expected = np.linalg.norm(vectors @ basis, axis=1)
        # float32 in 576 dimensions: 576 * 6e-8 times a head's condition number, up to 100.
        np.testing.assert_allclose(found.scores[row], np.sort(expected)[::-1][:10], atol=3e-3)
        np.testing.assert_allclose(expected[found.token_ids[row]], found.scores[row], atol=3e-3)
    with pytest.warns(UserWarning, match="fold_final_norm"):
        subspace_tokens(smollm2, (0, 0))

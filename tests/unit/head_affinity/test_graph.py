"""The head graph, its names for key-value heads, hubs and files."""

from __future__ import annotations

import sys
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity.graph import head_graph, hubs, write_graph
from transformer_lens.tools.analysis.head_affinity.labels import HeadLabels
from transformer_lens.tools.analysis.head_affinity.metrics import simple_composition_score
from transformer_lens.tools.analysis.head_affinity.significance import significance
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import toy_models
import toy_results

PAIRINGS = ("OQ", "OK", "OV")


@pytest.fixture(scope="module")
def mha():
    return attention_head_affinities(toy_models.gpt2()[0], PAIRINGS)


@pytest.fixture(scope="module")
def gqa():
    """4 query and 2 key-value heads: query heads 0 and 1 read key-value head 0."""
    return attention_head_affinities(toy_models.llama()[0], (*PAIRINGS, "KK"))


def edges(graph) -> set[tuple]:
    return {
        (source, target, key, edge["rank"])
        for source, target, key, edge in graph.edges(keys=True, data=True)
    }


def test_edges_are_the_top_pairs(mha):
    graph = head_graph(mha, k=5)
    expected = {
        (pair.source.label, pair.target.label, name, rank)
        for name, result in mha.items()
        for rank, pair in enumerate(result.top_pairs(5), 1)
    }
    assert edges(graph) == expected
    assert graph.graph == {"metric": "projection_kernel", "k": 5}
    for source, target, edge in graph.edges(data=True):
        result = mha[edge["pairing"]]
        layers_and_heads = [
            (graph.nodes[node]["layer"], graph.nodes[node]["head"]) for node in (source, target)
        ]
        assert result.score(*layers_and_heads) == edge["score"]
        assert edge["normalized"] == pytest.approx(edge["score"] / 8)
        assert "q" not in edge
    assert {kind for _, kind in graph.nodes(data="kind")} == {"query"}


def test_any_collection_of_results_will_do(mha):
    expected = edges(head_graph(mha, k=3))
    assert edges(head_graph(list(mha.values()), k=3)) == expected
    assert edges(head_graph(iter(mha.values()), k=3)) == expected
    alone = head_graph(mha["OK"], k=1000)
    assert alone.number_of_edges() == int(mha["OK"].valid_mask.sum())


def test_significance_goes_onto_the_edges(mha):
    verdict = significance(mha["OK"], null="degree")
    graph = head_graph([verdict, mha["OQ"]], k=2)
    best = verdict.to_dataframe(1).iloc[0]
    edge = graph.edges[best["source"], best["target"], "OK"]
    assert [edge[name] for name in "zpq"] == [best[name] for name in "zpq"]
    assert all("q" not in edge for *_, edge in graph.edges(data=True) if edge["pairing"] == "OQ")


def test_classes(mha):
    classes = {"Induction": [(2, 0), (1, 3)], "Copying": ((1, 3),)}
    for given in (classes, HeadLabels.from_dict(classes)):
        graph = head_graph(mha, k=1000, classes=given)
        assert graph.nodes["L2H0"]["head_class"] == "Induction"
        assert graph.nodes["L1H3"]["head_class"] == "Induction, Copying"
        assert graph.nodes["L0H0"]["head_class"] == ""


def test_shared_key_value_heads_are_kept_under_a_name_of_their_own(gqa):
    graph = head_graph(gqa, k=1000, classes={"A": [(1, 0)]})
    names = {node for node, kind in graph.nodes(data="kind") if kind == "kv"}
    assert names == {f"L{layer}KV{head}" for layer in range(3) for head in range(2)}
    assert graph.nodes["L1KV0"]["head_class"] == ""
    assert graph.nodes["L1H0"]["head_class"] == "A"
    assert all(
        graph.nodes[target]["kind"] == "query"
        for _, target, p in graph.edges(data="pairing")
        if p == "OQ"
    )


def test_shared_key_value_heads_expand_to_their_readers(gqa):
    graph = head_graph(gqa["OK"], k=3, kv_heads="expand")
    expected = {
        (pair.source.label, f"L{pair.target.layer}H{reader}", "OK", rank)
        for rank, pair in enumerate(gqa["OK"].top_pairs(3), 1)
        for reader in (2 * pair.target.head, 2 * pair.target.head + 1)
    }
    assert edges(graph) == expected
    for _, target, edge in graph.edges(data=True):
        assert edge["target_kv_head"] == graph.nodes[target]["head"] // 2
        assert "source_kv_head" not in edge
    both = head_graph(gqa["KK"], k=1, kv_heads="expand", query_heads=4)
    assert both.number_of_edges() == 4


def test_key_value_heads_by_themselves(gqa):
    graph = head_graph(gqa["KK"], k=2)
    assert all("KV" in node for node in graph)
    with pytest.raises(ValueError, match="query_heads"):
        head_graph(gqa["KK"], kv_heads="expand")
    own = attention_head_affinities(toy_models.gpt2()[0], ("KK",))
    assert all("KV" in node for node in head_graph(own, k=2))
    assert not any("KV" in node for node in head_graph(own, k=2, query_heads=4))


def test_refusals(mha, gqa):
    with pytest.raises(ValueError, match="one result per pairing"):
        head_graph([mha["OK"], mha["OK"]])
    other = simple_composition_score(toy_models.gpt2()[0], target_role="Q")
    with pytest.raises(ValueError, match="one metric"):
        head_graph([mha["OK"], other])
    with pytest.raises(ValueError, match="at least one"):
        head_graph([])
    with pytest.raises(ValueError, match="number of kv heads"):
        head_graph([mha["OK"], gqa["OV"]])
    with pytest.raises(ValueError, match="evenly"):
        head_graph(gqa["KK"], query_heads=3)
    with pytest.raises(ValueError, match="negative"):
        hubs(head_graph(mha["OK"].relative(), k=1000))


def test_hubs(mha):
    graph = head_graph(mha, k=6)
    table = hubs(graph).set_index("node")
    strength: dict[str, list[float]] = {node: [0.0, 0.0, 0] for node in graph}
    transition = np.zeros((len(graph), len(graph)))
    position = {node: index for index, node in enumerate(graph)}
    for source, target, edge in graph.edges(data=True):
        strength[source][0] += edge["score"]
        strength[target][1] += edge["score"]
        strength[source][2] += 1
        strength[target][2] += 1
        transition[position[source], position[target]] += edge["score"]
    for node, (out, into, degree) in strength.items():
        assert table.loc[node, "weighted_out"] == pytest.approx(out)
        assert table.loc[node, "weighted_in"] == pytest.approx(into)
        assert table.loc[node, "weighted_degree"] == pytest.approx(out + into)
        assert table.loc[node, "degree"] == degree
    assert table["weighted_degree"].is_monotonic_decreasing

    # PageRank is the stationary law of a surfer who follows an edge by its weight with probability
    # 0.85 and else, or at a dead end, goes anywhere. NetworkX stops at an error of 1e-6 a node.
    totals = transition.sum(1, keepdims=True)
    anywhere = np.full_like(transition, 1 / len(graph))
    chain = 0.85 * np.where(totals > 0, transition / np.where(totals > 0, totals, 1), anywhere)
    chain += 0.15 / len(graph)
    stationary = np.linalg.matrix_power(chain, 200)[0]
    for node, index in position.items():
        assert table.loc[node, "pagerank"] == pytest.approx(stationary[index], abs=1e-5)


def test_betweenness_counts_the_paths_through_a_head():
    graph = nx.MultiDiGraph()
    for node, layer in (("a", 0), ("b", 1), ("c", 2)):
        graph.add_node(node, layer=layer, head=0)
    graph.add_edge("a", "b", key="OK", score=1.0, directed=True)
    graph.add_edge("a", "b", key="OQ", score=1.0, directed=True)
    graph.add_edge("b", "c", key="OK", score=1.0, directed=True)
    table = hubs(graph).set_index("node")
    # One of the two ordered pairs of other heads, (a, c), is joined; its way leads through b.
    assert table["betweenness"].to_dict() == {"a": 0, "b": 0.5, "c": 0}


def test_graphml_round_trip(mha, tmp_path):
    verdict = significance(mha["OK"], null="degree")
    graph = head_graph([verdict, mha["OQ"], mha["OV"]], k=8, classes={'A "b" & c': [(0, 0)]})
    write_graph(graph, tmp_path / "heads.graphml")
    read = nx.read_graphml(tmp_path / "heads.graphml", force_multigraph=True)
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    keys = [key for *_, key in read.edges(keys=True)]
    assert len(set(keys)) == len(keys) == graph.number_of_edges()
    by_pairing = {(s, t, edge["pairing"]): edge for s, t, edge in read.edges(data=True)}
    expected = {(s, t, key): edge for s, t, key, edge in graph.edges(keys=True, data=True)}
    # The reader adds the name of the edge as an attribute.
    assert {w: {**e, "id": None} for w, e in by_pairing.items()} == {
        w: {**e, "id": None} for w, e in expected.items()
    }
    assert read.graph["metric"] == "projection_kernel"
    assert {key for *_, key in graph.edges(keys=True)} == set(PAIRINGS)


# pyparsing's old names in pydot, as the file is read.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dot_round_trip(mha, tmp_path):
    pytest.importorskip("pydot")
    graph = head_graph(mha, k=8, classes={'Name "x" Mover, b': [(0, 0)]})
    write_graph(graph, tmp_path / "heads.dot")
    read = nx.nx_pydot.read_dot(tmp_path / "heads.dot")

    def text(value: str) -> str:
        return value[1:-1].replace(r"\"", '"')

    assert set(read) == set(graph)
    for node, attributes in graph.nodes(data=True):
        found = {name: text(value) for name, value in read.nodes[node].items()}
        assert found == {name: str(value) for name, value in attributes.items()}
    found = {
        (s, t, text(edge["pairing"])): float(text(edge["score"]))
        for s, t, edge in read.edges(data=True)
    }
    assert found == {
        (s, t, key): edge["score"] for s, t, key, edge in graph.edges(keys=True, data=True)
    }


def test_files_of_other_kinds_and_without_pydot(mha, tmp_path, monkeypatch):
    graph = head_graph(mha["OK"], k=2)
    with pytest.raises(ValueError, match=r"\.graphml"):
        write_graph(graph, tmp_path / "heads.json")
    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(ImportError, match="pip install pydot"):
        write_graph(graph, tmp_path / "heads.dot")


@pytest.mark.parametrize("centre", range(4))
def test_a_star_of_unordered_pairs_has_its_hub_in_the_middle(centre):
    """Wherever it stands in the order of heads, which an unordered pair knows nothing of."""
    layers = torch.arange(4)
    star = (layers[:, None] < layers) & ((layers[:, None] == centre) | (layers == centre))
    scores = torch.where(star, 1.0, 0.0)[:, None, :, None]
    result = toy_results.random_result(
        4, 1, source_role="Q", target_role="Q", layer_order="distinct", scores=scores
    )
    graph = head_graph(result, k=3)
    table = hubs(graph).set_index("node")
    assert not any(directed for *_, directed in graph.edges(data="directed"))
    assert table.index[0] == f"L{centre}H0"
    best = table.iloc[0]
    assert best["degree"] == best["in_degree"] == best["out_degree"] == 3
    assert best["weighted_in"] == best["weighted_out"] == best["weighted_degree"] == 3
    assert best["betweenness"] == 1
    assert (table["betweenness"].iloc[1:] == 0).all()
    # All leaves rank alike, and with damping d: centre (1-d)/4 + 3 d leaf, leaf (1-d)/4 + d/3 c.
    leaf = (0.15 / 4 + 0.85 / 3 * 0.15 / 4) / (1 - 0.85**2)
    np.testing.assert_allclose(table["pagerank"].iloc[1:], leaf, atol=1e-5)


@pytest.mark.parametrize("pruned", [0, 3])
def test_a_pruned_head_changes_no_names(pruned):
    model, _ = toy_models.gpt2()
    model.blocks[0].attn.o.weight.data[8 * pruned : 8 * pruned + 8] = 0
    results = attention_head_affinities(model, ("OQ", "OK"), rank="measured")
    for kv_heads in ("keep", "expand"):
        graph = head_graph(results, k=1000, kv_heads=kv_heads)
        assert {kind for _, kind in graph.nodes(data="kind")} == {"query"}
        assert set(graph) == {f"L{layer}H{head}" for layer in range(3) for head in range(4)} - {
            f"L0H{pruned}"
        }


def test_the_shared_rotary_key_is_a_node_of_its_own():
    model, _ = toy_models.deepseek()
    results = attention_head_affinities(model, ("OK", "OrotaryK"))
    graph = head_graph(results, k=1000)
    targets = {(key, target) for _, target, key in graph.edges(keys=True)}
    assert targets == {("OrotaryK", f"L{layer}R0") for layer in (1, 2)} | {
        ("OK", f"L{layer}H{head}") for layer in (1, 2) for head in range(4)
    }
    assert graph.nodes["L2R0"]["kind"] == "rotary"
    expanded = head_graph(results["OrotaryK"], k=1, kv_heads="expand")
    best = results["OrotaryK"].top_pairs(1)[0].target
    assert {t for _, t in expanded.edges()} == {f"L{best.layer}H{head}" for head in range(4)}


def test_results_of_different_models_are_not_mixed(mha):
    wide = toy_models.gpt2(n_embd=64)[0]
    deep = toy_models.gpt2(n_layer=5)[0]
    fewer = toy_models.gpt2(n_head=2)[0]
    for other, message in (
        (wide, r"their d_model differ: 32 \(OK\), 64 \(VV\)"),
        (deep, r"their attention layers differ"),
    ):
        result = attention_head_subspace_affinity(other, source_role="V", target_role="V")
        with pytest.raises(ValueError, match=message):
            head_graph([mha["OK"], result])
    result = attention_head_subspace_affinity(fewer, target_role="Q")
    with pytest.raises(ValueError, match=r"heads of role O differ: 4 \(OK\), 2 \(OQ\)"):
        head_graph([mha["OK"], result])
    unknown = replace(mha["OK"], d_model=None)
    assert head_graph([unknown, mha["OQ"]]).number_of_edges() == 40


def test_what_is_no_result_or_no_head_is_refused(mha):
    model = toy_models.gpt2()[0]
    for wrong in (model, attention_head_subspaces(model), [attention_head_subspaces(model)]):
        with pytest.raises(TypeError, match="each of results must be a HeadAffinityResult"):
            head_graph(wrong)
    with pytest.raises(ValueError, match="a head is named like 'L5H1' or '5.1', got '51'"):
        head_graph(mha, classes={"A": ["51"]})


def test_hubs_of_other_graphs_are_refused(mha, tmp_path):
    with pytest.raises(TypeError, match="graph must be a MultiDiGraph, got DiGraph"):
        hubs(nx.DiGraph([(1, 2)]))
    write_graph(head_graph(mha), tmp_path / "heads.dot")
    with pytest.raises(TypeError, match="export to GraphML, which keeps types"):
        hubs(nx.nx_pydot.read_dot(tmp_path / "heads.dot"))
    write_graph(head_graph(mha), tmp_path / "heads.graphml")
    read = nx.read_graphml(tmp_path / "heads.graphml", force_multigraph=True)
    assert hubs(read).equals(hubs(head_graph(mha)))


def test_classes_name_heads_that_there_are(mha, gqa):
    for head in ("3.0", "0.4"):
        with pytest.raises(ValueError, match=rf"classes names L{head[0]}H{head[2]}, but"):
            head_graph(mha, classes={"A": [head]})
    # Key-value heads by themselves do not tell how many query heads there are.
    assert head_graph(gqa["KK"], classes={"A": ["0.9"]}).number_of_nodes()

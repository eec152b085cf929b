"""What the comparing figures and the graph hold, read back from the artists."""

from __future__ import annotations

import matplotlib
import networkx
import numpy as np
import pandas as pd
import pytest

from transformer_lens.tools.analysis.head_affinity.evaluation import HeadLabels, head_detection
from transformer_lens.tools.analysis.head_affinity.graph import head_graph
from transformer_lens.tools.analysis.head_affinity.plots import (
    plot_detection,
    plot_graph,
    plot_informativeness,
    plot_scatter,
)
from transformer_lens.tools.analysis.head_affinity.plots.graph import _Curvature
from transformer_lens.tools.analysis.projection_kernel import attention_head_affinities

import toy_models

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    matplotlib.pyplot.close("all")


@pytest.fixture(scope="module")
def results():
    return attention_head_affinities(toy_models.gpt2()[0], ("OQ", "OK", "QQ"))


def test_scatter_draws_every_pair_once_and_marks_the_top(results):
    result, relative = results["OQ"], results["OQ"].relative()
    ax = plot_scatter(result, relative, top_share=0.1)
    others, top = (collection.get_offsets() for collection in ax.collections)
    drawn = np.concatenate([others, top])
    valid = result.valid_mask
    expected = np.stack([result.scores[valid].numpy(), relative.scores[valid].numpy()], axis=1)
    assert sorted(map(tuple, drawn)) == sorted(map(tuple, expected.astype(float)))
    count = int(np.ceil(0.1 * len(expected)))
    limits = [np.sort(column)[-count] for column in expected.T]
    assert (np.asarray(top) >= limits).any(axis=1).all()
    assert not (np.asarray(others) >= limits).any()
    assert ax.get_ylabel() == "relative Projection Kernel"


def test_scatter_refuses_results_of_different_pairs(results):
    with pytest.raises(ValueError, match="must score the same pairs"):
        plot_scatter(results["OQ"], results["OK"])
    with pytest.raises(ValueError, match="top_share must lie between"):
        plot_scatter(results["OQ"], results["OQ"], top_share=1)
    with pytest.raises(TypeError, match="other must be a HeadAffinityResult"):
        plot_scatter(results["OQ"], None)


def test_detection_draws_the_curves_it_is_given(results):
    labels = HeadLabels.from_dict({"A": ["0.0", "1.1", "2.3"]})
    detections = [head_detection(results[name], labels) for name in ("OQ", "OK")]
    ax = plot_detection(detections)
    for line, detection in zip(ax.lines, detections, strict=False):
        curve = detection.curve()
        np.testing.assert_array_equal(line.get_xdata(), curve["recall"])
        np.testing.assert_array_equal(line.get_ydata(), curve["precision"])
    assert ax.lines[2].get_ydata()[0] == pytest.approx(3 / 12), "chance"
    assert ax.get_title() == "3 of 12 heads labelled"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [name.split(":")[0] for name in names] == [
        "O→Q Projection Kernel",
        "O→K Projection Kernel",
    ]

    ax = plot_detection([head_detection(results["OQ"].relative(), labels), detections[0]])
    assert ax.get_title() == "O→Q, 3 of 12 heads labelled"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [name.split(":")[0] for name in names] == [
        "relative Projection Kernel",
        "Projection Kernel",
    ]
    with pytest.raises(ValueError, match="no detections"):
        plot_detection([])


def test_informativeness_puts_every_number_in_its_cell():
    table = pd.DataFrame(
        {
            "source_role": ["O", "O", "Q", "Q"],
            "target_role": ["K", "Q", "K", "Q"],
            "divergence": [1.0, 2.0, 3.0, 4.0],
        }
    )
    ax = plot_informativeness(table)
    assert ax.images[0].get_array().tolist() == [[4.0, 3.0], [2.0, 1.0]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["Q", "O"]
    cells = {text.get_position(): text.get_text() for text in ax.texts}
    assert cells == {(0, 0): "4.000", (1, 0): "3.000", (0, 1): "2.000", (1, 1): "1.000"}


def test_informativeness_shows_the_roles_of_cross_attention_and_of_shared_rotary_keys():
    roles = ["O", "crossQ", "rotaryK"]
    table = pd.DataFrame(
        {"source_role": ["O"] * 3, "target_role": roles, "divergence": [1.0, 2, 3]}
    )
    ax = plot_informativeness(table)
    assert [label.get_text() for label in ax.get_xticklabels()] == roles
    assert ax.images[0].get_array().tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("divergences", [[1.0, np.inf, 3.0], [np.inf] * 3])
def test_infinite_divergences_are_told_from_a_scale(divergences):
    table = pd.DataFrame(
        {"source_role": ["O"] * 3, "target_role": list("QKV"), "divergence": divergences}
    )
    ax = plot_informativeness(table)
    shown = {text.get_text(): text.get_color() for text in ax.texts}
    assert shown["∞"] == "black"
    if len(shown) > 1:
        assert shown == {"1.000": "white", "∞": "black", "3.000": "black"}
        assert ax.images[0].get_clim() == (1, 3)
    assert len(ax.figure.axes) == (2 if len(shown) > 1 else 1), "no scale without a number"


@pytest.mark.parametrize("layout", ["layers", "circle"])
def test_graph_shows_every_head_edge_pairing_and_class(results, layout):
    graph = head_graph(
        {name: results[name] for name in ("OQ", "OK")}, k=5, classes={"Copying": [(0, 0), (2, 1)]}
    )
    ax = plot_graph(graph, layout=layout)
    names = {node.removeprefix("L").replace("H", ".") for node in graph}
    assert {text.get_text() for text in ax.texts} == names
    assert len(ax.patches) == graph.number_of_edges() == 10
    positions = np.asarray(ax.collections[0].get_offsets())
    assert len(np.unique(positions.round(6), axis=0)) == graph.number_of_nodes(), (
        "no head on another"
    )
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend[:2] == ["O→Q", "O→K"] and legend[-1] == "no class"


def nearest_foreign_head(ax, graph) -> float:
    """The least distance, in pixels, of an edge from a head that it does not join."""
    ax.figure.canvas.draw()
    places = dict(zip(graph, ax.transData.transform(ax.collections[0].get_offsets()), strict=True))
    distances = []
    for patch, (source, target) in zip(ax.patches, graph.edges(), strict=True):
        start, control, end = patch.get_path().vertices[:3]  # then comes the arrowhead
        t = np.linspace(0, 1, 100)[:, None]
        curve = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
        others = np.stack([place for node, place in places.items() if node not in (source, target)])
        pixels = ax.transData.transform(curve)
        distances.append(np.linalg.norm(pixels[:, None] - others, axis=-1).min())
    return min(distances)


def test_edges_pass_between_the_heads_that_they_do_not_join(monkeypatch):
    graph = networkx.MultiDiGraph(k=3)
    for layer in range(3):
        for head in range(6):
            graph.add_node(f"L{layer}H{head}", layer=layer, head=head, head_class="")
    for source, target in (("L0H0", "L2H4"), ("L0H5", "L2H1"), ("L0H2", "L2H2")):
        graph.add_edge(source, target, key="OK", pairing="OK", score=1.0, directed=True)
    ax = plot_graph(graph)
    radius = np.sqrt(420 / np.pi) * ax.figure.dpi / 72
    assert nearest_foreign_head(ax, graph) > radius
    monkeypatch.setattr(_Curvature, "of", lambda self, source, target, usual: usual)
    assert nearest_foreign_head(plot_graph(graph), graph) < radius


def test_unordered_pairs_have_no_arrowheads(results):
    ax = plot_graph(head_graph(results["QQ"], k=3))
    assert {type(patch.get_arrowstyle()).__name__ for patch in ax.patches} == {"Curve"}
    assert ax.get_legend().get_texts()[0].get_text() == "Q with Q"
    ax = plot_graph(head_graph(results["OQ"], k=3))
    assert {type(patch.get_arrowstyle()).__name__ for patch in ax.patches} == {"CurveFilledB"}


def test_stronger_edges_are_less_transparent(results):
    ax = plot_graph(head_graph(results["OQ"], k=6))
    opacity = [patch.get_edgecolor()[3] for patch in ax.patches]
    assert max(opacity) == 1.0 and min(opacity) == 0.25
    with pytest.raises(ValueError, match="no edges"):
        plot_graph(type(head_graph(results["OQ"], k=1))())
    with pytest.raises(ValueError, match="layout must be one of"):
        plot_graph(head_graph(results["OQ"], k=1), layout="spring")

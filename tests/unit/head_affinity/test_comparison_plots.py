"""What the comparing figures and the graph hold, read back from the artists."""

from __future__ import annotations

import matplotlib
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


def test_stronger_edges_are_less_transparent(results):
    ax = plot_graph(head_graph(results["OQ"], k=6))
    opacity = [patch.get_edgecolor()[3] for patch in ax.patches]
    assert max(opacity) == 1.0 and min(opacity) == 0.25
    with pytest.raises(ValueError, match="no edges"):
        plot_graph(type(head_graph(results["OQ"], k=1))())
    with pytest.raises(ValueError, match="layout must be one of"):
        plot_graph(head_graph(results["OQ"], k=1), layout="spring")

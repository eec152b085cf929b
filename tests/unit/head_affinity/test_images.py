"""What the figures look like, against stored images.

The other tests read back what the figures hold; these notice what only the eye sees: overlapping
names, lines that vanish, colours that cannot be told apart. After a change that is meant, store the
new images, look at them, and commit them::

    STORE_IMAGES=1 python -m pytest tests/unit/head_affinity/test_images.py
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

import pytest
import torch

from transformer_lens.tools.analysis.head_affinity import plots
from transformer_lens.tools.analysis.head_affinity.evaluation import HeadLabels, head_detection
from transformer_lens.tools.analysis.head_affinity.graph import head_graph

from toy_results import random_result

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

STORED = pathlib.Path(__file__).parent / "images"

#: Root mean square difference of the pixels, of 255. With the pinned matplotlib, which brings its
#: own FreeType, images agree to the pixel; other releases may place text a little differently. Of a
#: dozen faults made on purpose the faintest that counts, solid lines for dashed ones, gives 3.3.
TOLERANCE = 2.0


def two_pairings():
    keys = random_result(4, 6, target_role="K", target_head_kind="kv")
    return {"OQ": random_result(4, 6, seed=1), "OK": keys}


def affinity_of_few_heads():
    return plots.plot_affinity(random_result(4, 5))


def smooth_result(layers: int, heads: int, **changes):
    """Scores that vary slowly from head to head: images of noise are large files."""
    result = random_result(layers, heads, **changes)
    angle = torch.arange(layers * heads) * (6 * torch.pi / (layers * heads))
    scores = (2 + angle.sin()[:, None] + (2 * angle).cos()).view_as(result.scores)
    return dataclasses.replace(result, scores=scores)


def affinity_of_many_heads():
    return plots.plot_affinity(smooth_result(30, 32))


def relative_affinity_of_a_hybrid_stack():
    layers = tuple(range(1, 80, 2))
    result = smooth_result(40, 4, source_layer_indices=layers, target_layer_indices=layers)
    return plots.plot_affinity(result.relative())


def distribution_against_chance():
    return plots.plot_distribution(random_result(6, 8))


def scatter_of_two_metrics():
    result = random_result(6, 8)
    return plots.plot_scatter(result, result.relative())


def detection_curves():
    labels = HeadLabels.from_dict({"Previous Token": ["0.1", "1.3"], "Induction": ["2.5", "3.0"]})
    return plots.plot_detection(head_detection(r, labels) for r in two_pairings().values())


def informativeness_of_all_roles():
    pandas = pytest.importorskip("pandas")
    pairs = [(source, target) for source in "QKVO" for target in "QKVO"]
    table = pandas.DataFrame(pairs, columns=["source_role", "target_role"])
    table["divergence"] = [(5 * index % 16) / 4 for index in range(16)]
    return plots.plot_informativeness(table)


def graph_in_layers():
    return plots.plot_graph(small_graph())


def graph_in_a_circle():
    return plots.plot_graph(small_graph(), layout="circle")


def small_graph():
    classes = {"Previous Token": [(0, 1), (1, 3)], "Induction": [(2, 5), (3, 0), (3, 4)]}
    return head_graph(two_pairings(), k=12, classes=classes)


FIGURES: tuple[Callable, ...] = (
    affinity_of_few_heads,
    affinity_of_many_heads,
    relative_affinity_of_a_hybrid_stack,
    distribution_against_chance,
    scatter_of_two_metrics,
    detection_curves,
    informativeness_of_all_roles,
    graph_in_layers,
    graph_in_a_circle,
)


def draw(figure: Callable, path: pathlib.Path) -> None:
    # Whoever runs the tests may have a style of their own.
    with matplotlib.rc_context(matplotlib.rcParamsDefault), torch.no_grad():
        ax = figure()
        ax.figure.savefig(path, dpi=50)
        pyplot.close(ax.figure)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.__name__)
def test_figure_looks_as_stored(figure, tmp_path):
    from matplotlib.testing.compare import compare_images

    if os.environ.get("STORE_IMAGES"):
        draw(figure, STORED / f"{figure.__name__}.png")
        pytest.skip("stored, not compared")
    drawn = tmp_path / f"{figure.__name__}.png"
    draw(figure, drawn)
    difference = compare_images(STORED / drawn.name, drawn, tol=TOLERANCE)
    assert difference is None, difference


def test_no_stored_image_is_left_over():
    assert {path.stem for path in STORED.glob("*.png")} == {f.__name__ for f in FIGURES}

"""What the figures hold, read back from the artists."""

from __future__ import annotations

import builtins
import dataclasses
import math
import runpy

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity.plots import (
    affinity,
    plot_affinity,
    plot_distribution,
)
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    random_projection_kernel_moments,
)

import toy_models
from toy_results import random_result

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def without_matplotlib(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.fixture(scope="module")
def results():
    return attention_head_affinities(toy_models.llama()[0], ("OK", "OQ", "QQ"))


def tick_labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


class TestAffinity:
    @pytest.mark.parametrize("pairing", ["OK", "OQ", "QQ"])
    def test_cells_are_the_scores_and_masked_where_there_is_no_pair(self, results, pairing):
        result = results[pairing]
        (image,) = plot_affinity(result).images
        drawn = image.get_array()
        target_heads = result.target_ranks.shape[1]
        assert drawn.shape == (3 * 4, 3 * target_heads)
        for a, b, c, d in np.ndindex(*result.scores.shape):
            row, column = a * 4 + b, c * target_heads + d
            assert drawn.mask[row, column] == (not result.valid_mask[a, b, c, d])
            if result.valid_mask[a, b, c, d]:
                assert drawn[row, column] == result.scores[a, b, c, d].item()

    def test_the_scale_spans_the_valid_scores(self, results):
        result = results["OK"]
        valid = result.scores[result.valid_mask]
        (image,) = plot_affinity(result).images
        assert image.get_clim() == (valid.min().item(), valid.max().item())

    @pytest.mark.parametrize("sign", [1, -1])
    def test_relative_scores_have_a_scale_around_zero(self, results, sign):
        relative = results["OK"].relative()
        relative = dataclasses.replace(relative, scores=sign * relative.scores)
        (image,) = plot_affinity(relative).images
        low, high = image.get_clim()
        assert low == -high == -relative.scores.abs().max().item()
        assert image.get_cmap().name == "PuOr"

    def test_masked_cells_are_drawn_in_a_colour_that_no_score_has(self, results):
        ax = plot_affinity(results["OK"])
        (image,) = ax.images
        rgba = image.cmap(image.norm(image.get_array()))
        assert (rgba[image.get_array().mask][:, 3] == 0).all(), "transparent"
        grey = matplotlib.colors.to_rgb(ax.get_facecolor())
        colours = image.cmap(np.linspace(0, 1, 256))[:, :3]
        assert np.abs(colours - grey).max(axis=1).min() > 0.1
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["no pair"]

    def test_no_legend_where_all_pairs_are_valid(self, results):
        everything = torch.ones_like(results["OK"].valid_mask)
        result = dataclasses.replace(results["OK"], valid_mask=everything)
        assert plot_affinity(result).get_legend() is None

    def test_few_heads_have_their_names(self, results):
        ax = plot_affinity(results["OK"])
        assert tick_labels(ax.yaxis)[:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
        assert tick_labels(ax.xaxis) == ["L0H0", "L0H1", "L1H0", "L1H1", "L2H0", "L2H1"]
        assert ax.get_xlabel() == "target kv head (K)"
        assert ax.get_ylabel() == "source query head (O)"

    def test_many_heads_have_thinned_layer_numbers_in_the_middle_of_their_layers(self):
        numbers = tuple(range(1, 60, 2))  # a hybrid stack
        result = random_result(30, 9, source_layer_indices=numbers, target_layer_indices=numbers)
        ax = plot_affinity(result)
        assert tick_labels(ax.xaxis) == [str(number) for number in numbers[::2]]
        assert ax.get_xticks().tolist() == [9 * layer + 4 for layer in range(0, 30, 2)]
        assert ax.get_xlabel() == "target layer, 9 query heads each (Q)"
        lines = sorted(line.get_xdata()[0] for line in ax.lines if line.get_xdata()[0] != 0)
        assert lines == [9 * layer - 0.5 for layer in range(1, 30)]

    def test_too_many_heads_share_cells_that_show_their_highest_score(self):
        result = random_result(
            8, 110
        )  # 400 // 8 = 50 cells for 110 heads: 37 cells of 3, 3, ..., 2
        ax = plot_affinity(result)
        drawn = ax.images[0].get_array()
        assert drawn.shape == (8 * 37, 8 * 37)
        for a, b, c, d in [(0, 0, 1, 0), (2, 36, 5, 7), (6, 12, 7, 36)]:
            block = result.scores[a, 3 * b : 3 * b + 3, c, 3 * d : 3 * d + 3]
            assert drawn[37 * a + b, 37 * c + d] == block.max().item()
        assert drawn.max() == result.scores.max().item()
        assert drawn.mask[37:74, 37:74].all()
        assert "highest of 3 heads" in ax.get_xlabel()

    def test_half_precision_scores(self, results):
        half = results["OK"].scores.to(torch.bfloat16)
        ax = plot_affinity(dataclasses.replace(results["OK"], scores=half))
        drawn = ax.images[0].get_array().compressed()
        assert sorted(drawn) == sorted(half[results["OK"].valid_mask].double().tolist())


class TestDistribution:
    def test_the_histogram_holds_every_valid_score(self, results):
        result = results["OQ"]
        ax = plot_distribution(result)
        values = result.scores[result.valid_mask].double().numpy()
        edges = np.array([[bar.get_x(), bar.get_x() + bar.get_width()] for bar in ax.patches])
        heights = np.array([bar.get_height() for bar in ax.patches])
        counts = heights * np.diff(edges).ravel() * len(values)
        expected, _ = np.histogram(values, bins=[*edges[:, 0], edges[-1, 1]])
        np.testing.assert_allclose(counts, expected, atol=1e-9)
        assert edges[0, 0] == pytest.approx(values.min())
        assert edges[-1, 1] == pytest.approx(values.max())

    def test_the_reference_is_the_normal_density_of_the_moments(self, results):
        result = results["OQ"]
        ax = plot_distribution(result)
        curve = next(line for line in ax.lines if "normal" in line.get_label())
        moments = random_projection_kernel_moments(32, 8, 8)
        x, y = curve.get_data()
        expected = np.exp(-((x - moments.mean) ** 2) / (2 * moments.variance))
        expected /= math.sqrt(2 * math.pi * moments.variance)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        assert x[y.argmax()] == pytest.approx(moments.mean, abs=x[1] - x[0])

    def test_both_means_are_marked_and_told(self, results):
        result = results["OQ"]
        ax = plot_distribution(result)
        observed = result.scores[result.valid_mask].double().mean().item()
        marked = {
            line.get_label(): line.get_xdata()[0] for line in ax.lines if "mean" in line.get_label()
        }
        assert marked == {
            f"mean of heads: {observed:.2f}": pytest.approx(observed),
            "mean of random subspaces: 2.00": pytest.approx(2.0),
        }
        assert set(marked) < {text.get_text() for text in ax.get_legend().get_texts()}

    def test_heads_of_different_ranks_have_a_mixture_for_a_reference(self):
        ranks = torch.tensor([[8, 4], [8, 8]])
        result = random_result(2, 2, source_ranks=ranks)
        ax = plot_distribution(result)
        x, y = next(line for line in ax.lines if "normal" in line.get_label()).get_data()
        # Both source heads of layer 0 have two pairs each.
        expected = np.zeros_like(x)
        for p in (8, 4):
            moments = random_projection_kernel_moments(32, p, 8)
            expected += (
                0.5
                * np.exp(-((x - moments.mean) ** 2) / (2 * moments.variance))
                / math.sqrt(2 * math.pi * moments.variance)
            )
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        assert any(line.get_label() == "mean of random subspaces: 1.50" for line in ax.lines)

    def test_truncated_heads_count_with_the_rank_they_kept(self):
        ranks = torch.full((2, 2), 8)
        result = random_result(2, 2, source_ranks=ranks, source_rank=2, target_rank=2)
        ax = plot_distribution(result)
        assert any(line.get_label() == "mean of random subspaces: 0.12" for line in ax.lines)

    def test_subspaces_that_are_the_whole_space(self):
        ax = plot_distribution(random_result(2, 2, d_model=8))
        assert any(line.get_label() == "mean of random subspaces: 8.00" for line in ax.lines)
        ax.figure.canvas.draw()

    def test_other_metrics_have_no_reference(self, results):
        with pytest.raises(ValueError, match="'relative_projection_kernel'"):
            plot_distribution(results["OQ"].relative())

    def test_a_result_that_does_not_know_the_ambient_dimension(self):
        with pytest.raises(ValueError, match="does not know the width of the residual stream"):
            plot_distribution(random_result(2, 2, d_model=None))


DRAW = [plot_affinity, plot_distribution]


@pytest.mark.parametrize("draw", DRAW, ids=["affinity", "distribution"])
class TestBoth:
    def test_draws_on_the_given_axes_and_leaves_pyplot_alone(self, draw, results):
        figure = matplotlib.figure.Figure()
        left, right = figure.subplots(1, 2)
        rc = dict(matplotlib.rcParams)
        assert draw(results["OQ"], ax=right) is right
        assert not left.has_data()
        assert right.has_data()
        assert plt.get_fignums() == []
        assert dict(matplotlib.rcParams) == rc

    def test_a_new_figure_is_one(self, draw, results):
        ax = draw(results["OQ"])
        assert plt.get_fignums() == [ax.figure.number]
        ax.figure.canvas.draw()

    def test_nothing_to_draw(self, draw, results):
        nothing = torch.zeros_like(results["OQ"].valid_mask)
        with pytest.raises(ValueError, match="no valid pair"):
            draw(dataclasses.replace(results["OQ"], valid_mask=nothing))

    def test_something_else(self, draw, results):
        with pytest.raises(TypeError, match="result must be a HeadAffinityResult"):
            draw(results["OQ"].scores)

    @pytest.mark.usefixtures("without_matplotlib")
    def test_without_matplotlib(self, draw, results):
        with pytest.raises(ImportError, match=r"pip install .*\[plots\]"):
            draw(results["OQ"])


@pytest.mark.usefixtures("without_matplotlib")
def test_the_module_itself_does_not_need_matplotlib():
    assert "plot_affinity" in runpy.run_path(affinity.__file__)

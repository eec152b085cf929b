"""The figures of the guides to calibration, graph and readout, from the real models.

    make figures

Takes less than a minute on two CPU cores. Figures of GPT-2 small are left as they are where its
weights are not to be had.
"""

from __future__ import annotations

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")  # before pyplot looks for a screen
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from transformer_lens.tools.analysis.head_affinity.evaluation import gpt2_small_ioi_labels
from transformer_lens.tools.analysis.head_affinity.graph import head_graph
from transformer_lens.tools.analysis.head_affinity.informativeness import informativeness_table
from transformer_lens.tools.analysis.head_affinity.plots import (
    plot_distribution,
    plot_graph,
    plot_informativeness,
)
from transformer_lens.tools.analysis.head_affinity.readout import subspace_tokens
from transformer_lens.tools.analysis.head_affinity.significance import significance
from transformer_lens.tools.analysis.projection_kernel import (
    HeadSubspaces,
    attention_head_affinities,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import demo_model

IMAGES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "source" / "content" / "images"
#: Heads whose tokens are easy to name.
READABLE_HEADS = ((22, 2), (25, 3), (26, 2), (29, 2))


def save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / name, dpi=100)
    plt.close(figure)
    print(name)


def distribution(subspaces: HeadSubspaces) -> Figure:
    return plot_distribution(attention_head_subspace_affinity(subspaces, target_role="K")).figure


def shares_beyond(subspaces: HeadSubspaces) -> Figure:
    """What share of the pairs each null finds beyond its own p-values."""
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    figure, ax = plt.subplots(figsize=(6.0, 4.5), layout="constrained")
    levels = np.logspace(-3, 0, 61)
    styles = ("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-.")
    for null, (colour, style) in zip(("rotation", "anisotropic", "degree"), styles, strict=True):
        verdict = significance(result, subspaces, null=null, progress=False)
        shares = [verdict.share_beyond(level) for level in levels]
        ax.plot(levels, shares, style, color=colour, label=f"{null} null")
    ax.plot(levels, levels, ":", color="black", label="if the null were true")
    ax.set(xscale="log", yscale="log", xlabel="p-value", ylabel="share of pairs at or below it")
    ax.set_title("O→K of SmolLM2-135M against three nulls")
    ax.legend()
    return figure


def tokens(model) -> Figure:
    """The best tokens of some heads, with the score of a random subspace."""
    found = subspace_tokens(model, READABLE_HEADS, k=10, fold_final_norm=False)
    figure, axes = plt.subplots(1, len(found.heads), figsize=(11.0, 3.9), layout="constrained")
    chance = np.sqrt(model.cfg.d_head / model.cfg.d_model)
    for row, (head, ax) in enumerate(zip(found.heads, axes, strict=True)):
        ax.barh(range(10), found.scores[row].numpy(), color="#56B4E9")
        ax.axvline(chance, color="#D55E00", linestyle="--", label="random subspace")
        ax.set_yticks(range(10), [repr(token) for token in found.tokens[row]])
        ax.invert_yaxis()
        ax.set(xlim=(0, 1), xlabel="cosine to the subspace", title=head.label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
    return figure


def main() -> None:
    small = demo_model.load_smollm2(tokenizer=True)
    subspaces = attention_head_subspaces(small)
    save(distribution(subspaces), "calibration_distribution.png")
    save(shares_beyond(subspaces), "calibration_nulls.png")
    results = attention_head_affinities(subspaces)
    save(plot_graph(head_graph(results, k=10)).figure, "graph_smollm2.png")
    save(tokens(small), "readout_tokens.png")

    try:
        subspaces = attention_head_subspaces(demo_model.load_gpt2_small())
    except OSError as error:
        print(f"GPT-2 small is left out: {error}", file=sys.stderr)
        return
    save(
        plot_informativeness(informativeness_table(subspaces)).figure,
        "calibration_informativeness.png",
    )
    classes = gpt2_small_ioi_labels(identity=True).classes
    graph = head_graph(attention_head_affinities(subspaces), k=20, classes=classes)
    save(plot_graph(graph, layout="circle").figure, "graph_gpt2_small.png")


if __name__ == "__main__":
    main()

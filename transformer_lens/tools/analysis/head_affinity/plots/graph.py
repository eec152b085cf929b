"""Figures of the head graph."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx
import numpy as np

from transformer_lens.tools.analysis._arguments import require_choice, require_instance
from transformer_lens.tools.analysis._head_weights import ALL_ROLES
from transformer_lens.tools.analysis._pairings import roles_of
from transformer_lens.tools.analysis.head_affinity.plots._figures import (
    COLOURS,
    GREY,
    new_axes,
    pairing_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_graph"]

#: One line style per pairing, so that pairings are told apart without colour too.
_LINE_STYLES: tuple[Literal["solid", "dashed", "dotted", "dashdot"], ...] = (
    "solid",
    "dashed",
    "dotted",
    "dashdot",
)
_FAINTEST = 0.25

#: In square points.
_NODE_AREA = 420

#: Fills of the classes, light enough for a head's name on them; grey is for heads without a class.
_CLASS_COLOURS = (
    "#56B4E9",
    "#E69F00",
    "#5FC9A5",
    "#F0E442",
    "#CC79A7",
    "#F28E6B",
    "#B39DDB",
    "#A1887F",
)


def plot_graph(
    graph: nx.MultiDiGraph,
    ax: Axes | None = None,
    *,
    layout: Literal["layers", "circle"] = "layers",
) -> Axes:
    """The head graph: heads coloured by class, edges by pairing, stronger for higher scores.

    Args:
        graph: From ``head_graph``.
        ax: Where to draw. Default: a new figure.
        layout: ``"layers"``: layers from left to right, heads of a layer above each other.
            ``"circle"``: labelled heads on an inner circle and the others on an outer one, by layer
            (arXiv 2601.10266, figure 1).

    Returns:
        The axes.

    Raises:
        ArgumentTypeError: If ``graph`` is something else.
        ValueError: If it has no edges, or ``layout`` is unknown.
        ImportError: If matplotlib is not installed.

    Example:
        >>> from transformer_lens.tools.analysis.head_affinity.graph import head_graph
        >>> graph = head_graph(attention_head_affinities(model, pairings=("OQ", "OK")), k=2)
        >>> [text.get_text() for text in plot_graph(graph).get_legend().get_texts()]
        ['O→Q', 'O→K', 'no class']
    """
    require_instance(graph, nx.MultiDiGraph, "graph")
    require_choice(layout, ("layers", "circle"), "layout")
    if not graph.number_of_edges():
        raise ValueError("there is nothing to draw: the graph has no edges")
    ax = new_axes(ax, (10.0, 8.0))
    from matplotlib.lines import Line2D

    positions = _by_layer(graph) if layout == "layers" else _on_circles(graph)
    classes = sorted({data["head_class"] for _, data in graph.nodes(data=True)} - {""})
    colours = dict(zip(classes, cycle(_CLASS_COLOURS), strict=False)) | {"": GREY}
    # In one order for all graphs, so that a pairing has its colour whatever its edges.
    edges: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for edge in graph.edges(data=True):
        edges.setdefault(edge[2]["pairing"], []).append(edge)
    pairings = sorted(edges, key=lambda name: [ALL_ROLES.index(role) for role in roles_of(name)])
    styles = [
        (COLOURS[index % len(COLOURS)], _LINE_STYLES[index % len(_LINE_STYLES)])
        for index in range(len(pairings))
    ]
    directed = [all(edge["directed"] for *_, edge in edges[pairing]) for pairing in pairings]

    nx.draw_networkx_nodes(
        graph,
        positions,
        ax=ax,
        node_size=_NODE_AREA,
        node_color=[colours[data["head_class"]] for _, data in graph.nodes(data=True)],
        edgecolors="black",
        linewidths=0.6,
    )
    names = {node: _short_name(node) for node in graph}
    nx.draw_networkx_labels(graph, positions, ax=ax, labels=names, font_size=6.5)
    handles = [
        Line2D(
            [],
            [],
            color=colour,
            linestyle=line,
            label=pairing_name(*roles_of(pairing), directed=arrows),
        )
        for pairing, (colour, line), arrows in zip(pairings, styles, directed, strict=True)
    ]
    handles += [
        Line2D(
            [],
            [],
            color="none",
            marker="o",
            markerfacecolor=colours[name],
            markeredgecolor="black",
            label=name or "no class",
        )
        for name in [*classes, ""]
    ]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    ax.set_title(f"The {graph.graph['k']} strongest pairs of each pairing")
    ax.set_axis_off()

    # Edges are bent to pass between heads, so the heads' places must not change any more.
    ax.margins(0.1)
    ax.autoscale_view()
    ax.set_autoscale_on(False)
    curvature = _Curvature(ax, positions)
    for index, (pairing, (colour, line)) in enumerate(zip(pairings, styles, strict=True)):
        scores = [data["score"] for *_, data in edges[pairing]]
        lowest, highest = min(scores), max(scores)
        for source, target, data in edges[pairing]:
            strength = (data["score"] - lowest) / (highest - lowest) if highest > lowest else 1.0
            nx.draw_networkx_edges(
                graph,
                positions,
                ax=ax,
                edgelist=[(source, target)],
                edge_color=colour,
                style=line,
                alpha=_FAINTEST + (1 - _FAINTEST) * strength,
                width=1.0 + strength,
                arrowstyle="-|>" if directed[index] else "-",
                arrowsize=9,
                node_size=_NODE_AREA,
                connectionstyle=f"arc3,rad={curvature.of(source, target, 0.12 + 0.05 * index)}",
            )
    return ax


class _Curvature:
    """How far edges must bend to miss the heads that they do not join."""

    def __init__(self, ax: Axes, positions: dict[str, np.ndarray]) -> None:
        # Where everything is to be seen, once legend and title have taken their room.
        ax.figure.canvas.figure.draw_without_rendering()
        nodes = ax.transData.transform(np.stack(list(positions.values())))
        self._places = dict(zip(positions, nodes, strict=True))
        self._enough = 1.2 * math.sqrt(_NODE_AREA / math.pi) * ax.figure.dpi / 72

    def of(self, source: str, target: str, usual: float) -> float:
        """The first that misses all others, from the usual one on, or the one that misses most."""
        ends = self._places[source], self._places[target]
        others = [place for node, place in self._places.items() if node not in (source, target)]
        if not others:
            return usual
        missed = {
            curvature: min(_distance(*ends, curvature, np.stack(others)), self._enough)
            for scale in (1.0, 0.3, 1.8, 2.6, 3.4)
            for curvature in (scale * usual, -scale * usual)
        }
        return max(missed, key=lambda curvature: missed[curvature])


def _distance(start: np.ndarray, end: np.ndarray, curvature: float, others: np.ndarray) -> float:
    """From the nearest of some points to the curve that matplotlib calls arc3."""
    along = end - start
    control = (start + end) / 2 + curvature * np.array([along[1], -along[0]])
    t = np.linspace(0, 1, 50)[:, None]
    curve = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    return float(np.linalg.norm(curve[:, None] - others, axis=-1).min())


def _short_name(node: str) -> str:
    """``4.7`` for ``L4H7``, ``4`` over ``kv1`` for ``L4KV1``, and so on."""
    name = node.removeprefix("L")
    for marker, short in (("H", "."), ("KV", "\nkv"), ("X", ".x"), ("R", ".r")):
        name = name.replace(marker, short)
    return name


def _by_layer(graph: nx.MultiDiGraph) -> dict[str, np.ndarray]:
    """Layers in columns; heads of a layer spread evenly, in the order of their numbers."""
    layers: dict[int, list[str]] = {}
    for node, data in sorted(graph.nodes(data=True), key=lambda n: (n[1]["layer"], n[1]["head"])):
        layers.setdefault(data["layer"], []).append(node)
    positions = {}
    for column, (_, nodes) in enumerate(sorted(layers.items())):
        for row, node in enumerate(nodes):
            # Half a step up in every second column, so that straight edges miss the heads between.
            height = row - (len(nodes) - 1) / 2 + 0.25 * (-1) ** column
            positions[node] = np.array([float(column), -height])
    return positions


def _on_circles(graph: nx.MultiDiGraph) -> dict[str, np.ndarray]:
    """Labelled heads inside, others outside, both clockwise from the top by layer and head."""
    positions = {}
    for radius, labelled in ((0.62, True), (1.0, False)):
        ring = sorted(
            (node for node, data in graph.nodes(data=True) if bool(data["head_class"]) == labelled),
            key=lambda node: (graph.nodes[node]["layer"], graph.nodes[node]["head"]),
        )
        for index, node in enumerate(ring):
            angle = math.pi / 2 - 2 * math.pi * index / len(ring)
            positions[node] = radius * np.array([math.cos(angle), math.sin(angle)])
    return positions

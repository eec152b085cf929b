"""The strongest affinities as a directed graph of heads, and which heads are its hubs.

:func:`head_graph` draws an edge for each of the top pairs of every pairing, :func:`hubs` ranks the
heads, :func:`write_graph` exports to GraphML and DOT. The graph is a ``networkx.MultiDiGraph``, so
all that NetworkX does with graphs is a call away; NetworkX comes with torch.

What it does not show: that an edge carries anything on any input. The number of edges is chosen and
not found, and a hub may be one because it uses directions that everything uses: compare with the
graph of ``result.relative()``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx

from transformer_lens.tools.analysis._arguments import (
    ArgumentTypeError,
    require_choice,
    require_instance,
    require_integer,
    warn_if_states_differ,
)
from transformer_lens.tools.analysis._head_affinity_result import (
    HeadAffinityResult,
)
from transformer_lens.tools.analysis.head_affinity._graph_nodes import Classes, Naming
from transformer_lens.tools.analysis.head_affinity.reference import require_scipy
from transformer_lens.tools.analysis.head_affinity.significance import Significance

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["head_graph", "hubs", "write_graph"]

Scored = HeadAffinityResult | Significance


def head_graph(
    results: Scored | Iterable[Scored] | Mapping[str, Scored],
    k: int = 20,
    *,
    classes: Classes | None = None,
    kv_heads: Literal["keep", "expand"] = "keep",
    query_heads: int | None = None,
) -> nx.MultiDiGraph:
    """The ``k`` highest-scoring pairs of every pairing as a graph.

    Nodes are named like ``L4H7`` and carry ``layer``, ``head``, ``kind`` (``"query"``, ``"kv"``,
    ``"cross"`` or ``"rotary"``) and ``head_class``. Edges run from source to target, have the
    pairing as their key, and carry ``pairing``, ``rank`` (1 for the pairing's best), ``score``,
    ``normalized`` and ``directed``, and ``z``, ``p`` and ``q`` where significances were given.
    Edges of unordered pairs (``layer_order="distinct"``) are not directed: they run from the first
    to the second by layer and head, which means nothing more. The graph carries ``metric`` and
    ``k``.

    Key-value heads of a grouped-query model are heads of their own, named ``L4KV1``: none of the
    query heads that read one need have its number. Where each query head has its own, key-value
    head 7 is query head 7 and is named so. A head of cross-attention (role crossQ) is another than
    the head of its number in the same block's self-attention, and is named ``L4X7``. The rotary key
    that the heads of a layer share in multi-head latent attention is ``L4R0``.

    Args:
        results: A result of one metric per pairing; a :class:`Significance` stands for its result.
        k: Edges per pairing; fewer where there are fewer valid pairs.
        classes: ``HeadLabels``, or heads by class as ``HeadLabels.from_dict`` takes them,
            ``{"Induction": [(5, 1), ...]}``. Layers and query heads. A head in several is given
            them all, joined by commas; one in none, or a key-value head that is kept, an empty
            string.
        kv_heads: What to do with key-value heads that several query heads share: ``"keep"``, or
            ``"expand"`` to the query heads that read them, each with an edge of the same rank and
            score. ``k`` counts pairs before this. Expanded edges carry ``source_kv_head`` or
            ``target_kv_head``.
        query_heads: Query heads per layer, the same in all. Default: as many as a Q or O axis of
            the results has. Needed for K and V among themselves, whose axes do not tell; without it
            their heads are kept and called key-value heads.

    Returns:
        The graph; heads without an edge are not in it.

    Raises:
        ArgumentTypeError, ValueError: If an argument is out of range, if results repeat a pairing
            or mix models, metrics or the streams of an encoder-decoder model, if ``classes`` names
            heads that there are not, or if key-value heads cannot be expanded.

    Warns:
        UserWarning: If some were computed from raw and some from folded weights.

    Example:
        >>> results = attention_head_affinities(model, pairings=("OQ", "OK"))
        >>> graph = head_graph(results, k=1, classes={"Copying": [(1, 1)]})
        >>> for source, target, edge in graph.edges(data=True):
        ...     print(source, target, edge["pairing"], round(edge["score"], 3))
        L0H0 L1H0 OQ 4.0
        L0H0 L1H1 OK 4.0
        >>> graph.nodes["L1H1"]
        {'layer': 1, 'head': 1, 'kind': 'query', 'head_class': 'Copying'}
    """
    k = require_integer(k, "k")
    require_choice(kv_heads, ("keep", "expand"), "kv_heads")
    scored = _as_list(results)
    naming = Naming([result for result, _ in scored], classes, kv_heads == "expand", query_heads)
    graph = nx.MultiDiGraph(metric=scored[0][0].metric, k=k)
    for result, verdict in scored:
        _, positions = result.topk(k)
        for rank, (pair, where) in enumerate(
            zip(result.top_pairs(k), positions.tolist(), strict=True), 1
        ):
            edge = {
                "pairing": result.pairing,
                "rank": rank,
                "score": pair.score,
                "normalized": pair.normalized,
                "directed": result.layer_order != "distinct",
            }
            if verdict is not None:
                edge |= {name: float(getattr(verdict, name)[tuple(where)]) for name in "zpq"}
            for source, source_node in naming.nodes_of(pair.source):
                for target, target_node in naming.nodes_of(pair.target):
                    graph.add_node(source, **source_node)
                    graph.add_node(target, **target_node)
                    own = dict(edge)
                    if naming.expands(pair.source):
                        own["source_kv_head"] = pair.source.head
                    if naming.expands(pair.target):
                        own["target_kv_head"] = pair.target.head
                    graph.add_edge(source, target, key=result.pairing, **own)
    return graph


def hubs(graph: nx.MultiDiGraph) -> pd.DataFrame:
    """The heads of a graph by how much they are connected.

    Args:
        graph: From :func:`head_graph`, or a part of it.

    Returns:
        One row per head, largest ``weighted_degree`` first and ties by layer and head: the node's
        attributes; ``degree``, ``in_degree`` and ``out_degree``, which count edges;
        ``weighted_degree``, ``weighted_in`` and ``weighted_out``, which sum their scores;
        ``pagerank`` by score, high for heads that hear from heads that hear much; and
        ``betweenness``, the share of shortest paths between other heads, counted in hops, that lead
        through the head. An edge that is not directed leads both in and out of either head. Where
        key-value heads were expanded, a pair counts once for every head that reads one: compare
        heads within such a graph by O→Q edges alone, or keep key-value heads.

    Raises:
        ArgumentTypeError: If ``graph`` is something else, or was read from DOT.
        ValueError: If a score is negative, as relative ones can be.
        ImportError: If SciPy, with which NetworkX computes PageRank, is not installed.

    Example:
        >>> graph = head_graph(attention_head_affinities(model, pairings=("OQ", "OK")), k=2)
        >>> hubs(graph)[["node", "degree", "weighted_degree"]].head(2).round(3)
           node  degree  weighted_degree
        0  L0H0       2              8.0
        1  L0H1       2              6.0
    """
    import pandas as pd

    require_instance(graph, nx.MultiDiGraph, "graph")
    if any(isinstance(score, str) for _, _, score in graph.edges(data="score")):
        raise ArgumentTypeError(
            "the graph's scores are text, as DOT keeps them; export to GraphML, which keeps types"
        )
    if any(score < 0 for _, _, score in graph.edges(data="score")):
        raise ValueError("hubs sums up scores, and this graph has negative ones; use a smaller k")
    require_scipy("PageRank")
    ways = _with_ways_back(graph)
    pagerank = nx.pagerank(ways, weight="score")
    betweenness = nx.betweenness_centrality(ways)
    rows = [
        {
            "node": node,
            **attributes,
            "degree": graph.degree(node),
            "in_degree": ways.in_degree(node),
            "out_degree": ways.out_degree(node),
            "weighted_degree": graph.degree(node, weight="score"),
            "weighted_in": ways.in_degree(node, weight="score"),
            "weighted_out": ways.out_degree(node, weight="score"),
            "pagerank": pagerank[node],
            "betweenness": betweenness[node],
        }
        for node, attributes in graph.nodes(data=True)
    ]
    table = pd.DataFrame(rows)
    if rows:
        table = table.sort_values(
            ["weighted_degree", "layer", "head"], ascending=[False, True, True], ignore_index=True
        )
    return table


def _with_ways_back(graph: nx.MultiDiGraph) -> nx.MultiDiGraph:
    """A copy where edges that are not directed can be followed from either end."""
    ways = graph.copy()
    for source, target, pairing, edge in graph.edges(keys=True, data=True):
        if not edge["directed"]:
            ways.add_edge(target, source, key=pairing, **edge)
    return ways


def write_graph(graph: nx.MultiDiGraph, path: str | PathLike[str]) -> None:
    """Write a graph to GraphML (``.graphml``) or DOT (``.dot``), as the file's name ends.

    Edges are named after source, pairing and target, for programs such as Gephi take edges of one
    name for one edge. ``networkx.read_graphml(path, force_multigraph=True)`` reads the former back
    with all attributes in their types; in DOT they all are text.

    Args:
        graph: From :func:`head_graph`.
        path: Where to.

    Raises:
        ValueError: If the name ends in something else.
        ImportError: For DOT, if pydot is not installed.

    Example:
        >>> result = attention_head_subspace_affinity(model, target_role="K")
        >>> write_graph(head_graph(result, k=2), "heads.graphml")
    """
    suffix = pathlib.Path(path).suffix.lower()
    require_choice(suffix, (".graphml", ".dot"), "the end of the file's name")
    if suffix == ".graphml":
        nx.write_graphml(_with_named_edges(graph, lambda value: value), path)
        return
    try:
        nx.nx_pydot.write_dot(_with_named_edges(graph, _quoted), path)
    except ImportError as error:
        raise ImportError("writing DOT needs pydot; install it with pip install pydot") from error


def _with_named_edges(graph: nx.MultiDiGraph, written: Callable[[Any], Any]) -> nx.MultiDiGraph:
    """A copy whose edges have unique keys, with names and attributes as they are ``written``."""
    named = nx.MultiDiGraph(**{name: written(value) for name, value in graph.graph.items()})
    for node, attributes in graph.nodes(data=True):
        named.add_node(node, **{name: written(value) for name, value in attributes.items()})
    for source, target, pairing, attributes in graph.edges(keys=True, data=True):
        key = written(f"{source} {pairing} {target}")
        values = {name: written(value) for name, value in attributes.items()}
        named.add_edge(source, target, key=key, **values)
    return named


def _quoted(value: Any) -> str:
    """A DOT string; in one, nothing but the quotation mark is special."""
    return '"' + str(value).replace('"', r"\"") + '"'


def _as_list(results: Any) -> list[tuple[HeadAffinityResult, Significance | None]]:
    if isinstance(results, Mapping):
        results = results.values()
    elif not isinstance(results, Iterable):
        results = [results]
    scored: list[tuple[HeadAffinityResult, Significance | None]] = []
    for entry in results:
        verdict = entry if isinstance(entry, Significance) else None
        result = entry if verdict is None else verdict.result
        require_instance(result, HeadAffinityResult, "each of results")
        scored.append((result, verdict))
    if not scored:
        raise ValueError("results must hold at least one result")
    pairings = [result.pairing for result, _ in scored]
    if len(set(pairings)) < len(pairings):
        raise ValueError(f"results must hold one result per pairing, got {pairings}")
    for name in ("metric", "stream"):
        values = {str(getattr(result, name)) for result, _ in scored}
        if len(values) > 1:
            raise ValueError(f"results must be of one {name}, got {sorted(values)}")
    _require_one_model([result for result, _ in scored])
    warn_if_states_differ((result.weights for result, _ in scored), stacklevel=4)
    return scored


def _require_one_model(results: list[HeadAffinityResult]) -> None:
    """Refuse results that cannot be of one model: its heads would pass for another's."""
    facts: dict[str, dict[object, str]] = {}
    for result in results:
        if result.d_model is not None:
            facts.setdefault("d_model", {})[result.d_model] = result.pairing
        for axis in result.axes:
            # Blocks with self-attention are the same for all of its roles.
            crossing = axis.role == "crossQ"
            attention = "layers with cross-attention" if crossing else "attention layers"
            facts.setdefault(attention, {})[axis.layer_indices] = result.pairing
            heads = axis.head_counts or axis.ranks.shape[1]
            facts.setdefault(f"heads of role {axis.role}", {})[heads] = result.pairing
    for name, found in facts.items():
        if len(found) > 1:
            claims = ", ".join(f"{value} ({pairing})" for value, pairing in found.items())
            raise ValueError(f"results must be of one model, but their {name} differ: {claims}")

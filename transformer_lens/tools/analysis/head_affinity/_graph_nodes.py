"""Which nodes of a head graph stand for a head, and what they are called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from transformer_lens.tools.analysis._arguments import require_integer
from transformer_lens.tools.analysis._head_affinity_result import (
    AttentionHeadRef,
    HeadAffinityResult,
)
from transformer_lens.tools.analysis._head_weights import HEAD_KINDS, AttentionRole, HeadKind
from transformer_lens.tools.analysis.head_affinity.labels import HeadLabels

Classes = HeadLabels | Mapping[str, Iterable[Any]]


class Naming:
    """Which nodes a head of a result stands for."""

    def __init__(
        self,
        results: Iterable[HeadAffinityResult],
        classes: Classes | None,
        expand: bool,
        query_heads: int | None,
    ) -> None:
        counts: dict[AttentionRole, int] = {}
        varying = set()
        layers: set[int] = set()
        for axis in (axis for result in results for axis in result.axes):
            layers.update(axis.layer_indices)
            counts[axis.role] = axis.ranks.shape[1]
            if axis.head_counts is not None:
                varying.add(axis.role)
        by_kind: dict[HeadKind, set[int]] = {"query": set(), "kv": set()}
        for role, count in counts.items():
            if role != "rotaryK":  # all heads share one
                by_kind[HEAD_KINDS[role]].add(count)
        if query_heads is not None:
            by_kind["query"].add(require_integer(query_heads, "query_heads"))
        for kind, found in by_kind.items():
            if len(found) > 1:
                raise ValueError(
                    f"results (and query_heads) disagree on the number of {kind} heads: "
                    f"{sorted(found)}"
                )
        most = max(by_kind["query"], default=math.inf)
        self._classes = _class_of(classes)
        for layer, head in self._classes:
            if layer not in layers or head >= most:
                raise ValueError(
                    f"classes names L{layer}H{head}, but the attention layers are "
                    f"{sorted(layers)} with {most} query heads each"
                )
        self._expand = expand
        #: Query heads per key-value head of each role; 0 where that is unknown.
        self._groups: dict[AttentionRole, int] = {}
        for role, kv in counts.items():
            if HEAD_KINDS[role] == "query":
                continue
            shared_by = max(by_kind["query"], default=0)
            if shared_by % kv:
                raise ValueError(
                    f"{shared_by} query heads cannot share {kv} key-value heads evenly"
                )
            if expand and shared_by == 0:
                raise ValueError(
                    "kv_heads='expand' needs to know how many query heads there are: pass "
                    "query_heads, or a result with a Q or O axis"
                )
            if expand and varying:
                raise ValueError(
                    "kv_heads='expand' needs as many heads in every layer, and layers differ in "
                    f"those of role {', '.join(sorted(varying))}. Use kv_heads='keep'"
                )
            self._groups[role] = 0 if varying else shared_by // kv

    def expands(self, head: AttentionHeadRef) -> bool:
        """Whether a key-value head is replaced by several query heads."""
        return self._expand and self._groups.get(head.role, 1) > 1

    def nodes_of(self, head: AttentionHeadRef) -> list[tuple[str, dict[str, Any]]]:
        """Names and attributes of the nodes that a head stands for."""
        if head.role == "crossQ":
            name = f"L{head.layer}X{head.head}"
            return [(name, _unlabelled(head, "cross"))]
        if head.role == "rotaryK" and not self._expand:
            return [(f"L{head.layer}R{head.head}", _unlabelled(head, "rotary"))]
        per_kv_head = self._groups.get(head.role, 1)
        if per_kv_head != 1 and not self.expands(head):
            name = f"L{head.layer}KV{head.head}"
            return [(name, _unlabelled(head, "kv"))]
        group = per_kv_head if self.expands(head) else 1
        return [
            (
                f"L{head.layer}H{query}",
                {
                    "layer": head.layer,
                    "head": query,
                    "kind": "query",
                    "head_class": self._classes.get((head.layer, query), ""),
                },
            )
            for query in range(head.head * group, (head.head + 1) * group)
        ]


def _unlabelled(head: AttentionHeadRef, kind: str) -> dict[str, Any]:
    """Attributes of a node that is no query head of self-attention, which classes are given for."""
    return {"layer": head.layer, "head": head.head, "kind": kind, "head_class": ""}


def _class_of(classes: Classes | None) -> dict[tuple[int, int], str]:
    """Names of the classes of each labelled head, joined by commas."""
    if not classes:
        return {}
    labels = classes if isinstance(classes, HeadLabels) else HeadLabels.from_dict(classes)
    names: dict[tuple[int, int], list[str]] = {}
    for name, heads in labels.classes.items():
        for head in heads:
            names.setdefault(head, []).append(name)
    return {head: ", ".join(found) for head, found in names.items()}

"""Which heads are known to do what: classes of heads, as data."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from os import PathLike
from typing import Any

from transformer_lens.tools.analysis._arguments import (
    ArgumentTypeError,
    require_head,
    require_integer,
)

__all__ = ["Head", "HeadLabels", "LabelledHead", "gpt2_small_ioi_labels"]

#: Layer, in the model's own numbering, and query head.
Head = tuple[int, int]

_LABEL = re.compile(r"L(\d+)H(\d+)|(\d+)\.(\d+)")


@dataclass(frozen=True)
class LabelledHead:
    """A head's membership in a class.

    Attributes:
        head_class: Name of the class.
        layer, head: Which head; ``head`` counts query heads.
        certainty: How sure the membership is, in the words of whoever made the labels.
        source: Where it comes from.
    """

    head_class: str
    layer: int
    head: int
    certainty: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class HeadLabels:
    """Classes of attention heads. A head may be in several, and most heads are in none.

    Attributes:
        entries: The memberships.
        heads_per_layer: Query heads per layer of the model. Needed only to evaluate pairings of
            key-value heads with each other (KK, VV), whose scores do not tell how many query heads
            share one.
        description: What the labels are.

    Example:
        >>> labels = HeadLabels.from_dict({"Induction": ["5.1", "L6H9"], "Copying": [(4, 1)]})
        >>> labels
        HeadLabels(3 heads in 2 classes: Induction 2, Copying 1)
        >>> labels.classes["Induction"]
        ((5, 1), (6, 9))
    """

    entries: tuple[LabelledHead, ...]
    heads_per_layer: int | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("labels must name at least one head")
        if self.heads_per_layer is not None:
            require_integer(self.heads_per_layer, "heads_per_layer")
        seen = set()
        for entry in self.entries:
            membership = (entry.head_class, entry.layer, entry.head)
            if membership in seen:
                raise ValueError(f"{entry.head_class!r} lists L{entry.layer}H{entry.head} twice")
            seen.add(membership)
            if self.heads_per_layer is not None and entry.head >= self.heads_per_layer:
                raise ValueError(
                    f"{entry.head_class!r} lists L{entry.layer}H{entry.head}, but a layer has "
                    f"{self.heads_per_layer} heads"
                )

    @cached_property
    def classes(self) -> dict[str, tuple[Head, ...]]:
        """Heads by class, in the order of the entries."""
        classes: dict[str, tuple[Head, ...]] = {}
        for entry in self.entries:
            members = classes.get(entry.head_class, ())
            classes[entry.head_class] = (*members, (entry.layer, entry.head))
        return classes

    @property
    def heads(self) -> frozenset[Head]:
        """All labelled heads."""
        return frozenset((entry.layer, entry.head) for entry in self.entries)

    def select(
        self, *, classes: Iterable[str] | None = None, certainty: str | None = None
    ) -> HeadLabels:
        """The memberships of some classes, or of one certainty, only.

        Raises:
            ValueError: If there is no such class, or nothing is left.

        Example:
            >>> labels = gpt2_small_ioi_labels()
            >>> labels.select(classes=["Induction"])
            HeadLabels(6 heads in 1 classes: Induction 6)
            >>> len(labels.select(certainty="seen in the paper's figures").heads)
            27
        """
        wanted = None if classes is None else set(classes)
        unknown = (wanted or set()) - set(self.classes)
        if unknown:
            raise ValueError(f"no class {sorted(unknown)}, only {list(self.classes)}")
        entries = tuple(
            entry
            for entry in self.entries
            if (wanted is None or entry.head_class in wanted)
            and (certainty is None or entry.certainty == certainty)
        )
        return replace(self, entries=entries)

    @classmethod
    def from_dict(
        cls,
        classes: Mapping[str, Iterable[Any]],
        *,
        heads_per_layer: int | None = None,
        description: str = "",
    ) -> HeadLabels:
        """Labels from heads by class.

        Args:
            classes: Heads are ``(layer, head)``, ``"L5H1"``, ``"5.1"``, or a mapping with the keys
                ``layer`` and ``head`` or the key ``name``, and optionally ``certainty`` and
                ``source``.
            heads_per_layer, description: As in the class.

        Raises:
            ArgumentTypeError, ValueError: If a head is none of these, or listed twice in a class.
        """
        if not isinstance(classes, Mapping):
            raise ArgumentTypeError(
                f"classes must map names to heads, got {type(classes).__name__}"
            )
        entries = tuple(
            _entry(str(name), head) for name, heads in classes.items() for head in heads
        )
        return cls(entries, heads_per_layer, description)

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> HeadLabels:
        """Labels from a JSON file: an object with ``classes`` as in :meth:`from_dict`, and
        optionally ``heads_per_layer`` and ``description``.

        Raises:
            FileNotFoundError: If there is no such file.
            ArgumentTypeError, ValueError: If it holds something else.
        """
        with open(path, encoding="utf-8-sig") as file:  # with a mark in front or without
            return cls._from_document(json.load(file), str(path))

    @classmethod
    def from_csv(
        cls, path: str | PathLike[str], *, heads_per_layer: int | None = None
    ) -> HeadLabels:
        """Labels from a CSV file with the columns ``class``, ``layer``, ``head`` and optionally
        ``certainty`` and ``source``.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If a column is missing or a number is none.
        """
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        missing = {"class", "layer", "head"} - set(rows[0] if rows else ())
        if missing:
            raise ValueError(f"{path} lacks the columns {sorted(missing)}, or any rows")
        entries = []
        for number, row in enumerate(rows, 1):
            try:
                layer, head = int(row["layer"]), int(row["head"])
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, row {number}: layer and head must be integers, got "
                    f"{row['layer']!r} and {row['head']!r}"
                ) from error
            certainty, source = row.get("certainty") or None, row.get("source") or None
            entries.append(LabelledHead(row["class"], layer, head, certainty, source))
        return cls(tuple(entries), heads_per_layer, description=str(path))

    @classmethod
    def _from_document(cls, document: Any, where: str) -> HeadLabels:
        if not isinstance(document, dict) or "classes" not in document:
            raise ValueError(f"{where} must hold a JSON object with the key 'classes'")
        return cls.from_dict(
            document["classes"],
            heads_per_layer=document.get("heads_per_layer"),
            description=document.get("description", where),
        )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(heads)}" for name, heads in self.classes.items())
        return f"HeadLabels({len(self.heads)} heads in {len(self.classes)} classes: {sizes})"


def gpt2_small_ioi_labels(*, identity: bool = False) -> HeadLabels:
    """The classes of GPT-2 small's heads that arXiv 2601.10266 evaluates with.

    36 heads in seven classes after Wang et al. (*Interpretability in the Wild*, arXiv 2211.00593).
    The paper prints the list in a table that the authors of this file have not read. For 27 heads
    ``certainty`` is ``"seen in the paper's figures"``. The other nine are ``"reconstructed"``: of
    some four million completions tried, theirs is the only one with which every cell of the paper's
    head detection table comes out; its retrieval table, which the search did not use, comes out
    too.

    Args:
        identity: Also the two heads of class Identity, which attend to their own position. The
            paper's figures name them, its tables count them as unlabelled.

    Example:
        >>> gpt2_small_ioi_labels()
        HeadLabels(36 heads in 7 classes: Duplicate Token 3, Previous Token 10, Induction 6,
        S-Inhibition 4, Name Mover 3, Negative Name Mover 2, Backup Name Mover 8)
    """
    name = "gpt2_small_ioi_heads.json"
    text = (resources.files(__package__) / "data" / name).read_text(encoding="utf-8")
    labels = HeadLabels._from_document(json.loads(text), name)
    if identity:
        return labels
    return labels.select(classes=[name for name in labels.classes if name != "Identity"])


def _entry(name: str, head: Any) -> LabelledHead:
    if isinstance(head, Mapping):
        place = head["name"] if "name" in head else (head["layer"], head["head"])
        return LabelledHead(name, *_head(place), head.get("certainty"), head.get("source"))
    return LabelledHead(name, *_head(head))


def _head(head: Any) -> Head:
    if isinstance(head, str):
        match = _LABEL.fullmatch(head)
        if match is None:
            raise ValueError(f"a head is named like 'L5H1' or '5.1', got {head!r}")
        layer, number = (int(part) for part in match.groups() if part is not None)
        return layer, number
    # Not a float: 5.1 and 5.10 are one number and two heads.
    if not isinstance(head, (tuple, list)) or len(head) != 2:
        raise ArgumentTypeError(f"a head is (layer, head), 'L5H1' or '5.1', got {head!r}")
    return require_head(head, "a head")

"""What an affinity call returns: scores of head pairs, and how to rank, tabulate and store them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from transformer_lens.tools.analysis._arguments import (
    ArgumentTypeError,
    Rank,
    require_head,
    require_integer,
)
from transformer_lens.tools.analysis._head_axis import HeadAxis
from transformer_lens.tools.analysis._head_weights import (
    AttentionRole,
    HeadKind,
    Stream,
)
from transformer_lens.tools.analysis._weight_state import WeightState

if TYPE_CHECKING:
    import pandas as pd

LayerOrder = Literal["forward", "distinct", "all"]

_FILE_FORMAT = "transformer_lens.HeadAffinityResult/1"


@dataclass(frozen=True)
class AttentionHeadRef:
    """Which head, and which of its subspaces.

    ``kind`` tells what ``head`` counts: in a grouped-query model, head 1 of kind ``"kv"`` is read
    by several query heads, none of which need be query head 1.
    """

    layer: int
    head: int
    role: AttentionRole
    kind: HeadKind

    @property
    def label(self) -> str:
        """Layer and head the way TransformerLens writes them, such as ``L4H7``."""
        return f"L{self.layer}H{self.head}"

    def __str__(self) -> str:
        return f"{self.label} ({self.kind} head, {self.role})"


@dataclass(frozen=True)
class HeadAffinityPair:
    """A source head, a target head, and their affinity."""

    source: AttentionHeadRef
    target: AttentionHeadRef
    score: float
    normalized: float


@dataclass(frozen=True, eq=False, repr=False)
class HeadAffinityResult:
    """Affinities between the heads of two roles.

    All pair tensors have shape ``[source_layer, source_head, target_layer, target_head]`` and share
    a device. Positions on the layer axes are attention layers; ``source_layer_indices`` and
    ``target_layer_indices`` give their block numbers, which differ in models where some blocks have
    no attention.

    Attributes:
        scores: Affinities, 0 outside ``valid_mask``.
        normalized: Scores divided by the geometric mean of the two retained ranks, 0 outside
            ``valid_mask``. For the Projection Kernel this is the cosine between the two projectors.
        valid_mask: Pairs that belong to ``layer_order``. Pairs of a head without any direction
            (rank 0, as after pruning) are left out, since they have no affinity to speak of.
        source_role, target_role: Which of a head's matrices each axis stands for.
        source_layer_indices, target_layer_indices: Block numbers of the layer axes.
        source_head_kind, target_head_kind: Whether a head axis counts query or key-value heads.
        source_ranks, target_ranks: Measured ranks ``[layer, head]``, before any truncation; 0 for
            heads that a layer lacks.
        source_rank, target_rank: Largest number of directions that any head retained.
        rank: The ``rank`` that was asked for.
        rtol: The relative singular-value threshold that was applied.
        layer_order: ``"forward"``: earlier to strictly later layers (from O to crossQ, which comes
            after it in a block, the same layer too). ``"distinct"``: every
            unordered pair of different heads once. ``"all"``: every pair; within one role, every
            ordered pair of different heads.
        metric: What the scores are.
        d_model: Width of the residual stream; ``None`` if it was not recorded.
        weights: ``"raw"`` as the checkpoint has them, or ``"folded"`` once the model was processed
            (norms folded in, writing weights centred), which changes subspaces and scores.
        stream: Whose heads these are in an encoder-decoder model.
        source_head_counts, target_head_counts: How many heads each layer has, where layers differ;
            ``None`` if all have as many as the axis. Absent heads come last.
    """

    scores: Float[torch.Tensor, "source_layer source_head target_layer target_head"]
    normalized: Float[torch.Tensor, "source_layer source_head target_layer target_head"]
    valid_mask: Bool[torch.Tensor, "source_layer source_head target_layer target_head"]
    source_role: AttentionRole
    target_role: AttentionRole
    source_layer_indices: tuple[int, ...]
    target_layer_indices: tuple[int, ...]
    source_head_kind: HeadKind
    target_head_kind: HeadKind
    source_ranks: Int[torch.Tensor, "source_layer source_head"]
    target_ranks: Int[torch.Tensor, "target_layer target_head"]
    source_rank: int
    target_rank: int
    rank: Rank
    rtol: float
    layer_order: LayerOrder = "forward"
    metric: str = "projection_kernel"
    d_model: int | None = None
    weights: WeightState = "raw"
    stream: Stream | None = None
    source_head_counts: tuple[int, ...] | None = None
    target_head_counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.source_ranks.shape) + tuple(self.target_ranks.shape)
        for name in ("scores", "normalized", "valid_mask"):
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}, but the ranks are of "
                    f"{shape} [source_layer, source_head, target_layer, target_head]"
                )
        for name, layers in (
            ("source_layer_indices", shape[0]),
            ("source_head_counts", shape[0]),
            ("target_layer_indices", shape[2]),
            ("target_head_counts", shape[2]),
        ):
            entries = getattr(self, name)
            if entries is not None and len(entries) != layers:
                raise ValueError(f"{name} must have one entry per layer, {layers} in all")
        if self.valid_mask.dtype != torch.bool:
            raise ArgumentTypeError(f"valid_mask must be Boolean, got {self.valid_mask.dtype}")

    @property
    def pairing(self) -> str:
        """Both roles in short, such as ``OQ``."""
        return self.source_role + self.target_role

    @property
    def axes(self) -> tuple[HeadAxis, HeadAxis]:
        """What stands on the source's axes and on the target's.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> [(axis.role, axis.kind, axis.layer_indices) for axis in result.axes]
            [('O', 'query', (0, 1, 2)), ('K', 'kv', (0, 1, 2))]
        """
        return (
            HeadAxis(
                self.source_role,
                self.source_head_kind,
                self.source_layer_indices,
                self.source_ranks,
                self.source_head_counts,
            ),
            HeadAxis(
                self.target_role,
                self.target_head_kind,
                self.target_layer_indices,
                self.target_ranks,
                self.target_head_counts,
            ),
        )

    def topk(
        self, k: int = 20, *, normalized: bool = False
    ) -> tuple[Float[torch.Tensor, "pair"], Int[torch.Tensor, "pair 4"]]:
        """The ``k`` highest valid scores and where they stand.

        Args:
            k: How many; fewer are returned where there are fewer valid pairs.
            normalized: Rank by ``normalized`` instead of ``scores``.

        Returns:
            Values in descending order and their positions in the pair tensors (int64; positions
            on the layer axes, not block numbers), on the result's device. Ties are ordered by
            source layer, source head, target layer and target head, at the cut too.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> values, positions = result.topk(2)
            >>> positions.tolist()
            [[0, 0, 1, 1], [0, 1, 2, 0]]
        """
        ranked = self.normalized if normalized else self.scores
        k = min(require_integer(k, "k"), int(self.valid_mask.sum()))
        if k == 0:
            return ranked.new_empty(0), torch.empty(0, 4, dtype=torch.int64, device=ranked.device)
        values = ranked.masked_fill(~self.valid_mask, -torch.inf)
        cut = values.flatten().topk(k).values[-1]
        # topk breaks ties as it likes. Whatever ties with the last one takes part in the sort.
        candidates = (self.valid_mask & (values >= cut)).nonzero()
        source_layer, source_head, target_layer, target_head = candidates.cpu().numpy().T
        order = np.lexsort(
            (
                target_head,
                np.asarray(self.target_layer_indices)[target_layer],
                source_head,
                np.asarray(self.source_layer_indices)[source_layer],
                -values[tuple(candidates.T)].cpu().numpy(),
            )
        )[:k]
        positions = candidates[torch.from_numpy(order).to(candidates.device)]
        return values[tuple(positions.T)], positions

    def top_pairs(self, k: int = 20, *, normalized: bool = False) -> list[HeadAffinityPair]:
        """The ``k`` highest-scoring valid pairs, best first, ties as in :meth:`topk`.

        Args:
            k: How many; fewer are returned where there are fewer valid pairs.
            normalized: Rank by ``normalized`` instead of ``scores``.

        Returns:
            Pairs with layers in the model's own numbering.

        Raises:
            ArgumentTypeError, ValueError: If ``k`` is not a positive integer.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> for pair in result.top_pairs(2):
            ...     print(pair.source, "->", pair.target, round(pair.score, 3))
            L0H0 (query head, O) -> L1H1 (kv head, K) 4.0
            L0H1 (query head, O) -> L2H0 (kv head, K) 3.0
        """
        _, positions = self.topk(k, normalized=normalized)
        where = tuple(positions.T)
        return [
            HeadAffinityPair(
                source=self._head("source", source_layer, source_head),
                target=self._head("target", target_layer, target_head),
                score=score,
                normalized=normalized_score,
            )
            for (
                source_layer,
                source_head,
                target_layer,
                target_head,
            ), score, normalized_score in zip(
                positions.tolist(),
                self.scores[where].tolist(),
                self.normalized[where].tolist(),
                strict=True,
            )
        ]

    def to_dataframe(self, k: int | None = None) -> pd.DataFrame:
        """The valid pairs as a table, best first.

        Args:
            k: Only the ``k`` highest-scoring pairs; ``None`` for all.

        Returns:
            One row per pair, with the columns ``source``, ``target`` (labels), ``source_role``,
            ``source_kind``, ``source_layer``, ``source_head``, the same for the target, ``score``
            and ``normalized``.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> result.to_dataframe(1)[["source", "target", "target_kind", "score"]].round(3)
              source target target_kind  score
            0   L0H0   L1H1          kv    4.0
        """
        import pandas as pd

        valid = int(self.valid_mask.sum())
        _, positions = self.topk(max(valid, 1) if k is None else k)
        where = tuple(positions.T)
        columns: dict[str, Any] = {"source": None, "target": None}
        for side, layer, head in (
            ("source", positions[:, 0], positions[:, 1]),
            ("target", positions[:, 2], positions[:, 3]),
        ):
            layers = torch.tensor(getattr(self, f"{side}_layer_indices"))[layer.cpu()].tolist()
            heads = head.tolist()
            columns[side] = [f"L{layer}H{head}" for layer, head in zip(layers, heads, strict=True)]
            columns[f"{side}_role"] = getattr(self, f"{side}_role")
            columns[f"{side}_kind"] = getattr(self, f"{side}_head_kind")
            columns[f"{side}_layer"] = layers
            columns[f"{side}_head"] = heads
        # As float64, whose rounded values print as they are.
        columns["score"] = self.scores[where].cpu().double().numpy()
        columns["normalized"] = self.normalized[where].cpu().double().numpy()
        return pd.DataFrame(columns)

    def score(
        self, source: tuple[int, int] | AttentionHeadRef, target: tuple[int, int] | AttentionHeadRef
    ) -> float:
        """The affinity of one pair of heads.

        Args:
            source: ``(layer, head)`` of the source, layers in the model's own numbering, or an
                ``AttentionHeadRef``.
            target: The same of the target. Where pairs are unordered (``layer_order="distinct"``)
                the two may be exchanged.

        Raises:
            ArgumentTypeError: If a head is no ``(layer, head)``.
            KeyError: If there is no such head.
            ValueError: If the pair does not belong to ``layer_order``, or a head is of another
                role.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> round(result.score((0, 1), (2, 0)), 3)
            3.0
        """
        source_axis, target_axis = self.axes
        for head, side, axis in ((source, "source", source_axis), (target, "target", target_axis)):
            if isinstance(head, AttentionHeadRef) and head.role != axis.role:
                raise ValueError(f"{side} must be of role {axis.role}, got {head}")
        source, target = require_head(source, "source"), require_head(target, "target")
        where = source_axis.position(source, "source ") + target_axis.position(target, "target ")
        if self.layer_order == "distinct" and not self.valid_mask[where]:
            where = where[2:] + where[:2]
        if not self.valid_mask[where]:
            raise ValueError(
                f"{self.source_role} of L{source[0]}H{source[1]} and {self.target_role} of "
                f"L{target[0]}H{target[1]} are no valid pair: the result holds "
                f"{self.layer_order!r} pairs of heads of positive rank"
            )
        return float(self.scores[where])

    def relative(self) -> HeadAffinityResult:
        """What is left of each affinity when hubs are discounted.

        Some heads overlap with everything. Here the mean over the valid pairs of the source head
        and that of the target head are subtracted and the mean of all is added back (double
        centring), so a score says how much more, or less, the two have in common than either has
        with others. Where pairs are unordered, a head's mean runs over all pairs that it is in.

        Returns:
            A result of the same shape with ``metric`` prefixed by ``relative_``; its scores can be
            negative.

        Raises:
            ValueError: If the result is relative already.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> relative = result.relative()
            >>> relative.metric, round(relative.score((0, 0), (1, 1)), 3)
            ('relative_projection_kernel', 1.75)
        """
        if self.metric.startswith("relative_"):
            raise ValueError(f"the result is relative already: {self.metric}")
        return replace(
            self,
            scores=self._double_centred(self.scores),
            normalized=self._double_centred(self.normalized),
            metric=f"relative_{self.metric}",
        )

    def _double_centred(self, values: torch.Tensor) -> torch.Tensor:
        rows, columns = self.source_ranks.numel(), self.target_ranks.numel()
        # On the CPU, where float64 is to be had whatever the device: a mean of thousands of scores
        # should not add rounding of its own.
        scores = values.reshape(rows, columns).to("cpu", torch.float64)
        valid = self.valid_mask.reshape(rows, columns).to("cpu", torch.float64)
        source_sum, target_sum = (scores * valid).sum(1), (scores * valid).sum(0)
        source_count, target_count = valid.sum(1), valid.sum(0)
        if self.layer_order == "distinct":
            source_sum = target_sum = source_sum + target_sum
            source_count = target_count = source_count + target_count
        source_mean = source_sum / source_count.clamp(min=1)
        target_mean = target_sum / target_count.clamp(min=1)
        mean = (scores * valid).sum() / valid.sum().clamp(min=1)
        centred = (scores - source_mean[:, None] - target_mean + mean) * valid
        return centred.to(values).reshape(values.shape)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to a safetensors file; :meth:`load` reads it back unchanged.

        Example:
            >>> result = attention_head_subspace_affinity(model, target_role="K")
            >>> result.save("affinity.safetensors")
            >>> HeadAffinityResult.load("affinity.safetensors")
            HeadAffinityResult(projection_kernel, O of 3x2 query heads -> K of 3x2 kv heads,
            12 forward pairs, best L0H0 -> L1H1 at 4)
        """
        from safetensors.torch import save_file

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        # Copies: within one role both axes share their ranks, and the format shares nothing.
        tensors = {name: v.contiguous().clone() for name, v in fields.items() if torch.is_tensor(v)}
        rest = {name: value for name, value in fields.items() if name not in tensors}
        save_file(tensors, path, {"format": _FILE_FORMAT, "fields": json.dumps(rest)})

    @classmethod
    def load(
        cls, path: str | PathLike[str], device: str | torch.device = "cpu"
    ) -> HeadAffinityResult:
        """Read a result that :meth:`save` wrote, onto ``device``.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file holds something else.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FILE_FORMAT:
                    raise ValueError(
                        f"{path} is no saved HeadAffinityResult: its format is "
                        f"{metadata.get('format')!r}, expected {_FILE_FORMAT!r}"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        try:
            fields = json.loads(metadata["fields"])
            for name, value in fields.items():
                if isinstance(value, list):
                    fields[name] = tuple(value)
            return cls(**tensors, **fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is a damaged HeadAffinityResult: {error}") from error

    def __repr__(self) -> str:
        def axis(side: str) -> str:
            layers, heads = getattr(self, f"{side}_ranks").shape
            role, kind = getattr(self, f"{side}_role"), getattr(self, f"{side}_head_kind")
            return f"{role} of {layers}x{heads} {kind} heads"

        best = self.top_pairs(1)
        top = (
            f", best {best[0].source.label} -> {best[0].target.label} at {best[0].score:.4g}"
            if best
            else ""
        )
        return (
            f"HeadAffinityResult({self.metric}, {axis('source')} -> {axis('target')}, "
            f"{int(self.valid_mask.sum()):,} {self.layer_order} pairs{top})"
        )

    def _head(self, side: Literal["source", "target"], layer: int, head: int) -> AttentionHeadRef:
        return AttentionHeadRef(
            layer=getattr(self, f"{side}_layer_indices")[layer],
            head=head,
            role=getattr(self, f"{side}_role"),
            kind=getattr(self, f"{side}_head_kind"),
        )

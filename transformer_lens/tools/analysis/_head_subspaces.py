"""The subspaces that a model's attention heads read and write, extracted once for all heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int

from transformer_lens.tools.analysis._arguments import (
    ArgumentTypeError,
    Rank,
    require_integer,
    require_tolerance,
)
from transformer_lens.tools.analysis._head_axis import HeadAxis
from transformer_lens.tools.analysis._head_weights import (
    HEAD_KINDS,
    ROLES,
    AttentionRole,
    HeadKind,
    HeadWeights,
    Stream,
    read_head_weights,
    require_finite_heads,
    require_role,
)
from transformer_lens.tools.analysis._linalg import (
    clamped,
    default_rtol,
    exact_arithmetic,
    numerical_ranks,
    thin_qr,
    thin_svd,
    unit_scaled,
)
from transformer_lens.tools.analysis._pairwise_overlap import pairwise_overlaps
from transformer_lens.tools.analysis._weight_state import WeightState

#: Bound of the temporaries that factoring a chunk of heads takes; a chunk has one head at least.
_CHUNK_BYTES = 32 * 1024**2

#: How many tensors of a chunk's size the factorisation holds at once.
_COPIES_PER_CHUNK = 4


@dataclass(frozen=True, eq=False, repr=False)
class RoleSubspaces:
    """The subspaces of one role, one per head.

    Attributes:
        role: ``"Q"``, ``"K"``, ``"V"``, ``"O"``, ``"crossQ"`` or ``"rotaryK"``.
        layer_indices: Block numbers of the layer axes.
        bases: Orthonormal bases. A head that retains fewer directions than the widest one ends in
            zero columns.
        ranks: Measured ranks (int64), before truncation by ``rank``. 0 too for heads that a layer
            lacks.
        head_counts: How many heads each layer has, where layers differ; ``None`` if all have as
            many as the head axis. Absent heads come last.
    """

    role: AttentionRole
    layer_indices: tuple[int, ...]
    bases: Float[torch.Tensor, "layer head d_model rank"]
    ranks: Int[torch.Tensor, "layer head"]
    head_counts: tuple[int, ...] | None = None

    @property
    def kind(self) -> HeadKind:
        """Whether the head axis counts query heads or key-value heads."""
        return HEAD_KINDS[self.role]

    @property
    def axis(self) -> HeadAxis:
        """What stands on the axes of ``ranks`` and on the first two of ``bases``."""
        return HeadAxis(self.role, self.kind, self.layer_indices, self.ranks, self.head_counts)

    @property
    def heads(self) -> int:
        """Heads per layer, in the layer that has most."""
        return self.ranks.shape[1]

    @property
    def retained_ranks(self) -> Int[torch.Tensor, "layer head"]:
        """Number of basis vectors of each head that are not padding."""
        return self.ranks.clamp(max=self.bases.shape[-1])

    @property
    def frames(self) -> Float[torch.Tensor, "layer_head d_model rank"]:
        """The bases with layers and heads in one axis, as the engine takes them."""
        return self.bases.flatten(0, 1)

    def __repr__(self) -> str:
        layers, heads, d_model, rank = self.bases.shape
        return (
            f"RoleSubspaces({self.role} of {layers}x{heads} {self.kind} heads, "
            f"rank {rank} in {d_model} dimensions)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class HeadSubspaces:
    """The subspaces of a model's heads, by role: ``subspaces["O"].bases``.

    Attributes:
        by_role: The extracted roles.
        rank: The ``rank`` that was asked for.
        rtol: The relative singular-value threshold that was applied.
        weights: ``"raw"`` as the checkpoint has them, or ``"folded"`` by the bridge's processing.
        stream: Whose heads these are in an encoder-decoder model.
    """

    by_role: Mapping[AttentionRole, RoleSubspaces]
    rank: Rank
    rtol: float
    weights: WeightState = "raw"
    stream: Stream | None = None

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return next(iter(self.by_role.values())).bases.shape[-2]

    def __getitem__(self, role: AttentionRole) -> RoleSubspaces:
        require_role(role, "role")
        if role not in self.by_role:
            raise ValueError(
                f"role {role} was not extracted, only {list(self.by_role)}; ask for it with "
                f"attention_head_subspaces(model, roles=...)"
            )
        return self.by_role[role]

    def overlap(
        self,
        source_role: AttentionRole,
        target_role: AttentionRole,
        *,
        keep: Bool[torch.Tensor, "source_layer source_head target_layer target_head"] | None = None,
        progress: bool | None = None,
    ) -> Float[torch.Tensor, "source_layer source_head target_layer target_head"]:
        """Projection Kernels of any two roles, sensible as a composition or not.

        Args:
            source_role: Role of the first two axes.
            target_role: Role of the last two axes.
            keep: Pairs that are wanted; the others are 0 and cost little. Default: all, a head's
                overlap with itself included.
            progress: ``True`` for a progress bar, ``False`` for none, ``None`` for one that appears
                when the work takes more than a few seconds.

        Returns:
            Scores between 0 and the smaller of the two ranks, in the bases' dtype and on their
            device.

        Raises:
            ValueError: If a role was not extracted.

        Example:
            >>> subspaces = attention_head_subspaces(model)
            >>> subspaces.overlap("Q", "K").shape
            torch.Size([3, 2, 3, 2])
        """
        return overlaps(self, source_role, {target_role: keep}, progress=progress)[target_role]

    def __repr__(self) -> str:
        return f"HeadSubspaces({', '.join(map(repr, self.by_role.values()))})"


def overlaps(
    subspaces: HeadSubspaces,
    source_role: AttentionRole,
    keeps: Mapping[AttentionRole, torch.Tensor | None],
    *,
    progress: bool | None = None,
) -> dict[AttentionRole, torch.Tensor]:
    """:meth:`HeadSubspaces.overlap` of one source role with several target roles at once.

    Args:
        subspaces: The subspaces.
        source_role: Role of the first two axes.
        keeps: By target role the pairs that are wanted, ``None`` for all.
        progress: As in the method.

    Example:
        >>> found = overlaps(attention_head_subspaces(model), "O", {"Q": None, "K": None})
        >>> {role: tuple(scores.shape) for role, scores in found.items()}
        {'Q': (3, 2, 3, 2), 'K': (3, 2, 3, 2)}
    """
    source = subspaces[source_role]
    targets = [
        (
            None if role == source_role else subspaces[role].frames,
            None if keep is None else keep.reshape(source.ranks.numel(), -1),
        )
        for role, keep in keeps.items()
    ]
    with exact_arithmetic(source.bases.device):
        scores = pairwise_overlaps(source.frames, targets, progress=progress)
    results = {}
    for role, of_role in zip(keeps, scores, strict=True):
        target = subspaces[role]
        bound = min(source.bases.shape[-1], target.bases.shape[-1])
        shape = source.ranks.shape + target.ranks.shape
        results[role] = clamped(of_role, bound, "Projection Kernel").reshape(shape)
    return results


def attention_head_subspaces(
    model: Any,
    roles: Sequence[AttentionRole] = ROLES,
    *,
    rank: Rank = None,
    rtol: float | None = None,
    stream: Stream | None = None,
) -> HeadSubspaces:
    """Orthonormal bases of what every attention head reads and writes.

    Args:
        model: A ``TransformerBridge``. It is not changed.
        roles: Which of ``"Q"``, ``"K"``, ``"V"``, ``"O"`` to extract, and of the two that only some
            models have: ``"crossQ"``, the queries of a decoder's cross-attention, and
            ``"rotaryK"``, the rotary key that all heads of a layer share in multi-head latent
            attention. There, ``K`` is what each head's own part of the key reads, and ``Q`` what
            the whole query does.
        rank: ``None``: every head must have full column rank. A number: keep that many leading
            singular directions of every head. ``"measured"``: every head keeps as many as it has,
            down to none for a pruned head.
        rtol: Singular values up to ``rtol`` times the head's largest count as zero. Default:
            ``max(d_model, d_head) * eps`` of the dtype computed in.
        stream: Of an encoder-decoder model, ``"encoder"`` or ``"decoder"``: their heads live in two
            residual streams.

    Returns:
        Bases ``[layer, head, d_model, rank]``, measured ranks, layer numbers and head kinds. They
        are in float64 if any of the weights is, else in float32, and on the model's device. Q and O
        have an entry per query head, K and V one per key-value head. A basis spans the head's
        column space; its vectors are singular directions only where ``rank`` truncates.

    Raises:
        ArgumentTypeError, ValueError: If an argument is out of range, if the model has no attention
            layers, or not the role or stream that is asked for, or if a head has non-finite weights
            or a smaller rank than asked for. The message names role, layer and head.
        NotImplementedError: If the weights cannot be read per head, or if the model has two
            residual streams (encoder-decoder) and ``stream`` does not choose.

    Example:
        >>> subspaces = attention_head_subspaces(model, roles=("O", "K"))
        >>> subspaces["K"].bases.shape, subspaces["K"].kind
        (torch.Size([3, 2, 8, 4]), 'kv')
    """
    if isinstance(roles, str) or not roles:
        raise ArgumentTypeError(
            f"roles must be a sequence of roles such as ('O', 'K'), got {roles!r}"
        )
    roles = tuple(dict.fromkeys(roles))
    weights = read_head_weights(model, roles, stream=stream)

    sizes = [
        tuple(matrix.shape)
        for role_weights in weights.values()
        for matrix in role_weights.matrices
        if len(matrix)
    ]
    if isinstance(rank, str) and rank != "measured":
        raise ArgumentTypeError(f"rank must be None, an integer or 'measured', got {rank!r}")
    if rank != "measured" and rank is not None:
        rank = require_integer(rank, "rank", maximum=min(min(size[1:]) for size in sizes))
    dtype = weights.compute_dtype
    threshold = (
        default_rtol([max(size[1:]) for size in sizes], dtype)
        if rtol is None
        else require_tolerance(rtol, "rtol")
    )

    with exact_arithmetic(weights.device):
        by_role = {role: _extract(weights, role, rank, threshold, dtype) for role in roles}
    return HeadSubspaces(
        by_role=by_role,
        rank=rank,
        rtol=threshold,
        weights=weights.state,
        stream=weights.stream,
    )


def _extract(
    weights: HeadWeights, role: AttentionRole, rank: Rank, rtol: float, dtype: torch.dtype
) -> RoleSubspaces:
    layer_indices, matrices = weights[role].layer_indices, weights[role].matrices
    heads, d_model, d_head = weights[role].shape
    width = rank if isinstance(rank, int) else min(d_model, d_head)
    # Zeros stay where a layer has fewer or narrower heads than others.
    bases = torch.zeros(len(matrices), heads, d_model, width, dtype=dtype, device=weights.device)
    ranks = torch.zeros(len(matrices), heads, dtype=torch.int64, device=weights.device)
    bytes_per_head = _COPIES_PER_CHUNK * d_model * d_head * bases.element_size()
    chunk = max(1, _CHUNK_BYTES // bytes_per_head)
    for position, (layer, matrix) in enumerate(zip(layer_indices, matrices, strict=True)):
        own_heads, _, own_width = matrix.shape
        kept = min(width, own_width)
        for start in range(0, own_heads, chunk):
            some = slice(start, min(start + chunk, own_heads))
            stack = matrix[some].to(device=weights.device, dtype=dtype)
            scaled, scales = unit_scaled(stack)
            require_finite_heads(scales, role, layer, weights.architecture, first_head=start)
            frames, ranks[position, some] = _frames(scaled, rank, kept, rtol)
            bases[position, some, :, :kept] = frames
            for head, measured in enumerate(ranks[position, some].tolist(), start):
                needed = own_width if rank is None else 0 if rank == "measured" else rank
                if measured < needed:
                    raise ValueError(
                        f"{weights.architecture}, role {role}, layer {layer}, head {head}: "
                        f"measured rank {measured} is below {needed}, the rank asked for "
                        f"(rank={rank!r}, rtol={rtol:.3g}). Pass rank='measured' to let every head "
                        "keep its own rank"
                    )
    counts = tuple(map(len, matrices))
    return RoleSubspaces(role, layer_indices, bases, ranks, counts if min(counts) < heads else None)


def _frames(
    scaled: torch.Tensor, rank: Rank, width: int, rtol: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormal bases ``[head, d_model, width]`` and measured ranks ``[head]`` of the heads."""
    orthonormal, triangular = thin_qr(scaled)
    ranks = numerical_ranks(triangular, rtol)
    # The columns of Q span the right space unless directions are to be dropped; only then is the
    # SVD of R needed to tell which.
    dropping = ranks < width if width == orthonormal.shape[-1] else torch.ones_like(ranks).bool()
    if not bool(dropping.any()):
        return orthonormal, ranks
    left, _ = thin_svd(triangular[dropping])
    kept = torch.arange(width, device=scaled.device) < ranks[dropping, None, None]
    frames = orthonormal[..., :width].clone()
    frames[dropping] = orthonormal[dropping] @ left[..., :width] * kept
    return frames, ranks

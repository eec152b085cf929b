"""Per-head attention weights of a model, as matrices in residual-stream coordinates.

How a ``TransformerBridge`` keeps its weights is known here and in ``_attention_stacks`` and
``_attention_layouts`` only; the rest of the project sees :class:`HeadWeights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._arguments import ArgumentTypeError, require_choice
from transformer_lens.tools.analysis._attention_layouts import (
    Projection,
    head_matrices,
    require_values,
)
from transformer_lens.tools.analysis._attention_stacks import (
    Stream,
    architecture_name,
    attention_layers,
    cross_attention_layers,
)
from transformer_lens.tools.analysis._linalg import compute_dtype
from transformer_lens.tools.analysis._weight_state import WeightState, is_processed, weight_state

AttentionRole = Literal["Q", "K", "V", "O", "crossQ", "rotaryK"]
HeadKind = Literal["query", "kv"]

#: The roles that attention of every kind has.
ROLES: tuple[AttentionRole, ...] = ("Q", "K", "V", "O")

#: Those that some have besides: the queries of a decoder's cross-attention, and the rotary key that
#: all heads of multi-head latent attention share.
ALL_ROLES: tuple[AttentionRole, ...] = (*ROLES, "crossQ", "rotaryK")

#: Grouped-query models have fewer key-value heads than query heads; the two kinds never mix.
HEAD_KINDS: dict[AttentionRole, HeadKind] = {
    **dict.fromkeys(("Q", "O", "crossQ"), "query"),
    **dict.fromkeys(("K", "V", "rotaryK"), "kv"),
}


@dataclass(frozen=True, eq=False)
class RoleWeights:
    """One role's weights, a tensor per attention layer.

    Attributes:
        role: ``"Q"``, ``"K"``, ``"V"``, ``"O"``, ``"crossQ"`` or ``"rotaryK"``.
        layer_indices: Block numbers of the attention layers, in the model's own numbering.
        matrices: Per layer the heads' matrices, whose columns span what the head reads from the
            residual stream or, for O, writes to it. They are views of the model's parameters
            wherever one parameter holds them, on the parameters' devices and in their dtypes. In
            most models all are of one shape; a layer without such heads has none, ``[0, d_model,
            0]``.
    """

    role: AttentionRole
    layer_indices: tuple[int, ...]
    matrices: tuple[Float[torch.Tensor, "head d_model d_head"], ...]

    @property
    def heads(self) -> int:
        """Heads per layer, in the layer that has most."""
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(heads, d_model, d_head)``: the most that a layer has of each."""
        heads, d_model, d_head = (
            max(sizes) for sizes in zip(*(matrix.shape for matrix in self.matrices), strict=True)
        )
        return heads, d_model, d_head

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same number of heads, of the same width."""
        return all(tuple(matrix.shape) == self.shape for matrix in self.matrices)


@dataclass(frozen=True, eq=False)
class HeadWeights(Mapping[AttentionRole, RoleWeights]):
    """The weights of a model's heads by role, and what is to be known of the model.

    Attributes:
        by_role: The roles that were read.
        architecture: What errors call the model.
        device: Where results belong.
        state: ``"raw"`` as the checkpoint has them, or ``"folded"`` by the bridge's processing.
        stream: Whose residual stream it is in an encoder-decoder model.
    """

    by_role: Mapping[AttentionRole, RoleWeights]
    architecture: str
    device: torch.device
    state: WeightState = "raw"
    stream: Stream | None = None

    def __getitem__(self, role: AttentionRole) -> RoleWeights:
        return self.by_role[role]

    def __iter__(self) -> Iterator[AttentionRole]:
        return iter(self.by_role)

    def __len__(self) -> int:
        return len(self.by_role)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return next(iter(self.values())).shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 if any of the weights is, else float32."""
        dtype = torch.float32
        for role_weights in self.values():
            for matrix in role_weights.matrices:
                dtype = torch.promote_types(dtype, compute_dtype(matrix.dtype))
        return dtype


def require_role(role: Any, name: str) -> None:
    """Refuse ``role`` unless it is one of :data:`ALL_ROLES`."""
    if role in ("crossK", "crossV"):
        raise ValueError(
            f"{name}: the keys and values of cross-attention read the encoder's final output and "
            "not the residual stream that the decoder's heads write to. Of cross-attention there "
            "is crossQ only"
        )
    require_choice(role, ALL_ROLES, name)


def read_head_weights(
    model: Any, roles: Sequence[AttentionRole], *, stream: Stream | None = None
) -> HeadWeights:
    """Read the roles' weights of all attention layers of a ``TransformerBridge``.

    Args:
        model: A ``TransformerBridge``.
        roles: Which of ``"Q"``, ``"K"``, ``"V"``, ``"O"``, ``"crossQ"`` and ``"rotaryK"``.
        stream: Of an encoder-decoder model, ``"encoder"`` or ``"decoder"``.

    Returns:
        A mapping from roles to :class:`RoleWeights`.

    Raises:
        ArgumentTypeError: If ``model`` is not a bridge.
        NotImplementedError: For weights that cannot be read as one matrix per head (quantised,
            offloaded, shared by experts), for encoder-decoder models unless ``stream`` chooses, and
            for blocks that have no one order.
        ValueError: If the model has no attention layers, or not the roles or streams that are
            asked for, or if weights are missing, of inconsistent shape, or empty.
    """
    for role in roles:
        require_role(role, "role")
    if stream is not None:
        require_choice(stream, ("encoder", "decoder"), "stream")
    if not callable(getattr(model, "blocks_with", None)):
        raise ArgumentTypeError(
            f"model must be a TransformerBridge, got {type(model).__name__}; load it with "
            "TransformerBridge.boot_transformers(name)"
        )
    architecture = architecture_name(model)
    processed = is_processed(model)
    layers = attention_layers(model, architecture, stream)
    by_role = {}
    for role in roles:
        where = layers
        if role == "crossQ":
            where = cross_attention_layers(model, architecture, stream)
        by_role[role] = _role_weights(where, role, architecture, processed)
    _check_shapes(by_role, architecture)
    return HeadWeights(
        by_role=by_role,
        architecture=architecture,
        device=_home_device(model, by_role),
        state=weight_state(model, stream),
        stream=stream,
    )


def _home_device(model: Any, by_role: Mapping[AttentionRole, RoleWeights]) -> torch.device:
    """Where results about ``model`` belong: its configured device, else that of its weights."""
    configured = getattr(getattr(model, "cfg", None), "device", None)
    if configured is not None:
        return torch.device(configured)
    return next(iter(by_role.values())).matrices[0].device


def require_finite_heads(
    scales: Float[torch.Tensor, "head 1 1"],
    role: AttentionRole,
    layer: int,
    architecture: str,
    *,
    first_head: int = 0,
) -> None:
    """Refuse heads with an infinite or undefined weight, naming the first such head.

    ``scales`` are those of :func:`unit_scaled`, which has looked at every weight already.
    """
    for head, finite in enumerate(scales.flatten().isfinite().tolist(), first_head):
        if not finite:
            raise ValueError(
                f"{architecture}, role {role}, layer {layer}, head {head}: the "
                "weight must contain only finite values"
            )


def _role_weights(
    layers: list[tuple[int, Any]], role: AttentionRole, architecture: str, processed: bool
) -> RoleWeights:
    found = [_read(attention, layer, role, architecture, processed) for layer, attention in layers]
    example = next((matrix for matrix in found if matrix is not None), None)
    if example is None:
        raise ValueError(
            f"{architecture}, role {role}: no layer has such heads of its own. Choose pairings "
            "without this role"
        )
    none = example.new_empty(0, example.shape[1], 0)
    return RoleWeights(
        role=role,
        layer_indices=tuple(layer for layer, _ in layers),
        matrices=tuple(none if matrix is None else matrix for matrix in found),
    )


def _read(
    attention: Any, layer: int, role: AttentionRole, architecture: str, processed: bool
) -> torch.Tensor | None:
    where = f"{architecture}, role {role}, layer {layer}"
    projection: Projection = "Q" if role == "crossQ" else role
    matrix = head_matrices(attention, projection, where, processed=processed)
    if matrix is None:
        return None
    require_values(matrix, where)
    if matrix.ndim != 3:
        raise ValueError(
            f"{where}: expected one matrix per head, a three-dimensional tensor, "
            f"got shape {tuple(matrix.shape)}"
        )
    if matrix.numel() == 0:
        raise ValueError(f"{where}: the weight is empty, of shape {tuple(matrix.shape)}")
    # W_O is [head, d_head, d_model]: what a head writes is the span of its rows.
    return (matrix.mT if role == "O" else matrix).detach()


def _check_shapes(weights: Mapping[AttentionRole, RoleWeights], architecture: str) -> None:
    """One residual stream, and in every layer as many heads of one role as of its twin."""
    first = next(iter(weights.values()))
    for role, role_weights in weights.items():
        for layer, matrix in zip(role_weights.layer_indices, role_weights.matrices, strict=True):
            if matrix.shape[1] != first.matrices[0].shape[1]:
                raise ValueError(
                    f"{architecture}, role {role}, layer {layer}: d_model is {matrix.shape[1]}, "
                    f"that of role {first.role}, layer {first.layer_indices[0]} is "
                    f"{first.matrices[0].shape[1]}; they must share one residual stream"
                )
    twins: tuple[tuple[AttentionRole, AttentionRole], ...] = (("Q", "O"), ("K", "V"))
    for role, twin in twins:
        if role not in weights or twin not in weights:
            continue
        ours, theirs = weights[role], weights[twin]
        for layer, own, other in zip(
            ours.layer_indices, ours.matrices, theirs.matrices, strict=True
        ):
            if len(own) != len(other):
                raise ValueError(
                    f"{architecture}, layer {layer}: role {role} has {len(own)} heads, role {twin} "
                    f"has {len(other)}; both must have one per {HEAD_KINDS[role]} head"
                )

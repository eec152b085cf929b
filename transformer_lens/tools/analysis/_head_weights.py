"""Per-head attention weights of a model, as matrices in residual-stream coordinates.

How a ``TransformerBridge`` keeps its weights is known here and in ``_attention_layouts`` only; the
rest of the project sees :class:`RoleWeights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._arguments import ArgumentTypeError
from transformer_lens.tools.analysis._attention_layouts import (
    attention_layers,
    head_matrices,
    require_values,
)
from transformer_lens.tools.analysis._linalg import compute_dtype

AttentionRole = Literal["Q", "K", "V", "O"]
HeadKind = Literal["query", "kv"]

ROLES: tuple[AttentionRole, ...] = ("Q", "K", "V", "O")

#: Grouped-query models have fewer key-value heads than query heads; the two kinds never mix.
HEAD_KINDS: dict[AttentionRole, HeadKind] = {"Q": "query", "O": "query", "K": "kv", "V": "kv"}


@dataclass(frozen=True, eq=False)
class RoleWeights:
    """One role's weights, a tensor per attention layer.

    Attributes:
        role: ``"Q"``, ``"K"``, ``"V"`` or ``"O"``.
        layer_indices: Block numbers of the attention layers, in the model's own numbering.
        matrices: Per layer the heads' matrices, whose columns span what the head reads from the
            residual stream (Q, K, V) or writes to it (O, hence transposed). They are views of the
            model's parameters wherever the model stores them that way, on the parameters' devices
            and in their dtypes.
    """

    role: AttentionRole
    layer_indices: tuple[int, ...]
    matrices: tuple[Float[torch.Tensor, "head d_model d_head"], ...]

    @property
    def heads(self) -> int:
        """Heads per layer."""
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(heads, d_model, d_head)``, the same in every layer."""
        heads, d_model, d_head = self.matrices[0].shape
        return heads, d_model, d_head


def read_head_weights(
    model: Any, roles: Sequence[AttentionRole]
) -> dict[AttentionRole, RoleWeights]:
    """Read the roles' weights of all attention layers of a ``TransformerBridge``.

    Raises:
        ArgumentTypeError: If ``model`` is not a bridge.
        NotImplementedError: For encoder-decoder models, and for weights that cannot be read as one
            matrix per head (multi-head latent attention, quantised, offloaded).
        ValueError: If the model has no attention layers, or weights are missing, of inconsistent
            shape, or empty.
    """
    architecture = architecture_name(model)
    if not callable(getattr(model, "blocks_with", None)):
        raise ArgumentTypeError(
            f"model must be a TransformerBridge, got {type(model).__name__}; load it with "
            "TransformerBridge.boot_transformers(name)"
        )
    layers = attention_layers(model, architecture)
    processed = bool(getattr(model, "compatibility_mode", False))
    weights = {
        role: RoleWeights(
            role=role,
            layer_indices=tuple(layer for layer, _ in layers),
            matrices=tuple(
                _read(attention, layer, role, architecture, processed)
                for layer, attention in layers
            ),
        )
        for role in roles
    }
    _check_shapes(weights, architecture)
    return weights


def architecture_name(model: Any) -> str:
    """The model's architecture as its checkpoint names it, else the name of its class."""
    cfg = getattr(model, "cfg", None)
    for attribute in ("original_architecture", "architecture"):
        name = getattr(cfg, attribute, None)
        if name:
            return str(name)
    return type(model).__name__


def home_device(model: Any, weights: Mapping[AttentionRole, RoleWeights]) -> torch.device:
    """Where results about ``model`` belong: its configured device, else that of its weights."""
    configured = getattr(getattr(model, "cfg", None), "device", None)
    if configured is not None:
        return torch.device(configured)
    return next(iter(weights.values())).matrices[0].device


def shared_compute_dtype(weights: Mapping[AttentionRole, RoleWeights]) -> torch.dtype:
    """float64 if any of the weights is, else float32."""
    dtype = torch.float32
    for role_weights in weights.values():
        for matrix in role_weights.matrices:
            dtype = torch.promote_types(dtype, compute_dtype(matrix.dtype))
    return dtype


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


def _read(
    attention: Any, layer: int, role: AttentionRole, architecture: str, processed: bool
) -> torch.Tensor:
    where = f"{architecture}, role {role}, layer {layer}"
    matrix = head_matrices(attention, role, where, processed=processed)
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


def _check_shapes(weights: dict[AttentionRole, RoleWeights], architecture: str) -> None:
    """Every layer of a role alike, every role with the same residual stream and head counts."""
    for role, role_weights in weights.items():
        expected = role_weights.shape
        for layer, matrix in zip(role_weights.layer_indices, role_weights.matrices, strict=True):
            if tuple(matrix.shape) != expected:
                raise ValueError(
                    f"{architecture}, role {role}, layer {layer}: heads of shape "
                    f"{tuple(matrix.shape)} where layer {role_weights.layer_indices[0]} has "
                    f"{expected} ([head, d_model, d_head]); layers must agree"
                )
    seen: dict[HeadKind, AttentionRole] = {}
    first = next(iter(weights))
    for role in weights:
        if weights[role].shape[1] != weights[first].shape[1]:
            raise ValueError(
                f"{architecture}: role {role} has d_model {weights[role].shape[1]}, role {first} "
                f"has {weights[first].shape[1]}; they must share one residual stream"
            )
        twin = seen.setdefault(HEAD_KINDS[role], role)
        if weights[role].shape[0] != weights[twin].shape[0]:
            raise ValueError(
                f"{architecture}: role {role} has {weights[role].shape[0]} heads, role {twin} "
                f"has {weights[twin].shape[0]}; both must have one per {HEAD_KINDS[role]} head"
            )

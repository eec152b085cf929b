"""Which roles make a pairing, and which of its head pairs count."""

from __future__ import annotations

import re
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool

from transformer_lens.tools.analysis._arguments import require_choice
from transformer_lens.tools.analysis._head_affinity_result import LayerOrder
from transformer_lens.tools.analysis._head_weights import (
    ALL_ROLES,
    AttentionRole,
    require_role,
)

#: Two names of roles in a row.
_PAIRING = re.compile("({0})({0})".format("|".join((*ALL_ROLES, "crossK", "crossV"))))


@runtime_checkable  # beartype checks arguments by isinstance
class RoleAxes(Protocol):
    """Anything with one entry per attention layer and head of a role."""

    @property
    def role(self) -> AttentionRole: ...

    @property
    def layer_indices(self) -> tuple[int, ...]: ...

    @property
    def heads(self) -> int: ...


def roles_of(pairing: str) -> tuple[AttentionRole, AttentionRole]:
    """Source and target role of a pairing such as ``"OQ"`` or ``"OcrossQ"``."""
    match = _PAIRING.fullmatch(pairing) if isinstance(pairing, str) else None
    if match is None:
        raise ValueError(
            f"a pairing is two roles in a row, such as 'OQ' or 'OcrossQ', got {pairing!r}"
        )
    return cast(tuple[AttentionRole, AttentionRole], match.groups())


def resolve_layer_order(source_role: str, target_role: str, layer_order: str | None) -> LayerOrder:
    """The order to use, once roles and order are known to go together."""
    require_role(source_role, "source_role")
    require_role(target_role, "target_role")
    if source_role == target_role:
        orders: tuple[LayerOrder, ...] = ("distinct", "forward", "all")
    elif source_role == "O":
        orders = ("forward", "all")
    elif target_role == "O":
        raise ValueError(
            f"{source_role}->O is the transpose of O->{source_role}; use source_role='O', "
            f"target_role={source_role!r}"
        )
    else:
        raise ValueError(
            f"{source_role}->{target_role} describes no composition: both heads read from the "
            "residual stream and neither writes. For the bare overlaps use "
            f"attention_head_subspaces(model).overlap({source_role!r}, {target_role!r})"
        )
    if layer_order is None:
        return orders[0]
    require_choice(layer_order, orders, f"layer_order of {source_role}->{target_role}")
    return cast(LayerOrder, layer_order)


def pair_mask(
    source: RoleAxes, target: RoleAxes, layer_order: LayerOrder
) -> Bool[torch.Tensor, "source_layer source_head target_layer target_head"]:
    """The pairs of ``layer_order``, on the CPU."""
    source_layers = torch.tensor(source.layer_indices)
    target_layers = torch.tensor(target.layer_indices)
    shape = (len(source_layers), source.heads, len(target_layers), target.heads)
    if layer_order == "forward":
        earlier = source_layers[:, None] < target_layers
        if (source.role, target.role) == ("O", "crossQ"):
            # Cross-attention comes after the self-attention of its own block.
            earlier |= source_layers[:, None] == target_layers
        return earlier[:, None, :, None].expand(shape).contiguous()
    pairs = torch.ones(shape[0] * shape[1], shape[2] * shape[3], dtype=torch.bool)
    if layer_order == "distinct":
        pairs = pairs.triu(1)
    elif source.role == target.role:
        pairs.fill_diagonal_(False)
    return pairs.reshape(shape)

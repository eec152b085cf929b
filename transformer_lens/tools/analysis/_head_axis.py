"""The layers and heads of one role, as they stand on two axes of a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int

from transformer_lens.tools.analysis._head_weights import AttentionRole, HeadKind


class HeadAxis(NamedTuple):
    """What stands on two neighbouring axes, the layers and heads of one role.

    Attributes:
        role: The role.
        kind: Whether heads are query or key-value heads.
        layer_indices: Block numbers of the layer axis.
        ranks: Measured ranks.
        head_counts: How many heads each layer has, where layers differ.
    """

    role: AttentionRole
    kind: HeadKind
    layer_indices: tuple[int, ...]
    ranks: Int[torch.Tensor, "layer head"]
    head_counts: tuple[int, ...] | None

    def position(self, head: tuple[int, int], side: str = "") -> tuple[int, int]:
        """Where ``(layer, head)`` of the model's own numbering stands.

        Args:
            head: Of whole numbers that are not negative.
            side: Precedes "layer" and "head" in errors.

        Raises:
            KeyError: If there is no such head.
        """
        layer, number = head
        if layer not in self.layer_indices:
            raise KeyError(
                f"{side}layer {layer} has no attention; attention layers: {self.layer_indices}"
            )
        position = self.layer_indices.index(layer)
        heads = self.head_counts[position] if self.head_counts else self.ranks.shape[1]
        if number >= heads:
            raise KeyError(
                f"{side}head {number} does not exist: layer {layer} has {heads} {self.kind} heads"
            )
        return position, number

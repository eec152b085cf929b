"""What the peer metrics compare: one matrix per head, of unit size, in the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int

from transformer_lens.tools.analysis._head_weights import (
    HEAD_KINDS,
    AttentionRole,
    HeadKind,
    HeadWeights,
    require_finite_heads,
)
from transformer_lens.tools.analysis._linalg import (
    default_rtol,
    numerical_ranks,
    thin_qr,
    unit_scaled,
)

#: The other matrix of the circuit that a role's matrix is one side of: OV, VO, QK, KQ.
CIRCUIT_PARTNERS: dict[AttentionRole, AttentionRole] = {"O": "V", "V": "O", "Q": "K", "K": "Q"}


#: Frames, factors, logarithms of the norms and ranks of one layer's heads.
_Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class HeadFrames:
    """One matrix per head, scaled to Frobenius norm 1.

    Attributes:
        role: Whose columns these are.
        kind: Whether the head axis counts query or key-value heads.
        layer_indices: Block numbers of the layer axis.
        frames: The matrices; zero where the rank is.
        factors: Small matrices that hold all there is to know about a frame but its position in
            the residual stream: ``frames = Q @ factors`` with orthonormal ``Q``.
        log2_norms: Binary logarithms of the Frobenius norms before scaling. Norms themselves could
            leave the range of the dtype.
        ranks: Measured ranks (int64). A head of rank 0 takes part in no pair.
    """

    role: AttentionRole
    kind: HeadKind
    layer_indices: tuple[int, ...]
    frames: Float[torch.Tensor, "layer head d_model width"]
    factors: Float[torch.Tensor, "layer head rows width"]
    log2_norms: Float[torch.Tensor, "layer head"]
    ranks: Int[torch.Tensor, "layer head"]

    @property
    def heads(self) -> int:
        """Heads per layer."""
        return self.ranks.shape[1]

    def centred(self, rtol: float) -> HeadFrames:
        """Every row less its mean; heads of which at most ``rtol`` is left get rank 0."""
        factors = self.factors - self.factors.mean(-1, keepdim=True)
        nothing_left = _norms(factors) <= rtol
        return replace(
            self,
            frames=self.frames - self.frames.mean(-1, keepdim=True),
            factors=factors,
            ranks=self.ranks.masked_fill(nothing_left, 0),
        )


class FrameReader:
    """Turns weights into frames, one layer at a time.

    Attributes:
        rtol: Relative singular-value threshold of the ranks.
    """

    def __init__(self, weights: HeadWeights) -> None:
        for role, role_weights in weights.items():
            if not role_weights.uniform:
                raise NotImplementedError(
                    f"{weights.architecture}, role {role}: layers differ in the number or width of "
                    "their heads, which this metric does not allow for. The Projection Kernel does "
                    "(attention_head_subspace_affinity)"
                )
        self._weights = weights
        self._dtype = weights.compute_dtype
        self.rtol = default_rtol([max(role.shape[1:]) for role in weights.values()], self._dtype)

    def single(self, role: AttentionRole) -> HeadFrames:
        """A role's own matrices: ``W_Oᵀ``, ``W_Q``, ``W_K`` or ``W_V``."""
        return self._collected(role, HEAD_KINDS[role], self._single_layer)

    def circuit(self, role: AttentionRole) -> HeadFrames:
        """A role's side of the full OV or QK map, per query head.

        Writing ``W_V = Q R``, the map ``W_V W_O`` differs from ``R W_O`` by a factor with
        orthonormal columns, which no Frobenius norm of a product notices. Its transpose,
        ``W_Oᵀ Rᵀ``, has the width of a head where the map has that of the residual stream.
        """
        return self._collected(role, "query", self._circuit_layer)

    def centred(self, role: AttentionRole) -> HeadFrames:
        """A role's own matrices, every row less its mean; a head of equal columns has rank 0."""
        return self.single(role).centred(self.rtol)

    def _single_layer(self, role: AttentionRole, position: int) -> _Layer:
        scaled, scales, triangular = self._factored(role, position)
        norms = _norms(triangular)
        factor = _unit(triangular, norms)
        log2_norms = norms.log2() + scales.log2()
        return _unit(scaled, norms), factor, log2_norms, numerical_ranks(factor, self.rtol)

    def _circuit_layer(self, role: AttentionRole, position: int) -> _Layer:
        own, own_scales, own_factor = self._factored(role, position)
        _, partner_scales, partner_factor = self._factored(CIRCUIT_PARTNERS[role], position)
        if own.shape[-1] != partner_factor.shape[-1]:
            layer = self._weights[role].layer_indices[position]
            raise NotImplementedError(
                f"{self._weights.architecture}, layer {layer}: heads of role {role} are "
                f"{own.shape[-1]} wide and those of role {CIRCUIT_PARTNERS[role]} "
                f"{partner_factor.shape[-1]}, as where all heads share a rotary key: these two "
                "make no circuit. Use simple_composition_score"
            )
        own_group, partner_group = self._groups(own_factor, partner_factor, role, position)
        # Key-value heads are repeated as their small factors, never as their weights.
        own_factor = own_factor.repeat_interleave(own_group, 0)
        partner_factor = partner_factor.repeat_interleave(partner_group, 0)
        core = own_factor @ partner_factor.mT
        norms = _norms(core)
        # A product that cancels down to rounding noise is zero, as after pruning one side.
        noise = self.rtol * _norms(own_factor) * _norms(partner_factor)
        norms = torch.where(norms > noise, norms, 0)

        by_group = partner_factor.unflatten(0, (len(own), own_group))
        product = torch.einsum("hdi,hgji->hgdj", own, by_group).flatten(0, 1)
        _, factor = thin_qr(_unit(core, norms))
        log2_norms = (
            norms.log2()
            + own_scales.log2().repeat_interleave(own_group)
            + partner_scales.log2().repeat_interleave(partner_group)
        )
        return _unit(product, norms), factor, log2_norms, numerical_ranks(factor, self.rtol)

    def _factored(
        self, role: AttentionRole, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's matrices at unit scale, the scales, and their QR factors R."""
        weights = self._weights[role]
        stack = weights.matrices[position].to(device=self._weights.device, dtype=self._dtype)
        scaled, scales = unit_scaled(stack)
        layer = weights.layer_indices[position]
        require_finite_heads(scales, role, layer, self._weights.architecture)
        return scaled, scales.flatten(), thin_qr(scaled)[1]

    def _groups(
        self, own: torch.Tensor, partner: torch.Tensor, role: AttentionRole, position: int
    ) -> tuple[int, int]:
        """How many query heads share each head of the two stacks; one of the numbers is 1."""
        query_heads = max(len(own), len(partner))
        if query_heads % len(own) or query_heads % len(partner):
            layer = self._weights[role].layer_indices[position]
            raise ValueError(
                f"{self._weights.architecture}, layer {layer}: {query_heads} query heads cannot "
                f"share {min(len(own), len(partner))} key-value heads evenly"
            )
        return query_heads // len(own), query_heads // len(partner)

    def _collected(
        self,
        role: AttentionRole,
        kind: HeadKind,
        read_layer: Callable[[AttentionRole, int], _Layer],
    ) -> HeadFrames:
        layers = self._weights[role].layer_indices
        first = read_layer(role, 0)
        # Filled in place: stacking a list would hold all frames twice.
        stacks = [part.new_empty(len(layers), *part.shape) for part in first]
        for position in range(len(layers)):
            parts = first if position == 0 else read_layer(role, position)
            for stack, part in zip(stacks, parts, strict=True):
                stack[position] = part
        return HeadFrames(role, kind, layers, *stacks)


def _norms(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.square().sum((-2, -1)).sqrt()


def _unit(matrices: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Matrices over their norms; zero where the norm is."""
    return matrices * torch.where(norms > 0, 1 / norms, 0)[:, None, None]

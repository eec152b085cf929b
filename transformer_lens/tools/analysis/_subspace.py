"""Subspaces without a model: bases, principal angles, their kernel, and what chance would give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._arguments import (
    require_flag,
    require_instance,
    require_integer,
    require_tolerance,
)
from transformer_lens.tools.analysis._linalg import (
    clamped,
    compute_dtype,
    default_rtol,
    exact_arithmetic,
    singular_values,
    thin_svd,
    unit_scaled,
)


@dataclass(frozen=True, eq=False)
class SubspaceBasis:
    """An orthonormal basis of a matrix's column space, with how its rank was decided.

    Attributes:
        basis: Orthonormal columns.
        singular_values: All singular values of the matrix, descending.
        rank: Number of columns kept.
        measured_rank: Number of singular values above ``threshold``.
        rtol: Relative tolerance: ``threshold`` over the largest singular value.
        threshold: Singular values up to this one count as zero.
        input_shape: Shape of the matrix.
    """

    basis: Float[torch.Tensor, "ambient rank"]
    singular_values: Float[torch.Tensor, "spectrum"]
    rank: int
    measured_rank: int
    rtol: float
    threshold: float
    input_shape: tuple[int, int]

    @property
    def ambient_dim(self) -> int:
        """Dimension of the space that the subspace lies in."""
        return self.basis.shape[0]


@dataclass(frozen=True, eq=False)
class ProjectionKernelResult:
    """The Projection Kernel of two subspaces and the principal angles that it sums up.

    Attributes:
        score: Sum of the squared cosines, between 0 and ``min(rank_a, rank_b)``.
        normalized: ``score / sqrt(rank_a * rank_b)``, the cosine between the two projectors.
        cosines: Cosines of the principal angles, descending.
        angles: Principal angles in radians, ascending.
        rank_a, rank_b: Dimensions of the two subspaces.
        ambient_dim: Dimension of the space that both lie in.
    """

    score: Float[torch.Tensor, ""]
    normalized: Float[torch.Tensor, ""]
    cosines: Float[torch.Tensor, "principal_angle"]
    angles: Float[torch.Tensor, "principal_angle"]
    rank_a: int
    rank_b: int
    ambient_dim: int


@dataclass(frozen=True)
class RandomSubspaceReference:
    """Mean and variance of the Projection Kernel between independent random subspaces.

    Attributes:
        ambient_dim: Dimension of the space.
        rank: Dimension of one subspace.
        mean, variance: Moments of the score, not of ``normalized``.
        other_rank: Dimension of the other subspace; ``None`` if equal to ``rank``.
    """

    ambient_dim: int
    rank: int
    mean: float
    variance: float
    other_rank: int | None = None


def orthonormal_subspace(
    matrix: Float[torch.Tensor, "ambient width"],
    *,
    rank: int | None = None,
    rtol: float | None = None,
) -> SubspaceBasis:
    """Orthonormal basis of the column space of a matrix, by singular value decomposition.

    The result does not depend on the scale of the matrix, over the whole range of exponents.

    Args:
        matrix: Finite, floating-point, of any shape.
        rank: Keep this many leading singular directions. Default: the measured rank.
        rtol: Singular values up to ``rtol`` times the largest count as zero. Default:
            ``max(matrix.shape) * eps`` of the dtype computed in.

    Returns:
        The basis ``[ambient, rank]``, all singular values, and the measured rank. float64 is
        computed in float64 and everything else in float32; basis and singular values have that
        dtype, the device of ``matrix``, and no graph.

    Raises:
        ArgumentTypeError, ValueError: If the matrix is not a finite, non-empty floating-point
            matrix, if it is zero, if its singular values are beyond the range of the dtype, or if
            ``rank`` exceeds the measured rank.

    Example:
        >>> subspace = orthonormal_subspace(torch.tensor([[3.0, 6.0], [4.0, 8.0], [0.0, 0.0]]))
        >>> subspace.rank, subspace.basis.abs().squeeze()
        (1, tensor([0.6000, 0.8000, 0.0000]))
    """
    require_instance(matrix, torch.Tensor, "matrix")
    shape = tuple(matrix.shape)
    if matrix.ndim != 2:
        raise ValueError(f"matrix must be two-dimensional, got shape {shape}")
    if matrix.numel() == 0:
        raise ValueError(f"matrix must be non-empty, got shape {shape}")
    if not matrix.is_floating_point():
        raise ValueError(f"matrix must have a real floating-point dtype, got {matrix.dtype}")
    if matrix.device.type == "meta":
        raise ValueError("matrix must have values, got a tensor on the meta device")
    if rank is not None:
        rank = require_integer(rank, "rank", maximum=min(shape))
    tolerance = (
        default_rtol(shape, matrix.dtype) if rtol is None else require_tolerance(rtol, "rtol")
    )

    with exact_arithmetic(matrix.device):
        work = matrix.to(compute_dtype(matrix.dtype))
        if not bool(work.isfinite().all()):
            raise ValueError("matrix must contain only finite values")
        scaled, scale = unit_scaled(work)
        left, scaled_values = thin_svd(scaled)
        measured_rank = int((scaled_values > tolerance * scaled_values[0]).sum())
        values = scaled_values * scale.squeeze()
    if not bool(values[0].isfinite()):
        raise ValueError(
            f"the largest singular value of this {shape} {matrix.dtype} matrix is beyond the range "
            f"of {work.dtype}. Divide the matrix by a constant, its column space stays the same"
        )
    threshold = tolerance * float(values[0])
    if measured_rank == 0:
        raise ValueError(
            f"matrix numerical rank is zero: all singular values of this {shape} {matrix.dtype} "
            f"matrix are at most the threshold {threshold:.6g}"
        )
    if rank is not None and rank > measured_rank:
        raise ValueError(
            f"requested rank {rank} exceeds measured rank {measured_rank} at threshold "
            f"{threshold:.6g}"
        )
    kept = measured_rank if rank is None else rank
    return SubspaceBasis(
        basis=left[:, :kept],
        singular_values=values,
        rank=kept,
        measured_rank=measured_rank,
        rtol=tolerance,
        threshold=threshold,
        input_shape=(shape[0], shape[1]),
    )


def projection_kernel(
    subspace_a: SubspaceBasis,
    subspace_b: SubspaceBasis,
    *,
    check_orthonormal: bool = True,
) -> ProjectionKernelResult:
    """Projection Kernel and principal angles of two subspaces (arXiv 2601.10266, section 3).

    Args:
        subspace_a: From :func:`orthonormal_subspace`.
        subspace_b: Likewise, in the same ambient dimension and on the same device.
        check_orthonormal: Refuse bases whose columns are not orthonormal.

    Returns:
        Score, normalised score, cosines and angles (radians, ascending), in float64 if one of the
        bases is, else float32, on the bases' device. Angles are accurate to a few eps everywhere:
        small ones come from their sines, since the cosine of a small angle has lost its digits
        (Björck and Golub 1973; ``scipy.linalg.subspace_angles`` does the same).

    Raises:
        ArgumentTypeError, ValueError: If the arguments are no bases of one ambient space on one
            device, or are inconsistent or not orthonormal.

    Example:
        >>> plane = orthonormal_subspace(torch.eye(3)[:, :2])
        >>> line = orthonormal_subspace(torch.tensor([[1.0], [0.0], [1.0]]))
        >>> result = projection_kernel(plane, line)
        >>> round(result.score.item(), 4), round(math.degrees(result.angles[0]), 3)
        (0.5, 45.0)
    """
    require_flag(check_orthonormal, "check_orthonormal")
    _check_subspace(subspace_a, "subspace_a")
    _check_subspace(subspace_b, "subspace_b")
    if subspace_a.ambient_dim != subspace_b.ambient_dim:
        raise ValueError(
            "subspaces must have equal ambient dimensions, got "
            f"{subspace_a.ambient_dim} and {subspace_b.ambient_dim}"
        )
    device = subspace_a.basis.device
    if subspace_b.basis.device != device:
        raise ValueError(
            f"subspaces must be on the same device, got {device} and {subspace_b.basis.device}"
        )

    dtype = compute_dtype(torch.promote_types(subspace_a.basis.dtype, subspace_b.basis.dtype))
    smallest_rank = min(subspace_a.rank, subspace_b.rank)
    with exact_arithmetic(device):
        a, b = subspace_a.basis.to(dtype), subspace_b.basis.to(dtype)
        if check_orthonormal:
            _check_orthonormal(a, "subspace_a")
            _check_orthonormal(b, "subspace_b")
        products = a.mT @ b
        score = clamped(products.square().sum(), smallest_rank, "Projection Kernel")
        cosines = clamped(singular_values(products), 1, "cosines of principal angles")
        small, large = (a, b) if subspace_a.rank <= subspace_b.rank else (b, a)
        # What sticks out of the larger subspace; its singular values are the sines.
        sines = singular_values(small - large @ (large.mT @ small)).flip(0).clamp(max=1)
        angles = torch.where(cosines.square() >= 0.5, sines.asin(), cosines.acos())
    return ProjectionKernelResult(
        score=score,
        normalized=score / math.sqrt(subspace_a.rank * subspace_b.rank),
        cosines=cosines,
        angles=angles,
        rank_a=subspace_a.rank,
        rank_b=subspace_b.rank,
        ambient_dim=subspace_a.ambient_dim,
    )


def _check_subspace(subspace: SubspaceBasis, name: str) -> None:
    """Refuse a basis that was put together by hand and does not agree with itself."""
    require_instance(subspace, SubspaceBasis, name)
    for field, dimensions in (("basis", 2), ("singular_values", 1)):
        tensor = getattr(subspace, field)
        require_instance(tensor, torch.Tensor, f"{name}.{field}")
        if tensor.ndim != dimensions or not tensor.is_floating_point():
            raise ValueError(f"{name}.{field} must be floating-point with {dimensions} dimensions")
        if tensor.device != subspace.basis.device or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}.{field} must be finite and on the device of the basis")
    shape = subspace.input_shape
    if not (isinstance(shape, tuple) and len(shape) == 2):
        raise ValueError(f"{name}.input_shape must be a pair of dimensions, got {shape!r}")
    smallest = min(require_integer(size, f"{name}.input_shape") for size in shape)
    require_integer(subspace.rank, f"{name}.rank")
    require_integer(
        subspace.measured_rank, f"{name}.measured_rank", minimum=subspace.rank, maximum=smallest
    )
    require_tolerance(subspace.rtol, f"{name}.rtol")
    require_tolerance(subspace.threshold, f"{name}.threshold")
    if tuple(subspace.basis.shape) != (shape[0], subspace.rank):
        raise ValueError(
            f"{name}.basis has shape {tuple(subspace.basis.shape)}, expected "
            f"{(shape[0], subspace.rank)} by its input_shape and rank"
        )
    if len(subspace.singular_values) != smallest:
        raise ValueError(f"{name}.singular_values must be {smallest}, min(input_shape)")


def _check_orthonormal(basis: torch.Tensor, name: str) -> None:
    # Rounding of a product of columns of length ambient, with room for the factorisation's own.
    tolerance = 10 * max(basis.shape) * torch.finfo(basis.dtype).eps
    identity = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
    if not bool(((basis.mT @ basis - identity).abs() <= tolerance).all()):
        raise ValueError(f"{name} basis columns must be orthonormal")


def random_projection_kernel_moments(
    ambient_dim: int, rank: int, other_rank: int | None = None
) -> RandomSubspaceReference:
    """Mean and variance of the Projection Kernel between independent Haar-random subspaces.

    For dimensions ``p`` and ``q`` in ``d``: mean ``p q / d`` and variance
    ``2 p q (d - p)(d - q) / (d² (d - 1)(d + 2))`` (arXiv 2601.10266 gives ``p = q``). A description
    of what no structure at all looks like, not a null for trained heads, which share directions.

    Args:
        ambient_dim: ``d``, at least 2.
        rank: ``p``, from 1 to ``d``.
        other_rank: ``q``, from 1 to ``d``. Default: ``rank``.

    Raises:
        ArgumentTypeError, ValueError: If a dimension is no integer or out of range.

    Example:
        >>> reference = random_projection_kernel_moments(768, 64)
        >>> round(reference.mean, 3), round(reference.variance, 6)
        (5.333, 0.011655)
    """
    d = require_integer(ambient_dim, "ambient_dim", minimum=2)
    p = require_integer(rank, "rank", maximum=d)
    q = p if other_rank is None else require_integer(other_rank, "other_rank", maximum=d)
    return RandomSubspaceReference(
        ambient_dim=d,
        rank=p,
        mean=p * q / d,
        variance=2 * p * q * (d - p) * (d - q) / (d**2 * (d - 1) * (d + 2)),
        other_rank=None if other_rank is None else q,
    )

"""Linear algebra that runs on every device, in a precision that is known.

The only module of this project that calls ``torch.linalg``. All routines take stacks of matrices
in float32 or float64 (see :func:`compute_dtype`) and return results on the device of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from transformer_lens.tools.analysis._model_state import compute_dtype

__all__ = [
    "KERNEL_LESS_DEVICE_TYPES",
    "MODERATE",
    "clamped",
    "compute_dtype",
    "default_rtol",
    "exact_arithmetic",
    "numerical_ranks",
    "singular_values",
    "thin_qr",
    "thin_svd",
    "unit_scaled",
]

#: Device types without kernels for the factorisations; these are computed on the CPU instead.
KERNEL_LESS_DEVICE_TYPES = frozenset({"mps"})

#: Entries up to this size, and largest entries down to its inverse, are no danger to float32: the
#: squares of millions of them can be summed.
MODERATE = 2.0**20


def default_rtol(shape: Sequence[int], dtype: torch.dtype) -> float:
    """Relative singular-value threshold below which a direction is rounding noise.

    ``max(shape) * eps`` is the size of the error that the factorisation itself makes, relative to
    the largest singular value (Golub and Van Loan, *Matrix Computations*, section 5.4). It belongs
    to the precision of the factorisation, not to the one in which a checkpoint is stored: rounding
    a weight to bfloat16 perturbs it, but the perturbed matrix is what the model computes with.
    """
    return max(shape) * torch.finfo(compute_dtype(dtype)).eps


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute without a graph, without autocast and without reduced-precision float32 products.

    A notebook may run under ``torch.autocast`` or with TF32 switched on; either would turn scores
    that are good to six digits into ones that are good to three. Settings are restored on exit.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(_full_float32_products())
        yield


@contextmanager
def _full_float32_products() -> Iterator[None]:
    backends: list[Any] = [torch.backends.cuda.matmul]
    backends.append(getattr(torch.backends.mkldnn, "matmul", None))
    if all(hasattr(backend, "fp32_precision") for backend in backends):
        # Reading or writing torch.{get,set}_float32_matmul_precision here would raise for users
        # who have set the per-backend attributes; these can be saved and restored without a trace.
        saved = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, saved, strict=True):
                backend.fp32_precision = precision
    else:  # torch < 2.9
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def _on_capable_device(routine: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
    """Call ``routine`` on the tensors' device, or on the CPU if that device has no kernel."""
    device = tensors[0].device
    if device.type not in KERNEL_LESS_DEVICE_TYPES:
        return routine(*tensors, **options)
    result = routine(*(tensor.cpu() for tensor in tensors), **options)
    if isinstance(result, torch.Tensor):
        return result.to(device)
    return tuple(tensor.to(device) for tensor in result)


def clamped(values: torch.Tensor, upper: float, name: str) -> torch.Tensor:
    """Clamp ``values`` to ``[0, upper]``, having checked that only rounding stands out of it."""
    tolerance = 100 * torch.finfo(values.dtype).eps * max(1.0, upper)
    if values.numel():
        lowest, highest = (float(extreme) for extreme in values.aminmax())
        if not (lowest >= -tolerance and highest <= upper + tolerance):
            raise ValueError(
                f"{name} must lie in [0, {upper:g}], got [{lowest:.6g}, {highest:.6g}], which "
                "rounding does not explain: are the bases orthonormal?"
            )
    return values.clamp(0, upper)


def unit_scaled(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide matrices by powers of two where their squares could overflow or vanish.

    The largest entry of each comes out between ``1 / MODERATE`` and ``MODERATE``, so that Gram
    matrices and norms are safe, and since the factors are powers of two no entry is rounded. A
    stack that is moderate as it is, like nearly all trained weights, is returned without a copy.

    Returns:
        The scaled matrices, and the scales ``[..., 1, 1]`` with ``matrices = scaled * scale``. The
        scale of a matrix with an infinite or undefined entry is not finite either.
    """
    peaks = torch.maximum(matrices.amax((-2, -1)), -matrices.amin((-2, -1)))[..., None, None]
    if bool(((peaks <= MODERATE) & (peaks >= 1 / MODERATE)).all()):
        return matrices, torch.ones_like(peaks)
    # Beyond these exponents a power of two, or its inverse, is no normal number.
    limit = -math.log2(torch.finfo(matrices.dtype).tiny)
    scales = peaks.log2().ceil().clamp(-limit, limit).exp2()
    scales = torch.where(peaks.isfinite(), scales, peaks)
    return matrices / scales, scales


def singular_values(matrices: torch.Tensor) -> torch.Tensor:
    """Singular values in descending order, ``[..., min(rows, cols)]``."""
    return _on_capable_device(torch.linalg.svdvals, matrices)


def thin_svd(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left singular vectors ``[..., rows, k]`` and singular values ``[..., k]``, descending.

    A tall matrix goes through its triangular factor (R-SVD; Golub and Van Loan, section 5.4.4),
    which costs less and is as accurate.
    """
    rows, cols = matrices.shape[-2:]
    if rows > cols:
        orthonormal, triangular = thin_qr(matrices)
        left, values = thin_svd(triangular)
        return orthonormal @ left, values
    left, values, _ = _on_capable_device(torch.linalg.svd, matrices, full_matrices=False)
    return left, values


def thin_qr(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormal ``Q`` ``[..., rows, k]`` and upper triangular ``R`` ``[..., k, cols]``.

    Two rounds of Cholesky QR (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, 2015): matrix products
    instead of Householder reflections, hence several times faster for a stack of tall matrices,
    on GPUs above all. It is as accurate as Householder QR wherever the first round came out roughly
    orthonormal, which is measured; matrices for which it did not (condition number above about
    eps^-1/2, or rank deficient, or wide) are factored by Householder reflections.

    Entries are expected to be of moderate size (see :func:`unit_scaled`).
    """
    rows, cols = matrices.shape[-2:]
    if rows < cols:
        return _householder_qr(matrices)
    stack = matrices.reshape(-1, rows, cols)
    identity = torch.eye(cols, dtype=stack.dtype, device=stack.device)

    first, first_triangular = _cholesky_round(stack, stack.mT @ stack)
    gram = first.mT @ first
    # A NaN from a failed Cholesky factorisation compares False, as it should.
    trusted = (gram - identity).square().sum((-2, -1)) < 0.25
    orthonormal, second_triangular = _cholesky_round(first, gram)
    triangular = second_triangular @ first_triangular

    if not bool(trusted.all()):
        orthonormal[~trusted], triangular[~trusted] = _householder_qr(stack[~trusted])
    batch = matrices.shape[:-2]
    return orthonormal.reshape(*batch, rows, cols), triangular.reshape(*batch, cols, cols)


def _cholesky_round(stack: torch.Tensor, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``stack = Q @ R`` with ``R`` from the Cholesky factor of ``gram = stack.mT @ stack``."""
    lower, _ = _on_capable_device(torch.linalg.cholesky_ex, gram)
    # One small inverse and a matrix product are faster than a tall triangular solve; the second
    # round removes the error that the inverse of the first leaves.
    return stack @ _triangular_inverse(lower.mT), lower.mT


def _triangular_inverse(triangular: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(triangular.shape[-1], dtype=triangular.dtype, device=triangular.device)
    return _on_capable_device(
        torch.linalg.solve_triangular, triangular, identity.expand_as(triangular), upper=True
    )


def _householder_qr(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _on_capable_device(torch.linalg.qr, matrices)


def numerical_ranks(triangular: torch.Tensor, rtol: float) -> torch.Tensor:
    """Number of singular values above ``rtol`` times the largest, int64 ``[...]``.

    Takes factors ``R`` of :func:`thin_qr`. Most square ones are certified to be of full rank
    without an SVD, by ``smallest >= 1 / norm(R^-1)`` and ``largest <= norm(R)`` in the Frobenius
    norm; the singular values of the others are computed.
    """
    rows, cols = triangular.shape[-2:]
    ranks = torch.full(triangular.shape[:-2], rows, dtype=torch.int64, device=triangular.device)
    if rows == cols:
        norms = triangular.square().sum((-2, -1)).sqrt()
        inverse_norms = _triangular_inverse(triangular).square().sum((-2, -1)).sqrt()
        # The factor of two leaves room for rounding in the two norms. NaN and inf compare False.
        certified = 2 * rtol * norms * inverse_norms < 1
    else:
        certified = torch.zeros_like(ranks, dtype=torch.bool)
    if not bool(certified.all()):
        values = singular_values(triangular[~certified])
        ranks[~certified] = (values > rtol * values[..., :1]).sum(-1)
    return ranks

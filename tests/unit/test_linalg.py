"""Factorisations against LAPACK in float64, on matrices that are easy, hard and degenerate."""

from __future__ import annotations

import ast
import inspect
import pathlib

import numpy as np
import pytest
import torch

import transformer_lens.tools.analysis.projection_kernel  # noqa: F401  (locates our tree below)
from transformer_lens.tools.analysis import _linalg, _subspace
from transformer_lens.tools.analysis._linalg import (
    MODERATE,
    clamped,
    default_rtol,
    exact_arithmetic,
    numerical_ranks,
    thin_qr,
    thin_svd,
    unit_scaled,
)

DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 9, 4), (5, 40, 8), (3, 8, 8), (2, 4, 9), (4, 7, 1)]


def spectrum_matrix(spectrum, rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A matrix with the given singular values and random singular vectors."""
    generator = np.random.default_rng(seed)
    cols = len(spectrum)
    left = np.linalg.qr(generator.standard_normal((rows, cols)))[0]
    right = np.linalg.qr(generator.standard_normal((cols, cols)))[0]
    return torch.tensor(left * np.asarray(spectrum) @ right.T, dtype=dtype)


def orthonormality_error(basis: torch.Tensor) -> float:
    basis = basis.double()
    identity = torch.eye(basis.shape[-1], dtype=torch.float64)
    return float((basis.mT @ basis - identity).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_thin_qr_reproduces_the_matrix_with_orthonormal_columns(shape, dtype):
    matrices = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    orthonormal, triangular = thin_qr(matrices)
    # Backward error of a QR factorisation: a small multiple of sqrt(rows) * eps.
    tolerance = 20 * shape[1] ** 0.5 * torch.finfo(dtype).eps
    assert orthonormality_error(orthonormal) < tolerance
    difference = orthonormal.double() @ triangular.double() - matrices.double()
    assert difference.norm() < tolerance * matrices.double().norm()
    assert torch.equal(triangular, triangular.triu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_condition", [0, 2, 4, 6, 12])
def test_thin_qr_is_orthonormal_at_every_condition_number(dtype, log_condition):
    spectrum = np.logspace(0, -log_condition, 16)
    # Beside an easy matrix, so that both ways of factoring meet in one call.
    stack = torch.stack(
        [spectrum_matrix(spectrum, 64, dtype), spectrum_matrix(np.ones(16), 64, dtype, seed=1)]
    )
    orthonormal, triangular = thin_qr(stack)
    eps = torch.finfo(dtype).eps
    assert orthonormality_error(orthonormal) < 20 * 8 * eps
    assert (orthonormal @ triangular - stack).norm() < 20 * 8 * eps * stack.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_thin_qr_handles_columns_that_repeat_or_vanish(dtype):
    stack = torch.randn(3, 30, 6, dtype=dtype, generator=torch.Generator().manual_seed(2))
    stack[0, :, 3] = stack[0, :, 1]
    stack[1] = 0
    orthonormal, triangular = thin_qr(stack)
    assert orthonormality_error(orthonormal) < 100 * torch.finfo(dtype).eps
    assert torch.allclose(orthonormal @ triangular, stack, atol=100 * torch.finfo(dtype).eps)
    assert numerical_ranks(triangular, default_rtol((30, 6), dtype)).tolist() == [5, 0, 6]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_thin_svd_agrees_with_numpy(shape, dtype):
    matrices = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    left, values = thin_svd(matrices)
    expected_left, expected_values, _ = np.linalg.svd(
        matrices.double().numpy(), full_matrices=False
    )
    tolerance = 50 * max(shape) * torch.finfo(dtype).eps
    np.testing.assert_allclose(values.double().numpy(), expected_values, rtol=0, atol=tolerance)
    # Singular vectors are unique up to sign.
    cosines = np.abs((left.double().numpy() * expected_left).sum(-2))
    np.testing.assert_allclose(cosines, 1, rtol=0, atol=100 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(1, 9))
def test_numerical_ranks_count_singular_values_above_the_threshold(dtype, rank):
    rtol = default_rtol((32, 8), dtype)
    # One decade above the threshold counts, one below does not.
    spectrum = np.where(np.arange(8) < rank, 1.0, 0.1 * rtol)
    spectrum[rank - 1] = 1.0 if rank == 1 else 10 * rtol
    _, triangular = thin_qr(spectrum_matrix(spectrum, 32, dtype)[None])
    assert numerical_ranks(triangular, rtol).tolist() == [rank]


def test_a_full_rank_certificate_is_never_given_wrongly():
    """Around the threshold the count must be that of the singular values themselves."""
    rtol = 1e-3
    for smallest in np.logspace(-4, -2, 40):  # an even number: none equals rtol itself
        matrix = spectrum_matrix([1.0, 1.0, smallest], 12, torch.float64)
        _, triangular = thin_qr(matrix[None])
        expected = int((np.linalg.svd(matrix.numpy(), compute_uv=False) > rtol).sum())
        assert numerical_ranks(triangular, rtol).item() == expected, smallest


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 38), (torch.float64, 307)])
def test_unit_scaling_is_exact_over_the_range_of_exponents(dtype, largest):
    generator = torch.Generator().manual_seed(4)
    matrix = torch.rand(5, 3, dtype=dtype, generator=generator) + 0.5
    for exponent in range(-largest + 8, largest, 5):
        stack = (matrix * 10.0**exponent)[None]
        scaled, scales = unit_scaled(stack)
        assert 1 / MODERATE <= float(scaled.abs().max()) <= MODERATE
        assert torch.equal(scaled * scales, stack)
    scaled, scales = unit_scaled(torch.zeros(1, 5, 3, dtype=dtype))
    assert bool((scaled == 0).all()) and bool(scales.isfinite().all())


def test_values_outside_their_bounds_are_refused_and_rounding_is_clamped():
    assert clamped(torch.tensor([-1e-7, 1 + 1e-6]), 1, "score").tolist() == [0, 1]
    for bad in (1.1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="score must lie in"):
            clamped(torch.tensor([0.5, bad]), 1, "score")


def test_exact_arithmetic_holds_under_autocast_and_reduced_precision():
    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(5))
    exact = a @ b
    matmul = torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        inside_precision = matmul.fp32_precision
        with torch.autocast("cpu", dtype=torch.bfloat16), exact_arithmetic(a.device):
            product = a @ b
            assert product.dtype == torch.float32
            assert torch.equal(product, exact)
            assert matmul.fp32_precision == "ieee"
            assert not torch.is_grad_enabled()
        assert matmul.fp32_precision == inside_precision
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def kernel_less_cpu(monkeypatch):
    """A machine whose device, here the CPU, is declared to have no kernels.

    Every ``torch.linalg`` routine refuses tensors unless they passed through ``.cpu()``.
    """
    monkeypatch.setattr(_linalg, "KERNEL_LESS_DEVICE_TYPES", frozenset({"cpu"}))
    moved: set[int] = set()
    keep_alive = []
    original_cpu = torch.Tensor.cpu

    def cpu(tensor, *args, **kwargs):
        copy = original_cpu(tensor, *args, **kwargs).clone()
        moved.add(id(copy))
        keep_alive.append(copy)  # an id is unique only while its object lives
        return copy

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    for name in ("qr", "svd", "svdvals", "cholesky_ex", "solve_triangular"):
        routine = getattr(torch.linalg, name)

        def guarded(*tensors, routine=routine, name=name, **options):
            for tensor in tensors:
                assert id(tensor) in moved, f"torch.linalg.{name} was called on a device without it"
            return routine(*tensors, **options)

        monkeypatch.setattr(torch.linalg, name, guarded)


def test_devices_without_kernels_are_computed_on_the_cpu(kernel_less_cpu):
    matrices = torch.randn(3, 20, 5, generator=torch.Generator().manual_seed(6))
    matrices[1, :, 2] = matrices[1, :, 0]  # takes the Householder way
    orthonormal, triangular = thin_qr(matrices)
    numerical_ranks(triangular, 1e-5)
    thin_svd(matrices)
    assert torch.allclose(orthonormal @ triangular, matrices, atol=1e-5)
    a, b = (_subspace.orthonormal_subspace(matrix) for matrix in matrices[[0, 2]])
    _subspace.projection_kernel(a, b)


def test_only_the_wrapper_calls_torch_linalg():
    package = pathlib.Path(inspect.getfile(_linalg)).parent
    sources = sorted(package.rglob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            calls_linalg = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.linalg"
            imports_linalg = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "torch.linalg"
            )
            if calls_linalg or imports_linalg:
                assert source.name == "_linalg.py", f"{source.name}:{node.lineno}"

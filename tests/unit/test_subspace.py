"""Subspaces, principal angles and random moments against scipy, in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_linalg import spectrum_matrix

from transformer_lens.tools.analysis.projection_kernel import (
    orthonormal_subspace,
    projection_kernel,
    random_projection_kernel_moments,
)

import oracles

DTYPES = [torch.float32, torch.float64]


def gaussian(rows: int, cols: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    return torch.randn(rows, cols, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20, 4), (4, 4), (4, 20), (9, 1), (1, 1)])
def test_basis_spans_the_column_space(shape, dtype):
    matrix = gaussian(*shape, dtype=dtype)
    subspace = orthonormal_subspace(matrix)
    assert subspace.rank == subspace.measured_rank == min(shape)
    assert subspace.basis.dtype == subspace.singular_values.dtype == dtype
    assert subspace.basis.shape == (shape[0], min(shape)) and subspace.ambient_dim == shape[0]
    basis, eps = subspace.basis.double(), torch.finfo(dtype).eps
    assert (basis @ (basis.mT @ matrix.double()) - matrix).norm() < 50 * eps * matrix.norm()
    np.testing.assert_allclose(
        subspace.singular_values.double(),
        np.linalg.svd(matrix.double(), compute_uv=False),
        atol=50 * eps * float(matrix.norm()),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_low_precision_is_computed_in_float32(dtype):
    matrix = gaussian(24, 3).to(dtype)
    subspace = orthonormal_subspace(matrix)
    reference = orthonormal_subspace(matrix.float())
    assert subspace.basis.dtype == torch.float32
    assert torch.equal(subspace.basis, reference.basis)
    assert subspace.rtol == 24 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_heads_of_condition_1000_have_full_rank(dtype):
    # A floor at the storage dtype's eps (2**-8 for bfloat16) would count 20-odd of these 64.
    matrix = spectrum_matrix(np.logspace(0, -3, 64), 768, torch.float64).to(dtype)
    assert orthonormal_subspace(matrix).measured_rank == 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ambient", [64, 768, 4096])
def test_an_exactly_repeated_column_is_found(dtype, ambient):
    matrix = gaussian(ambient, 16).to(dtype)
    matrix[:, 11] = matrix[:, 2]
    assert orthonormal_subspace(matrix).measured_rank == 15


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 30), (torch.float64, 200)])
def test_scale_changes_nothing_but_the_singular_values(dtype, largest):
    matrix = spectrum_matrix(np.logspace(0, -3, 8), 40, dtype)
    reference = orthonormal_subspace(matrix)
    for exponent in (-largest, -1, largest):
        scaled = orthonormal_subspace(matrix * 2.0 ** round(exponent * math.log2(10)))
        # Powers of two round nothing, so the result is the same to the last bit.
        assert torch.equal(scaled.basis, reference.basis)
        assert scaled.measured_rank == 8
    scaled = orthonormal_subspace(matrix * 10.0**largest)
    assert bool(scaled.singular_values.isfinite().all())
    assert projection_kernel(scaled, reference).score.item() == pytest.approx(8, abs=1e-5)


def test_rank_and_rtol_decide_what_is_kept():
    matrix = spectrum_matrix([1, 0.5, 1e-3, 1e-4], 12, torch.float64)
    assert orthonormal_subspace(matrix, rtol=1e-2).rank == 2
    truncated = orthonormal_subspace(matrix, rank=1)
    assert (truncated.rank, truncated.measured_rank, truncated.basis.shape) == (1, 4, (12, 1))
    leading = np.linalg.svd(matrix.numpy())[0][:, 0]
    assert abs(float(truncated.basis[:, 0] @ torch.tensor(leading))) == pytest.approx(1)
    assert truncated.threshold == pytest.approx(truncated.rtol * 1.0)
    with pytest.raises(ValueError, match="requested rank 3 exceeds measured rank 2"):
        orthonormal_subspace(matrix, rank=3, rtol=1e-2)


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        ([[1.0]], {}, TypeError, "matrix must be a Tensor"),
        (torch.ones(3), {}, ValueError, "two-dimensional"),
        (torch.ones(3, 0), {}, ValueError, "non-empty"),
        (torch.ones(3, 2, dtype=torch.int64), {}, ValueError, "floating-point"),
        (torch.ones(3, 2, dtype=torch.complex64), {}, ValueError, "floating-point"),
        (torch.ones(3, 2, device="meta"), {}, ValueError, "meta device"),
        (torch.tensor([[1.0], [math.nan]]), {}, ValueError, "finite"),
        (torch.tensor([[1.0], [math.inf]]), {}, ValueError, "finite"),
        (torch.zeros(3, 2), {}, ValueError, "rank is zero"),
        (torch.ones(3, 2), {"rank": True}, TypeError, "rank must be an integer"),
        (torch.ones(3, 2), {"rank": 1.0}, TypeError, "rank must be an integer"),
        (torch.ones(3, 2), {"rank": 0}, ValueError, "rank must be between 1 and 2"),
        (torch.ones(3, 2), {"rank": 3}, ValueError, "rank must be between 1 and 2"),
        (torch.ones(3, 2), {"rtol": "1e-3"}, TypeError, "rtol must be a finite"),
        (torch.ones(3, 2), {"rtol": -1e-3}, ValueError, "rtol must be a finite"),
        (torch.ones(3, 2), {"rtol": math.nan}, ValueError, "rtol must be a finite"),
    ],
)
def test_bad_matrices_are_refused(matrix, options, error, message):
    with pytest.raises(error, match=message) as caught:
        orthonormal_subspace(matrix, **options)
    # Callers of TransformerLens 4.3 catch ValueError whatever was wrong.
    assert isinstance(caught.value, ValueError)


def planes_at(angles, ambient: int, dtype: torch.dtype):
    """Two subspaces with exactly these principal angles, in general position."""
    angles = np.asarray(angles, float)
    count = len(angles)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((ambient, ambient)))[0]
    first, second = rotation[:, :count], rotation[:, count : 2 * count]
    tilted = first * np.cos(angles) + second * np.sin(angles)
    return tuple(orthonormal_subspace(torch.tensor(m, dtype=dtype)) for m in (first, tilted))


@pytest.mark.parametrize("angle", [0, 1e-8, 1e-6, 1e-3, 0.1, np.pi / 4, 1, 1.5, np.pi / 2])
def test_angles_are_accurate_at_every_size(angle):
    # A few eps of absolute error, for the construction of the planes as much as for the angles.
    tolerance = 50 * np.finfo(float).eps
    for others in ((0.3, 1.2), (0.2, 0.5), (0.9, 1.3)):
        angles = np.sort([angle, *others])
        a, b = planes_at(angles, 16, torch.float64)
        found = projection_kernel(a, b).angles
        np.testing.assert_allclose(found, angles, rtol=0, atol=tolerance)
        # With angles on both sides of pi/4, scipy 1.17 takes the smallest ones from their cosines
        # (its mask and its angles run in opposite order), so it serves as an oracle beside it only.
        if (angles < np.pi / 4).all() or (angles > np.pi / 4).all():
            expected = scipy.linalg.subspace_angles(a.basis.numpy(), b.basis.numpy())[::-1]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_small_angles_keep_their_digits_in_float32():
    a, b = planes_at([1e-4, 1e-3], 16, torch.float32)
    angles = projection_kernel(a, b).angles
    # acos of a float32 cosine is off by up to sqrt(eps) = 3e-4 here.
    np.testing.assert_allclose(angles, [1e-4, 1e-3], rtol=0, atol=20 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("p", "q"), [(1, 1), (3, 3), (2, 5), (5, 2), (7, 8)])
def test_kernel_agrees_with_scipy_for_unequal_ranks(p, q, dtype):
    first, second = gaussian(8, p, 1, dtype), gaussian(8, q, 2, dtype)
    result = projection_kernel(orthonormal_subspace(first), orthonormal_subspace(second))
    eps = torch.finfo(dtype).eps
    expected = scipy.linalg.subspace_angles(first.double().numpy(), second.double().numpy())[::-1]
    # Rounding of the bases is amplified by the condition numbers of these Gaussian matrices.
    tolerance = 50 * eps * float(torch.linalg.cond(first) + torch.linalg.cond(second))
    np.testing.assert_allclose(result.score, (np.cos(expected) ** 2).sum(), atol=tolerance)
    np.testing.assert_allclose(result.angles, expected, atol=tolerance)
    np.testing.assert_allclose(result.cosines, np.cos(expected), atol=tolerance)
    assert result.normalized.item() == pytest.approx(result.score.item() / math.sqrt(p * q))
    assert (result.rank_a, result.rank_b, result.ambient_dim) == (p, q, 8)
    assert result.score.dtype == dtype and len(result.angles) == min(p, q)


@given(
    seed=st.integers(0, 10_000),
    ambient=st.integers(2, 12),
    p=st.integers(1, 5),
    q=st.integers(1, 5),
)
def test_invariances(seed, ambient, p, q):
    p, q = min(p, ambient), min(q, ambient)
    generator = np.random.default_rng(seed)
    a, b = generator.standard_normal((ambient, p)), generator.standard_normal((ambient, q))
    mix_a, _ = np.linalg.qr(generator.standard_normal((p, p)))
    rotation, _ = np.linalg.qr(generator.standard_normal((ambient, ambient)))

    def score(left, right):
        subspaces = (orthonormal_subspace(torch.tensor(m)) for m in (left, right))
        return projection_kernel(*subspaces).score.item()

    reference = score(a, b)
    # Gaussian matrices this small have condition numbers up to a few thousand.
    close = pytest.approx(reference, abs=1e-9)
    assert -1e-12 <= reference <= min(p, q) + 1e-12
    assert score(b, a) == close, "symmetric"
    assert score(a @ mix_a * 3.7, b) == close, "depends on the subspace alone"
    assert score(rotation @ a, rotation @ b) == close, "invariant to rotation of the space"
    assert score(a, a) == pytest.approx(p), "a subspace overlaps itself in all dimensions"
    complement = scipy.linalg.null_space(a.T)
    if complement.size:
        assert score(a, complement) == pytest.approx(0, abs=1e-9), "orthogonal"
        whole = score(a, b) + score(complement, b)
        assert whole == pytest.approx(q, abs=1e-9), "what is not in a is in its complement"


def test_bases_that_make_no_sense_are_refused():
    good = orthonormal_subspace(gaussian(6, 2))
    other_space = orthonormal_subspace(gaussian(7, 2))
    with pytest.raises(ValueError, match="equal ambient dimensions, got 6 and 7"):
        projection_kernel(good, other_space)
    with pytest.raises(TypeError, match="subspace_b must be a SubspaceBasis, got Tensor"):
        projection_kernel(good, good.basis)
    with pytest.raises(TypeError, match="check_orthonormal must be a Boolean"):
        projection_kernel(good, good, check_orthonormal=1)
    skewed = dataclasses.replace(good, basis=good.basis + 0.01)
    with pytest.raises(ValueError, match="subspace_a basis columns must be orthonormal"):
        projection_kernel(skewed, good)
    for changes in (
        {"rank": 1},
        {"rank": 0},
        {"measured_rank": 1},
        {"basis": good.basis[:, 0]},
        {"basis": good.basis * math.nan},
        {"basis": good.basis.long()},
        {"singular_values": good.singular_values[:1]},
        {"singular_values": good.singular_values * math.inf},
        {"input_shape": (5, 2)},
        {"input_shape": 6},
        {"rtol": -1.0},
        {"threshold": math.nan},
    ):
        with pytest.raises(ValueError, match="subspace_b"):
            projection_kernel(good, dataclasses.replace(good, **changes))


def test_nothing_keeps_a_graph():
    matrix = gaussian(6, 2).requires_grad_()
    subspace = orthonormal_subspace(matrix)
    result = projection_kernel(subspace, subspace)
    for tensor in (subspace.basis, subspace.singular_values, result.score, result.angles):
        assert not tensor.requires_grad


@pytest.mark.parametrize(("d", "p", "q"), [(10, 3, 3), (12, 2, 7), (6, 1, 1), (5, 5, 2)])
def test_random_moments_agree_with_monte_carlo(d, p, q):
    draws = 4000
    generator = np.random.default_rng(7)
    first = oracles.haar_frames(generator, draws, d, p)
    second = oracles.haar_frames(generator, draws, d, q)
    scores = (np.einsum("ndp,ndq->npq", first, second) ** 2).sum((1, 2))
    reference = random_projection_kernel_moments(d, p, q)
    # Five standard errors of the sample mean and, for near-normal scores, of the variance.
    assert scores.mean() == pytest.approx(
        reference.mean, abs=5 * math.sqrt(reference.variance / draws) + 1e-9
    )
    assert scores.var() == pytest.approx(
        reference.variance, abs=5 * reference.variance * math.sqrt(4 / draws) + 1e-9
    )


def test_random_moments_of_the_paper():
    reference = random_projection_kernel_moments(768, 64)
    assert round(reference.mean, 3) == 5.333
    assert round(reference.variance, 6) == 0.011655
    assert random_projection_kernel_moments(768, 64, 64).variance == reference.variance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1), "ambient_dim must be at least 2"),
        ((8, 9), "rank must be between 1 and 8"),
        ((8, 2, 0), "other_rank must be between 1 and 8"),
        ((8.0, 2), "ambient_dim must be an integer"),
    ],
)
def test_impossible_dimensions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        random_projection_kernel_moments(*arguments)


def test_singular_values_beyond_the_range_are_refused():
    with pytest.raises(ValueError, match=r"beyond the range of torch.float32. Divide the matrix"):
        orthonormal_subspace(torch.full((4, 1), 3e38))
    assert orthonormal_subspace(torch.full((4, 1), 1.5e38)).rank == 1

"""Random references and nulls: against sampled subspaces, and on data of the null itself.

All tests are seeded. A Kolmogorov-Smirnov test at level 0.001 that passes for its seed keeps
passing; the level says how far from typical the seed may be.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import scipy.stats
import torch

from transformer_lens.tools.analysis.head_affinity.informativeness import (
    informativeness,
    informativeness_table,
)
from transformer_lens.tools.analysis.head_affinity.metrics import (
    composition_score,
    linear_cka,
    procrustes_similarity,
    simple_composition_score,
)
from transformer_lens.tools.analysis.head_affinity.reference import (
    random_overlap_reference,
    random_projection_kernel_reference,
    sample_random_projection_kernel,
)
from transformer_lens.tools.analysis.head_affinity.significance import (
    benjamini_hochberg,
    significance,
)
from transformer_lens.tools.analysis.projection_kernel import (
    HeadSubspaces,
    RoleSubspaces,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import oracles
import toy_models
import toy_results

LEVEL = 0.001


def subspaces_of(**frames) -> HeadSubspaces:
    """By role, frames ``[layer, head, d_model, rank]`` as arrays."""
    by_role = {}
    for role, stack in frames.items():
        bases = torch.as_tensor(np.asarray(stack), dtype=torch.float64)
        ranks = (bases != 0).any(-2).sum(-1)
        by_role[role] = RoleSubspaces(role, tuple(range(len(bases))), bases, ranks)
    return HeadSubspaces(MappingProxyType(by_role), "measured", 1e-12)


def haar(generator, layers, heads, ambient, rank):
    frames = oracles.haar_frames(generator, layers * heads, ambient, rank)
    return frames.reshape(layers, heads, ambient, rank)


def one_to_one(values) -> np.ndarray:
    """Head i of layer 0 with head i of layer 1: pairs that share no head."""
    return torch.diagonal(values[0, :, 1, :]).numpy()


def uniform(p_values) -> float:
    return scipy.stats.kstest(p_values, "uniform").pvalue


# --- the law of random overlaps ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ambient", "rank", "other"), [(6, 2, 3), (8, 1, 5), (8, 6, 7), (10, 4, 4), (5, 3, 2)]
)
def test_draws_are_those_of_random_subspaces(ambient, rank, other):
    generator = np.random.default_rng(0)
    first = oracles.haar_frames(generator, 1500, ambient, rank)
    second = oracles.haar_frames(generator, 1500, ambient, other)
    expected = ((first.transpose(0, 2, 1) @ second) ** 2).sum((1, 2))
    draws = sample_random_projection_kernel(ambient, rank, other, n_samples=20_000)
    assert scipy.stats.ks_2samp(expected, draws).pvalue > LEVEL


@pytest.mark.parametrize("ranks", [(3, 8), (8, 3), (8, 8)])
def test_a_subspace_that_is_everything_has_one_overlap(ranks):
    draws = sample_random_projection_kernel(8, *ranks, n_samples=3)
    assert draws.tolist() == [min(ranks)] * 3
    reference = random_projection_kernel_reference(8, *ranks)
    assert reference.variance == 0
    assert reference.survival(min(ranks)) == 1


@pytest.mark.parametrize("other", [1, 3, 7])
def test_rank_one_is_a_beta_law_exactly(other):
    overlaps = np.linspace(0.05, 0.95, 7)
    expected = scipy.stats.beta(other / 2, (8 - other) / 2).sf(overlaps)
    reference = random_projection_kernel_reference(8, 1, other)
    np.testing.assert_allclose(reference.survival(overlaps), expected, rtol=1e-12)
    draws = sample_random_projection_kernel(8, 1, other, n_samples=4000)
    assert scipy.stats.kstest(draws, lambda x: 1 - reference.survival(x)).pvalue > LEVEL


def test_a_complement_has_what_the_subspace_leaves():
    overlaps = np.linspace(0.1, 2.9, 9)
    plain = random_projection_kernel_reference(11, 3, 4).survival(overlaps)
    complement = random_projection_kernel_reference(11, 3, 7).survival(3 - overlaps)
    np.testing.assert_allclose(plain, 1 - complement, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("dimensions", "bound"),
    [
        # The distances of the table in the module's docstring. 40,000 draws from a law show a
        # distance to it beyond 1.95 / 200 once in a thousand times (Kolmogorov).
        ((4, 2, 2), 0.058),
        ((16, 2, 2), 0.010),
        ((64, 2, 2), 0.004),
        ((64, 8, 8), 0.004),
        ((768, 4, 64), 0.001),
        ((768, 64, 64), 0.003),
    ],
)
def test_the_beta_law_is_near_the_exact_one(dimensions, bound):
    reference = random_projection_kernel_reference(*dimensions)
    draws = sample_random_projection_kernel(*dimensions, n_samples=40_000, seed=1)
    distance = scipy.stats.kstest(draws, lambda x: 1 - reference.survival(x)).statistic
    assert distance < bound + 1.95 / 200


def test_the_normal_law_is_not_where_ranks_are_small():
    reference = random_projection_kernel_reference(64, 2, 2)
    draws = sample_random_projection_kernel(64, 2, 2, n_samples=40_000)
    normal = scipy.stats.norm(reference.mean, np.sqrt(reference.variance))
    assert scipy.stats.kstest(draws, normal.cdf).statistic > 0.08


def test_far_tails_keep_their_digits():
    reference = random_projection_kernel_reference(768, 64)
    tails = reference.survival(np.array([6.0, 7.0, 8.0]))
    # 6, 15 and 24 standard deviations; beyond 8 a difference from 1 would be 0.
    assert (tails > 0).all()
    assert (np.diff(np.log10(tails)) < -30).all()


@pytest.mark.parametrize(("ambient", "widths"), [(6, (2, 3)), (7, (5, 4))])
def test_matrices_that_keep_their_singular_values(ambient, widths):
    """Moments from 30,000 random rotations; 4 standard errors, of the variance for normal data."""
    generator = np.random.default_rng(3)
    spectra = [generator.uniform(0.1, 2, (1, width)) for width in widths]
    count = 30_000
    frames = [
        np.linalg.qr(generator.standard_normal((count, ambient, width)))[0] * np.sqrt(spectrum)
        for width, spectrum in zip(widths, spectra, strict=True)
    ]
    overlaps = ((frames[0].transpose(0, 2, 1) @ frames[1]) ** 2).sum((1, 2))
    reference = random_overlap_reference(*spectra, ambient)
    error = overlaps.std() / np.sqrt(count)
    assert abs(overlaps.mean() - reference.mean[0, 0]) < 4 * error
    assert overlaps.var() == pytest.approx(reference.variance[0, 0], rel=4 * np.sqrt(2 / count))
    assert reference.low[0, 0] < overlaps.min()
    assert overlaps.max() < reference.high[0, 0]


def test_bounds_are_attained_by_aligned_and_opposed_frames():
    first, second = np.array([[3.0, 2.0, 1.0, 0.5]]), np.array([[4.0, 3.0, 1.0]])
    reference = random_overlap_reference(first, second, 5)
    padded = np.pad(first[0], (0, 1)), np.pad(second[0], (0, 2))
    assert reference.high[0, 0] == pytest.approx(padded[0] @ padded[1])
    assert reference.low[0, 0] == pytest.approx(padded[0] @ padded[1][::-1])


def test_flat_spectra_are_projection_kernels():
    reference = random_overlap_reference(np.ones((1, 5)), np.ones((1, 6)), 8)
    expected = random_projection_kernel_reference(8, 5, 6)
    for name in ("mean", "variance", "low", "high"):
        assert getattr(reference, name)[0, 0] == pytest.approx(float(getattr(expected, name)))


# --- informativeness --------------------------------------------------------------------------


def divergence(scores, rank, mean, deviation) -> float:
    """The paper's protocol, bin by bin."""
    edges = np.linspace(0, rank, 256)
    total = 0.0
    for low, high in itertools.pairwise(edges):
        reference = scipy.stats.norm.cdf(high, mean, deviation)
        reference -= scipy.stats.norm.cdf(low, mean, deviation)
        if reference > 1e-15:
            observed = np.mean((scores >= low) & (scores < high))
            total += reference * np.log(reference / observed) if observed else np.inf
    return total


@pytest.fixture(scope="module")
def random_heads():
    """In 512 dimensions rank 16 makes the reference five bins wide, and 3,600 pairs fill them."""
    generator = np.random.default_rng(0)
    return subspaces_of(O=haar(generator, 2, 60, 512, 16), Q=haar(generator, 2, 60, 512, 16))


def test_informativeness_by_hand(random_heads):
    """On scores that leave no possible bin empty, and on random ones, which do."""
    result = attention_head_subspace_affinity(random_heads, target_role="Q")
    assert informativeness(result).divergence == np.inf
    spread = torch.zeros_like(result.scores)
    spread[result.valid_mask] = torch.linspace(0, 2, 3600, dtype=torch.float64)
    found = informativeness(toy_result(result, spread))
    scores = spread[result.valid_mask].numpy()
    deviation = np.sqrt(2 * 16**2 * 496**2 / (512**2 * 511 * 514))
    expected = divergence(scores, 16, 0.5, deviation)
    assert np.isfinite(expected)
    assert found.divergence == pytest.approx(expected, rel=1e-9)
    assert found.observed_mean == pytest.approx(scores.mean())
    assert found.reference_mean == pytest.approx(0.5)
    assert found.observed.sum() == pytest.approx(1)
    assert found.reference.sum() == pytest.approx(1)
    assert found.pairs == 3600


def test_the_table_has_all_roles_and_the_same_numbers(random_heads):
    table = informativeness_table(random_heads).set_index(["source_role", "target_role"])
    assert len(table) == 4
    result = attention_head_subspace_affinity(random_heads, target_role="Q")
    assert table.loc[("O", "Q"), "divergence"] == informativeness(result).divergence
    backward = random_heads.overlap("Q", "O")[0, :, 1, :]
    assert table.loc[("Q", "O"), "mean"] == pytest.approx(float(backward.mean()))


def test_ranks_that_differ_make_a_mixture():
    generator = np.random.default_rng(1)
    frames = haar(generator, 2, 4, 12, 3)
    frames[0, 0, :, 1:] = 0
    subspaces = subspaces_of(O=frames, K=haar(generator, 2, 4, 12, 2))
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    found = informativeness(result)
    assert found.reference_mean == pytest.approx((3 * 3 * 2 / 12 + 1 * 2 / 12) / 4)
    assert found.edges[-1] == 2
    expected = 0.75 * scipy.stats.norm.cdf(1, 0.5, np.sqrt(random_variance(12, 3, 2)))
    expected += 0.25 * scipy.stats.norm.cdf(1, 1 / 6, np.sqrt(random_variance(12, 1, 2)))
    # What the normal law gives to negative scores is in the first bin. 1 lies in the middle of the
    # 128th, half of whose probability is less than 0.005.
    assert found.reference[:128].sum() == pytest.approx(expected, abs=0.005)


def random_variance(d, p, q):
    return 2 * p * q * (d - p) * (d - q) / (d**2 * (d - 1) * (d + 2))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_divergence_is_none_of_mass_that_got_lost(rank):
    generator = np.random.default_rng(2)
    # Many heads, so that no bin of the reference is empty.
    subspaces = subspaces_of(
        O=haar(generator, 2, 300, 24, rank), Q=haar(generator, 2, 300, 24, rank)
    )
    found = informativeness(attention_head_subspace_affinity(subspaces, target_role="Q"))
    assert found.reference.sum() == pytest.approx(1, abs=1e-12)
    assert found.divergence >= 0
    standard = np.sqrt(random_variance(24, rank, rank))
    lowest = scipy.stats.norm.cdf(rank / 255, rank**2 / 24, standard)
    assert lowest > 0.05
    assert found.reference[0] == pytest.approx(lowest)


def test_only_projection_kernels_are_informative(random_heads):
    result = attention_head_subspace_affinity(random_heads, target_role="Q").relative()
    with pytest.raises(ValueError, match="relative_projection_kernel"):
        informativeness(result)


# --- calibration of the nulls -----------------------------------------------------------------


def preferring(generator, covariance_root, layers, heads, rank):
    """Spans of Gaussian vectors with the covariance ``root @ root.T``."""
    d = len(covariance_root)
    frames = np.linalg.qr(covariance_root @ generator.standard_normal((layers * heads, d, rank)))[0]
    return frames.reshape(layers, heads, d, rank)


def root(generator, d):
    """Directions of its own, with standard deviations from 3 down to 0.3."""
    directions = np.linalg.qr(generator.standard_normal((d, d)))[0]
    return directions * np.geomspace(3, 0.3, d)


def test_rotation_null_is_calibrated():
    generator = np.random.default_rng(0)
    subspaces = subspaces_of(O=haar(generator, 2, 400, 24, 4), K=haar(generator, 2, 400, 24, 4))
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    verdict = significance(result, subspaces, null="rotation")
    assert uniform(one_to_one(verdict.p)) > LEVEL
    z = verdict.z[result.valid_mask]
    # 160,000 pairwise independent overlaps: 4 standard errors.
    assert abs(z.mean()) < 4 / 400
    assert abs(z.std() - 1) < 4 / 400


@pytest.mark.parametrize("metric", [simple_composition_score, composition_score, linear_cka])
def test_rotation_null_is_calibrated_for_metrics_that_weigh_directions(metric):
    """Gaussian weights are turned at random by construction, whatever their singular values."""
    model, _ = toy_models.gpt2(n_layer=2, n_head=16, n_embd=64)
    result = metric(model, target_role="K")
    verdict = significance(result, model, null="rotation")
    p = verdict.p[result.valid_mask].numpy()
    assert len(p) == 256
    assert uniform(p) > LEVEL
    z = verdict.z[result.valid_mask]
    assert abs(z.mean()) < 4 / 16
    assert abs(z.std() - 1) < 4 / 16


@pytest.mark.parametrize("seed", range(3))
def test_anisotropic_null_is_calibrated(seed):
    generator = np.random.default_rng(seed)
    shared = root(generator, 24)
    subspaces = subspaces_of(
        O=preferring(generator, shared, 2, 300, 6), K=preferring(generator, shared, 2, 300, 6)
    )
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    verdict = significance(result, subspaces, n_samples=4000)
    assert uniform(one_to_one(verdict.p)) > LEVEL
    # The control: rotation does not allow for the roles' preferences.
    assert uniform(one_to_one(significance(result, subspaces, null="rotation").p)) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_anisotropic_null_within_a_role_is_calibrated(seed):
    generator = np.random.default_rng(seed)
    subspaces = subspaces_of(Q=preferring(generator, root(generator, 24), 2, 60, 6))
    result = attention_head_subspace_affinity(subspaces, target_role="Q", source_role="Q")
    verdict = significance(result, subspaces, n_samples=4000)
    assert uniform(one_to_one(verdict.p)) > LEVEL


def test_a_head_is_no_partner_of_its_own():
    """Few heads of high rank, where a head's part in its role's mean projector shows.

    Had both draws the mean projector of all 24 heads, their mean overlap would be too high by
    ``(16 - 16²/96) / 24 = 0.56``, 2.8 standard deviations of an overlap. From halves it is the mean
    of 4 times 144 of the 276 observed overlaps.
    """
    generator = np.random.default_rng(0)
    subspaces = subspaces_of(Q=haar(generator, 2, 12, 96, 16))
    result = attention_head_subspace_affinity(subspaces, source_role="Q", target_role="Q")
    z = significance(result, subspaces).z[result.valid_mask]
    assert abs(z.mean()) < 0.4


def test_sampled_subspaces_have_the_roles_mean_projector():
    """The mean overlap of the draws is that of all pairs of heads.

    In units of its excess over isotropic subspaces: the prior is good to 0.3 % here (measured with
    40,000 subspaces), and 2,000 draws have a standard error of 0.5 %. Gaussian vectors with the
    mean projector for their covariance would show 59 % of the excess.
    """
    generator = np.random.default_rng(5)
    shared = root(generator, 48)
    subspaces = subspaces_of(
        O=preferring(generator, shared, 2, 200, 12), K=preferring(generator, shared, 2, 200, 12)
    )
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    z = significance(result, subspaces, n_samples=2000).z[result.valid_mask]
    expected = subspaces.overlap("O", "K").mean()
    isotropic = 12 * 12 / 48
    # Recover the null's mean from two pairs' z-scores.
    scores = result.scores[result.valid_mask]
    slope = (scores[0] - scores[1]) / (z[0] - z[1])
    null_mean = scores[0] - slope * z[0]
    assert expected - isotropic > 1
    assert abs(null_mean - expected) < 0.02 * (expected - isotropic)


@pytest.mark.parametrize("layer_order", ["forward", "distinct", "all"])
def test_degree_null_is_calibrated(layer_order):
    """Scores that are a sum of contributions and normal noise, with pairs missing."""
    generator = np.random.default_rng(0)
    heads = haar(generator, 6, 8, 20, 2)
    subspaces = subspaces_of(K=heads)
    result = attention_head_subspace_affinity(
        subspaces, source_role="K", target_role="K", layer_order=layer_order
    )
    # Contributions grow with the layer: means of rows with different columns would mislead.
    effects = torch.as_tensor(generator.standard_normal((6, 8)) + np.arange(6)[:, None])
    noise = 0.1 * torch.as_tensor(generator.standard_normal(result.scores.shape))
    scores = effects[:, :, None, None] + effects + noise
    result = toy_result(result, scores)
    verdict = significance(result, null="degree")
    assert uniform(verdict.p[result.valid_mask].numpy()) > 0.01
    assert float(verdict.z[result.valid_mask].std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("layer_order", ["forward", "distinct", "all"])
def test_degree_residuals_are_those_of_an_explicit_regression(layer_order):
    """One effect per head where pairs are unordered, else one per side that a head is on."""
    generator = np.random.default_rng(0)
    subspaces = subspaces_of(K=haar(generator, 4, 3, 8, 2))
    result = attention_head_subspace_affinity(
        subspaces, source_role="K", target_role="K", layer_order=layer_order
    )
    flat = result.scores.reshape(12, 12).numpy()
    pairs = np.argwhere(result.valid_mask.reshape(12, 12).numpy())
    design = np.zeros((len(pairs), 24))
    for row, (source, target) in enumerate(pairs):
        design[row, source] += 1
        design[row, target + 12 * (layer_order != "distinct")] += 1
    hat = design @ np.linalg.pinv(design)
    scores = flat[tuple(pairs.T)]
    residuals = (scores - hat @ scores) / np.sqrt(1 - np.diag(hat))
    # 0.6745 is the median of the absolute value of a standard normal variable.
    expected = residuals / (np.median(np.abs(residuals)) / scipy.stats.norm.ppf(0.75))
    z = significance(result, null="degree").z.reshape(12, 12).numpy()[tuple(pairs.T)]
    np.testing.assert_allclose(z, expected, rtol=1e-6, atol=1e-9)


def test_the_degree_null_allows_for_what_the_fit_takes_up():
    """Two heads a layer: half of the noise of pairs into layer 1 goes into their targets' effects.

    400 pairs, at worst two of a kind: 0.15 is 3 standard errors. Residuals as they are show 0.76,
    having 0.53 of their variance taken where others lose a quarter.
    """
    z = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        subspaces = subspaces_of(K=haar(generator, 10, 2, 8, 2))
        result = attention_head_subspace_affinity(
            subspaces, source_role="K", target_role="K", layer_order="forward"
        )
        noise = torch.as_tensor(generator.standard_normal(result.scores.shape))
        z.append(significance(toy_result(result, noise), null="degree").z[0, :, 1, :])
    assert float(torch.stack(z).std()) == pytest.approx(1, abs=0.15)


def toy_result(result, scores):
    return replace(result, scores=torch.where(result.valid_mask, scores, 0))


def test_the_degree_null_and_relative_agree_where_no_pair_is_missing():
    generator = np.random.default_rng(0)
    subspaces = subspaces_of(O=haar(generator, 2, 5, 12, 3), K=haar(generator, 2, 4, 12, 3))
    result = attention_head_subspace_affinity(subspaces, target_role="K", layer_order="all")
    z = significance(result, null="degree").z.flatten()
    ratio = z / result.relative().scores.flatten()
    assert float(ratio.std() / ratio.mean()) < 1e-9


def test_a_pair_that_decided_its_own_fit_is_no_evidence():
    generator = np.random.default_rng(0)
    subspaces = subspaces_of(O=haar(generator, 2, 1, 12, 3), K=haar(generator, 2, 4, 12, 3))
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    verdict = significance(result, null="degree")
    assert bool((verdict.p == 1).all())
    assert bool((verdict.z == 0).all())


@pytest.mark.parametrize("null", ["rotation", "anisotropic", "degree"])
def test_false_discoveries_are_rare_and_the_planted_pair_is_found(null):
    """Of 40 models without structure, at a rate of 10 %, some 4 make a discovery; 11 are 3.7
    standard deviations more."""
    false_alarms = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        frames = {role: haar(generator, 2, 12, 24, 4) for role in "OK"}
        subspaces = subspaces_of(**frames)
        result = attention_head_subspace_affinity(subspaces, target_role="K")
        verdict = significance(result, subspaces, null=null, n_samples=500)
        false_alarms += bool((verdict.q <= 0.1).any())
    assert false_alarms <= 11

    frames["K"][1, 3] = frames["O"][0, 7]
    subspaces = subspaces_of(**frames)
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    verdict = significance(result, subspaces, null=null, n_samples=4000)
    assert verdict.q[0, 7, 1, 3] < 0.05
    assert torch.argmax(verdict.z) == torch.argmax(result.scores)
    assert int((verdict.q <= 0.05).sum()) <= 3
    table = verdict.to_dataframe(1)
    assert table[["source", "target"]].values.tolist() == [["L0H7", "L1H3"]]
    assert table["q"][0] == verdict.q[0, 7, 1, 3]


def test_p_values_of_a_sample_count_the_observation():
    """The smallest possible is 1/(n+1), and every one is a multiple of it."""
    generator = np.random.default_rng(0)
    frames = {role: haar(generator, 2, 6, 24, 4) for role in "OK"}
    frames["K"][1, 3] = frames["O"][0, 5]
    subspaces = subspaces_of(**frames)
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    p = significance(result, subspaces, n_samples=99).p
    assert p[0, 5, 1, 3] == 1 / 100
    steps = p * 100
    assert torch.allclose(steps, steps.round())


def test_ranks_that_differ_have_samples_of_their_own():
    generator = np.random.default_rng(2)
    frames = {role: haar(generator, 2, 150, 24, 4) for role in "OK"}
    frames["O"][:, ::2, :, 2:] = 0
    frames["K"][1, 0] = 0
    subspaces = subspaces_of(**frames)
    result = attention_head_subspace_affinity(subspaces, target_role="K")
    verdict = significance(result, subspaces, n_samples=2000)
    p = one_to_one(verdict.p)[1:]
    assert uniform(p[1::2]) > LEVEL
    assert uniform(p[::2]) > LEVEL
    assert bool((verdict.p[~result.valid_mask] == 1).all())


def test_a_seed_decides_and_inputs_stay():
    model, _ = toy_models.gpt2()
    result = attention_head_subspace_affinity(model, target_role="Q")
    before = result.scores.clone()
    subspaces = attention_head_subspaces(model, roles=("O", "Q"))
    first, again, other = (
        significance(result, source, seed=seed, n_samples=50).p
        for source, seed in ((model, 1), (subspaces, 1), (model, 2))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(result.scores, before)


def test_benjamini_hochberg():
    generator = np.random.default_rng(0)
    p_values = generator.uniform(size=50) ** 3
    p_values[:5] = p_values[5]
    expected = scipy.stats.false_discovery_control(p_values)
    np.testing.assert_allclose(benjamini_hochberg(p_values), expected, rtol=1e-12)
    assert benjamini_hochberg(np.empty(0)).shape == (0,)


# --- what is refused --------------------------------------------------------------------------


def test_refusals(monkeypatch):
    model, _ = toy_models.gpt2()
    result = attention_head_subspace_affinity(model, target_role="Q")
    with pytest.raises(ValueError, match="anisotropic null of projection_kernel needs the model"):
        significance(result)
    with pytest.raises(ValueError, match="rotation null of simple_composition_score needs the mod"):
        significance(simple_composition_score(model, target_role="Q"), null="rotation")
    with pytest.raises(ValueError, match="does not know the width of the residual stream"):
        significance(replace(result, d_model=None), null="rotation")
    with pytest.raises(ValueError, match="null must be one of"):
        significance(result, model, null="haar")
    with pytest.raises(ValueError, match="anisotropic null is known for"):
        significance(simple_composition_score(model, target_role="Q"), model)
    with pytest.raises(ValueError, match="rotation null is known for"):
        significance(procrustes_similarity(model, target_role="Q"), model, null="rotation")
    with pytest.raises(ValueError, match="another model"):
        significance(result, toy_models.gpt2(n_layer=2)[0])
    with pytest.raises(TypeError, match="HeadAffinityResult"):
        significance(result.scores, model)
    with pytest.raises(ValueError, match="n_samples"):
        significance(result, model, n_samples=0)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"projection-kernel\[evaluation\]"):
        significance(result, model, null="rotation")


def test_another_model_is_refused():
    model = toy_models.gpt2()[0]
    kernel = attention_head_subspace_affinity(model, target_role="K")
    scores = composition_score(model, target_role="K")
    for other, message in (
        (toy_models.gpt2(n_embd=64)[0], "stream is 32 wide, the model's 64"),
        (
            toy_models.gpt2(n_layer=2)[0],
            r"in each of the layers \[0, 1, 2\], the model 4 in",
        ),
        (toy_models.gpt2(n_head=2)[0], "the result has 4 heads of role O"),
    ):
        for result, null in ((kernel, "anisotropic"), (scores, "rotation")):
            with pytest.raises(ValueError, match=message):
                significance(result, other, null=null, n_samples=10)
    # A target axis of query heads on key-value heads is the Composition Score's own.
    grouped = toy_models.llama()[0]
    significance(composition_score(grouped, target_role="K"), grouped, null="rotation")


@pytest.mark.parametrize("null", ["rotation", "anisotropic", "degree"])
def test_a_result_without_pairs_has_a_verdict_without_pairs(null):
    model = toy_models.gpt2(n_layer=1, n_head=1)[0]
    result = attention_head_subspace_affinity(model, source_role="Q", target_role="Q")
    verdict = significance(result, model, null=null, n_samples=10)
    assert verdict.p.tolist() == verdict.q.tolist() == [[[[1.0]]]]


@pytest.mark.parametrize("wrong", [[[0.1, 0.2]], [0.1, float("nan")], [1.5], [-0.1, 0.5]])
def test_what_is_no_probability_is_refused(wrong):
    with pytest.raises(ValueError, match="p_values must be one-dimensional and between 0 and 1"):
        benjamini_hochberg(wrong)


def test_p_values_as_a_list_or_a_tensor():
    for values in ([0.01, 0.5, 0.02], torch.tensor([0.01, 0.5, 0.02], dtype=torch.float64)):
        np.testing.assert_allclose(benjamini_hochberg(values), [0.03, 0.5, 0.03])


def test_subspaces_of_other_ranks_are_no_null():
    model = toy_models.gpt2()[0]
    result = attention_head_subspace_affinity(model, target_role="K")
    with pytest.raises(ValueError, match="extracted with rank=3 .* the result with rank=None"):
        significance(result, attention_head_subspaces(model, ("O", "K"), rank=3))


def test_a_model_is_no_result():
    model = toy_models.gpt2()[0]
    with pytest.raises(TypeError, match="result must be a HeadAffinityResult, got Tran"):
        informativeness(model)
    with pytest.raises(TypeError, match="subspaces must be a HeadSubspaces, got Tran"):
        informativeness_table(model)


def test_subspaces_of_another_stream_are_no_null():
    model = toy_models.bart()[0]
    result = attention_head_subspace_affinity(model, target_role="Q", stream="decoder")
    with pytest.raises(ValueError, match="of the stream 'decoder', the subspaces of 'encoder'"):
        significance(result, attention_head_subspaces(model, ("O", "Q"), stream="encoder"))


def test_far_tails_of_the_degree_null_keep_their_digits():
    generator = np.random.default_rng(3)
    scores = torch.as_tensor(generator.normal(size=(2, 40, 2, 40)))
    scores[0, 0, 1, 0] += 12
    scores[0, 1, 1, 1] += 30
    result = toy_results.random_result(2, 40, scores=scores)
    verdict = significance(result, null="degree")
    found = verdict.p[result.valid_mask].numpy()
    expected = scipy.stats.norm.sf(verdict.z[result.valid_mask].numpy())
    assert 0 < found.min() < 1e-100
    np.testing.assert_allclose(found, expected, rtol=1e-10)

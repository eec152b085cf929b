"""The engine against the loop over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis import _pairwise_overlap as engine
from transformer_lens.tools.analysis._pairwise_overlap import pairwise_overlap

import oracles

FORMULATIONS = ["_by_projectors", "_by_overlaps"]
BUDGETS = [1, 4096, engine.BYTE_BUDGET]


def frames(count: int, ambient: int, width: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, ambient, width, dtype=dtype, generator=generator)


def tolerance(source: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """Rounding of an inner product: a few eps times the norms of its two factors.

    The factors are the projectors ``A Aᵀ`` and ``B Bᵀ``; sums of ``ambient²`` terms, made of
    products of ``width`` terms each, stay well within 32 eps when they are accumulated in blocks.
    """
    norms = [
        np.linalg.norm(f @ f.transpose(0, 2, 1), axis=(1, 2))
        for f in (source.double().numpy(), target.double().numpy())
    ]
    return 32 * torch.finfo(source.dtype).eps * np.outer(*norms)


def assert_close(scores: torch.Tensor, source: torch.Tensor, target: torch.Tensor, keep=None):
    expected = oracles.overlaps(source, target)
    if keep is not None:
        expected = np.where(keep.numpy(), expected, 0)
    assert scores.dtype == source.dtype and scores.shape == expected.shape
    assert (np.abs(scores.double().numpy() - expected) <= tolerance(source, target)).all()


@pytest.fixture(params=FORMULATIONS)
def formulation(request, monkeypatch):
    """Force one of the two formulations, whatever the cost model says."""
    monkeypatch.setattr(
        engine, "_projectors_are_cheaper", lambda *_: request.param == "_by_projectors"
    )
    return request.param


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("sources", "targets", "ambient", "p", "q"),
    [(1, 1, 5, 2, 2), (7, 5, 13, 3, 4), (60, 3, 9, 1, 5), (3, 60, 9, 5, 1), (2, 3, 1, 1, 1)],
)
def test_equals_the_loop(formulation, sources, targets, ambient, p, q, dtype, budget):
    source, target = frames(sources, ambient, p, dtype), frames(targets, ambient, q, dtype, 1)
    assert_close(pairwise_overlap(source, target, byte_budget=budget), source, target)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_a_stack_with_itself_equals_the_loop(formulation, count, budget):
    source = frames(count, 11, 3)
    scores = pairwise_overlap(source, byte_budget=budget)
    assert_close(scores, source, source)
    assert torch.equal(scores, scores.mT)


MASKS = {
    "staircase": lambda n, m: torch.arange(n)[:, None] // 6 < torch.arange(m) // 6,
    "upper triangle": lambda n, m: torch.ones(n, m, dtype=torch.bool).triu(1),
    "lower triangle": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(-1),
    "one pair": lambda n, m: (torch.arange(n)[:, None] == n - 1) & (torch.arange(m) == 0),
    "nothing": lambda n, m: torch.zeros(n, m, dtype=torch.bool),
    "scattered": lambda n, m: torch.rand(n, m, generator=torch.Generator().manual_seed(2)) < 0.1,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_masks_keep_what_they_keep_and_zero_the_rest(formulation, mask, symmetric, budget):
    source = frames(54, 10, 2)
    target = source if symmetric else frames(54, 10, 2, seed=1)
    keep = MASKS[mask](54, 54)
    scores = pairwise_overlap(source, None if symmetric else target, keep=keep, byte_budget=budget)
    assert_close(scores, source, target, keep)


def test_masked_pairs_are_not_computed(monkeypatch):
    """Rows and columns that the mask empties are never read: poison them."""
    source, target = frames(96, 10, 2), frames(96, 10, 2, seed=1)
    keep = MASKS["staircase"](96, 96)
    source[90:], target[:6] = torch.nan, torch.nan
    assert not bool(keep[90:].any()) and not bool(keep[:, :6].any())
    for cheaper in (True, False):
        monkeypatch.setattr(engine, "_projectors_are_cheaper", lambda *_, c=cheaper: c)
        scores = pairwise_overlap(source, target, keep=keep)
        assert bool(scores.isfinite().all())


def test_zero_columns_pad_frames_of_smaller_rank(formulation):
    source, target = frames(4, 9, 3), frames(5, 9, 4, seed=1)
    source[1, :, 2:] = 0
    source[2] = 0
    assert_close(pairwise_overlap(source, target), source, target)


def test_orthogonal_frames_score_no_less_than_zero(formulation):
    axes = torch.linalg.qr(frames(1, 40, 40)[0])[0]
    source, target = axes[:, :20].reshape(40, 4, 5).transpose(0, 1), axes[:, 20:].reshape(40, 4, 5)
    scores = pairwise_overlap(source.contiguous(), target.transpose(0, 1).contiguous())
    assert bool((scores >= 0).all()) and float(scores.max()) < 1e-5


def test_the_cheaper_formulation_is_taken(monkeypatch):
    taken = []
    for name in FORMULATIONS:
        original = getattr(engine, name)

        def spy(*arguments, name=name, original=original):
            taken.append(name)
            return original(*arguments)

        monkeypatch.setattr(engine, name, spy)
    pairwise_overlap(frames(40, 32, 16), frames(40, 32, 16))  # 2*16*16 > 32: projectors
    pairwise_overlap(frames(40, 256, 2), frames(40, 256, 2))  # 2*2*2 < 256: overlaps
    pairwise_overlap(frames(2, 32, 16), frames(2, 32, 16))  # too few pairs to pay for projectors
    assert taken == ["_by_projectors", "_by_overlaps", "_by_overlaps"]


@pytest.mark.parametrize("budget", [2**16, 2**20])
@pytest.mark.parametrize("cheaper", [True, False])
def test_temporaries_stay_within_the_budget(monkeypatch, cheaper, budget):
    """Counts the bytes of the largest set of tensors that one step makes."""
    monkeypatch.setattr(engine, "_projectors_are_cheaper", lambda *_: cheaper)
    source, target = frames(30, 64, 8), frames(30, 64, 8, seed=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        pairwise_overlap(source, target, byte_budget=budget)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    results = 4 * 30 * 30 * 8  # the scores and what is made of them at the end
    assert largest <= budget + results


def test_a_progress_bar_appears_when_asked_for_only(capsys):
    source = frames(4, 9, 3)
    for progress, expected in ((True, True), (False, False), (None, False)):
        pairwise_overlap(source, source, progress=progress)
        assert ("pairwise overlap" in capsys.readouterr().err) == expected

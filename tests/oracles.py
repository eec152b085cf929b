"""The definitions, written down once more as slowly and plainly as possible, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import scipy.linalg


def projection_kernel(a, b) -> float:
    """Sum of squared cosines of the principal angles between two column spaces."""
    angles = scipy.linalg.subspace_angles(np.asarray(a, float), np.asarray(b, float))
    return float((np.cos(angles) ** 2).sum())


def overlaps(source, target) -> np.ndarray:
    """``‖source[i].T @ target[j]‖²_F``, pair by pair."""
    source, target = np.asarray(source, float), np.asarray(target, float)
    scores = np.zeros((len(source), len(target)))
    for i, j in itertools.product(range(len(source)), range(len(target))):
        scores[i, j] = ((source[i].T @ target[j]) ** 2).sum()
    return scores


def haar_frames(generator: np.random.Generator, count: int, ambient: int, rank: int) -> np.ndarray:
    """Orthonormal bases of independent, uniformly distributed subspaces."""
    return np.stack(
        [np.linalg.qr(generator.standard_normal((ambient, rank)))[0] for _ in range(count)]
    )

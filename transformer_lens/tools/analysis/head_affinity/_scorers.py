"""From the frames of two roles to the scores of their pairs, one function per metric."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from transformer_lens.tools.analysis._pairwise_overlap import pairwise_overlap
from transformer_lens.tools.analysis.head_affinity._frames import HeadFrames
from transformer_lens.tools.analysis.head_affinity._nuclear_norms import pairwise_nuclear_norms

#: From source and target (``None`` means the source itself), the pairs to keep and ``progress``
#: to scores ``[source, target]``. Frames have layers and heads in one axis.
Scorer = Callable[[HeadFrames, HeadFrames | None, torch.Tensor, bool | None], torch.Tensor]


def _overlap(
    source: HeadFrames, target: HeadFrames | None, keep: torch.Tensor, progress: bool | None
) -> torch.Tensor:
    frames = None if target is None else target.frames.flatten(0, 1)
    return pairwise_overlap(source.frames.flatten(0, 1), frames, keep=keep, progress=progress)


def cosine(
    source: HeadFrames, target: HeadFrames | None, keep: torch.Tensor, progress: bool | None
) -> torch.Tensor:
    return _overlap(source, target, keep, progress).sqrt()


def alignment(
    source: HeadFrames, target: HeadFrames | None, keep: torch.Tensor, progress: bool | None
) -> torch.Tensor:
    def gram_norms(frames: HeadFrames) -> torch.Tensor:
        grams = frames.factors.mT @ frames.factors
        # Those of frames without a direction are 0 and belong to no pair.
        return torch.where(frames.ranks > 0, grams.square().sum((-2, -1)).sqrt(), 1).flatten()

    normaliser = gram_norms(source)[:, None] * gram_norms(target or source)
    return _overlap(source, target, keep, progress) / normaliser


def gram_alignment(
    source: HeadFrames, target: HeadFrames | None, keep: torch.Tensor, progress: bool | None
) -> torch.Tensor:
    def grams(frames: HeadFrames) -> torch.Tensor:
        flat = (frames.factors.mT @ frames.factors).flatten(0, 1).flatten(1)
        return torch.nn.functional.normalize(flat, eps=torch.finfo(flat.dtype).tiny)

    other = _of_equal_width(source, target)
    # Both Grams are positive semidefinite, so only rounding is below zero.
    return torch.where(keep, grams(source) @ grams(other).mT, 0).clamp(min=0)


def inner_rotation(
    source: HeadFrames, target: HeadFrames | None, keep: torch.Tensor, progress: bool | None
) -> torch.Tensor:
    frames = None if target is None else target.frames.flatten(0, 1).mT
    return pairwise_nuclear_norms(
        source.frames.flatten(0, 1).mT, frames, keep=keep, progress=progress
    )


def outer_rotation(
    source: HeadFrames, target: HeadFrames | None, keep: torch.Tensor, progress: bool | None
) -> torch.Tensor:
    other = _of_equal_width(source, target)
    cosines = pairwise_nuclear_norms(
        source.factors.flatten(0, 1),
        None if target is None else target.factors.flatten(0, 1),
        keep=keep,
        progress=progress,
    )
    # 2 ab / (a² + b²) = 1 / cosh(log(a / b)), which no a or b can overflow.
    log2_ratios = source.log2_norms.flatten()[:, None] - other.log2_norms.flatten()
    return torch.where(keep, cosines / (log2_ratios * math.log(2)).cosh(), 0)


def _of_equal_width(source: HeadFrames, target: HeadFrames | None) -> HeadFrames:
    other = target or source
    widths = source.frames.shape[-1], other.frames.shape[-1]
    if widths[0] != widths[1]:
        raise ValueError(
            f"form='paper' compares inner coordinates one by one, but heads of role {source.role} "
            f"have {widths[0]} and heads of role {other.role} have {widths[1]}; use form='textbook'"
        )
    return other

r"""The engine: ``‖Aᵢᵀ Bⱼ‖²_F`` for all pairs of two stacks of frames, exact and bounded in memory.

Every affinity of this project is this number, for frames chosen by the metric. There are two ways
to compute it, equal up to rounding:

- *overlap*: multiply the frames, then sum squares. ``2·d·p·q`` flops a pair.
- *projector*: ``‖Aᵀ B‖²_F = ⟨A Aᵀ, B Bᵀ⟩``, an inner product of two symmetric ``d × d`` matrices.
  Half of their entries are enough, hence ``d²`` flops a pair, after ``d²·p`` flops a frame to make
  them. They are made one block of rows and columns at a time, for all frames together, used in one
  matrix product, and dropped.

A frame of rank 64 in 768 dimensions takes 6.3 MFLOP a pair the first way and 0.6 the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isqrt

import torch
from jaxtyping import Bool, Float
from tqdm.auto import tqdm

#: Upper bound of the engine's temporaries, results excluded.
BYTE_BUDGET = 32 * 1024**2

#: Rows and columns of a projector that are made at a time, for all frames. Larger blocks make
#: better matrix products but leave the processor's cache between being made and being used.
PREFERRED_SIDE = 96

#: Rows of scores that one matrix product computes. Enough for it to run near full speed, few
#: enough for the staircase of a layer mask to save nearly half of the work.
ROWS_PER_PRODUCT = 48

#: A progress bar appears after this many seconds unless asked for or switched off.
PROGRESS_DELAY = 3.0


def pairwise_overlap(
    source: Float[torch.Tensor, "source ambient source_width"],
    target: Float[torch.Tensor, "target ambient target_width"] | None = None,
    *,
    keep: Bool[torch.Tensor, "source target"] | None = None,
    byte_budget: int = BYTE_BUDGET,
    progress: bool | None = None,
) -> Float[torch.Tensor, "source target"]:
    """Squared Frobenius norms of ``source[i].T @ target[j]``.

    Args:
        source: Frames, one per row of the result. Zero columns are harmless, so frames of
            different widths can share a stack.
        target: Frames, one per column; ``None`` compares ``source`` with itself, in half the time.
        keep: Pairs that are wanted. Others are 0 in the result and mostly not computed.
        byte_budget: Bound of the temporaries. Exceeded only where one frame pair is larger.
        progress: ``True`` for a progress bar, ``False`` for none, ``None`` for one that appears
            when the work takes more than a few seconds.

    Returns:
        The overlaps, non-negative, in the frames' dtype and on their device. Rounding is of the
        order of eps times ``‖A Aᵀ‖_F ‖B Bᵀ‖_F``.
    """
    (scores,) = pairwise_overlaps(
        source, [(target, keep)], byte_budget=byte_budget, progress=progress
    )
    return scores


def pairwise_overlaps(
    source: Float[torch.Tensor, "source ambient source_width"],
    targets: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
    *,
    byte_budget: int = BYTE_BUDGET,
    progress: bool | None = None,
) -> list[torch.Tensor]:
    """:func:`pairwise_overlap` of one source with several ``(target, keep)``.

    What the projector form makes of the source serves all targets.
    """
    all_scores, keeps, wanted = [], [], []
    for target, keep in targets:
        shape = len(source), len(source if target is None else target)
        if keep is None:
            keep = torch.ones(shape, dtype=torch.bool, device=source.device)
        # The host walks the mask many times; one transfer is cheaper than a synchronisation each.
        wanted.append(((keep | keep.mT).triu() if target is None else keep).cpu())
        keeps.append(keep)
        all_scores.append(source.new_zeros(shape))

    used = [mask.any(1) for mask in wanted]
    used += [
        mask.any(0) for (target, _), mask in zip(targets, wanted, strict=True) if target is None
    ]
    rows = _extent(torch.stack(used).any(0))
    left, by_projectors = source[rows], []
    for (target, _), mask, scores in zip(targets, wanted, all_scores, strict=True):
        columns = rows if target is None else _extent(mask.any(0))
        right = left if target is None else target[columns]
        product = _Product(right, mask[rows, columns], scores[rows, columns])
        if not bool(product.wanted.any()):
            continue
        if _projectors_are_cheaper(left, product):
            by_projectors.append(product)
        else:
            _by_overlaps(left, product, byte_budget, progress)
    if by_projectors:
        _by_projectors(left, by_projectors, byte_budget, progress)

    results = []
    for (target, _), keep, scores in zip(targets, keeps, all_scores, strict=True):
        if target is None:
            upper = scores.triu(1)
            scores = upper + upper.mT + scores.diagonal().diag_embed()
        # A sum of squares; the projector form can round an empty overlap to just below zero.
        results.append(torch.where(keep, scores, 0).clamp_(min=0))
    return results


@dataclass(frozen=True, eq=False)
class _Product:
    """The frames ``right``, which pairs with them are wanted, and where the scores go."""

    right: torch.Tensor
    wanted: torch.Tensor
    scores: torch.Tensor


def _extent(flags: torch.Tensor) -> slice:
    """From the first to the last ``True``; empty if there is none."""
    positions = flags.nonzero()
    return slice(int(positions[0]), int(positions[-1]) + 1) if len(positions) else slice(0, 0)


def spans(wanted: torch.Tensor, rows_per_span: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows, each with the range of columns in which any of its pairs is wanted."""
    for start in range(0, len(wanted), rows_per_span):
        rows = slice(start, min(start + rows_per_span, len(wanted)))
        columns = _extent(wanted[rows].any(0))
        if columns.stop:
            yield rows, columns


def _projectors_are_cheaper(left: torch.Tensor, product: _Product) -> bool:
    """Compare the flop counts of the two formulations (module docstring)."""
    right = product.right
    ambient, left_width, right_width = left.shape[1], left.shape[2], right.shape[2]
    pairs = sum(
        (rows.stop - rows.start) * (columns.stop - columns.start)
        for rows, columns in spans(product.wanted, ROWS_PER_PRODUCT)
    )
    making = len(left) * left_width + (0 if right is left else len(right) * right_width)
    by_projectors = ambient**2 * (pairs + making)
    by_overlaps = 2 * pairs * ambient * left_width * right_width
    return by_projectors < by_overlaps


def _by_projectors(
    left: torch.Tensor, products: Sequence[_Product], byte_budget: int, progress: bool | None
) -> None:
    ambient = left.shape[1]
    others = [len(product.right) for product in products if product.right is not left]
    bytes_per_entry = (len(left) + max(others, default=0)) * left.element_size()
    largest_side = min(ambient, PREFERRED_SIDE, max(1, isqrt(byte_budget // bytes_per_entry)))
    # Blocks of equal size instead of full ones and a remainder.
    side = ceil(ambient / ceil(ambient / largest_side))
    left_buffer = left.new_empty(len(left) * side * side)
    right_buffer = left.new_empty(max(others, default=0) * side * side)
    tiles = [list(spans(product.wanted, ROWS_PER_PRODUCT)) for product in products]

    bands = [slice(start, min(start + side, ambient)) for start in range(0, ambient, side)]
    blocks = [(i, j) for i in range(len(bands)) for j in range(i, len(bands))]
    for i, j in with_progress(blocks, progress, "pairwise overlap"):
        # Blocks above the diagonal also stand for their mirror images below it.
        weight = 1 if i == j else 2
        of_left = _projector_block(left, bands[i], bands[j], left_buffer)
        for product, tiles_of_product in zip(products, tiles, strict=True):
            of_right = of_left
            if product.right is not left:
                of_right = _projector_block(product.right, bands[i], bands[j], right_buffer)
            for rows, columns in tiles_of_product:
                product.scores[rows, columns].addmm_(
                    of_left[rows], of_right[columns].mT, alpha=weight
                )


def _projector_block(
    frames: torch.Tensor, band: slice, other_band: slice, buffer: torch.Tensor
) -> torch.Tensor:
    """The block ``(A Aᵀ)[band, other_band]`` of every frame, flattened: ``[frame, entries]``."""
    first, second = frames[:, band], frames[:, other_band]
    shape = (len(frames), first.shape[1], second.shape[1])
    block = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
    torch.bmm(first, second.mT, out=block)
    return block.view(len(frames), -1)


def _by_overlaps(
    left: torch.Tensor, product: _Product, byte_budget: int, progress: bool | None
) -> None:
    _, ambient, left_width = left.shape
    right_width = product.right.shape[2]
    # A tile of n x n pairs holds n² products and two rearranged copies of n frames.
    bytes_per_pair = left.element_size() * (
        left_width * right_width + ambient * (left_width + right_width)
    )
    side = max(1, isqrt(byte_budget // bytes_per_pair))
    tiles = list(spans(product.wanted, side))
    for rows, columns in with_progress(tiles, progress, "pairwise overlap"):
        first = left[rows].mT.reshape(-1, ambient)
        for start in range(columns.start, columns.stop, side):
            tile = slice(start, min(start + side, columns.stop))
            second = product.right[tile].mT.reshape(-1, ambient)
            cosines = (first @ second.mT).view(
                rows.stop - rows.start, left_width, tile.stop - tile.start, right_width
            )
            product.scores[rows, tile] = cosines.square_().sum((1, 3))


def with_progress(steps: list, progress: bool | None, description: str) -> Iterator:
    """Walk through ``steps`` behind a progress bar, or none; ``progress`` as in the engine."""
    return iter(
        tqdm(
            steps,
            desc=description,
            disable=progress is False,
            delay=0.0 if progress else PROGRESS_DELAY,
            leave=False,
        )
    )

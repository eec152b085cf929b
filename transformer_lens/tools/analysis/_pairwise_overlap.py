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

from collections.abc import Iterator
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
    symmetric = target is None
    other = source if target is None else target
    if keep is None:
        keep = torch.ones(len(source), len(other), dtype=torch.bool, device=source.device)
    # The host walks the mask many times; one transfer is cheaper than a synchronisation each.
    wanted = ((keep | keep.mT).triu() if symmetric else keep).cpu()

    scores = source.new_zeros(len(source), len(other))
    rows, columns = _extent(wanted.any(1)), _extent(wanted.any(0))
    if symmetric:
        rows = columns = slice(min(rows.start, columns.start), max(rows.stop, columns.stop))
    left, part = source[rows], wanted[rows, columns]
    right = left if symmetric else other[columns]
    if bool(part.any()):
        compute = _by_projectors if _projectors_are_cheaper(left, right, part) else _by_overlaps
        compute(left, right, part, scores[rows, columns], byte_budget, progress)
    if symmetric:
        upper = scores.triu(1)
        scores = upper + upper.mT + scores.diagonal().diag_embed()
    # A sum of squares; the projector form can round an empty overlap to just below zero.
    return torch.where(keep, scores, 0).clamp_(min=0)


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


def _projectors_are_cheaper(left: torch.Tensor, right: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare the flop counts of the two formulations (module docstring)."""
    ambient, left_width, right_width = left.shape[1], left.shape[2], right.shape[2]
    pairs = sum(
        (rows.stop - rows.start) * (columns.stop - columns.start)
        for rows, columns in spans(wanted, ROWS_PER_PRODUCT)
    )
    making = len(left) * left_width + (0 if right is left else len(right) * right_width)
    by_projectors = ambient**2 * (pairs + making)
    by_overlaps = 2 * pairs * ambient * left_width * right_width
    return by_projectors < by_overlaps


def _by_projectors(
    left: torch.Tensor,
    right: torch.Tensor,
    wanted: torch.Tensor,
    scores: torch.Tensor,
    byte_budget: int,
    progress: bool | None,
) -> None:
    frames = [left] if right is left else [left, right]
    ambient = left.shape[1]
    bytes_per_entry = sum(map(len, frames)) * left.element_size()
    largest_side = min(ambient, PREFERRED_SIDE, max(1, isqrt(byte_budget // bytes_per_entry)))
    # Blocks of equal size instead of full ones and a remainder.
    side = ceil(ambient / ceil(ambient / largest_side))
    buffers = [frame.new_empty(len(frame) * side * side) for frame in frames]
    products = list(spans(wanted, ROWS_PER_PRODUCT))

    bands = [slice(start, min(start + side, ambient)) for start in range(0, ambient, side)]
    blocks = [(i, j) for i in range(len(bands)) for j in range(i, len(bands))]
    for i, j in with_progress(blocks, progress, "pairwise overlap"):
        made = [
            _projector_block(frame, bands[i], bands[j], buffer)
            for frame, buffer in zip(frames, buffers, strict=True)
        ]
        # Blocks above the diagonal also stand for their mirror images below it.
        weight = 1 if i == j else 2
        for rows, columns in products:
            scores[rows, columns].addmm_(made[0][rows], made[-1][columns].mT, alpha=weight)


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
    left: torch.Tensor,
    right: torch.Tensor,
    wanted: torch.Tensor,
    scores: torch.Tensor,
    byte_budget: int,
    progress: bool | None,
) -> None:
    _, ambient, left_width = left.shape
    right_width = right.shape[2]
    # A tile of n x n pairs holds n² products and two rearranged copies of n frames.
    bytes_per_pair = left.element_size() * (
        left_width * right_width + ambient * (left_width + right_width)
    )
    side = max(1, isqrt(byte_budget // bytes_per_pair))
    for rows, columns in with_progress(list(spans(wanted, side)), progress, "pairwise overlap"):
        first = left[rows].mT.reshape(-1, ambient)
        for start in range(columns.start, columns.stop, side):
            tile = slice(start, min(start + side, columns.stop))
            second = right[tile].mT.reshape(-1, ambient)
            products = (first @ second.mT).view(
                rows.stop - rows.start, left_width, tile.stop - tile.start, right_width
            )
            scores[rows, tile] = products.square_().sum((1, 3))


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

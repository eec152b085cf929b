"""Checks of what a user passes in, each with one sentence that says what was wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal

Rank = int | Literal["measured"] | None


class ArgumentTypeError(TypeError, ValueError):
    """An argument of the wrong type.

    TransformerLens 4.3 raises ``ValueError`` here and callers catch that; ``TypeError`` is what
    the error means. This class is both.
    """


def require_instance(value: Any, expected: type, name: str) -> None:
    """Refuse ``value`` unless it is an instance of ``expected``."""
    if not isinstance(value, expected):
        raise ArgumentTypeError(f"{name} must be a {expected.__name__}, got {type(value).__name__}")


def require_choice(value: Any, choices: Sequence[str], name: str) -> None:
    """Refuse ``value`` unless it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def require_integer(value: Any, name: str, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Return ``value`` as an ``int`` between ``minimum`` and ``maximum``; a bool is no integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} must be {bounds}, got {value!r}")
    return number


def require_head(value: Any, name: str) -> tuple[int, int]:
    """Return ``value``, a pair or an ``AttentionHeadRef``, as ``(layer, head)``."""
    if hasattr(value, "layer") and hasattr(value, "head"):
        value = value.layer, value.head
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ArgumentTypeError(f"{name} must be (layer, head), got {value!r}")
    layer, head = (
        require_integer(part, f"{what} of {name}", minimum=0)
        for part, what in zip(value, ("layer", "head"), strict=True)
    )
    return layer, head


def require_tolerance(value: Any, name: str) -> float:
    """Return ``value`` as a finite, non-negative ``float``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"{name} must be a finite non-negative real number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite non-negative real number, got {value!r}")
    return number


def require_flag(value: Any, name: str) -> None:
    """Refuse ``value`` unless it is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a Boolean, got {value!r}")


def warn_if_states_differ(states: Iterable[str], *, stacklevel: int = 3) -> None:
    """Warn that raw and folded weights are about to be compared, on behalf of the caller."""
    if len(set(states)) > 1:
        warnings.warn(
            "these come from different states of the weights, raw and folded "
            "(enable_compatibility_mode()), which changes subspaces and scores; what differs may "
            "be that",
            UserWarning,
            stacklevel=stacklevel,
        )

"""Whether a bridge's weights are those of the checkpoint, and what its norms multiply by."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float

from transformer_lens.tools.analysis._attention_stacks import (
    Stream,
    architecture_name,
    attention_blocks,
)

WeightState = Literal["raw", "folded"]


def is_processed(model: Any) -> bool:
    """Whether the bridge went through its processing, ``enable_compatibility_mode()``."""
    return bool(getattr(model, "_weights_processed", False))


def weight_state(model: Any, stream: Stream | None) -> WeightState:
    """``"folded"`` if processing has changed what attention reads or writes, else ``"raw"``.

    Processing folds norms into what follows them only where the architecture allows for it, and
    centres what is written only where norms subtract the mean. A folded norm multiplies by 1.
    Attention that is not bridged stays out of it.

    Args:
        model: A bridge.
        stream: Of which residual stream, where there are two.
    """
    if not is_processed(model):
        return "raw"
    blocks = [block for _, block in attention_blocks(model, architecture_name(model), stream)]
    gains = [norm_gain(getattr(block, "ln1", None)) for block in blocks]
    folded = [gain is None or bool((gain == 1).all()) for gain in gains]
    centred = (
        str(getattr(model.cfg, "normalization_type", "LN")).startswith("LN")
        and not getattr(model.cfg, "final_rms", False)
        and getattr(model.adapter, "supports_center_writing_weights", True)
    )
    return "folded" if any(folded) or (blocks and centred) else "raw"


def norm_gain(norm: Any) -> Float[torch.Tensor, "d_model"] | None:
    """What a bridged norm multiplies by; ``None`` where it has no weight."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    # Gemma, for one, stores what is to be added to 1.
    return weight.detach() + 1 if getattr(norm, "uses_weight_offset", False) else weight.detach()

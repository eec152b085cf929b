"""How the heads of an attention module lie in its weights.

Most bridges split their weights per head themselves (``attn.W_Q`` and so on). The rest is here:
attention that the bridge left as it was, projections that it does not take apart, and one that it
takes apart wrongly. Everything is recognised by the structure of the module that is wrapped; what
is not recognised is refused, never guessed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from transformer_lens.model_bridge.generalized_components.attention import PerLayerGeometryError
from transformer_lens.tools.analysis._linalg import compute_dtype, exact_arithmetic

#: What attention does with the residual stream. The rotary key is the part of a key that all heads
#: of multi-head latent attention share.
Projection = Literal["Q", "K", "V", "O", "rotaryK"]

#: What a bridge calls the projections of an attention, and what Hugging Face does.
_COMPONENTS: dict[Projection, str] = {"Q": "q", "K": "k", "V": "v", "O": "o"}
_PROJECTIONS: dict[Projection, str] = {"Q": "q_proj", "K": "k_proj", "V": "v_proj", "O": "o_proj"}


def has_plain_projections(module: Any) -> bool:
    """Whether a Hugging Face module is an attention with a ``Linear`` for each projection."""
    return all(hasattr(module, name) for name in (*_PROJECTIONS.values(), "head_dim"))


def head_matrices(attention: Any, projection: Projection, where: str, *, processed: bool) -> Any:
    """One projection's matrices: ``[head, d_model, d_head]``, for O ``[head, d_head, d_model]``.

    They are views of the parameters wherever one parameter holds them. ``None`` if this layer has
    no such heads, although others of the model do.

    Args:
        attention: An attention module, bridged or Hugging Face's own.
        projection: Which of its maps.
        where: Begins every error message.
        processed: Whether the bridge has changed its weights since they were loaded.

    Raises:
        ValueError: If the attention is of a kind that has no such map.
        NotImplementedError: If there is no such matrix, or none that can be read.
    """
    module = getattr(attention, "original_component", attention)
    if hasattr(module, "kv_b_proj"):
        return _latent(module, projection, where)
    if projection == "rotaryK":
        raise ValueError(
            f"{where}: {type(module).__name__} has no rotary key that its heads share, which "
            "multi-head latent attention has. Use role K"
        )
    if getattr(module, "new_decoder_architecture", False):
        return _grouped_falcon(attention, module, projection, where, processed)
    if hasattr(module, "kv_proj") and hasattr(module, "experts"):
        return _expert_queries(module, projection, where)
    if hasattr(module, "o_a_proj"):
        raise NotImplementedError(
            f"{where}: heads share compressed keys and values and write through a grouped "
            "bottleneck, so that none has a matrix of its own. Choose a model with plain attention"
        )
    if projection in ("K", "V") and getattr(module, "is_kv_shared_layer", False):
        return None  # Gemma 3n and 4: an earlier layer's keys and values serve here too
    if attention is module and has_plain_projections(module):
        weight = weight_of(getattr(module, _PROJECTIONS[projection]), where)
        return _per_head(weight, projection, module.head_dim, where)
    return _split_by_bridge(attention, module, projection, where)


def weight_of(component: Any, where: str) -> torch.Tensor:
    """The weight of a projection, once it is known to hold values.

    Raises:
        NotImplementedError: If it holds none, or only codes for them.
    """
    if hasattr(getattr(component, "original_component", component), "base_layer"):
        raise NotImplementedError(
            f"{where}: the weight is the base of an adapter that is added to it. Merge the adapter "
            "into the model first"
        )
    weight = component.weight
    require_values(weight, where)
    return weight


def require_values(weight: Any, where: str) -> None:
    """Refuse a weight without values, or one that holds codes instead of them."""
    if not isinstance(weight, torch.Tensor):
        raise NotImplementedError(
            f"{where}: the weight must be a tensor, got {type(weight).__name__}, as packed "
            "quantised weights are. Load the model without quantisation"
        )
    if weight.device.type == "meta":
        raise NotImplementedError(
            f"{where}: the weight is on the meta device, without values. Load the model without "
            "disk offloading, or materialise it first"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise NotImplementedError(
            f"{where}: the weight is quantised, its dtype {weight.dtype} holds codes without their "
            "scales. Load the model without quantisation"
        )


def _per_head(
    weight: torch.Tensor, projection: Projection, d_head: int, where: str
) -> torch.Tensor:
    """The heads of a ``Linear``'s ``[out, in]`` weight, which come one after the other."""
    flat = weight.T if projection == "O" else weight
    if len(flat) % d_head:
        raise ValueError(f"{where}: {len(flat)} rows cannot be heads of width {d_head}")
    heads = flat.unflatten(0, (-1, d_head))
    return heads if projection == "O" else heads.mT


def _grouped_falcon(
    attention: Any, module: Any, projection: Projection, where: str, processed: bool
) -> torch.Tensor:
    """New Falcon fuses, per key-value head, its queries, its key and its value.

    The bridge cuts the weight as if all queries came first, so what it calls Q, K and V is mixed up
    (its logits are off as well). The fused weight itself is what the checkpoint holds.
    """
    if projection == "O":
        return _per_head(weight_of(attention.o, where), projection, module.head_dim, where)
    if processed:
        raise NotImplementedError(
            f"{where}: the bridge processed weights that it had split by a wrong layout. Do "
            "without enable_compatibility_mode()"
        )
    per_group = module.num_heads // module.num_kv_heads + 2
    groups = weight_of(attention.qkv, where).unflatten(
        0, (module.num_kv_heads, per_group, module.head_dim)
    )
    if projection == "Q":
        return groups[:, :-2].flatten(0, 1).mT
    return groups[:, -2 if projection == "K" else -1].mT


def _latent(module: Any, projection: Projection, where: str) -> torch.Tensor:
    """Multi-head latent attention reads through bottlenecks that its heads share (DeepSeek-V2).

    A head's query is ``W_UQ γ W_DQ x / rms(W_DQ x)``. The division scales a token's query and
    leaves what it can read from as it is; the norm's weight ``γ`` does not. A key is in two parts:
    one of each head's own, through the bottleneck of keys and values, and the rotary one that they
    share.
    """
    if projection == "O":
        return _per_head(weight_of(module.o_proj, where), projection, module.v_head_dim, where)
    d_nope, d_rotary = module.qk_nope_head_dim, module.qk_rope_head_dim
    if projection == "Q":
        if module.q_lora_rank is None:
            weight = weight_of(module.q_proj, where)
        else:
            weight = _through_norm(
                weight_of(module.q_a_proj, where), module.q_a_layernorm, module.q_b_proj, where
            )
        return _per_head(weight, projection, d_nope + d_rotary, where)
    down = weight_of(module.kv_a_proj_with_mqa, where)
    if projection == "rotaryK":
        return down[module.kv_lora_rank :].mT[None]
    weight = _through_norm(
        down[: module.kv_lora_rank], module.kv_a_layernorm, module.kv_b_proj, where
    )
    both = _per_head(weight, projection, d_nope + module.v_head_dim, where)
    return both[..., :d_nope] if projection == "K" else both[..., d_nope:]


def _through_norm(down: torch.Tensor, norm: Any, up: Any, where: str) -> torch.Tensor:
    """The ``[out, in]`` weight of ``down``, the weight of ``norm``, and ``up`` in one.

    Both are multiplied in the precision of the analysis: a product in half precision would have
    rounding of its own, which a checkpoint has not.
    """
    up_weight, gain = weight_of(up, where), weight_of(norm, where)
    dtype = compute_dtype(torch.promote_types(down.dtype, up_weight.dtype))
    with torch.no_grad(), exact_arithmetic(down.device):
        return up_weight.to(dtype) @ (gain.to(dtype)[:, None] * down.to(dtype))


def _expert_queries(module: Any, projection: Projection, where: str) -> torch.Tensor:
    if projection in ("Q", "O"):
        raise NotImplementedError(
            f"{where}: every expert has queries and outputs of its own, so that no head has one "
            "matrix. Only K and V can be compared (KK, VV)"
        )
    key, value = weight_of(module.kv_proj, where).chunk(2)
    return _per_head(key if projection == "K" else value, projection, module.head_dim, where)


def _split_by_bridge(attention: Any, module: Any, projection: Projection, where: str) -> Any:
    if projection == "V" and hasattr(module, "v_proj") and module.v_proj is None:
        projection = "K"  # Gemma 4: values are what the key projection gives, before its norm
    component = getattr(attention, _COMPONENTS[projection], None)
    weight = None if component is None else weight_of(component, where)
    try:
        matrix = getattr(attention, f"W_{projection}")
    except PerLayerGeometryError:
        matrix = None
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise NotImplementedError(
            f"{where}: {type(module).__name__} has no matrix per head that the bridge could give. "
            "Choose pairings without this role"
        ) from error
    if weight is None or not has_plain_projections(module):
        if matrix is None:
            raise NotImplementedError(
                f"{where}: the layer's heads differ in width or number from what the model's "
                "configuration says. Choose pairings without this role"
            )
        return matrix
    # The bridge goes by the configuration, where layers may differ (Gemma 4, Laguna): two heads of
    # width 32 would pass for four of 16. The module knows the width of its own heads.
    d_head = getattr(module, "v_head_dim" if projection in "VO" else "head_dim", module.head_dim)
    if matrix is not None and matrix.shape[-2 if projection == "O" else -1] == d_head:
        return matrix
    return _per_head(weight, projection, d_head, where)

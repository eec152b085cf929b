"""Where a bridge keeps the attention of a block, and how its heads lie in the weights.

Most bridges split their weights per head themselves (``attn.W_Q`` and so on). The rest is here:
attention that the bridge leaves unbridged inside a block, projections that it does not take apart,
and one that it takes apart wrongly. Everything is recognised by the structure of the module that is
wrapped; what is not recognised is refused, never guessed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from transformer_lens.model_bridge.generalized_components.attention import PerLayerGeometryError

#: What a bridge calls a block's self-attention, and its projections.
_ATTENTION_NAMES = ("attn", "self_attn")
_COMPONENTS = {"Q": "q", "K": "k", "V": "v", "O": "o"}

#: Where blocks that are bridged as a whole keep a Hugging Face attention module (Nemotron-H,
#: RecurrentGemma), and what its projections are called there.
_UNBRIDGED_NAMES = ("mixer", "temporal_block")
_PROJECTIONS = {"Q": "q_proj", "K": "k_proj", "V": "v_proj", "O": "o_proj"}


def attention_layers(model: Any, architecture: str) -> list[tuple[int, Any]]:
    """The blocks' attention modules with their block numbers, bridged or as Hugging Face has them.

    Raises:
        ValueError: If the model has no attention.
        NotImplementedError: If its blocks have no one order, or no one residual stream.
    """
    stacks = _block_stacks(model)
    if {"encoder_blocks", "decoder_blocks"} & set(stacks):
        raise NotImplementedError(
            f"{architecture} is an encoder-decoder model: its heads live in two residual streams, "
            "and subspaces of different streams cannot be compared"
        )
    if len(stacks) > 1:
        raise NotImplementedError(
            f"{architecture} keeps its blocks in the stacks {', '.join(stacks)}, which take turns: "
            "there is no one order of layers to compare them in"
        )
    layers = []
    for layer, block in model.blocks_with("attn"):
        name = next((name for name in _ATTENTION_NAMES if hasattr(block, name)), None)
        if name is not None:
            layers.append((int(layer), getattr(block, name)))
    if not layers:
        layers = [
            (layer, attention)
            for layer, block in enumerate(getattr(model, "blocks", ()))
            if (attention := _unbridged_attention(block, layer, architecture)) is not None
        ]
    if not layers:
        raise ValueError(
            f"No attention layers found in {architecture}: there are no heads to compare. Choose a "
            "model with attention in some of its blocks"
        )
    return layers


def head_matrices(
    attention: Any, role: Literal["Q", "K", "V", "O"], where: str, *, processed: bool
) -> Any:
    """One role's matrices, as views of the parameters: ``[head, d_model, d_head]``, for O
    ``[head, d_head, d_model]``.

    Args:
        attention: An attention module of :func:`attention_layers`.
        role: The role.
        where: Begins every error message.
        processed: Whether the bridge has changed its weights since they were loaded.

    Raises:
        NotImplementedError: If there is no such matrix, or none that can be read.
    """
    module = getattr(attention, "original_component", attention)
    if getattr(module, "new_decoder_architecture", False):
        return _grouped_falcon(attention, module, role, where, processed)
    if hasattr(module, "kv_b_proj"):
        return _latent(module, role, where)
    if hasattr(module, "kv_proj") and hasattr(module, "experts"):
        return _expert_queries(module, role, where)
    if hasattr(module, "o_a_proj"):
        raise NotImplementedError(
            f"{where}: heads share compressed keys and values and write through a grouped "
            "bottleneck, so that none has a matrix of its own. Choose a model with plain attention"
        )
    if attention is module and hasattr(module, _PROJECTIONS["Q"]):
        return _per_head(
            weight_of(getattr(module, _PROJECTIONS[role]), where), role, module.head_dim, where
        )
    return _split_by_bridge(attention, module, role, where)


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


def _block_stacks(model: Any) -> list[str]:
    """Names of the block lists that the bridge enumerates."""
    modules: dict[str, Any] = getattr(model, "_modules", None) or {}
    return [
        name
        for name, blocks in modules.items()
        if isinstance(blocks, torch.nn.ModuleList)
        and len(blocks) > 0
        and all(getattr(block, "is_list_item", False) for block in blocks)
    ]


def _unbridged_attention(block: Any, layer: int, architecture: str) -> Any | None:
    hidden = getattr(block, "original_component", block)
    if hasattr(hidden, "shared_transformer"):
        raise NotImplementedError(
            f"{architecture}, layer {layer}: attention reads the residual stream beside the "
            "embeddings and writes through a further map, so that its heads have no subspaces of "
            "the residual stream. Choose a model whose attention reads the stream alone"
        )
    for name in _UNBRIDGED_NAMES:
        module = getattr(hidden, name, None)
        module = getattr(module, "original_component", module)
        wanted = (*_PROJECTIONS.values(), "head_dim")
        if all(hasattr(module, attribute) for attribute in wanted):
            return module
    return None


def _per_head(
    weight: torch.Tensor, role: Literal["Q", "K", "V", "O"], d_head: int, where: str
) -> torch.Tensor:
    """The heads of a ``Linear``'s ``[out, in]`` weight, which come one after the other."""
    flat = weight.T if role == "O" else weight
    if len(flat) % d_head:
        raise ValueError(f"{where}: {len(flat)} rows cannot be heads of width {d_head}")
    heads = flat.unflatten(0, (-1, d_head))
    return heads if role == "O" else heads.mT


def _grouped_falcon(
    attention: Any,
    module: Any,
    role: Literal["Q", "K", "V", "O"],
    where: str,
    processed: bool,
) -> torch.Tensor:
    """New Falcon fuses, per key-value head, its queries, its key and its value.

    The bridge cuts the weight as if all queries came first, so what it calls Q, K and V is mixed up
    (its logits are off as well). The fused weight itself is what the checkpoint holds.
    """
    if role == "O":
        return _per_head(weight_of(attention.o, where), role, module.head_dim, where)
    if processed:
        raise NotImplementedError(
            f"{where}: the bridge processed weights that it had split by a wrong layout. Do "
            "without enable_compatibility_mode()"
        )
    per_group = module.num_heads // module.num_kv_heads + 2
    groups = weight_of(attention.qkv, where).unflatten(
        0, (module.num_kv_heads, per_group, module.head_dim)
    )
    if role == "Q":
        return groups[:, :-2].flatten(0, 1).mT
    return groups[:, -2 if role == "K" else -1].mT


def _latent(module: Any, role: Literal["Q", "K", "V", "O"], where: str) -> torch.Tensor:
    if role == "O":
        return _per_head(weight_of(module.o_proj, where), role, module.v_head_dim, where)
    raise NotImplementedError(
        f"{where}: multi-head latent attention reads through a bottleneck that all heads share, "
        "and no single weight holds what a head reads. Only O can be compared (OO)"
    )


def _expert_queries(module: Any, role: Literal["Q", "K", "V", "O"], where: str) -> torch.Tensor:
    if role in ("Q", "O"):
        raise NotImplementedError(
            f"{where}: every expert has queries and outputs of its own, so that no head has one "
            "matrix. Only K and V can be compared (KK, VV)"
        )
    key, value = weight_of(module.kv_proj, where).chunk(2)
    return _per_head(key if role == "K" else value, role, module.head_dim, where)


def _split_by_bridge(
    attention: Any, module: Any, role: Literal["Q", "K", "V", "O"], where: str
) -> Any:
    if role == "V" and hasattr(module, "v_proj") and module.v_proj is None:
        role = "K"  # Gemma 4: values are what the key projection gives, before its norm
    component = getattr(attention, _COMPONENTS[role], None)
    if component is not None:
        weight_of(component, where)
    elif role in ("K", "V") and getattr(module, "is_kv_shared_layer", False):
        raise NotImplementedError(
            f"{where}: the layer has no keys and values of its own, it reuses an earlier layer's. "
            "Compare Q and O (OQ, QQ, OO)"
        )
    try:
        return getattr(attention, f"W_{role}")
    except PerLayerGeometryError as error:
        raise NotImplementedError(
            f"{where}: the layer's heads differ in width or number from those of other layers, and "
            "only layers of one geometry can be compared"
        ) from error
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise NotImplementedError(
            f"{where}: {type(module).__name__} has no matrix per head that the bridge could give. "
            "Choose pairings without this role"
        ) from error

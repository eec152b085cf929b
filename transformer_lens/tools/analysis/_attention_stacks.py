"""Which blocks of a bridge have attention, and where they keep it."""

from __future__ import annotations

from typing import Any, Literal

import torch

from transformer_lens.tools.analysis._attention_layouts import has_plain_projections

#: The residual streams of an encoder-decoder model.
Stream = Literal["encoder", "decoder"]

#: What bridges of encoder-decoder models call their two lists of blocks.
_STACKS: dict[Stream, str] = {"encoder": "encoder_blocks", "decoder": "decoder_blocks"}

#: What a bridge calls a block's self-attention.
_ATTENTION_NAMES = ("attn", "self_attn")

#: Where blocks that are bridged as a whole keep a Hugging Face attention module (Nemotron-H,
#: RecurrentGemma).
_UNBRIDGED_NAMES = ("mixer", "temporal_block")


def architecture_name(model: Any) -> str:
    """The model's architecture as its checkpoint names it, else the name of its class."""
    cfg = getattr(model, "cfg", None)
    for attribute in ("original_architecture", "architecture"):
        name = getattr(cfg, attribute, None)
        if name:
            return str(name)
    return type(model).__name__


def has_two_streams(model: Any) -> bool:
    """Whether a bridge has an encoder's residual stream beside a decoder's."""
    return not set(_STACKS.values()).isdisjoint(_block_stacks(model))


def attention_layers(model: Any, architecture: str, stream: Stream | None) -> list[tuple[int, Any]]:
    """The self-attention modules of one residual stream, each with its block number.

    They are bridged, or Hugging Face's own where the bridge takes a block as a whole.

    Raises:
        ValueError: If the model has no attention, or one stream only and one is named.
        NotImplementedError: If its blocks have no one order, or two streams and none is named.
    """
    blocks = attention_blocks(model, architecture, stream)
    layers = []
    for layer, block in blocks:
        name = next((name for name in _ATTENTION_NAMES if hasattr(block, name)), None)
        if name is not None:
            layers.append((layer, getattr(block, name)))
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


def cross_attention_layers(
    model: Any, architecture: str, stream: Stream | None
) -> list[tuple[int, Any]]:
    """The cross-attention modules of one residual stream, each with its block number.

    Raises:
        ValueError: If the stream has none.
        NotImplementedError: As :func:`attention_layers`.
    """
    layers = [
        (layer, block.cross_attn)
        for layer, block in attention_blocks(model, architecture, stream)
        if hasattr(block, "cross_attn")
    ]
    if not layers:
        place = architecture if stream is None else f"{architecture}, {stream}"
        raise ValueError(
            f"{place}: no block has a cross-attention of its own, and there is no role crossQ. "
            "Use role Q"
        )
    return layers


def attention_blocks(model: Any, architecture: str, stream: Stream | None) -> list[tuple[int, Any]]:
    """The blocks of one residual stream that have bridged attention, each with its number.

    Raises:
        ValueError, NotImplementedError: As :func:`attention_layers`, which finds other attention
            too.
    """
    stacks = _block_stacks(model)
    if has_two_streams(model):
        if stream is None:
            raise NotImplementedError(
                f"{architecture} is an encoder-decoder model: its heads live in two residual "
                "streams, and subspaces of different streams cannot be compared. Choose one with "
                "stream='encoder' or stream='decoder'"
            )
        return list(enumerate(getattr(model, _STACKS[stream])))
    if stream is not None:
        raise ValueError(
            f"{architecture} has one residual stream, not an encoder's and a decoder's. Leave out "
            f"stream={stream!r}"
        )
    if len(stacks) > 1:
        raise NotImplementedError(
            f"{architecture} keeps its blocks in the stacks {', '.join(stacks)}, which take turns: "
            "there is no one order of layers to compare them in"
        )
    return [(int(layer), block) for layer, block in model.blocks_with("attn")]


def _block_stacks(model: Any) -> list[str]:
    """Names of the block lists that the bridge enumerates."""
    bridge = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    modules: dict[str, Any] = getattr(bridge, "_modules", None) or {}
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
        if has_plain_projections(module):
            return module
    return None

"""Makes tiny models, scores them through bridges, and compares with the raw weights.

``python -m architectures.bench`` (from ``tests/``) writes the table of outcomes to the docs.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from .layouts import Geometry, Heads, LatentAttention, frames, overlaps
from .table import ARCHITECTURES, GEOMETRIES, NATIVE, Architecture, variants_of

TABLE = Path(__file__).parents[2] / "docs/source/content/projection_kernel_architectures.md"
PAIRINGS = ("OQ", "OK", "OV", "QQ", "KK", "VV", "OO")
CROSS_PAIRINGS = ("OcrossQ", "crossQcrossQ")
LATENT_PAIRINGS = ("OrotaryK", "rotaryKrotaryK")
D_MODEL, LAYERS = 64, 4

#: Scores are in float32 and at most 32; a wrong layout is off by whole units.
TOLERANCE = 2e-4

#: What the sizes are called in the various configurations.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), D_MODEL),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "num_decoder_layers",
            "num_layers_per_stack",
            "encoder_layers",
            "decoder_layers",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "d_ff",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "shared_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    "vocab_size": 60,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_group": 1,
    "topk_group": 1,
}
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_D_HEAD = ("head_dim", "d_kv", "kv_channels")

_LANGUAGE_MODELS = ("text_config", "encoder", "decoder")


def tiny_config(
    config_class: type[transformers.PretrainedConfig],
    geometry: Geometry,
    options: Mapping[str, Any],
) -> transformers.PretrainedConfig:
    """A configuration with our sizes under whatever names it has for them, towers included."""
    sizes = {
        **_SIZES,
        **dict.fromkeys(_HEADS, geometry.heads),
        **dict.fromkeys(_KV_HEADS, geometry.kv_heads),
        **dict.fromkeys(_D_HEAD, geometry.d_head),
    }
    default = config_class()
    default.allow_global_per_layer_attribute_access = True
    settings: dict[str, Any] = {}
    for name, value in sizes.items():
        derived = isinstance(getattr(config_class, name, None), property)
        if hasattr(default, name) and name not in config_class.attribute_map and not derived:
            settings[name] = value
    if (
        not hasattr(default, "head_dim")
        and "d_kv" not in settings
        and geometry.heads * geometry.d_head != D_MODEL
    ):
        settings["head_dim"] = geometry.d_head  # read with getattr where it is no proper field
    for part in config_class.sub_configs:
        tower = getattr(default, part, None)
        if isinstance(tower, transformers.PretrainedConfig):
            settings[part] = tiny_config(
                type(tower),
                geometry if part in _LANGUAGE_MODELS else GEOMETRIES["multi-head"],
                options.get(part, {}),
            )
    settings |= {
        name: value
        for name, value in options.items()
        if name not in settings or not isinstance(value, dict)
    }
    return config_class(**settings)


class _NoTower(torch.nn.Module):
    """In place of a vision tower that would need another library. Nothing here looks at it."""


def tiny_model(key: str, row: Architecture, geometry: Geometry) -> torch.nn.Module:
    """A model with random weights, norms included, and its configuration as ``config``."""
    torch.manual_seed(0)
    if key == NATIVE:
        model = _native_model(geometry)
    else:
        model_class = getattr(transformers, row.model or key)
        config = tiny_config(model_class.config_class, geometry, row.options)
        with _without_timm():
            model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def _native_model(geometry: Geometry) -> torch.nn.Module:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import NativeModel

    config = TransformerBridgeConfig(
        d_model=D_MODEL,
        d_head=geometry.d_head,
        n_heads=geometry.heads,
        n_key_value_heads=geometry.kv_heads,
        n_layers=LAYERS,
        n_ctx=64,
        d_vocab=60,
        d_mlp=32,
        act_fn="gelu",
    )
    model = NativeModel(config).eval()
    model.config = config
    return model


@contextlib.contextmanager
def _without_timm() -> Iterator[None]:
    from transformers.models.gemma3n import modeling_gemma3n

    make = modeling_gemma3n.AutoModel.from_config

    def make_unless_timm(config: Any, **kwargs: Any) -> torch.nn.Module:
        timm = config.model_type == "gemma3n_vision"
        return _NoTower() if timm else make(config, **kwargs)

    with mock.patch.object(modeling_gemma3n.AutoModel, "from_config", make_unless_timm):
        yield


def bridge_of(model: torch.nn.Module, key: str) -> Any:
    """The bridge, without the libraries that only a tokenizer or image processor needs."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    with mock.patch.object(SUPPORTED_ARCHITECTURES[key], "required_libraries", []):
        config = {"tl_config" if key == NATIVE else "hf_config": model.config}
        return build_bridge_from_module(model, key, **config)


def reference_heads(
    weights: Mapping[str, np.ndarray], row: Architecture, stream: str | None, geometry: Geometry
) -> list[Heads]:
    """The heads' matrices of the layers that have attention."""
    path = row.path if isinstance(row.path, str) else row.path[stream or ""]
    layout = row.layout[stream or ""] if isinstance(row.layout, Mapping) else row.layout
    assert layout is not None
    heads = [layout(weights, path.format(layer=layer), geometry) for layer in row.layers]
    if stream == "decoder" and row.cross is not None:
        for layer, own in zip(row.layers, heads, strict=True):
            own["crossQ"] = layout(weights, row.cross.format(layer=layer), geometry)["Q"]
    return heads


def reference_scores(heads: list[Heads], pairing: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a pairing in float64, and which pairs of heads it has."""
    roles = roles_in(pairing)
    sides = [_padded([layer.get(role) for layer in heads]) for role in roles]
    (source, there), (target, here) = sides
    layers, count, target_count = len(heads), source.shape[1], target.shape[1]
    scores = overlaps(source.reshape(-1, *source.shape[2:]), target.reshape(-1, *target.shape[2:]))
    scores = scores.reshape(layers, count, layers, target_count)
    pairs = there[:, :, None, None] & here
    if roles[0] == roles[1]:
        square = np.triu(np.ones((layers * count,) * 2, bool), 1)
        pairs &= square.reshape(layers, count, layers, count)
    else:
        # Cross-attention comes after the self-attention of its own block.
        delay = 0 if roles[1] == "crossQ" else 1
        earlier = np.arange(layers)[:, None] + delay <= np.arange(layers)
        pairs &= earlier[:, None, :, None]
    return scores, pairs


def roles_in(pairing: str) -> list[str]:
    """The two roles of a pairing."""
    return re.findall("crossQ|rotaryK|[QKVO]", pairing)


def _padded(layers: list[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Bases ``[layer, head, d_model, rank]`` with zeros where there are no heads or directions."""
    present = [heads for heads in layers if heads is not None]
    count = max(len(heads) for heads in present)
    rank = max(min(heads.shape[1:]) for heads in present)
    bases = np.zeros((len(layers), count, D_MODEL, rank))
    there = np.zeros((len(layers), count), bool)
    for layer, heads in enumerate(layers):
        if heads is not None:
            of_layer = frames(heads)
            bases[layer, : len(heads), :, : of_layer.shape[-1]] = of_layer
            there[layer, : len(heads)] = True
    return bases, there


Outcome = tuple[str, str, str, str]


def outcomes(key: str) -> list[Outcome]:
    """``(variant, geometry, pairing, outcome)`` of all that can be tried with an architecture.

    An outcome is ``right``, ``WRONG: ...``, ``refused: ...`` or ``not built: ...``.
    """
    found = []
    for row in variants_of(key):
        if row.missing:
            return [("", "", "", f"not built: {row.missing}")]
        for name in row.geometries:
            found += [
                (stream or row.label, name, *pair)
                for stream, *pair in _outcomes_of(key, row, GEOMETRIES[name])
            ]
    return found


def _outcomes_of(
    key: str, row: Architecture, geometry: Geometry
) -> list[tuple[str | None, str, str]]:
    """Stream, pairing and outcome of all that is tried with one model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(key, row, geometry)
        weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
        try:
            bridge = bridge_of(model, key)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            # Up to the first number, which depends on the sizes, or the first full stop.
            start = re.split(r"\d|\. ", str(error).splitlines()[0])[0].strip()
            return [(None, "", f"not built: the bridge fails with {type(error).__name__}: {start}")]
    found = []
    for stream in row.streams:
        if stream is not None:
            found.append((stream, "OQ", _without_a_stream(bridge)))
        for pairing in (
            *PAIRINGS,
            *CROSS_PAIRINGS * (stream == "decoder"),
            *LATENT_PAIRINGS * isinstance(row.layout, LatentAttention),
        ):
            try:
                result = _affinity(bridge, pairing, stream)
            except (ValueError, NotImplementedError) as error:
                outcome = f"refused: {error}"
            else:
                outcome = _comparison(result, weights, row, stream, geometry, pairing)
            found.append((stream, pairing, outcome))
    return found


def _affinity(bridge: Any, pairing: str, stream: Any) -> Any:
    # Not before the working copy lies over the installed package.
    from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity

    source, target = roles_in(pairing)
    return attention_head_subspace_affinity(
        bridge, source_role=source, target_role=target, stream=stream
    )


def _without_a_stream(bridge: Any) -> str:
    """Right is here a refusal that names the choice."""
    try:
        _affinity(bridge, "OQ", None)
    except NotImplementedError as error:
        if "stream='encoder' or stream='decoder'" in str(error):
            return "right"
    return "WRONG: nothing is said of the two streams"


def _comparison(
    result: Any,
    weights: Mapping[str, np.ndarray],
    row: Architecture,
    stream: str | None,
    geometry: Geometry,
    pairing: str,
) -> str:
    if row.layout is None:
        return "WRONG: scores where there is no attention"
    if stream is None and not isinstance(row.path, str):
        return "WRONG: scores although layers have no one order"
    heads = reference_heads(weights, row, stream, geometry)
    if not all(any(role in layer for layer in heads) for role in roles_in(pairing)):
        return "WRONG: scores of heads that do not exist"
    scores, pairs = reference_scores(heads, pairing)
    layers = {result.source_layer_indices, result.target_layer_indices}
    if layers != {row.layers}:
        return f"WRONG: layers {sorted(layers)}, expected {row.layers}"
    if tuple(result.scores.shape) != scores.shape:
        return f"WRONG: shape {tuple(result.scores.shape)}, expected {scores.shape}"
    if not np.array_equal(result.valid_mask.numpy(), pairs):
        return "WRONG: other pairs are valid"
    error = np.abs(result.scores.numpy() - scores)[pairs].max()
    return "right" if error < TOLERANCE else f"WRONG: off by {error:.2g}"


def summary(found: list[Outcome]) -> str:
    """The outcomes of an architecture as one cell of the table."""
    geometries: dict[str, set[str]] = {}
    tried: dict[str, str] = {}
    by_outcome: dict[str, dict[str, dict[str, list[str]]]] = {}
    for variant, geometry, pairing, outcome in found:
        text = re.sub(
            r"^(refused: )\w+(, (en|de)coder)?(, role \w+)?(, layer \d+)?[:,] ", r"\1", outcome
        )
        geometries.setdefault(variant, set()).add(geometry)
        pairings = by_outcome.setdefault(text, {}).setdefault(variant, {})
        pairings.setdefault(geometry, []).append(pairing)
        if pairing not in tried.setdefault(variant, "").split():
            tried[variant] += f" {pairing}"
    if len(by_outcome) == 1:
        return next(iter(by_outcome)).replace("|", "\\|")
    parts = []
    for outcome, variants in sorted(by_outcome.items(), key=lambda item: item[0] != "right"):
        where = []
        for variant, seen in variants.items():
            some = [] if set(seen) == geometries[variant] else list(seen)
            if len(geometries) > 1:
                some.insert(0, variant or "usual")
            pairings = dict.fromkeys(next(iter(seen.values())))
            if set(pairings) - {""} not in (set(), set(tried[variant].split())):
                some.append(" ".join(pairings))
            where += [", ".join(some)] * bool(some)
        names = "; ".join(where)
        parts.append(f"[{names}] {outcome}" if names else outcome)
    return "<br>".join(parts).replace("|", "\\|")


def table(cells: Mapping[str, str]) -> str:
    """The page."""
    counts = {
        "right": sum(cell == "right" for cell in cells.values()),
        "not built": sum(cell.startswith("not built") for cell in cells.values()),
    }
    rest = len(cells) - sum(counts.values())
    rows = "\n".join(f"| `{key}` | {cell} |" for key, cell in sorted(cells.items()))
    return f"""# Projection Kernel: architectures

What attention-head affinities give on every architecture that TransformerLens lists, measured on
tiny models with random weights. *Right*: the pairings {", ".join(PAIRINGS)} equal a float64
reference computed from the raw Hugging Face weights by the layout that the modelling code
documents, of encoder-decoder models in either stream (`stream="encoder"`, `stream="decoder"`) and
with {" and ".join(CROSS_PAIRINGS)} in the decoder's, of models with multi-head latent attention
with {" and ".join(LATENT_PAIRINGS)} too. *Refused*: an error that says this. *Not built*: no model
of that architecture can be made here. Generated by `python -m architectures.bench`, run in
`tests/`; do not edit.

Of the encoder of LED the local attention is meant; the few tokens with global attention have
projections of their own.

{len(cells)} architectures: {counts["right"]} right, {rest} refused in whole or in part, \
{counts["not built"]} not built.

| Architecture | Outcome |
| --- | --- |
{rows}
"""


def cells_on_page(page: str) -> dict[str, str]:
    """The table's cells, read back from the page."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.MULTILINE))


def main(keys: list[str]) -> None:
    cells = cells_on_page(TABLE.read_text()) if keys and TABLE.exists() else {}
    for key in keys or ARCHITECTURES:
        cells[key] = summary(outcomes(key))
        print(f"{key}: {cells[key]}", flush=True)
    TABLE.write_text(table(cells))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    __import__("conftest")  # lays the working copy over the installed package
    main(sys.argv[1:])

"""How Hugging Face's modelling code lays the heads out in its weights, in plain NumPy.

Nothing here knows of bridges or of the code under test. A layout takes the weights of a checkpoint
and the place of an attention module, and returns per role an array ``[head, d_model, d_head]``: its
columns span what a head reads from the residual stream (Q, K, V) or writes to it (O). Weights of
``Linear`` modules are ``[out, in]``, those of ``Conv1D`` ``[in, out]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

Weights = Mapping[str, np.ndarray]
Heads = dict[str, np.ndarray]


@dataclass(frozen=True)
class Geometry:
    """Sizes of the attention of a tiny model; ``d_model`` is always 64."""

    heads: int
    kv_heads: int
    d_head: int


Layout = Callable[[Weights, str, Geometry], Heads]


def reading(weight: np.ndarray, heads: int) -> np.ndarray:
    """Heads of a ``[out, in]`` weight whose rows come head by head."""
    return weight.reshape(heads, -1, weight.shape[1]).swapaxes(1, 2)


def writing(weight: np.ndarray, heads: int) -> np.ndarray:
    """Heads of a ``[out, in]`` weight whose columns come head by head."""
    return weight.reshape(len(weight), heads, -1).swapaxes(0, 1)


@dataclass(frozen=True)
class Separate:
    """A ``Linear`` for each role, as in Llama.

    ``gated``: each head's rows of ``q`` are its query and then an output gate of the same width
    (``torch.chunk`` of the head axis in Qwen3-Next). ``any_width``: layers differ in head width.
    ``tied``: where there is no ``v``, values are the output of ``k`` (Gemma 4).
    """

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    gated: bool = False
    any_width: bool = False
    tied: bool = False

    def __call__(self, weights: Weights, path: str, geometry: Geometry) -> Heads:
        def weight(name: str) -> np.ndarray:
            return weights[f"{path}.{name}.weight"]

        q = reading(weight(self.q), geometry.heads)
        if self.gated:
            q = q[..., : geometry.d_head]
        k = reading(weight(self.k), geometry.kv_heads)
        own_values = not self.tied or f"{path}.{self.v}.weight" in weights
        if not self.any_width:
            assert q.shape[2] == k.shape[2] == geometry.d_head, "the model is of another geometry"
        return {
            "Q": q,
            "K": k,
            "V": reading(weight(self.v), geometry.kv_heads) if own_values else k,
            "O": writing(weight(self.o), geometry.heads),
        }


@dataclass(frozen=True)
class PerLayer:
    """As ``layout``, with numbers of heads that depend on the layer (Laguna, Gemma 4)."""

    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    layout: Layout = field(default_factory=Separate)

    def __call__(self, weights: Weights, path: str, geometry: Geometry) -> Heads:
        layer = int(path.split(".")[-2])
        if self.heads is not None:
            geometry = replace(geometry, heads=self.heads[layer])
        if self.kv_heads is not None:
            geometry = replace(geometry, kv_heads=self.kv_heads[layer])
        return self.layout(weights, path, geometry)


@dataclass(frozen=True)
class Fused:
    """One projection for queries, keys and values; ``split`` parts its ``[out, in]`` weight."""

    qkv: str
    o: str
    split: Callable[[np.ndarray, Geometry], dict[str, np.ndarray]]
    conv1d: bool = False

    def __call__(self, weights: Weights, path: str, geometry: Geometry) -> Heads:
        fused, out = weights[f"{path}.{self.qkv}.weight"], weights[f"{path}.{self.o}.weight"]
        if self.conv1d:
            fused, out = fused.T, out.T
        parts = self.split(fused, geometry)
        return {
            "Q": reading(parts["Q"], geometry.heads),
            "K": reading(parts["K"], geometry.kv_heads),
            "V": reading(parts["V"], geometry.kv_heads),
            "O": writing(out, geometry.heads),
        }


def blocked(weight: np.ndarray, geometry: Geometry) -> dict[str, np.ndarray]:
    """All queries, then all keys, then all values (GPT-2, MPT, Phi-3, multi-query BigCode)."""
    q, kv = geometry.heads * geometry.d_head, geometry.kv_heads * geometry.d_head
    assert len(weight) == q + 2 * kv
    return {"Q": weight[:q], "K": weight[q : q + kv], "V": weight[q + kv :]}


def per_head(weight: np.ndarray, geometry: Geometry) -> dict[str, np.ndarray]:
    """Query, key and value of the first head, then of the second (BLOOM, GPT-NeoX, old Falcon)."""
    by_head = weight.reshape(geometry.heads, 3, geometry.d_head, -1)
    return {role: np.concatenate(by_head[:, i]) for i, role in enumerate("QKV")}


def per_group(weight: np.ndarray, geometry: Geometry) -> dict[str, np.ndarray]:
    """The queries of a key-value head, its key, its value; then the next (new Falcon)."""
    queries = geometry.heads // geometry.kv_heads
    groups = weight.reshape(geometry.kv_heads, queries + 2, geometry.d_head, -1)
    return {
        "Q": np.concatenate(np.concatenate(groups[:, :queries])),
        "K": np.concatenate(groups[:, queries]),
        "V": np.concatenate(groups[:, queries + 1]),
    }


def in_four_parts(weight: np.ndarray, geometry: Geometry) -> dict[str, np.ndarray]:
    """CodeGen was trained on four devices: each's queries, values and keys (in that order)."""
    parts = weight.reshape(4, 3, -1, weight.shape[1])
    return {role: np.concatenate(parts[:, i]) for i, role in enumerate("QVK")}


@dataclass(frozen=True)
class ExpertQueries:
    """JetMoE: keys and values are plain, every expert has queries and outputs of its own."""

    def __call__(self, weights: Weights, path: str, geometry: Geometry) -> Heads:
        key, value = np.split(weights[f"{path}.kv_proj.weight"], 2)
        return {"K": reading(key, geometry.kv_heads), "V": reading(value, geometry.kv_heads)}


@dataclass(frozen=True)
class SharedKeyValues:
    """As :class:`Separate`; only ``owners`` compute keys and values, later layers reuse theirs."""

    owners: tuple[int, ...]

    def __call__(self, weights: Weights, path: str, geometry: Geometry) -> Heads:
        prefix, _, module = path.rpartition(".")
        names = dict(zip("QKVO", ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True))
        owner = int(prefix.rpartition(".")[2]) in self.owners
        assert owner == (f"{path}.k_proj.weight" in weights), module
        heads = {
            "Q": reading(weights[f"{path}.{names['Q']}.weight"], geometry.heads),
            "O": writing(weights[f"{path}.{names['O']}.weight"], geometry.heads),
        }
        if owner:
            heads["K"] = reading(weights[f"{path}.{names['K']}.weight"], geometry.kv_heads)
            heads["V"] = reading(weights[f"{path}.{names['V']}.weight"], geometry.kv_heads)
        return heads


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek-V2: reads go through a normalised bottleneck.

    A head's query is ``q_b[h] diag(γ) q_a x / rms(q_a x)``; the norm rescales a token and does not
    change what it can read from. Small models leave the bottleneck out. Its key is in two parts,
    one per head through a bottleneck and one, rotary, that all heads share.
    """

    rope: int = 4
    nope: int = 12
    value: int = 8

    def __call__(self, weights: Weights, path: str, geometry: Geometry) -> Heads:
        def weight(name: str) -> np.ndarray:
            return weights[f"{path}.{name}.weight"]

        down, rank = weight("kv_a_proj_with_mqa"), len(weight("kv_a_layernorm"))
        latent = weight("kv_a_layernorm")[:, None] * down[:rank]
        up = weight("kv_b_proj").reshape(geometry.heads, self.nope + self.value, rank)
        if f"{path}.q_proj.weight" in weights:
            query = weight("q_proj")
        else:
            query = weight("q_b_proj") @ (weight("q_a_layernorm")[:, None] * weight("q_a_proj"))
        return {
            "Q": reading(query, geometry.heads),
            "K": (up[:, : self.nope] @ latent).swapaxes(1, 2),
            "V": (up[:, self.nope :] @ latent).swapaxes(1, 2),
            "O": writing(weight("o_proj"), geometry.heads),
            "rotaryK": reading(down[rank:], 1),
        }


def frames(heads: np.ndarray) -> np.ndarray:
    """Orthonormal bases of the heads' column spaces, by QR."""
    return np.linalg.qr(heads.astype(np.float64))[0]


def overlaps(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """``‖U.T V‖²_F`` of all pairs of ``[n, d_model, d_head]`` bases."""
    cosines = np.einsum("idp,jdq->ijpq", source, target)
    return (cosines**2).sum((-2, -1))

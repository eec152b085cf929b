"""The peer metrics against their definitions, pair by pair in float64, and their properties."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity import metrics
from transformer_lens.tools.analysis.head_affinity._nuclear_norms import pairwise_nuclear_norms
from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity

import toy_models

LAYERS = (0, 1, 3)  # a block without attention in between
D_MODEL, D_HEAD, QUERY_HEADS = 24, 5, 4

Weights = dict[str, np.ndarray]  # role -> [layer, head, d_model, d_head]; O transposed


class Bridge:
    """As much of a bridge as weight analysis looks at."""

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float64) -> None:
        tensors = {role: torch.from_numpy(w).to(dtype) for role, w in weights.items()}
        tensors["O"] = tensors["O"].mT
        self.blocks = [
            SimpleNamespace(
                attn=SimpleNamespace(**{f"W_{role}": w[i] for role, w in tensors.items()})
            )
            for i in range(len(LAYERS))
        ]

    def blocks_with(self, _: str) -> list:
        return list(zip(LAYERS, self.blocks, strict=True))


def random_weights(seed: int = 0, kv_heads: int = QUERY_HEADS) -> Weights:
    generator = np.random.default_rng(seed)
    # Columns of different sizes, so that no metric can pass for one that ignores gains.
    gains = np.linspace(0.3, 2, D_HEAD)
    return {
        role: generator.standard_normal(
            (len(LAYERS), QUERY_HEADS if role in "QO" else kv_heads, D_MODEL, D_HEAD)
        )
        * gains
        for role in "QKVO"
    }


def orthonormal_weights(same: bool) -> Weights:
    """Every head of a role with one frame; O's equal to the others', or orthogonal to them."""
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((D_MODEL, 2 * D_HEAD)))[0]
    stack = np.broadcast_to(frame[:, :D_HEAD], (len(LAYERS), QUERY_HEADS, D_MODEL, D_HEAD))
    written = stack if same else np.broadcast_to(frame[:, D_HEAD:], stack.shape)
    return {"Q": stack.copy(), "K": stack.copy(), "V": stack.copy(), "O": written.copy()}


def norm(matrix: np.ndarray, order: str = "fro") -> float:
    return float(np.linalg.norm(matrix, order))


# The definitions. ``a`` and ``b`` are [d_model, d_head].


def simple_score(a: np.ndarray, b: np.ndarray) -> float:
    return norm(a.T @ b) / (norm(a) * norm(b))


def cka(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.trace(a @ a.T @ b @ b.T)) / (norm(a @ a.T) * norm(b @ b.T))


def cka_paper(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.T - a.T.mean(0), b.T - b.T.mean(0)
    return float(np.vdot(x @ x.T, y @ y.T)) / (norm(x @ x.T) * norm(y @ y.T))


def procrustes(a: np.ndarray, b: np.ndarray) -> float:
    return norm(a.T @ b, "nuc") / (norm(a) * norm(b))


def procrustes_paper(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * norm(a @ b.T, "nuc") / (norm(a) ** 2 + norm(b) ** 2)


def composition_oracle(weights: Weights, target_role: str) -> np.ndarray:
    """Full d_model x d_model maps, key-value heads repeated for their query heads."""
    repeats = QUERY_HEADS // weights["K"].shape[1]
    w = {role: np.repeat(x, 1 if role in "QO" else repeats, axis=1) for role, x in weights.items()}
    ov = np.einsum("lhdi,lhei->lhde", w["V"], w["O"])
    qk = np.einsum("lhdi,lhei->lhde", w["Q"], w["K"])
    target = {"Q": qk, "K": qk.swapaxes(-1, -2), "V": ov}[target_role]
    return pairwise(ov, target, lambda m, n: norm(m @ n) / (norm(m) * norm(n)))


def pairwise(source: np.ndarray, target: np.ndarray, function: Callable) -> np.ndarray:
    scores = np.zeros(source.shape[:2] + target.shape[:2])
    for i, j, k, m in np.ndindex(*scores.shape):
        scores[i, j, k, m] = function(source[i, j], target[k, m])
    return scores


@dataclass(frozen=True)
class Properties:
    """What holds for a metric. Rotations and factors are different ones for every matrix.

    Attributes:
        function: ``(model, source_role=, target_role=, layer_order=)`` to a result.
        oracle: Score of two matrices; ``None`` where it takes more than two.
        symmetric: The same in both directions, for one role with itself; ``None`` if refused.
        inner_rotation: ``W -> W R`` with orthogonal ``R`` changes nothing.
        invertible_factor: ``W -> W G`` with invertible ``G`` changes nothing.
        circuit_basis: ``W_V -> W_V G`` with ``W_O -> G⁻¹ W_O``, and the like for W_Q and W_K,
            changes nothing, as it does not for the model.
        scale: ``W -> c W`` changes nothing.
        identical, orthogonal: Score of equal and of orthogonal orthonormal frames.
        upper: Largest possible score.
    """

    function: Callable
    oracle: Callable | None
    symmetric: bool | None
    inner_rotation: bool
    invertible_factor: bool
    circuit_basis: bool
    scale: bool
    identical: float
    orthogonal: float
    upper: float = 1.0


def form(function: Callable, name: str) -> Callable:
    return lambda model, **options: function(model, form=name, **options)


REGISTRY = {
    "projection_kernel": Properties(
        attention_head_subspace_affinity, None,
        symmetric=True, inner_rotation=True, invertible_factor=True, circuit_basis=True,
        scale=True, identical=D_HEAD, orthogonal=0, upper=D_HEAD,
    ),
    "composition_score": Properties(
        metrics.composition_score, None,
        symmetric=None, inner_rotation=False, invertible_factor=False, circuit_basis=True,
        scale=True, identical=D_HEAD**-0.5, orthogonal=0,
    ),
    "simple_composition_score": Properties(
        metrics.simple_composition_score, simple_score,
        symmetric=True, inner_rotation=True, invertible_factor=False, circuit_basis=False,
        scale=True, identical=D_HEAD**-0.5, orthogonal=0,
    ),
    "linear_cka": Properties(
        metrics.linear_cka, cka,
        symmetric=True, inner_rotation=True, invertible_factor=False, circuit_basis=False,
        scale=True, identical=1, orthogonal=0,
    ),
    # The paper's forms do not see where in the residual stream a frame lies.
    "linear_cka_paper": Properties(
        form(metrics.linear_cka, "paper"), cka_paper,
        symmetric=True, inner_rotation=False, invertible_factor=False, circuit_basis=False,
        scale=True, identical=1, orthogonal=1,
    ),
    "procrustes_similarity": Properties(
        metrics.procrustes_similarity, procrustes,
        symmetric=True, inner_rotation=True, invertible_factor=False, circuit_basis=False,
        scale=True, identical=1, orthogonal=0,
    ),
    "procrustes_similarity_paper": Properties(
        form(metrics.procrustes_similarity, "paper"), procrustes_paper,
        symmetric=True, inner_rotation=False, invertible_factor=False, circuit_basis=False,
        scale=False, identical=1, orthogonal=1,
    ),
}  # fmt: skip
PEERS = [name for name in REGISTRY if name != "projection_kernel"]
SINGLE = [name for name, row in REGISTRY.items() if row.oracle]

# Scores are sums over unit frames, so their squares carry errors of some eps; scores here are
# above 0.05, and half of 1e-15 / 0.05 is far below.
EXACT = 1e-12


def test_every_public_metric_and_form_is_registered():
    public = set()
    for name in metrics.__all__:
        member = getattr(metrics, name)
        options = inspect.signature(member).parameters if inspect.isfunction(member) else ()
        if "layer_order" in options:
            forms = get_args(metrics.Form) if "form" in options else ("textbook",)
            public |= {f"{name}_{form}".removesuffix("_textbook") for form in forms}
    assert public == set(PEERS)


def scores_of(name: str, weights: Weights, source="O", target="K", order="all") -> np.ndarray:
    result = REGISTRY[name].function(
        Bridge(weights), source_role=source, target_role=target, layer_order=order, progress=False
    )
    assert result.metric == name
    assert result.scores.dtype == torch.float64
    return result.scores.numpy()


@pytest.mark.parametrize("kv_heads", [QUERY_HEADS, 2, 1])
@pytest.mark.parametrize("pairing", ["OQ", "OK", "OV", "QQ", "KK", "VV", "OO"])
@pytest.mark.parametrize("name", SINGLE)
def test_definition(name, pairing, kv_heads):
    weights = random_weights(kv_heads=kv_heads)
    expected = pairwise(weights[pairing[0]], weights[pairing[1]], REGISTRY[name].oracle)
    for order in ("all", "forward", "distinct")[: 3 if pairing[0] == pairing[1] else 2]:
        result = REGISTRY[name].function(
            Bridge(weights), source_role=pairing[0], target_role=pairing[1], layer_order=order
        )
        valid = result.valid_mask.numpy()
        assert valid.any()
        np.testing.assert_allclose(result.scores.numpy(), expected * valid, atol=EXACT)
        assert torch.equal(result.scores, result.normalized)
        assert (result.rank, result.source_rank, result.target_rank) == ("measured", 5, 5)
        assert result.source_layer_indices == LAYERS


@pytest.mark.parametrize("kv_heads", [QUERY_HEADS, 2, 1])
@pytest.mark.parametrize("target_role", ["Q", "K", "V"])
def test_composition_score_is_that_of_the_full_maps(target_role, kv_heads):
    weights = random_weights(kv_heads=kv_heads)
    result = metrics.composition_score(Bridge(weights), target_role=target_role, layer_order="all")
    assert (result.source_head_kind, result.target_head_kind) == ("query", "query")
    np.testing.assert_allclose(
        result.scores.numpy(), composition_oracle(weights, target_role), atol=EXACT
    )


@pytest.mark.parametrize("target_role", ["K", "V"])
def test_query_heads_of_a_group_differ_in_composition_score_alone(target_role):
    """The reason for the two conventions about key-value heads."""
    weights = random_weights(kv_heads=2)
    full = metrics.composition_score(Bridge(weights), target_role=target_role).scores[0, :, 1]
    assert full.shape == (QUERY_HEADS, QUERY_HEADS)
    assert (full[:, 0] - full[:, 1]).abs().max() > 0.01
    simple = metrics.simple_composition_score(Bridge(weights), target_role=target_role)
    assert simple.scores.shape[3] == 2
    assert simple.target_head_kind == "kv"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("build", [toy_models.gpt2, toy_models.llama, toy_models.hybrid])
def test_composition_score_is_that_of_transformer_lens(build, dtype):
    model, _ = build(dtype)
    # float32 scores of these models are sums of at most 32 x 32 squares.
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for role in ("Q", "K", "V"):
        table = metrics.compare_composition_scores(model, target_role=role)
        assert len(table) == int(
            metrics.composition_score(model, target_role=role).valid_mask.sum()
        )
        assert table["upstream"].min() > 0.01
        assert table["relative_difference"].max() < tolerance


@pytest.mark.parametrize("name", REGISTRY)
def test_symmetry(name):
    if REGISTRY[name].symmetric is None:
        with pytest.raises(ValueError, match="multiplies no maps"):
            scores_of(name, random_weights(), "Q", "Q")
        return
    scores = scores_of(name, random_weights(), "Q", "Q")
    swapped = scores.transpose(2, 3, 0, 1)
    assert (abs(scores - swapped).max() < EXACT) == REGISTRY[name].symmetric


def transformed(weights: Weights, factor: Callable[[], np.ndarray | float]) -> Weights:
    """Every matrix times a factor of its own."""
    return {
        role: np.stack([[np.dot(matrix, factor()) for matrix in layer] for layer in stack])
        for role, stack in weights.items()
    }


def invertible(generator: np.random.Generator) -> np.ndarray:
    """Condition number 4: singular values from 1/2 to 2."""
    left, right = (np.linalg.qr(generator.standard_normal((D_HEAD, D_HEAD)))[0] for _ in "ab")
    return left @ np.diag(np.geomspace(0.5, 2, D_HEAD)) @ right


def other_circuit_basis(weights: Weights, generator: np.random.Generator) -> Weights:
    changed = {role: stack.copy() for role, stack in weights.items()}
    for layer, head in np.ndindex(len(LAYERS), QUERY_HEADS):
        for inner, outer in (("V", "O"), ("Q", "K")):
            g = invertible(generator)
            changed[inner][layer, head] = weights[inner][layer, head] @ g
            changed[outer][layer, head] = weights[outer][layer, head] @ np.linalg.inv(g).T
    return changed


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("kind", ["inner_rotation", "invertible_factor", "circuit_basis", "scale"])
def test_invariances_and_their_absence(name, kind):
    weights, generator = random_weights(), np.random.default_rng(1)
    after = {
        "inner_rotation": lambda: transformed(
            weights, lambda: np.linalg.qr(generator.standard_normal((D_HEAD, D_HEAD)))[0]
        ),
        "invertible_factor": lambda: transformed(weights, lambda: invertible(generator)),
        "circuit_basis": lambda: other_circuit_basis(weights, generator),
        "scale": lambda: transformed(weights, lambda: generator.uniform(0.1, 10)),
    }[kind]()
    change = abs(scores_of(name, after) - scores_of(name, weights)).max()
    if getattr(REGISTRY[name], kind):
        assert change < EXACT
    else:
        assert change > 0.01


@pytest.mark.parametrize("name", REGISTRY)
def test_rotation_of_the_residual_stream_changes_nothing(name):
    weights = random_weights()
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((D_MODEL, D_MODEL)))[0]
    rotated = {role: rotation @ stack for role, stack in weights.items()}
    np.testing.assert_allclose(scores_of(name, rotated), scores_of(name, weights), atol=EXACT)


@pytest.mark.parametrize("name", REGISTRY)
def test_values_of_identical_and_of_orthogonal_frames(name):
    row = REGISTRY[name]
    np.testing.assert_allclose(
        scores_of(name, orthonormal_weights(same=True)), row.identical, atol=EXACT
    )
    # A score of 0 that is a square root has the root of the rounding error.
    np.testing.assert_allclose(
        scores_of(name, orthonormal_weights(same=False)), row.orthogonal, atol=EXACT**0.5
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_bounds(name):
    weights = random_weights()
    weights["K"][:] = weights["O"]  # comes close to the upper one
    scores = scores_of(name, weights)
    assert scores.min() >= 0
    assert scores.max() <= REGISTRY[name].upper


@pytest.mark.parametrize("exponent", [-110, 110])
@pytest.mark.parametrize("name", PEERS)
def test_a_common_scale_changes_nothing_near_the_ends_of_float32(name, exponent):
    weights = random_weights()

    def scores(scale: float) -> torch.Tensor:
        model = Bridge(weights, torch.float32)
        for block in model.blocks:
            for role in "QKVO":
                setattr(block.attn, f"W_{role}", getattr(block.attn, f"W_{role}") * scale)
        return REGISTRY[name].function(model, source_role="O", target_role="K").scores

    assert scores(1.0).dtype == torch.float32
    # Logarithms of the norms lose a few digits against exponents of a hundred.
    torch.testing.assert_close(scores(2.0**exponent), scores(1.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", PEERS)
def test_a_head_without_weights_takes_part_in_no_pair(name):
    weights = random_weights()
    weights["O"][0, 1] = 0
    result = REGISTRY[name].function(Bridge(weights), source_role="O", target_role="K")
    assert result.source_ranks[0].tolist() == [5, 0, 5, 5]
    assert not result.valid_mask[0, 1].any()
    assert not result.scores[0, 1].any()
    assert result.valid_mask[0, 0, 1].all()
    assert result.scores.isfinite().all()


def test_a_circuit_without_weights_takes_part_in_no_pair():
    """W_V alone is zero; or it writes only what W_O does not read, up to rounding."""
    weights = random_weights()
    weights["V"][0, 1] = 0
    left = np.linalg.qr(np.random.default_rng(1).standard_normal((D_HEAD, D_HEAD)))[0]
    weights["V"][0, 2] = weights["V"][0, 2] @ left[:, :2] @ left[:, :2].T
    weights["O"][0, 2] = weights["O"][0, 2] @ left[:, 2:] @ left[:, 2:].T
    result = metrics.composition_score(Bridge(weights), target_role="Q")
    assert result.source_ranks[0].tolist() == [5, 0, 0, 5]
    assert not result.valid_mask[0, 1:3].any()


def test_ranks_of_a_composition_are_those_of_the_maps():
    weights = random_weights(kv_heads=2)
    weights["V"][0, 1, :, 2:] = 0
    result = metrics.composition_score(Bridge(weights), target_role="V")
    assert result.source_ranks[0].tolist() == [5, 5, 2, 2]


def test_coordinates_that_are_all_the_same_vanish_by_centring():
    weights = random_weights()
    weights["O"][0, 1] = weights["O"][0, 1, :, :1]
    model = Bridge(weights)
    assert metrics.linear_cka(model, target_role="K").valid_mask[0, 1, 1].all()
    result = metrics.linear_cka(model, target_role="K", form="paper")
    assert result.source_ranks[0].tolist() == [5, 0, 5, 5]
    assert not result.valid_mask[0, 1].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", PEERS)
def test_non_finite_weights_are_refused_by_name(name, value):
    weights = random_weights()
    weights["K"][2, 3, 0, 0] = value
    with pytest.raises(ValueError, match=r"role K, layer 3, head 3: .* finite"):
        REGISTRY[name].function(Bridge(weights), source_role="O", target_role="K")


@pytest.mark.parametrize("name", PEERS)
def test_weights_can_be_read_once(name):
    model = Bridge(random_weights())
    weights = metrics.read_head_weights(model, ("Q", "K", "V", "O"))
    options = {"source_role": "O", "target_role": "K"}
    function = REGISTRY[name].function
    assert torch.equal(function(weights, **options).scores, function(model, **options).scores)
    with pytest.raises(ValueError, match=r"needs \['K'"):
        function({"O": weights["O"], "Q": weights["Q"]}, **options)


def test_what_has_no_meaning_is_refused():
    weights = random_weights()
    model = Bridge(weights)
    with pytest.raises(ValueError, match="form"):
        metrics.linear_cka(model, target_role="K", form="best")
    with pytest.raises(ValueError, match="layer_order"):
        metrics.composition_score(model, target_role="K", layer_order="distinct")
    with pytest.raises(ValueError, match="no composition"):
        metrics.composition_score(model, source_role="Q", target_role="K")
    narrow = Bridge(weights | {"K": weights["K"][..., :3], "Q": weights["Q"][..., :3]})
    for function in (metrics.linear_cka, metrics.procrustes_similarity):
        assert function(narrow, target_role="K").valid_mask.any()
        with pytest.raises(ValueError, match="one by one"):
            function(narrow, target_role="K", form="paper")
    uneven = Bridge(weights | {"K": weights["K"][:, :3], "V": weights["V"][:, :3]})
    with pytest.raises(ValueError, match="evenly"):
        metrics.composition_score(uneven, target_role="K")


def test_heads_wider_than_the_residual_stream():
    generator = np.random.default_rng(0)
    weights = {role: generator.standard_normal((3, 2, 4, 6)) for role in "QKVO"}
    expected = pairwise(weights["O"], weights["K"], procrustes_paper)
    result = metrics.procrustes_similarity(
        Bridge(weights), target_role="K", form="paper", layer_order="all"
    )
    np.testing.assert_allclose(result.scores.numpy(), expected, atol=EXACT)
    ov = np.einsum("lhdi,lhei->lhde", weights["V"], weights["O"])
    qk = np.einsum("lhdi,lhei->lhde", weights["Q"], weights["K"])
    expected = pairwise(ov, qk, lambda m, n: norm(m @ n) / (norm(m) * norm(n)))
    result = metrics.composition_score(Bridge(weights), target_role="Q", layer_order="all")
    np.testing.assert_allclose(result.scores.numpy(), expected, atol=EXACT)


def test_results_survive_a_round_trip_through_a_file(tmp_path):
    result = metrics.linear_cka(Bridge(random_weights()), target_role="K")
    result.save(tmp_path / "result.safetensors")
    loaded = type(result).load(tmp_path / "result.safetensors")
    assert torch.equal(loaded.scores, result.scores)
    assert (loaded.metric, loaded.rank) == ("linear_cka", "measured")


@pytest.mark.parametrize("byte_budget", [1, 3000, 10**9])
@pytest.mark.parametrize("symmetric", [False, True])
def test_nuclear_norms_do_not_depend_on_the_tiling(byte_budget, symmetric):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(6, 4, 7, generator=generator, dtype=torch.float64)
    target = source if symmetric else torch.randn(5, 3, 7, generator=generator, dtype=torch.float64)
    keep = torch.rand(6, len(target), generator=generator) < 0.7
    scores = pairwise_nuclear_norms(
        source, None if symmetric else target, keep=keep, byte_budget=byte_budget
    )
    for i, j in np.ndindex(*scores.shape):
        expected = norm((source[i] @ target[j].T).numpy(), "nuc") if keep[i, j] else 0
        assert scores[i, j].item() == pytest.approx(expected, abs=1e-12)

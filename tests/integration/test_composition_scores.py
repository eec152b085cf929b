"""Composition Scores of trained models against TransformerLens's own and a plain loop.

TransformerLens forms the products of all pairs at once, some 9 GB for GPT-2 small. Pairs are
independent of each other, so the comparison is made on three layers, with the same numbers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity.metrics import (
    compare_composition_scores,
    composition_score,
)

pytestmark = pytest.mark.slow

#: Early, middle and late.
LAYERS = {"gpt2_small": [0, 4, 11], "smollm2": [0, 12, 29]}

#: Of a float32 score to the exact one. Errors are of the order of eps times the square root of
#: the 64 x 64 squares summed up, relative to scores above 0.01.
RELATIVE = 1e-4


@pytest.fixture(params=LAYERS)
def few_layers(request, monkeypatch):
    """A real model that shows three of its attention layers, and the numbers of these."""
    model = request.getfixturevalue(request.param)
    layers = LAYERS[request.param]
    shown = [(layer, model.blocks[layer]) for layer in layers]
    with monkeypatch.context() as patch:
        patch.setattr(model, "blocks_with", lambda _: shown)
        yield model, layers


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_every_pair_is_that_of_transformer_lens(few_layers, role):
    model, _ = few_layers
    table = compare_composition_scores(model, target_role=role)
    assert len(table) == 3 * model.cfg.n_heads**2
    assert table["upstream"].min() > 0.01
    assert table["relative_difference"].max() < RELATIVE


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_both_are_those_of_the_full_maps_in_float64(few_layers, role):
    model, layers = few_layers
    result = composition_score(model, target_role=role)
    with torch.no_grad():
        upstream = model.all_composition_scores(role).scores

    def weight(position: int, name: str, head: int) -> np.ndarray:
        stack = getattr(model.blocks[layers[position]].attn, f"W_{name}")
        group = model.cfg.n_heads // len(stack)
        return stack[head // group].detach().double().numpy()

    def circuit(position: int, head: int, first: str, second: str) -> np.ndarray:
        second_matrix = weight(position, second, head)
        return weight(position, first, head) @ (second_matrix if second == "O" else second_matrix.T)

    generator = np.random.default_rng(0)
    pairs = result.valid_mask.nonzero().numpy()
    for i, j, k, m in pairs[generator.choice(len(pairs), 40, replace=False)]:
        source = circuit(i, j, "V", "O")
        target = circuit(k, m, *{"Q": "QK", "K": "KQ", "V": "VO"}[role])
        exact = np.linalg.norm(source @ target) / np.linalg.norm(source) / np.linalg.norm(target)
        for scores in (result.scores, upstream):
            assert scores[i, j, k, m].item() == pytest.approx(exact, rel=RELATIVE)


@pytest.mark.parametrize("name", LAYERS)
def test_a_pair_does_not_depend_on_the_layers_around_it(name, request, monkeypatch):
    """What carries the comparison over to the whole model."""
    model, layers = request.getfixturevalue(name), LAYERS[name]
    whole = composition_score(model, target_role="K", progress=False)
    shown = [(layer, model.blocks[layer]) for layer in layers]
    with monkeypatch.context() as patch:
        patch.setattr(model, "blocks_with", lambda _: shown)
        part = composition_score(model, target_role="K")
    torch.testing.assert_close(
        part.scores, whole.scores[layers][:, :, layers], rtol=RELATIVE, atol=0
    )
    assert part.source_layer_indices == tuple(layers)

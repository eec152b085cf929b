"""Weights as the checkpoint has them and as the bridge folds them: recorded, and not mixed."""

from __future__ import annotations

import warnings

import matplotlib
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity.evaluation import (
    HeadLabels,
    head_detection,
    paired_difference,
)
from transformer_lens.tools.analysis.head_affinity.graph import head_graph
from transformer_lens.tools.analysis.head_affinity.metrics import simple_composition_score
from transformer_lens.tools.analysis.head_affinity.plots import (
    plot_detection,
    plot_scatter,
)
from transformer_lens.tools.analysis.head_affinity.readout import subspace_tokens
from transformer_lens.tools.analysis.head_affinity.significance import significance
from transformer_lens.tools.analysis.projection_kernel import (
    HeadAffinityResult,
    attention_head_subspace_affinity,
    attention_head_subspaces,
)

import oracles
import toy_models

matplotlib.use("Agg")

DIFFERENT = "different states of the weights, raw and folded"


def bridge():
    """A Llama whose first norms are far from uniform; folding multiplies what Q, K and V read."""
    model, weights = toy_models.llama()
    generator = torch.Generator().manual_seed(1)
    gains = [torch.rand(32, generator=generator) * 3 + 0.1 for _ in range(3)]
    with torch.no_grad():
        for block, gain in zip(model.original_model.model.layers, gains, strict=True):
            norm = block.input_layernorm
            getattr(norm, "original_component", norm).weight.copy_(gain)
    return model, weights, gains


@pytest.fixture(scope="module")
def folded():
    model, weights, gains = bridge()
    model.enable_compatibility_mode(disable_warnings=True)
    return model, weights, gains


@pytest.fixture(scope="module")
def raw_result():
    return attention_head_subspace_affinity(bridge()[0], target_role="Q")


@pytest.fixture(scope="module")
def folded_result(folded):
    return attention_head_subspace_affinity(folded[0], target_role="Q")


def test_a_result_knows_the_state_of_its_weights(raw_result, folded_result, folded):
    model, weights, gains = folded
    assert (raw_result.weights, folded_result.weights) == ("raw", "folded")
    assert attention_head_subspaces(model).weights == "folded"
    assert simple_composition_score(model, target_role="Q").weights == "folded"

    written = weights["model.layers.0.self_attn.o_proj.weight"][:, 8:16].double()
    read = weights["model.layers.2.self_attn.q_proj.weight"][16:24].double()
    # Reading weights take up the norm's weight; the writing ones of a model with RMS norms stay.
    expected = oracles.projection_kernel(written.numpy(), (read * gains[2]).T.numpy())
    assert folded_result.score((0, 1), (2, 2)) == pytest.approx(expected, abs=1e-5)
    expected = oracles.projection_kernel(written.numpy(), read.T.numpy())
    assert raw_result.score((0, 1), (2, 2)) == pytest.approx(expected, abs=1e-5)


def test_compatibility_without_processing_leaves_weights_raw():
    model, _, _ = bridge()
    model.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    assert attention_head_subspaces(model, ("Q",)).weights == "raw"


def test_the_state_is_stored_and_files_without_one_can_be_read(folded_result, tmp_path):
    import json

    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "folded.safetensors"
    folded_result.save(path)
    assert HeadAffinityResult.load(path).weights == "folded"

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    fields = json.loads(metadata["fields"])
    for name in ("weights", "stream", "d_model"):
        del fields[name]
    save_file(load_file(path), path, metadata | {"fields": json.dumps(fields)})
    old = HeadAffinityResult.load(path)
    assert (old.weights, old.stream, old.d_model) == ("raw", None, None)


def detections(*results):
    labels = HeadLabels.from_dict({"Some": ["0.1", "2.2"]})
    return [head_detection(result, labels) for result in results]


@pytest.mark.parametrize(
    "compare",
    [
        lambda one, other: head_graph([one, other]),
        lambda one, other: plot_scatter(one, other),
        lambda one, other: paired_difference(*detections(one, other), resamples=10),
        lambda one, other: plot_detection(detections(one, other)),
    ],
    ids=["head_graph", "plot_scatter", "paired_difference", "plot_detection"],
)
def test_comparing_different_states_warns(raw_result, folded_result, folded, compare):
    if compare.__code__.co_names[0] == "head_graph":
        # One result per pairing.
        folded_result = attention_head_subspace_affinity(folded[0], target_role="K")
    with pytest.warns(UserWarning, match=DIFFERENT) as caught:
        compare(raw_result, folded_result)
    assert caught[0].filename == __file__
    if compare.__code__.co_names[0] != "head_graph":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(raw_result, raw_result)


def test_a_null_of_the_other_state_warns(raw_result, folded):
    with pytest.warns(UserWarning, match=DIFFERENT) as caught:
        significance(raw_result, folded[0], n_samples=10)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("make", [toy_models.deepseek, toy_models.hybrid])
def test_what_processing_does_not_fold_stays_raw(make):
    """Their adapters leave the norms where they are, and TransformerLens warns of that."""
    model, _ = make()
    for name, parameter in model.original_model.named_parameters():
        if "input_layernorm" in name:
            parameter.data.uniform_(0.5, 2)
    before = attention_head_subspace_affinity(model, target_role="K")
    with pytest.warns(UserWarning, match="does not support fold_ln"):
        model.enable_compatibility_mode(disable_warnings=True)
    after = attention_head_subspace_affinity(model, target_role="K")
    assert torch.equal(before.scores, after.scores)
    assert (before.weights, after.weights) == ("raw", "raw")


@pytest.mark.parametrize("make", [toy_models.gpt2, toy_models.neox, toy_models.bloom])
def test_norms_that_subtract_the_mean_are_folded_and_what_is_written_is_centred(make):
    model, _ = make()
    model.enable_compatibility_mode(disable_warnings=True)
    assert attention_head_subspaces(model, ("O",)).weights == "folded"


def test_subspaces_at_hand_of_the_other_state_warn(folded):
    subspaces = attention_head_subspaces(bridge()[0], ("O",))
    with pytest.warns(UserWarning, match=DIFFERENT) as caught:
        subspace_tokens(folded[0], (0, 0), k=1, fold_final_norm=False, subspaces=subspaces)
    assert caught[0].filename == __file__


def test_a_rotation_null_of_the_other_state_warns(folded):
    scores = simple_composition_score(bridge()[0], target_role="Q")
    with pytest.warns(UserWarning, match=DIFFERENT) as caught:
        significance(scores, folded[0], null="rotation")
    assert caught[0].filename == __file__

"""Whoever calls TransformerLens 4.3's module can call ours: same names, keywords and results."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import sys

import pytest
import torch

from transformer_lens.tools.analysis import interchange, jacobian_lens
from transformer_lens.tools.analysis import orthonormal_subspace as exported_orthonormal_subspace
from transformer_lens.tools.analysis.projection_kernel import (
    HeadAffinityResult,
    orthonormal_subspace,
)

import toy_models

OURS = importlib.import_module("transformer_lens.tools.analysis.projection_kernel")


@pytest.fixture(scope="module")
def upstream():
    """The installed package's own module, loaded from its file beside ours."""
    distribution = importlib.metadata.distribution("transformer-lens")
    path = distribution.locate_file("transformer_lens/tools/analysis/projection_kernel.py")
    spec = importlib.util.spec_from_file_location("upstream_projection_kernel", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def public_definitions(module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def test_every_public_name_is_there(upstream):
    names = public_definitions(upstream)
    assert len(names) >= 10
    assert not [name for name in names if not hasattr(OURS, name)]
    for alias in ("AttentionRole", "LayerOrder", "HeadKind"):
        assert hasattr(upstream, alias) and hasattr(OURS, alias)


def test_every_parameter_and_field_is_there(upstream):
    for name, theirs in public_definitions(upstream).items():
        ours = getattr(OURS, name)
        if dataclasses.is_dataclass(theirs):
            their_fields = [field.name for field in dataclasses.fields(theirs)]
            our_fields = [field.name for field in dataclasses.fields(ours)]
            assert our_fields[: len(their_fields)] == their_fields, name
            # What we add has a default, so results can be put together as before.
            added = dataclasses.fields(ours)[len(their_fields) :]
            assert all(field.default is not dataclasses.MISSING for field in added), name
        else:
            our_parameters = inspect.signature(ours).parameters
            for parameter in inspect.signature(theirs).parameters.values():
                assert our_parameters[parameter.name].kind == parameter.kind, name


@pytest.mark.parametrize("target_role", ["Q", "K", "V"])
@pytest.mark.parametrize("layer_order", ["forward", "all"])
@pytest.mark.parametrize("make", [toy_models.gpt2, toy_models.llama, toy_models.hybrid])
def test_results_agree(upstream, make, target_role, layer_order):
    bridge, _ = make()
    options = {"target_role": target_role, "layer_order": layer_order}
    theirs = upstream.attention_head_subspace_affinity(bridge, **options)
    ours = OURS.attention_head_subspace_affinity(bridge, **options)
    for field in dataclasses.fields(theirs):
        expected, found = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name in ("scores", "normalized"):
            # Both are good to eps times the condition number of these heads, below 100.
            assert torch.allclose(found, expected, atol=100 * 32 * torch.finfo(torch.float32).eps)
        elif torch.is_tensor(expected):
            assert torch.equal(found, expected) and found.dtype == expected.dtype
        else:
            assert found == expected, field.name


def test_top_pairs_agree_on_the_same_scores(upstream):
    bridge, _ = toy_models.gpt2()
    theirs = upstream.attention_head_subspace_affinity(bridge, target_role="Q")
    fields = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs)}
    rounded = {name: fields[name].round(decimals=1) for name in ("scores", "normalized")}
    theirs = dataclasses.replace(theirs, **rounded)  # ties
    ours = HeadAffinityResult(**{**fields, **rounded})
    for normalized in (False, True):
        for k in (1, 7, 1000):
            expected = theirs.top_pairs(k, normalized=normalized)
            found = ours.top_pairs(k, normalized=normalized)
            assert [dataclasses.asdict(pair) for pair in found] == [
                dataclasses.asdict(pair) for pair in expected
            ]


def test_other_modules_of_the_package_use_ours():
    assert exported_orthonormal_subspace is orthonormal_subspace
    assert interchange.orthonormal_subspace is orthonormal_subspace
    assert jacobian_lens.orthonormal_subspace is orthonormal_subspace
    basis = interchange.random_basis(12, 3, seed=0)
    assert torch.allclose(basis.mT @ basis, torch.eye(3), atol=1e-6)

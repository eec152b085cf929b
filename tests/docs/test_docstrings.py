"""The examples in the docstrings run, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import transformer_lens.tools.analysis as analysis
from transformer_lens.tools.analysis import head_affinity

import toy_models

OURS = "transformer_lens.tools.analysis"
MODULES = [
    f"{OURS}.{name}"
    for name in (
        "projection_kernel",
        "_head_affinity_result",
        "_head_subspaces",
        "_subspace",
        *(
            module.name
            for module in pkgutil.walk_packages(head_affinity.__path__, "head_affinity.")
            if not module.ispkg and "._" not in module.name
        ),
    )
]


@pytest.fixture
def example_namespace(monkeypatch, tmp_path):
    """What the examples take for granted: the public names, and a small model called ``model``."""
    monkeypatch.chdir(tmp_path)
    public = importlib.import_module(f"{OURS}.projection_kernel")
    names = {name: getattr(public, name) for name in public.__all__}
    return {**names, "model": toy_models.coordinate_model()}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, example_namespace):
    module = importlib.import_module(name)
    outcome = doctest.testmod(
        module,
        extraglobs=example_namespace,
        optionflags=doctest.NORMALIZE_WHITESPACE,
    )
    assert outcome.attempted > 0, "no example in this module was found"
    assert outcome.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name):
    module = importlib.import_module(name)
    undocumented = [
        member
        for member in getattr(module, "__all__", vars(module))
        if not member.startswith("_")
        and inspect.isfunction(function := getattr(module, member))
        and function.__module__.startswith(analysis.__name__)
        and ">>>" not in (function.__doc__ or "")
        and function.__module__ == name
    ]
    assert not undocumented

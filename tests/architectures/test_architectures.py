"""Affinities equal the raw weights' on every architecture, or are refused as the docs say."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import transformers

from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.tools.analysis.head_affinity.behavior import attention_behavior

from . import bench
from .layouts import Fused, blocked, per_head
from .table import ARCHITECTURES, GEOMETRIES, variants_of

pytestmark = pytest.mark.slow

ON_PAGE = bench.cells_on_page(bench.TABLE.read_text())


@pytest.fixture(autouse=True)
def _no_model_outlives_its_test():
    yield
    gc.collect()  # bridges and models refer to each other


def test_every_listed_architecture_has_a_row_and_a_line_on_the_page():
    assert set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES) == set(ON_PAGE)
    assert bench.TABLE.read_text() == bench.table(ON_PAGE)


@pytest.mark.parametrize("key", [key for key in ARCHITECTURES if variants_of(key)[0].missing])
def test_what_is_listed_as_missing_is_missing(key):
    assert not hasattr(transformers, key)


@pytest.mark.parametrize("key", sorted(ARCHITECTURES))
def test_scores_are_right_or_refused_as_the_page_says(key):
    found = bench.outcomes(key)

    for *case, outcome in found:
        assert not outcome.startswith("WRONG"), (case, outcome)
        if outcome.startswith("refused"):
            assert key in outcome
            assert "has no attribute" not in outcome
            assert len(outcome) < 320
    assert bench.summary(found) == ON_PAGE[key], "run `python -m architectures.bench` in tests/"


@pytest.mark.parametrize(
    "key, name, out, wrong",
    [
        ("GPTNeoXForCausalLM", "query_key_value", "dense", blocked),
        ("MptForCausalLM", "Wqkv", "out_proj", per_head),
    ],
)
def test_a_wrong_layout_would_be_noticed(monkeypatch, key, name, out, wrong):
    row = dataclasses.replace(variants_of(key)[0], layout=Fused(name, out, wrong))
    monkeypatch.setitem(ARCHITECTURES, key, row)

    outcomes = {pairing: outcome for _, _, pairing, outcome in bench.outcomes(key)}

    assert outcomes.pop("OO") == "right"
    assert all(outcome.startswith("WRONG: off by") for outcome in outcomes.values())


def test_heads_that_a_layer_lacks_have_no_behaviour():
    key = "LagunaForCausalLM"
    row = next(row for row in variants_of(key) if row.label == "more heads in some layers")
    model = bench.tiny_model(key, row, GEOMETRIES["multi-head"])
    model.set_attn_implementation("eager")

    found = attention_behavior(bench.bridge_of(model, key), batch=1, seq_len=4)

    for scores in (found.previous_token, found.induction, found.identity):
        present = ~scores.isnan()
        assert present.sum(1).tolist() == [4, 8, 4, 8]
        assert present[:, :4].all()
        assert bool(((scores[present] > 0) & (scores[present] < 1)).all())
    assert found.to_dataframe().groupby("layer").size().tolist() == [4, 8, 4, 8]
    assert "nan" not in repr(found)

"""The main job on a real model: weights say who talks to whom, and behaviour bears it out.

Scores are of SmolLM2-135M-Instruct as the demo package holds it. Measured with seeds 0 and 1 and
with 1, 4 and 8 sequences: L16H0 gives 0.88 to 0.89 of its attention to the previous token, query
heads 3, 4 and 5 of layer 17 give 0.63 to 0.81 to the induction target. Thresholds leave about 0.1
for other versions of the kernels, and are far from what heads do by chance (medians below 0.05).
"""

from __future__ import annotations

import contextlib
import csv
import io

import pytest

from transformer_lens.tools.analysis.head_affinity.behavior import attention_behavior
from transformer_lens.tools.analysis.projection_kernel import attention_head_affinities

import quick_start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(smollm2):
    return attention_head_affinities(smollm2)


@pytest.fixture(scope="module")
def behavior(smollm2):
    return attention_behavior(smollm2)


@pytest.fixture(scope="module")
def table(behavior):
    return behavior.to_dataframe()


def test_the_strongest_pair_of_o_to_k(results):
    first, second = results["OK"].top_pairs(2)
    assert str(first.source) == "L16H0 (query head, O)"
    assert str(first.target) == "L17H1 (kv head, K)"
    assert first.score == pytest.approx(24.857, abs=0.005)
    assert second.score == pytest.approx(24.327, abs=0.005), "no tie: the order is not by chance"


def test_its_source_is_the_previous_token_head(table):
    scores = table["previous_token"]
    assert scores.idxmax() == (16, 0)
    assert scores[16, 0] > 0.8
    assert scores.median() < 0.05


def test_its_target_is_read_by_induction_heads_alone(table):
    scores = table["induction"]
    layer = scores.loc[17]
    assert (layer.loc[3:5] > 0.5).all()
    # The control: the six heads of the layer that read other keys.
    assert (layer.drop([3, 4, 5]) < 0.25).all()
    assert scores.median() < 0.05


@pytest.fixture(scope="module")
def run(smollm2, tmp_path_factory):
    """Printed text and output directory of one run of the script."""
    output = tmp_path_factory.mktemp("quick_start") / "made" / "by_the_script"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        # The model is loaded already, by the same function.
        patch.setattr(quick_start, "load_smollm2", lambda: smollm2)
        patch.setenv("MPLBACKEND", "Agg")
        quick_start.main(["--top", "3", "--output", str(output)])
    return text.getvalue(), output


def test_it_prints_tables_and_the_finding(run):
    printed, _ = run
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "L16H0 L17 kv1 (read by query heads 3-5) 24.86 0.388 7.11" in lines
    assert "L23H2 L24H4 18.81 0.294 7.11" in lines
    assert "L23H2 L29 kv0 (read by query heads 0-2) 37.28 0.582 7.11" in lines
    assert sum(line.endswith(" 7.11") for line in lines) == 9, "three pairings of three pairs each"
    assert (
        "Weights and behaviour agree: a previous-token head writes where the keys of induction "
        "heads L17H3, L17H4, L17H5 are read." in printed
    )


def test_it_writes_tables_and_figures(run):
    _, output = run
    tables = {}
    for path in output.glob("*.csv"):
        with path.open() as file:
            tables[path.name] = list(csv.DictReader(file))
    assert {name: len(rows) for name, rows in tables.items()} == {
        "affinity_OQ.csv": 35_235,
        "affinity_OK.csv": 11_745,
        "affinity_OV.csv": 11_745,
        "behavior.csv": 270,
    }
    best = tables["affinity_OK.csv"][0]
    assert (best["source"], best["target"], best["target_kind"]) == ("L16H0", "L17H1", "kv")
    assert (best["target_first_query_head"], best["target_last_query_head"]) == ("3", "5")
    figures = {path.name: path.read_bytes() for path in output.glob("*.png")}
    assert set(figures) == {"affinity_OK.png", "distribution.png"}
    assert all(data.startswith(b"\x89PNG") and len(data) > 20_000 for data in figures.values())


def test_another_finding_is_told_as_such(results, behavior, smollm2):
    """The statement is computed: for a pair that is no induction circuit it says so."""
    report = quick_start.Report(results, smollm2.cfg.d_model)
    pair = results["OV"].top_pairs(1)[0]
    text = quick_start.describe_finding(report, pair, behavior)
    assert "L23H2 → L29 kv0 (read by query heads 0-2)" in text
    assert "This is not the pair of an induction circuit: L23H2 is no previous-token head" in text
    assert "agree" not in text

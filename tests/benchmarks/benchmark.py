"""Installed TransformerLens 4.3 against this project, on the same weights, in one run.

Both sides run in turn on the same model, and medians are compared, so that a machine whose speed
drifts drifts for both. Peak memory is measured in a fresh process for each side. Run with
``make benchmark``; the table goes to ``docs/source/content/projection_kernel_benchmark.md``.
``--full`` runs the whole 7B shape once, ours only, and sets it beside what the other side would
need at its measured rate.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import pathlib
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import psutil
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "source" / "content" / "projection_kernel_benchmark.md"
sys.path[:0] = [str(ROOT / "overlay"), str(ROOT / "demos")]


def activate_working_copy() -> None:
    """Measure the working copy, whatever is installed."""
    import transformer_lens_overlay

    transformer_lens_overlay.install(ROOT / "transformer_lens" / "tools" / "analysis")


def ours() -> ModuleType:
    return importlib.import_module("transformer_lens.tools.analysis.projection_kernel")


def upstream() -> ModuleType:
    """The installed package's own module, loaded from its file."""
    distribution = importlib.metadata.distribution("transformer-lens")
    path = distribution.locate_file("transformer_lens/tools/analysis/projection_kernel.py")
    spec = importlib.util.spec_from_file_location("upstream_projection_kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- models ------------------------------------------------------------------------------------


def random_slice(layers: int, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Attention weights of a 7B shape (32 heads of width 128 in 4096 dimensions), random.

    Only what both sides read of a bridge; a whole model would add memory and measure nothing.
    """
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    blocks = [
        SimpleNamespace(attn=SimpleNamespace(W_Q=weight(32, 4096, 128), W_O=weight(32, 128, 4096)))
        for _ in range(layers)
    ]
    return SimpleNamespace(
        cfg=SimpleNamespace(device="cpu", original_architecture="RandomWeights"),
        blocks_with=lambda name: list(enumerate(blocks)),
    )


def load(shape: str):
    import demo_model

    if shape == "GPT-2 small":
        try:
            return demo_model.load_gpt2_small()
        except (OSError, RuntimeError) as error:
            print(f"GPT-2 small: {error}\nUsing random weights of its shape.", file=sys.stderr)
            from transformers import GPT2Config, GPT2LMHeadModel

            from transformer_lens.model_bridge.sources._bridge_builder import (
                build_bridge_from_module,
            )

            model = GPT2LMHeadModel(GPT2Config()).eval()
            return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    if shape == "SmolLM2-135M":
        return demo_model.load_smollm2()
    return random_slice(int(shape.split()[-2]))


SHAPES = ("GPT-2 small", "SmolLM2-135M", "7B shape, 4 layers", "7B shape, 8 layers")


# -- the steps ---------------------------------------------------------------------------------


def theirs_extract(module: ModuleType, model, role: str):
    blocks = list(model.blocks_with("attn"))
    layers = [layer for layer, _ in blocks]
    matrices = [module._read_role_matrix(model, block, layer, role) for layer, block in blocks]
    _, ambient, width = module._validate_role_shapes(matrices, layers, role)
    bases, _ = module._extract_bases(
        matrices,
        layers,
        role,
        selected_rank=width,
        rtol=max(ambient, width) * torch.finfo(torch.float32).eps,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return bases.flatten(0, 1)


def steps(shape: str, model) -> dict[str, tuple[Callable, Callable]]:
    """For each step the other side's and ours, on inputs that are made beforehand."""
    from transformer_lens.tools.analysis.head_affinity.metrics import composition_score

    new, old = ours(), upstream()
    subspaces = new.attention_head_subspaces(model, ("O", "Q"))
    source, target = (subspaces[role].frames for role in "OQ")
    result = new.attention_head_subspace_affinity(subspaces, target_role="Q")
    old_result = old.HeadAffinityResult(
        **{name: getattr(result, name) for name in old.HeadAffinityResult.__dataclass_fields__}
    )
    chosen = {
        "extraction, O and Q": (
            lambda: [theirs_extract(old, model, role) for role in "OQ"],
            lambda: new.attention_head_subspaces(model, ("O", "Q")),
        ),
        "scoring, O to Q": (
            lambda: old._pairwise_projection_kernel(source, target),
            lambda: new.attention_head_subspace_affinity(subspaces, target_role="Q"),
        ),
        "O to Q, end to end": (
            lambda: old.attention_head_subspace_affinity(model, target_role="Q"),
            lambda: new.attention_head_subspace_affinity(model, target_role="Q"),
        ),
        "top_pairs(20)": (lambda: old_result.top_pairs(20), lambda: result.top_pairs(20)),
    }
    if "7B" not in shape:
        # All layers of SmolLM2 would take the other side some 22 GB.
        few = first_layers(model, 15)
        chosen["composition scores, Q, K and V" + (", 15 layers" if few is not model else "")] = (
            lambda: all_composition_scores(few),
            lambda: [composition_score(few, target_role=role) for role in "QKV"],
        )
        chosen["O to Q, K and V, end to end"] = (
            lambda: [old.attention_head_subspace_affinity(model, target_role=r) for r in "QKV"],
            lambda: new.attention_head_affinities(model),
        )
    return chosen


def first_layers(model, count: int):
    """A bridge that shows its first attention layers only; itself if it has no more."""
    blocks = model.blocks_with("attn")
    if len(blocks) <= count:
        return model
    few = copy.copy(model)
    object.__setattr__(few, "blocks_with", lambda _: blocks[:count])
    return few


def seconds(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()  # with a graph it takes more than 23 GB at GPT-2 small
def all_composition_scores(model) -> list:
    return [model.all_composition_scores(role) for role in "QKV"]


def slow(shape: str, step: str) -> bool:
    """Steps that take the other side minutes; they are run once, after the warm-up."""
    return "7B" in shape or step.startswith("composition")


def compare(theirs: Callable, mine: Callable, repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios run by run."""
    mine()  # warm-up: first calls allocate
    pairs = [(seconds(theirs), seconds(mine)) for _ in range(repeats)]
    return (
        statistics.median(old for old, _ in pairs),
        statistics.median(new for _, new in pairs),
        statistics.median(old / new for old, new in pairs),
    )


# -- memory ------------------------------------------------------------------------------------


def peak_above(call: Callable) -> int:
    """Bytes of resident memory that ``call`` reaches above what the process holds before it."""
    process, peak, done = psutil.Process(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    before = process.memory_info().rss
    sampler = threading.Thread(target=sample)
    sampler.start()
    call()
    done.set()
    sampler.join()
    return max(peak, process.memory_info().rss) - before


def measure_peak(side: str, shape: str) -> int:
    """In this process: O to Q, end to end, for the first time."""
    model = load(shape)
    module = ours() if side == "ours" else upstream()
    warm_up = random_slice(1)
    for block in (block for _, block in warm_up.blocks_with("attn")):
        for role in ("W_Q", "W_O"):  # threads and libraries allocate once, at any size
            setattr(block.attn, role, getattr(block.attn, role)[:1, :64, :64].clone())
    module.attention_head_subspace_affinity(warm_up, target_role="Q", layer_order="all")
    return peak_above(lambda: module.attention_head_subspace_affinity(model, target_role="Q"))


def peaks(shape: str) -> tuple[int, int]:
    def in_fresh_process(side: str) -> int:
        command = [sys.executable, __file__, "--peak", side, shape]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return in_fresh_process("upstream"), in_fresh_process("ours")


# -- flops -------------------------------------------------------------------------------------


def gemm_rate() -> float:
    """Flops per second of a large float32 matrix product, the best of several."""
    a, b = torch.randn(2, 3072, 3072)
    best = min(seconds(lambda: a @ b) for _ in range(8))
    return 2 * 3072**3 / best


def projector_flops(frames: int, ambient: int, width: int, pairs: int, sides: int) -> int:
    """What the projector formulation has to compute (``_pairwise_overlap``, module docstring)."""
    return ambient**2 * (pairs + sides * frames * width)


# -- report ------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(repeats: int, shapes: list[str]) -> str:
    rate = gemm_rate()
    speed, memory, efficiency = [], [], []
    for shape in shapes:
        model = load(shape)
        for step, (theirs, mine) in steps(shape, model).items():
            old, new, ratio = compare(theirs, mine, 1 if slow(shape, step) else repeats)
            speed.append([shape, step, f"{old:.4g} s", f"{new:.4g} s", f"{ratio:.1f}x"])
            print(*speed[-1], sep="   ", file=sys.stderr, flush=True)
            if step.startswith("scoring"):
                efficiency.append(efficiency_row(shape, model, new, rate))
        del model
        old_peak, new_peak = peaks(shape)
        memory.append(
            [
                shape,
                f"{old_peak / 2**20:,.0f} MiB",
                f"{new_peak / 2**20:,.0f} MiB",
                f"{new_peak / old_peak:.2f}",
            ]
        )
        print(*memory[-1], sep="   ", file=sys.stderr, flush=True)
    return "\n\n".join(
        [
            "# Benchmark of the Projection Kernel",
            f"`make benchmark`, {time.strftime('%Y-%m-%d')}: {machine()}. Installed "
            f"TransformerLens {importlib.metadata.version('transformer-lens')} and this project on "
            "the same weights, in turn; medians, and the median of the ratios (7B shape and "
            "composition scores: one run). GPT-2 small are the real weights where they are to be "
            "had; the 7B shape has random ones.",
            "## Time",
            table(["model", "step", "TransformerLens", "ours", "ratio"], speed),
            "## Peak memory above the model's, O to Q end to end",
            table(["model", "TransformerLens", "ours", "ours / theirs"], memory),
            "## Scoring against the machine",
            f"A large float32 matrix product runs at {rate / 1e9:.0f} GFLOP/s here. The flop count "
            "is that of the formulation that was chosen; masked pairs are not counted.",
            table(
                ["model", "flops", "at that rate", "measured", "measured / needed", "of the rate"],
                efficiency,
            ),
        ]
    )


def efficiency_row(shape: str, model, measured: float, rate: float) -> list[str]:
    subspaces = ours().attention_head_subspaces(model, ("O", "Q"))
    layers, heads, ambient, width = subspaces["O"].bases.shape
    pairs = heads**2 * layers * (layers - 1) // 2
    # The last layer writes to nobody and the first reads from nobody.
    flops = projector_flops((layers - 1) * heads, ambient, width, pairs, sides=2)
    return [
        shape,
        f"{flops / 1e9:,.1f} G",
        f"{flops / rate:.3g} s",
        f"{measured:.3g} s",
        f"{measured * rate / flops:.2f}",
        f"{100 * flops / rate / measured:.0f} %",
    ]


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def full_shape() -> str:
    """All 32 layers of the 7B shape, in bfloat16: ours for real, theirs by its measured rate."""
    old = upstream()
    frames = torch.linalg.qr(torch.randn(64, 4096, 128))[0]
    their_rate = 64 * 64 / seconds(lambda: old._pairwise_projection_kernel(frames, frames))
    one = random_slice(1, torch.bfloat16)
    their_extraction = 32 * seconds(lambda: [theirs_extract(old, one, role) for role in "OQ"])
    their_scoring = (32 * 32) ** 2 / their_rate
    del frames, one
    model = random_slice(32, torch.bfloat16)
    mine = seconds(
        lambda: ours().attention_head_subspace_affinity(model, target_role="Q", progress=True)
    )
    total = their_extraction + their_scoring
    return (
        "## The full 7B shape\n\n"
        "`benchmark.py --full` adds this: 32 layers of 32 heads, O to Q end to end, bfloat16 "
        "weights. Ours was run; the other side is its measured rate (pairs per second at 64 x 64 "
        "heads, heads per second at one layer) times the 1,048,576 pairs and 2,048 heads it "
        "computes.\n\n"
        + table(
            ["", "TransformerLens (extrapolated)", "ours (measured)", "ratio"],
            [["O to Q", f"{total:,.0f} s", f"{mine:,.0f} s", f"{total / mine:.1f}x"]],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=7, help="runs of each side; once where that takes minutes"
    )
    parser.add_argument("--shapes", nargs="*", default=SHAPES, choices=SHAPES)
    parser.add_argument("--full", action="store_true", help="also the full 7B shape, once")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    activate_working_copy()
    if arguments.peak:
        print(measure_peak(*arguments.peak))
        return
    text = report(arguments.repeats, list(arguments.shapes))
    if arguments.full:
        text += "\n\n" + full_shape()
    print(text)
    if not arguments.no_write:
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(text + "\n")


if __name__ == "__main__":
    main()

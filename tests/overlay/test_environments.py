"""The wheel beside an unmodified TransformerLens, in fresh virtual environments."""

from __future__ import annotations

import collections
import importlib.metadata
import pathlib
import sys
import tarfile
import zipfile

import pytest

from virtual_environments import OURS, ROOT, UPSTREAM, run

pytestmark = pytest.mark.overlay

ANALYSIS = "transformer_lens.tools.analysis"


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_uninstalling_leaves_nothing(new_environment, installer):
    new_environment.install(UPSTREAM, installer=installer)
    before = new_environment.files()
    new_environment.install(OURS, installer=installer)
    assert new_environment.which() == "OURS"
    assert new_environment.which(TRANSFORMER_LENS_OVERLAY="0") == "UPSTREAM"
    # Byte code, too, is to go.
    new_environment.run("-c", f"import {ANALYSIS}")
    assert list(new_environment.site_packages.glob("transformer_lens_overlay/**/*.pyc"))
    new_environment.uninstall(OURS, installer=installer)
    assert new_environment.files() == before
    assert new_environment.which() == "UPSTREAM"


def test_neither_order_nor_reinstallation_matters(new_environment):
    new_environment.install(OURS)
    new_environment.install(UPSTREAM)
    assert new_environment.which() == "OURS"
    new_environment.install(UPSTREAM, options=("--force-reinstall",))
    assert new_environment.which() == "OURS"


def test_no_file_belongs_to_two_distributions(environment):
    owners = collections.defaultdict(set)
    for distribution in importlib.metadata.distributions(path=[str(environment.site_packages)]):
        for file in distribution.files or ():
            path = pathlib.Path(file.locate()).resolve()
            assert path.exists() or path.suffix == ".pyc", path
            owners[path].add(distribution.metadata["Name"])
    assert {name for names in owners.values() for name in names} == {OURS, "transformer-lens"}
    assert not {path: names for path, names in owners.items() if len(names) > 1}


def test_the_wheel_holds_the_working_copy(release):
    tree = ROOT / "transformer_lens/tools/analysis"
    sources = {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(release["wheel"]) as wheel:

        def below(prefix: str) -> dict[str, bytes]:
            names = (name for name in wheel.namelist() if name.startswith(prefix))
            return {name.removeprefix(prefix): wheel.read(name) for name in names}

        assert below(f"transformer_lens_overlay/tree/{ANALYSIS.replace('.', '/')}/") == sources
        stubs = below("transformer_lens-stubs/")
    assert stubs.pop("py.typed") == b"partial\n"
    assert stubs == {
        f"tools/analysis/{name}i": text for name, text in sources.items() if name.endswith(".py")
    }
    with tarfile.open(release["sdist"]) as sdist:
        assert not [name for name in sdist.getnames() if "/tests/" in name or "/.venv" in name]


def test_the_wheel_of_the_tree_is_that_of_the_sdist(release, tmp_path):
    """Byte for byte: hatchling's wheels are reproducible."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    assert (tmp_path / release["wheel"].name).read_bytes() == release["wheel"].read_bytes()


USE = f"""
import importlib
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.tools.analysis import interchange, jacobian_lens, projection_kernel

ours = importlib.import_module("{ANALYSIS}.projection_kernel")
assert "transformer_lens_overlay" in ours.__file__
for module in (interchange, jacobian_lens):
    assert module.orthonormal_subspace is ours.orthonormal_subspace
assert projection_kernel is ours.projection_kernel, "re-exported by the package"

torch.manual_seed(0)
hf = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_layer=2, n_head=2, n_embd=16)).eval()
bridge = build_bridge_from_module(hf, "GPT2LMHeadModel", hf_config=hf.config)
assert isinstance(bridge, TransformerBridge)
result = ours.attention_head_affinities(bridge)["OQ"]
assert len(result.top_pairs(2)) == 2

basis = interchange.random_basis(16, 3, seed=0)
assert torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-5)
same = ours.orthonormal_subspace(basis)
assert abs(float(ours.projection_kernel(same, same).score) - 3) < 1e-5

lens = jacobian_lens.JacobianLens({{0: torch.eye(16)}}, n_prompts=1, d_model=16)
(name, ablate), = lens.ablation_hooks(bridge, [1, 2], [0])
removed = ablate(torch.randn(1, 4, 16), hook=None)
assert (removed @ lens.lens_vectors(bridge, [1, 2], 0).T).abs().max() < 1e-4
print("done")
"""


def test_a_model_and_the_modules_of_transformer_lens_work_over_ours(environment):
    assert environment.run("-c", USE).split()[-1] == "done"


def test_under_pytest(environment, tmp_path):
    (tmp_path / "conftest.py").write_text(
        f"import pytest\npytest.register_assert_rewrite('{ANALYSIS}.projection_kernel')\n"
    )
    (tmp_path / "test_it.py").write_text(
        f"import importlib\n"
        f"def test_it():\n"
        f"    module = importlib.import_module('{ANALYSIS}.projection_kernel')\n"
        f"    assert module.attention_head_affinities\n"
        f"    assert type(module.__loader__).__name__ == 'AssertionRewritingHook'\n"
    )
    assert "1 passed" in environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path)


def test_in_a_spawned_process(environment, tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        f"import importlib, multiprocessing\n"
        f"def which():\n"
        f"    module = importlib.import_module('{ANALYSIS}.projection_kernel')\n"
        f"    assert module.attention_head_affinities\n"
        f"if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context('spawn').Process(target=which)\n"
        f"    process.start(); process.join(); print(process.exitcode)\n"
    )
    assert environment.run(script).split() == ["0"]


HOOKS = {
    "jaxtyping": (
        "from jaxtyping import install_import_hook\n"
        f"install_import_hook('{ANALYSIS}', 'beartype.beartype')"
    ),
    "beartype": f"from beartype.claw import beartype_package\nbeartype_package('{ANALYSIS}')",
    # Not the whole package: typeguard takes the shapes of jaxtyping for forward references, in
    # TransformerLens's modules as in ours, and cannot parse those of several dimensions.
    "typeguard": (
        f"from typeguard import install_import_hook\ninstall_import_hook(['{ANALYSIS}._linalg'])"
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_import_hooks_process_our_modules(environment, hook):
    call = f"""
import importlib
importlib.import_module("{ANALYSIS}.projection_kernel").attention_head_affinities
linalg = importlib.import_module("{ANALYSIS}._linalg")
try:
    linalg.thin_qr("not a tensor")
except Exception as error:
    print(type(linalg.__loader__).__module__.split(".")[0], type(error).__module__.split(".")[0])
"""
    loader, error = environment.run("-c", f"{HOOKS[hook]}\n{call}").split()
    assert loader.strip("_") in {hook}
    assert error in {hook, "beartype"}


def test_the_working_copy_wins_over_an_installed_wheel(environment):
    """The root ``conftest.py``, in an environment whose start-up activated the wheel."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import conftest
conftest.pytest_sessionstart()
import importlib
print(importlib.import_module("{ANALYSIS}.projection_kernel").__file__)
"""
    found = environment.run("-c", code).strip()
    assert found == str(ROOT / f"{ANALYSIS.replace('.', '/')}/projection_kernel.py")

"""The mechanism alone, on a miniature TransformerLens that imports in no time."""

from __future__ import annotations

import os
import pathlib
import pkgutil
import re
import shutil
import sys
import sysconfig
import textwrap

import pytest

from virtual_environments import ROOT, run

pytestmark = pytest.mark.overlay

PACKAGE = "transformer_lens.tools.analysis"
OVERLAY = ROOT / "overlay"

FILES = {
    "transformer_lens/__init__.py": "",
    "transformer_lens/tools/__init__.py": "",
    "transformer_lens/tools/training.py": "",
    f"{PACKAGE.replace('.', '/')}/__init__.py": "from .projection_kernel import owner\n",
    f"{PACKAGE.replace('.', '/')}/projection_kernel.py": "owner = 'upstream'\n",
    f"{PACKAGE.replace('.', '/')}/jacobian_lens.py": "from .projection_kernel import owner\n",
}
TREE = f"transformer_lens_overlay/tree/{PACKAGE.replace('.', '/')}"
OUR_FILES = {
    f"{TREE}/projection_kernel.py": (
        "from ._linalg import twice\nowner = 'ours'\n"
        "def typed(number: int) -> int:\n    return twice(number)\n"
    ),
    f"{TREE}/_linalg.py": "def twice(number: int) -> int:\n    return 2 * number\n",
}

#: What the interpreter does with the start-up files: until 3.17, and from 3.15 on (PEP 829). No
#: Python that knows .start files is at hand; the second follows the text of the PEP.
STARTERS = {
    "pth": "import site; site.addsitedir({site!r})",
    "start": (
        "import pkgutil\n"
        "for line in open({site!r} + '/transformer_lens_overlay.start', encoding='utf-8-sig'):\n"
        "    pkgutil.resolve_name(line.strip())()"
    ),
}


@pytest.fixture
def site(tmp_path) -> pathlib.Path:
    """A site-packages directory with the miniature and an installed overlay."""
    for name, text in {**FILES, **OUR_FILES}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(OVERLAY / "transformer_lens_overlay/__init__.py", tmp_path / TREE / "../../../..")
    for suffix in STARTERS:
        shutil.copy(OVERLAY / f"transformer_lens_overlay.{suffix}", tmp_path)
    return tmp_path


def python(
    site: pathlib.Path, code: str, starter: str = "pth", behind: str | None = None, **variables: str
) -> list[str]:
    """Words printed by ``code`` in a process that was started with the overlay's start-up file.

    -S: what is installed for these tests, this project maybe, stays out; ``behind`` lets it in.
    """
    start = STARTERS[starter].format(site=str(site))
    code = f"{start}\n{textwrap.dedent(code)}"
    path = os.pathsep.join(filter(None, (str(site), behind)))
    return run(sys.executable, "-S", "-c", code, cwd=site, PYTHONPATH=path, **variables).split()


OWNERS = f"""
import {PACKAGE}, {PACKAGE}.jacobian_lens as lens
print({PACKAGE}.owner, lens.owner)
"""


@pytest.mark.parametrize("starter", STARTERS)
def test_upstream_modules_see_ours(site, starter):
    assert python(site, OWNERS, starter) == ["ours", "ours"]


def test_the_start_file_is_one_entry_point():
    (line,) = (OVERLAY / "transformer_lens_overlay.start").read_text("utf-8").splitlines()
    assert re.fullmatch(r"[\w.]+:\w+", line)
    assert callable(pkgutil.resolve_name(line))


@pytest.mark.parametrize("starter", STARTERS)
def test_the_environment_switches_it_off(site, starter):
    code = OWNERS + "import transformer_lens_overlay as o; print(o.is_active())"
    off = {"TRANSFORMER_LENS_OVERLAY": "0"}
    assert python(site, code, starter, **off) == ["upstream", "upstream", "False"]
    assert python(site, code, starter) == ["ours", "ours", "True"]


def break_tree(site: pathlib.Path, how: str) -> None:
    tree = site / TREE
    if how == "package removed":
        shutil.rmtree(site / "transformer_lens_overlay")
    elif how == "package broken":
        (site / "transformer_lens_overlay/__init__.py").write_text("1 / 0")
    else:
        shutil.rmtree(tree)
        if how == "tree emptied":
            tree.mkdir()
        elif how == "tree became a file":
            tree.write_text("")


@pytest.mark.parametrize(
    "how",
    ["package removed", "package broken", "tree removed", "tree emptied", "tree became a file"],
)
def test_nothing_breaks_without_our_files(site, how):
    break_tree(site, how)
    assert python(site, OWNERS) == ["upstream", "upstream"]


def test_nothing_breaks_when_our_files_go_while_python_runs(site):
    assert python(site, f"import shutil; shutil.rmtree({str(site / TREE)!r}){OWNERS}") == [
        "upstream",
        "upstream",
    ]


def test_start_up_imports_nothing_costly_and_not_the_host(site):
    code = "import sys; print(*sys.modules)"
    added = set(python(site, code)) - set(python(site, code, TRANSFORMER_LENS_OVERLAY="0"))
    assert not added, "the switch decides about nothing but the hook"
    loaded = set(python(site, code))
    assert not {"transformer_lens", "torch", "numpy", "typing", "pathlib"} & loaded


def test_installing_twice_adds_one_hook(site):
    code = """
    import sys, transformer_lens_overlay as overlay
    hooks = len(sys.path_hooks)
    overlay.start(); overlay.install(); overlay.install()
    print(len(sys.path_hooks) - hooks)
    """
    assert python(site, textwrap.dedent(code) + OWNERS) == ["0", "ours", "ours"]


# In these processes nothing happened at start-up, as in one that was older than the installation.


def late(site: pathlib.Path, code: str) -> list[str]:
    return python(site, textwrap.dedent(code), TRANSFORMER_LENS_OVERLAY="0")


def test_install_reaches_a_running_process(site):
    # The directory's finder exists and is remembered before installation.
    code = """
    import transformer_lens.tools.training, transformer_lens_overlay as overlay
    print(overlay.is_active())
    overlay.install()
    print(overlay.is_active())
    """
    assert late(site, textwrap.dedent(code) + OWNERS) == ["False", "True", "ours", "ours"]


def test_install_says_when_it_is_too_late(site):
    code = f"""
    import os, {PACKAGE}, transformer_lens_overlay as overlay
    try:
        overlay.install()
    except overlay.OverlayError as error:
        print("raised:", error)
    del os.environ[overlay.SWITCH]
    overlay.start()  # At start-up there is nobody to tell.
    print(overlay.is_active())
    """
    words = " ".join(late(site, code))
    assert words.startswith("raised: ")
    assert "was imported before the overlay" in words
    assert "restart the kernel" in words
    assert words.endswith("False")


def test_install_after_our_own_import_is_fine(site):
    code = OWNERS + "import transformer_lens_overlay; transformer_lens_overlay.install()"
    assert python(site, code) == ["ours", "ours"]


def test_install_refuses_a_tree_that_is_not_there(site):
    code = """
    import transformer_lens_overlay as overlay
    try:
        overlay.install("nowhere")
    except FileNotFoundError as error:
        print(error)
    """
    assert "nowhere" in " ".join(late(site, code))


def test_listings_and_resources_are_complete(site):
    code = f"""
    import importlib.resources, inspect, pkgutil, {PACKAGE} as package
    from {PACKAGE} import _linalg
    import transformer_lens.tools
    print(*sorted({{m.name for m in pkgutil.iter_modules(package.__path__)}}))
    print(*sorted({{m.name for m in pkgutil.iter_modules(transformer_lens.tools.__path__)}}))
    print(importlib.resources.files(package).joinpath("jacobian_lens.py").is_file())
    print("twice" in inspect.getsource(_linalg))
    """
    words = python(site, code)
    assert words[:3] == ["_linalg", "jacobian_lens", "projection_kernel"]
    assert words[3:] == ["analysis", "training", "True", "True"]


HOOKS = {
    "beartype package": (
        "from beartype.claw import beartype_package\nbeartype_package('transformer_lens')"
    ),
    "beartype all": "from beartype.claw import beartype_all\nbeartype_all()",
    "jaxtyping": (
        "from jaxtyping import install_import_hook\n"
        "install_import_hook('transformer_lens', 'beartype.beartype')"
    ),
    "typeguard": (
        "from typeguard import install_import_hook\ninstall_import_hook('transformer_lens')"
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_import_hooks_process_our_modules(site, hook):
    call = f"""
    import {PACKAGE} as analysis, transformer_lens.tools as tools
    from {PACKAGE}.projection_kernel import owner, typed
    print(owner, typed(2), type(analysis.__loader__) is type(tools.__loader__))
    try:
        typed("not a number")
    except Exception as error:
        print(type(error).__module__.split(".")[0])
    else:
        print("unchecked")
    """
    code = f"{HOOKS[hook]}\n{textwrap.dedent(call)}"
    words = python(site, code, behind=sysconfig.get_path("purelib"), PYTHONWARNINGS="error")
    assert words[:3] == ["ours", "4", "True"]
    assert words[3] in {"beartype", "jaxtyping", "typeguard"}

"""Lays this project's modules over an installed, unmodified TransformerLens.

Our files live in a directory of their own. What makes ``import
transformer_lens.tools.analysis.projection_kernel`` find them is the search path of the package
``transformer_lens.tools.analysis``: our directory is put in front of upstream's. From there on
everything is ordinary. Each directory is searched by the standard machinery, so ``pkgutil`` lists
both, and the import hooks of pytest, jaxtyping, typeguard and beartype treat our modules like any
others.

The search path comes from the package's spec, so one finder has to be ours: the one for the
directory that holds the package, ``transformer_lens/tools``. An entry of ``sys.path_hooks``
provides it. (A hook for the package's own directory would do as well, but then our finder, and not
the standard one, would have to serve every module in it, and every tool that looks at finders would
have to know ours. A finder on ``sys.meta_path`` would be bypassed by import hooks that call
``PathFinder`` themselves.) Nothing of the installed package is touched: uninstall this project and
it is as before.

At start-up of the interpreter :func:`start` is called from a ``.pth`` file, and from Python 3.15 on
from the ``.start`` file beside it (PEP 829; from 3.18 on it is the only way).
``TRANSFORMER_LENS_OVERLAY=0`` in the environment switches it off.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import FileFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__version__ = "0.1.0"
__all__ = ["OverlayError", "install", "is_active", "start"]

PACKAGE = "transformer_lens.tools.analysis"
SWITCH = "TRANSFORMER_LENS_OVERLAY"

_HOST = ("transformer_lens", "tools")
_INSTALLED_TREE = os.path.join(os.path.dirname(__file__), "tree", *PACKAGE.split("."))


class OverlayError(RuntimeError):
    """The overlay cannot take effect in this process."""


class _ToolsFinder(FileFinder):
    """Finder of ``transformer_lens/tools`` that knows one thing more than the one it stands for.

    A subclass of ``FileFinder`` because ``pkgutil`` lists a directory's modules by the finder's
    type.
    """

    def __init__(self, path: str, tree: str) -> None:
        super().__init__(path)
        self._tree = tree
        self._original = _finder_of_the_others(path)

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = self._original.find_spec(fullname, target)
        if fullname == PACKAGE and spec is not None and os.path.isdir(self._tree):
            spec.submodule_search_locations = [
                self._tree,
                *(spec.submodule_search_locations or ()),
            ]
        return spec

    def invalidate_caches(self) -> None:
        self._original.invalidate_caches()


def _make_path_hook(tree: str) -> Callable[[str], _ToolsFinder]:
    """Entry of ``sys.path_hooks``: answers for ``transformer_lens/tools`` and for nothing else."""

    # A function, because beartype looks up the name of every path hook.
    def overlay_path_hook(path: str) -> _ToolsFinder:
        if not _is_host(path):
            raise ImportError
        return _ToolsFinder(path, tree)

    overlay_path_hook.overlay_tree = tree  # type: ignore[attr-defined]
    return overlay_path_hook


def _is_host(path: object) -> bool:
    if not isinstance(path, str) or not path.endswith(_HOST[-1]):
        return False  # most paths; this runs for every entry of sys.path
    parts = os.path.split(path)
    return (
        (os.path.basename(parts[0]), parts[1]) == _HOST
        # Upstream's package, not our own tree, which has no __init__.py.
        and os.path.isfile(os.path.join(path, "analysis", "__init__.py"))
    )


def _is_ours(hook: object) -> bool:
    # By attribute: two copies of this module can meet in one process (installed and source tree).
    return hasattr(hook, "overlay_tree")


def _finder_of_the_others(path: str) -> FileFinder:
    """What the directory's finder would be without us: beartype's, say, or the standard one."""
    for hook in sys.path_hooks:
        if not _is_ours(hook):
            try:
                return hook(path)  # type: ignore[return-value]
            except ImportError:
                continue
    raise ImportError(f"no finder for {path}")


def install(tree: str | os.PathLike[str] | None = None) -> None:
    """Put our modules in front, in this process.

    Not needed in a process that was started after installation. In a notebook whose kernel was
    already running when the project was installed, call it before the first import of
    ``transformer_lens.tools.analysis``. Calling it twice is the same as calling it once.

    Args:
        tree: Directory of the modules to put in front. Default: those of the installed project.

    Raises:
        FileNotFoundError: If ``tree`` is not there.
        OverlayError: If the package was imported before, without our modules.

    Example:
        >>> import transformer_lens_overlay
        >>> transformer_lens_overlay.install()
    """
    tree = _INSTALLED_TREE if tree is None else os.path.abspath(os.fspath(tree))
    if not os.path.isdir(tree):
        raise FileNotFoundError(f"no modules to lay over transformer_lens at {tree}")
    imported = sys.modules.get(PACKAGE)
    if imported is not None:
        if tree == _first_location(imported.__path__):
            return
        raise OverlayError(
            f"{PACKAGE} was imported before the overlay took effect, from "
            f"{_first_location(imported.__path__)}. Restart the Python process (in a notebook: "
            "restart the kernel) and import it again"
        )
    sys.path_hooks[:] = [hook for hook in sys.path_hooks if not _is_ours(hook)]
    sys.path_hooks.insert(0, _make_path_hook(tree))
    # The directory's finder may have been made, and remembered, without us.
    for path in [path for path in sys.path_importer_cache if _is_host(path)]:
        del sys.path_importer_cache[path]


def is_active() -> bool:
    """Whether our modules are, or will be, the ones that are imported in this process."""
    trees = [hook.overlay_tree for hook in sys.path_hooks if _is_ours(hook)]  # type: ignore[attr-defined]
    imported = sys.modules.get(PACKAGE)
    if imported is None:
        return bool(trees) and os.path.isdir(trees[0])
    return _first_location(imported.__path__) in trees


def _first_location(locations: Sequence[str]) -> str:
    return next(iter(locations))


def start() -> None:
    """Activate the overlay at start-up, unless it is switched off or its files are gone."""
    if os.environ.get(SWITCH) != "0" and os.path.isdir(_INSTALLED_TREE):
        try:  # noqa: SIM105  (contextlib costs a millisecond at every start of Python)
            install()
        except OverlayError:
            pass  # another start-up file imported the package first; is_active() tells

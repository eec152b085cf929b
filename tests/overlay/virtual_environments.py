"""Fresh virtual environments, cheaply: TransformerLens and this project are really installed into
them; everything else (torch alone has hundreds of megabytes) is reached by links."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
UPSTREAM = "transformer-lens==4.3.0"
OURS = "transformer-lens-projection-kernel"

#: Finds the module as an import does, without running the packages on the way: that would be torch
#: and transformers each time. Other tests import for real.
LOCATE = """
from importlib.machinery import PathFinder
path, name = None, ""
for part in "transformer_lens.tools.analysis.projection_kernel".split("."):
    name = f"{name}.{part}".lstrip(".")
    spec = PathFinder.find_spec(name, path)
    path = spec.submodule_search_locations
print(spec.origin)
"""


def run(*command: object, cwd: pathlib.Path | None = None, **variables: str) -> str:
    """Output of a command, which must succeed. Nothing of this test run leaks into it."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "TRANSFORMER_LENS", "COV"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment:
    """A virtual environment and what the tests do with it."""

    def __init__(self, directory: pathlib.Path, wheels: Mapping[str, pathlib.Path], links: object):
        venv.create(directory, symlinks=True)
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.site_packages = pathlib.Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        )
        # Behind the environment's own packages on sys.path, and its start-up files are not run.
        (self.site_packages / "third_party.pth").write_text(f"{links}\n")
        self._wheels = wheels

    def run(self, *arguments: object, **variables: str) -> str:
        """Run Python in an empty directory of the environment."""
        elsewhere = self.directory / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        return run(self.python, *arguments, cwd=elsewhere, **variables)

    def install(self, *names: str, installer: str = "pip", options: tuple[str, ...] = ()) -> None:
        for name in names:
            wheel = self._wheels[name]
            shared = ("install", "--no-deps", "--no-index", *options, wheel)
            if installer == "uv":
                self._uv(*shared)
            else:
                self._pip(*shared)

    def uninstall(self, name: str, installer: str = "pip") -> None:
        if installer == "uv":
            self._uv("uninstall", name)
        else:
            self._pip("uninstall", "--yes", name)

    def _pip(self, *arguments: object) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def _uv(self, command: str, *arguments: object) -> None:
        run(sys.executable, "-m", "uv", "pip", command, "--python", self.python, *arguments)

    def which(self, **variables: str) -> str:
        """Whose ``projection_kernel`` a fresh process finds: ``OURS`` or ``UPSTREAM``."""
        path = pathlib.Path(self.run("-c", LOCATE, **variables).strip())
        owner = path.relative_to(self.site_packages).parts[0]
        return {"transformer_lens_overlay": "OURS", "transformer_lens": "UPSTREAM"}[owner]

    def files(self) -> set[str]:
        """Everything in site-packages, but for the byte code of TransformerLens itself."""
        paths = {str(p.relative_to(self.site_packages)) for p in self.site_packages.rglob("*")}
        return {p for p in paths if not (p.startswith("transformer_lens/") and "__pycache__" in p)}

"""Build hook: shows our modules to type checkers, which cannot follow an overlay.

A partial stub package (PEP 561) makes mypy and pyright look for ``transformer_lens`` there first.
Its stubs are our modules themselves, under the names of stub files, so there is nothing to keep in
step.
"""

from __future__ import annotations

import pathlib
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = pathlib.Path("transformer_lens", "tools", "analysis")
STUBS = pathlib.Path("transformer_lens-stubs", "tools", "analysis")


class StubsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = pathlib.Path(self.root)
        for module in sorted((root / PACKAGE).rglob("*.py")):
            stub = STUBS / module.relative_to(root / PACKAGE).with_suffix(".pyi")
            build_data["force_include"][str(module)] = str(stub)

"""Lays the working copy over the installed package before any test imports it."""

from __future__ import annotations

import importlib
import pathlib
import sys

from hypothesis import settings

ROOT = pathlib.Path(__file__).parent
ANALYSIS = ROOT / "transformer_lens" / "tools" / "analysis"

# The installed project may have been activated at start-up; the tests are of the working copy.
sys.modules.pop("transformer_lens_overlay", None)
sys.path.insert(0, str(ROOT / "overlay"))
importlib.import_module("transformer_lens_overlay").install(ANALYSIS)

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


def pytest_sessionstart() -> None:
    module = importlib.import_module("transformer_lens.tools.analysis.projection_kernel")
    assert pathlib.Path(module.__file__).parent == ANALYSIS, "the tests would not run our files"

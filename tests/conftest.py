"""Real models, loaded once per test run; tests that need one skip where it is not to be had."""

from __future__ import annotations

import pytest

import demo_model


@pytest.fixture(scope="session")
def gpt2_small():
    """The trained GPT-2 small: local attention weights, else the hub's model."""
    try:
        return demo_model.load_gpt2_small()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"GPT-2 small is not to be had: {error}")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, a grouped-query model, from a package."""
    try:
        return demo_model.load_smollm2()
    except ImportError as error:
        pytest.skip(f"SmolLM2 is not to be had: {error}")

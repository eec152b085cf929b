"""mypy and pyright, which cannot follow the overlay, see our signatures on a user's script."""

from __future__ import annotations

import re
import sys

import pytest

from virtual_environments import run

pytestmark = pytest.mark.overlay

SCRIPT = """
import torch
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_affinities,
    attention_head_subspaces,
    orthonormal_subspace,
)

reveal_type(attention_head_affinities)
reveal_type(attention_head_subspaces)
reveal_type(JacobianLens.load)
orthonormal_subspace(torch.ones(3, 2), rank="two")
"""

# What TransformerLens is made of takes mypy a minute to read and changes nothing here.
MYPY = """
[mypy]
[mypy-torch.*,transformers.*,numpy.*,transformer_lens.model_bridge.*]
follow_imports = skip
"""


def mypy(environment, tmp_path) -> tuple[object, ...]:
    (tmp_path / "mypy.ini").write_text(MYPY)
    return ("mypy", "--python-executable", environment.python, "--cache-dir", tmp_path / "cache")


def pyright(environment, tmp_path) -> tuple[object, ...]:
    return ("pyright", "--pythonpath", environment.python)


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_our_signatures_are_seen(environment, tmp_path, checker):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = checker(environment, tmp_path)
    # One error is expected, so the status is 1; 0 and crashes are failures here.
    code = (
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', *sys.argv[1:]])\n"
        "sys.exit(done.returncode != 1)"
    )
    output = run(sys.executable, "-c", code, *command, script, cwd=tmp_path)
    revealed = [line for line in output.splitlines() if re.search("[Rr]evealed|Type of", line)]
    affinities, subspaces, upstream = revealed
    assert "pairings" in affinities
    assert "HeadAffinityResult" in affinities
    assert "HeadSubspaces" in subspaces
    assert "JacobianLens" in upstream
    (error,) = [line for line in output.splitlines() if "error:" in line]
    assert "rank" in error

"""Fixtures of the overlay's tests: distributions and environments."""

from __future__ import annotations

import pathlib
import sys
import sysconfig
from collections.abc import Mapping

import pytest

from virtual_environments import OURS, ROOT, UPSTREAM, Environment, run


@pytest.fixture(scope="session")
def release(tmp_path_factory) -> Mapping[str, pathlib.Path]:
    """Our sdist and the wheel that is built from it, as for a release."""
    directory = tmp_path_factory.mktemp("release")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT)
    return {
        "sdist": next(directory.glob("*.tar.gz")),
        "wheel": next(directory.glob("*.whl")),
    }


@pytest.fixture(scope="session")
def wheels(release, tmp_path_factory) -> Mapping[str, pathlib.Path]:
    directory = tmp_path_factory.mktemp("upstream")
    run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", directory, UPSTREAM)
    return {OURS: release["wheel"], UPSTREAM: next(directory.glob("*.whl"))}


@pytest.fixture(scope="session")
def third_party(tmp_path_factory) -> pathlib.Path:
    """Links to every installed package except TransformerLens and this project."""
    directory = tmp_path_factory.mktemp("third_party")
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in pathlib.Path(source).iterdir():
            if not path.name.startswith(("transformer_lens", "__")) and path.suffix != ".pth":
                (directory / path.name).symlink_to(path)
    return directory


@pytest.fixture
def new_environment(wheels, third_party, tmp_path) -> Environment:
    return Environment(tmp_path / "environment", wheels, third_party)


@pytest.fixture(scope="session")
def environment(wheels, third_party, tmp_path_factory) -> Environment:
    """TransformerLens and ours, installed. Shared: not to be changed."""
    shared = Environment(tmp_path_factory.mktemp("environment"), wheels, third_party)
    shared.install(UPSTREAM, OURS)
    return shared

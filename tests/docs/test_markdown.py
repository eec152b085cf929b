"""Every Python block of README and guides runs, and prints what the text block after it shows."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "source" / "content").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path) -> list[tuple[str, str, int]]:
    """Language, text and line number of every fenced block."""
    text = page.read_text()
    return [
        (match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in BLOCK.finditer(text)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_shows(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed = None
    for language, text, line in blocks(page):
        if language == "python":
            # Padding makes line numbers of errors those of the page.
            code = compile("\n" * (line - 1) + text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, namespace)
            printed = output.getvalue()
        elif language == "text" and printed is not None:
            assert printed.split() == text.split(), f"{page.name}:{line}"
            printed = None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_pages_are_found():
    assert {"README.md", "projection_kernel.md"} <= {page.name for page in PAGES}

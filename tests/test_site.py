"""The site of docs/: every page is in its navigation and in llms.txt, and MkDocs builds it without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.test_docs import GENERATED

PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED)


def test_every_page_is_in_the_navigation_and_in_llms_txt() -> None:
    assert sorted(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == sorted(
        [*PAGES, *GENERATED]
    )
    linked = re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "llms.txt").read_text())
    assert sorted(name.removeprefix("docs/") for name in linked if name.startswith("docs/")) == PAGES
    assert all((ROOT / name).is_file() for name in linked)


def test_links_of_the_pages_stay_in_the_site() -> None:
    """The site holds docs/ alone, so a link to another file of the repository leads nowhere there: a page names it."""
    for name in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / "docs" / name).read_text()):
            inside = not target.startswith("..") and (ROOT / "docs" / target).is_file()
            assert target.startswith(("https://", "http://")) or inside, f"{name} links to {target}"


def test_every_line_of_the_comparison_has_a_source() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", page, re.MULTILINE))
    rows = [line for line in page.splitlines() if line.startswith("| ") and not re.match(r"\| (what|subject) \|", line)]
    assert len(rows) > 25
    used = set(re.findall(r"\]\[([\w-]+)\]", page))
    assert used == set(sources)
    for row in rows:
        assert re.search(r"\]\[[\w-]+\]|\]\([\w-]+\.md\)|benchmarks/results/\w+\.json", row), row


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs pip install 'headrace[docs]'")
def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    for name in GENERATED:
        subprocess.run([sys.executable, str(ROOT / "docs" / name.replace(".md", ".py"))], check=True)
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "runbooks" / "index.html").is_file()

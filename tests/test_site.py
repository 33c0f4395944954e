"""The site of docs/: every page is in its navigation and in llms.txt, and it is built without a warning."""

import importlib.util
import re
import shutil
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


LONG = {"clients.md", "models.md", "tasks.md"}
"""How-to pages that are not yet cut to a length that is read in one sitting. The list only gets shorter."""


def test_a_how_to_has_at_most_a_hundred_lines() -> None:
    section = re.search(r"^  - How-to:\n((?: {6}.*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert section is not None
    pages = re.findall(r": ([\w-]+\.md)$", section[1], re.MULTILINE)
    assert len(pages) > 20
    assert {name for name in pages if len((ROOT / "docs" / name).read_text().splitlines()) > 100} <= LONG


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
@pytest.mark.skipif(not importlib.util.find_spec("zensical"), reason="needs pip install 'headrace[docs]'")
def test_the_site_is_built_without_a_warning_and_fetches_nothing_from_other_hosts(tmp_path: Path) -> None:
    for name in GENERATED:
        subprocess.run([sys.executable, str(ROOT / "docs" / name.replace(".md", ".py"))], check=True)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    words = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / ".cache" / "site"
    pages = [path.read_text() for path in site.rglob("*.html")]
    assert (site / "runbooks" / "index.html").is_file() and not list(site.rglob("*.py")) and len(pages) > len(PAGES)
    loads = re.compile(r"<(?:link[^>]*stylesheet|script|img|iframe)[^>]*(?:src|href)=.?https?://[^>]*")
    assert [found for page in pages for found in loads.findall(page)] == []
    assert all('data-md-color-scheme="slate"' in page for page in pages)

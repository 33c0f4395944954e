"""The list of files with forbidden words only gets shorter."""

from tests.support.paths import ROOT
from tests.test_docs import script


def test_no_clean_file_is_still_allowed_forbidden_words() -> None:
    words = script("words")
    clean = [name for name in sorted(words.allowed()) if not (ROOT / name).is_file() or not words.findings(ROOT / name)]
    assert not clean, "run `python docs/words.py --shrink`"

"""The list of files with forbidden words only gets shorter; locals have names that say what they hold."""

from tests.support.paths import ROOT
from tests.test_docs import script


def test_no_clean_file_is_still_allowed_forbidden_words() -> None:
    words = script("words")
    clean = [name for name in sorted(words.allowed()) if not (ROOT / name).is_file() or not words.findings(ROOT / name)]
    assert not clean, "run `python docs/words.py --shrink`"


def test_a_vague_name_is_reported_wherever_a_local_gets_it() -> None:
    source = """
class Holder:
    kept: int

def f(known, *, own=1):
    known = own = 2
    found, one = [found for found in known], 3
    while (kept := known):
        with open(found) as found: pass
    try: pass
    except OSError as kept: pass
    match known:
        case {"a": found, **rest}: pass
    return lambda known: known.found(kept=own)

def g(found):
    def inner():
        for known, (*own,) in found: pass
        found.known = 4
"""
    words = script("words")
    reported = sorted(words.vague_locals(source, words.VAGUE))
    assert reported == [
        (7, "found"),
        (7, "found"),
        (8, "kept"),
        (9, "found"),
        (11, "kept"),
        (13, "found"),
        (18, "known"),
        (18, "own"),
    ]
    assert all(words.BINDING.search(source.splitlines()[line - 1]) for line, _ in reported)
    assert (7, "one") in words.vague_locals(source, words.VAGUE | {"one"})

"""Finds words, sentence forms and names of locals that docs/style.md forbids (`make lint`).

A short list catches the worst: private metaphors for which the field has a term, sentences whose subject is "who" or
"what", and locals whose name does not say what they hold. `words_allowed.txt` names the files that are not yet cleaned;
it only ever gets shorter, and `python docs/words.py --shrink` removes the entries of files that are clean now.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "docs" / "words_allowed.txt"
EXEMPT = {
    "docs/style.md",
    "docs/words.py",
    "tests/test_docs.py",
    "docs/modules.md",
    "docs/messages.md",
    "docs/errors.md",
}
"""Three show the forbidden words on purpose; the others are generated from sources that are checked."""

WORDS = {
    r"houses?": "repository, package or process",
    r"rooms?": "folder, or capacity",
    r"rivers?": "recorded run, or stream",
    r"desks?": "dead-letter queue",
    r"weather": "fault injection",
    r"(blow|blows)": "fault",
    r"deck": "fault plan",
    r"storms?": "fault injector",
    r"befalls?": "inject",
    r"books": "ledger or audit",
    r"(shelf|shelves)": "store",
    r"doors?": "entry point, or gateway",
    r"roof": "launch layer",
    r"crowds?": "simulated users",
    r"shrugs?": "gives up",
    r"hands (?!(it|them|its|the|a|back|over|on|out|each|any|every|that|this|training|one|nothing|what)\b)": "handlers",
    r"whoever": "the caller, the actor that ...",
    r"as ever": "as without ..., unchanged",
    r"in company": "in a batch",
    r"(the )?way back": "the inverse of ...",
    r"by turns": "alternately, in turn",
    r"at hand": "available, loaded",
    r"dealt (out|again)": "assigned round-robin",
    r"now and then": "sometimes, or the interval",
    r"in small,": "small",
    r"stands? beside": "is next to, or names",
    r"tells? of": "reports",
    r"slopes? by": "gradient with respect to",
    r"forgets the logits": "frees",
}
"""Pattern of a word, and what to write instead."""

CANDIDATE = re.compile(rf"\b(?:{'|'.join(WORDS)})(?![\w-])")
"""Any of the words in one pass over a lower-case text: only a file that has one is searched line by line."""

SUBJECT = re.compile(r'(?:"""|[.:;!] )(?:Who|What|Whatever) [a-z][^?"]*?(?:[.:;]|$)')
"""A sentence with "who" or "what" as its subject. Questions are fine."""

VAGUE = frozenset({"found", "known", "own", "kept"})
"""Names that no local may have. Parameters and fields are interfaces and may; inside the package `one` is vague too."""

BINDING = re.compile(r"(?<!\.)\b(?:found|known|own|kept|one)\s*(?:[:=,)\]}]|in\b)")
"""What follows one of these names where it is bound: only a file that has a match is parsed."""


class Finding(NamedTuple):
    """One forbidden word."""

    path: str
    line: int
    text: str
    instead: str


def files() -> Iterator[Path]:
    """Everything that people read: package, tests, benchmarks, examples, documents."""
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"
    code, pages = ("py",), ("py", "md")
    for folder, endings in (
        ("headrace", code),
        ("tests", code),
        ("benchmarks", code),
        ("examples", pages),
        ("deploy", pages),
        ("docs", pages),
    ):
        for ending in endings:
            yield from sorted((ROOT / folder).rglob(f"*.{ending}"))


def vague_locals(text: str, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of every place in a module's source where a variable with one of these names gets its value."""
    pending: list[tuple[ast.AST, frozenset[str]]] = [(ast.parse(text), names)]
    while pending:
        node, vague = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            vague -= {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign):
                continue  # a field
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and child.id in vague:
                yield child.lineno, child.id
            elif isinstance(child, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and child.name in vague:
                yield child.lineno, child.name
            pending.append((child, vague))


def findings(path: Path) -> list[Finding]:
    """The forbidden words of a file."""
    name = str(path.relative_to(ROOT))
    if name in EXEMPT:
        return []
    out: list[Finding] = []
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py" and BINDING.search(text):
        names = VAGUE | {"one"} if name.startswith("headrace/") else VAGUE
        out += [
            Finding(name, line, local, "a name that says what the local holds (docs/style.md, rule 5)")
            for line, local in sorted(vague_locals(text, names))
        ]
    has_words = CANDIDATE.search(text.lower()) is not None
    if not has_words and "Wh" not in text:
        return []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in WORDS.items() if has_words else ():
            for match in re.finditer(rf"\b{pattern}(?![\w-])", line, re.IGNORECASE):
                out.append(Finding(name, number, match.group().strip(), instead))
        for match in SUBJECT.finditer(line):
            out.append(Finding(name, number, match.group().lstrip('".:;! ')[:40], "subject, verb, object"))
    return out


def allowed() -> set[str]:
    """The files that are not yet cleaned."""
    return set(ALLOWED.read_text(encoding="utf-8").split())


def main(arguments: list[str]) -> int:
    """Print what is forbidden outside the allowed files; 1 if there is any."""
    unclean = {str(path.relative_to(ROOT)): hits for path in files() if (hits := findings(path))}
    if "--shrink" in arguments:
        ALLOWED.write_text("".join(f"{name}\n" for name in sorted(allowed() & set(unclean))), encoding="utf-8")
    wrong = [
        finding for name, hits in unclean.items() if name in arguments or name not in allowed() for finding in hits
    ]
    for finding in wrong:
        sys.stdout.write(f"{finding.path}:{finding.line}: {finding.text!r}: write {finding.instead}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

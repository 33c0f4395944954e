"""Writes the table of tried types into docs/models.md from the results of `make test-models` (JUnit files)."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parent / "models.md"
HEAD, END = "<!-- types: written by make test-models -->", "<!-- end of types -->"
CHECKS = {
    "a_packed_step_is_that_of_a_plain_loop": "step",
    "another_sequence_changes_no_bit": "no leak",
    "resume_and_export_keep_every_bit": "resume, export",
    "a_cached_forward_is_the_packed_one": "sampling",
    "transformers_4_reads_the_export": "read by 4.57",
    "a_server_samples_as_the_provider_scores": "served by vLLM",
}


def table(files: list[Path]) -> str:
    """A line per type, a column per check: yes, no, or the reason for which it was skipped. The page keeps the
    cells of checks that the files do not have."""
    old = re.findall(r"^\| (\w+) \|(.*)\|$", PAGE.read_text(encoding="utf-8").split(HEAD)[1].split(END)[0], re.M)
    rows = {
        kind: dict(zip(CHECKS.values(), map(str.strip, cells.split("|")), strict=False))
        for kind, cells in old
        if kind != "type"
    }
    for case in (case for file in files for case in ElementTree.parse(file).iter("testcase")):
        match = re.fullmatch(r"test_(\w+)\[(\w+)\]", case.get("name", ""))
        if match is None or match[1] not in CHECKS:
            continue
        skipped = case.find("skipped")
        bad = case.find("failure") is not None or case.find("error") is not None
        told = "**no**" if bad else "yes" if skipped is None else skipped.get("message", "").removeprefix("Skipped: ")
        told = " ".join(told.split()).replace("|", "/")[:160]
        largest = case.find("properties/property[@name='largest']")
        if largest is not None:
            told = f"{'yes' if float(largest.get('value', '')) < 1e-4 else 'differs'}, {largest.get('value')}"
        rows.setdefault(match[2], {})[CHECKS[match[1]]] = told
    lines = [f"| type | {' | '.join(CHECKS.values())} |", "|---" * (len(CHECKS) + 1) + "|"]
    lines += [
        f"| {kind} | {' | '.join(row.get(name, '') for name in CHECKS.values())} |"
        for kind, row in sorted(rows.items())
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(HEAD)
    text = f"{before}{HEAD}\n\n{table([Path(each) for each in sys.argv[1:]])}\n\n{END}{rest.split(END)[1]}"
    PAGE.write_text(text, encoding="utf-8")

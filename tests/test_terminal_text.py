"""A text of a policy, a user or a program does not control the terminal of its reader."""

import json
from pathlib import Path

import pytest

from headrace.launch import logs
from headrace.launch.output import complain, say
from headrace.terminal_text import plain

ATTACKS = {
    "clear the screen": "\x1b[2J\x1b[H",
    "write the clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "title": "\x1b]0;root\x1b\\",
    "link": "\x1b]8;;https://evil.example\x1b\\ok\x1b]8;;\x1b\\",
    "C1 control": "\x9b2J\x9d52;c;YQ==\x9c",
    "overwrite the line": "failed\rpassed",
    "erase": "failed\x08\x08\x08\x08\x08\x08passed",
    "reverse": "\u202egnissap\u202c",
    "isolate": "\u2066x\u2069",
    "invisible": "pass\u200bed\ufeff\u2060",
    "tags": "a\U000e0041\U000e007f",
    "null": "a\0b",
    "surrogate": "a\ud800b",
    "line separator": "a\u2028b\x0bc\x0cd\x85e",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_shown_as_escapes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(ATTACKS[name])
    complain(ATTACKS[name])
    shown = "".join(capsys.readouterr())
    assert shown.isascii()
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert shown.count("\n") == 2


def test_ordinary_text_stays() -> None:
    text = "naïve\tcafé 你好 😀\nsecond line\n"
    assert plain(text) == text
    assert plain("a\r\nb") == "a\nb"


def test_a_text_in_a_log_cannot_pass_for_a_line_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = "x\n12:00:00.000  trainer       error   \x1b[31mstep_failed  everything is lost"
    line = {"timestamp": "2026-11-27T12:00:00Z", "level": "info", "event": "told", "actor": "judge", "text": forged}
    (tmp_path / "judge.log").write_text(json.dumps(line) + "\n" + forged + "\n")
    logs.follow(tmp_path, logs.LineFilter(), say, ends=lambda: True)
    shown = capsys.readouterr().out.splitlines()
    assert [each for each in shown if not each.startswith(" " * 14)] == shown[:1]
    assert shown[0].split()[1:4] == ["judge", "info", "told"]
    assert all(each.isprintable() for each in shown)

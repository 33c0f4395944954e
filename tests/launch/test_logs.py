"""`headrace logs`: lines of all processes by time, filtered; what is written later follows."""

from pathlib import Path

import msgspec
import pytest

from headrace.launch.logs import LineFilter, Tail, follow, read, shown


def line(second: int, actor: str, event: str, **fields: str) -> str:
    stamp = f"2026-11-22T18:00:{second:02d}.000000Z"
    return msgspec.json.encode({"actor": actor, "event": event, "level": "info", "timestamp": stamp, **fields}).decode()


def test_lines_of_two_processes_are_merged_and_filtered(tmp_path: Path) -> None:
    (tmp_path / "judge.log").write_text(f"{line(2, 'judge', 'second', trace_id='ab12')}\nTraceback\n")
    (tmp_path / "rollout.log").write_text(f"{line(1, 'rollout', 'first')}\n{line(3, 'rollout', 'third')}\n")

    def events(wanted: LineFilter) -> list[str]:
        return [each.fields.get("event", each.raw) for each in read(tmp_path, wanted, {})]

    assert events(LineFilter()) == ["first", "second", "Traceback", "third"]
    assert events(LineFilter(actor="judge")) == ["second", "Traceback"]
    assert events(LineFilter(trace="ab")) == ["second"]
    assert events(LineFilter(level="warning")) == []
    assert "trace=ab12" in shown(read(tmp_path, LineFilter(trace="ab"), {})[0])


def test_a_half_written_line_waits_for_its_end_and_a_new_file_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "judge.log"
    whole = line(1, "judge", "one")
    path.write_text(whole[:20])
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text(f"{whole}\n")
    assert [each.fields["event"] for each in tail.read()] == ["one"]
    path.write_text("x\n")
    assert [each.raw for each in tail.read()] == ["x"]


def test_following_shows_what_is_written_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "judge.log"
    out: list[str] = []
    path.write_text(f"{line(1, 'judge', 'one')}\n")
    turns = iter([False, True])

    def ends() -> bool:
        over = next(turns)
        if over:
            with path.open("a") as file:
                file.write(f"{line(2, 'judge', 'two')}\n")
        return over

    follow(tmp_path, LineFilter(), out.append, ends=ends)
    assert [each.split()[3] for each in out] == ["one", "two"]


@pytest.mark.parametrize(
    "line",
    [
        '{"a":' * 100_000,
        '{"timestamp": "0001-01-01T00:00:00", "event": "x"}',
        '{"timestamp": "2026-01-01T00:00:00", "actor": ["x"], "level": {"y": 1}, "event": null, "trace_id": 1}',
        "\x00\x1b[2J",
    ],
)
def test_a_line_that_no_actor_wrote_is_shown(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.log").write_text(f"{line}\n")
    [told] = read(tmp_path, LineFilter(), {})
    assert shown(told)

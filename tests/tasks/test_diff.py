"""Changes that count as the agent's own."""

from headrace.tasks.diff import WorkspaceTree, diff

BEFORE = {"app/a.py": b"1", "app/b.py": b"2", "test_visible.py": b"t", "README.md": b"r"}


def test_changes_are_split_by_what_the_task_allows() -> None:
    after = {"app/a.py": b"new", "app/c.py": b"3", "test_visible.py": b"weaker", "README.md": b"r", "evil.pth": b"x"}
    assert diff(WorkspaceTree(BEFORE), WorkspaceTree(after), ("app/*.py",))[0] == (
        {"app/a.py": b"new", "app/c.py": b"3"},
        ("app/b.py",),
        ("evil.pth", "test_visible.py"),
    )


def test_what_tests_leave_behind_is_no_change() -> None:
    litter = {"app/__pycache__/a.pyc": b"x", ".pytest_cache/v/cache": b"x", "app/a.pyc": b"x"}
    assert diff(WorkspaceTree(BEFORE), WorkspaceTree(BEFORE | litter), ("**",)) == (({}, (), ()), ())

"""Errors: their codes, the statuses with which they end a process, and the table of both."""

import errno
import re
import runpy

import pytest

from headrace.bus.errors import BusError, BusTimeout, NoBroker, Unrecoverable
from headrace.errors import HeadraceError, exit_status
from headrace.registry import PluginError
from headrace.vmhost.errors import VmhostError
from tests.support.paths import ROOT


def test_every_code_names_one_class_and_stands_in_the_table() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "errors.py"))
    page = generator["page"]()
    codes = [kind.code for kind in set(generator["classes"]()) if kind.__module__.startswith("headrace.")]
    assert [code for code in codes if f"`{code}`" not in page] == []
    assert len(codes) == len(set(codes)) > 100
    assert [code for code in codes if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", code)] == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PluginError("x"), 2),
        (VmhostError("x"), 3),
        (Unrecoverable("x"), 3),
        (BusError("x"), 4),
        (NoBroker("x"), 4),
        (BusTimeout("x"), 4),
        (HeadraceError("x"), 1),
        (OSError(errno.ENOSPC, "x"), 3),
        (OSError(errno.ENOENT, "x"), 1),
        (RuntimeError("VmhostError: No space left"), 1),
    ],
    ids=repr,
)
def test_the_class_of_an_error_decides_the_status_and_its_text_does_not(error: Exception, status: int) -> None:
    assert exit_status(error) == status

"""A backup names headrace's own streams: their files are read and their contents are loaded under these names."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus import backup
from headrace.bus.errors import BusError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", ["../outside", "/etc/hostname", "HR_LEDGER/../../outside", "OTHER", ""])
async def test_a_copy_of_another_stream_is_refused(tmp_path: Path, stream: str) -> None:
    folder, nothing = tmp_path / "copy", Any
    folder.mkdir()
    (tmp_path / "outside").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    copy = backup.Copy(stream=stream, bytes=0, sha256=empty, messages=0, about={})
    made = backup.Backup(run="r", headrace="0", made=0.0, copies=[copy])
    (folder / backup.MANIFEST).write_bytes(msgspec.json.encode(made))
    with pytest.raises(BusError, match="names the stream"):
        await backup.restore(nothing, folder)  # type: ignore[arg-type]

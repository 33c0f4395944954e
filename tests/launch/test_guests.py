"""Lines of the image builder, however long they are."""

import asyncio

import pytest

from headrace.launch.guests import LINE_CHARS, bounded_lines

pytestmark = pytest.mark.anyio


async def test_a_line_of_any_length_is_printed_in_part() -> None:
    maker = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        "echo first; head -c 300000 /dev/zero | tr '\\0' x; echo; printf 'the end'",
        stdout=asyncio.subprocess.PIPE,
    )
    assert maker.stdout is not None
    lines = [line async for line in bounded_lines(maker.stdout)]
    assert lines == ["first", "x" * LINE_CHARS + " ...", "the end"]
    assert await maker.wait() == 0

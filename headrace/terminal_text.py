"""Text for a terminal: characters by which a policy's, a user's or a program's text would control it are shown as
escapes. Escape sequences move the cursor, write the clipboard (OSC 52) and hide lines; directional characters reorder
what is read."""

import re

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    r"""The text with every control character but line feed and tab, and every invisible one, as ``\x1b`` or
    ``\u202e``."""
    return _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text.replace("\r\n", "\n"))

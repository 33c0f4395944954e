"""Text in an HTML page: characters of markup become references, and characters that control or reorder what is read are
shown as escapes (`headrace.terminal_text`)."""

import html

from headrace.terminal_text import plain


def escape(text: str) -> str:
    """The text for an element or a quoted attribute."""
    return html.escape(plain(text))

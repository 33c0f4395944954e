"""Other words for the tools of a group: names, argument names, order and descriptions, drawn from one seed.

A policy that learns with one set of names depends on it. With `[tools] vary` each group of attempts sees its tools
under words of `TABLE`. The words of one column are held out: no training group gets them, and an evaluation that asks
for them measures the policy with tools that it has never seen. The syntax of a call stays the model's own.

Records keep the tools' own names: `Worded` translates between them and the words of the prompt. `finish` keeps its
name, because system texts name it; tools from outside of headrace keep all their words.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.messages.rollout import ToolCall, ToolWording
from headrace.rendering.base import Answered, Call, Exchange, Parsed, Renderer
from headrace.rendering.schemas import Parameter, ToolSchema

KEY = "*"
"""The key of `TABLE`'s hash among a bundle's tools: no tool can have this name."""


class Words(NamedTuple):
    """Words for one tool. The last one of every column is held out; training also uses the tool's own words."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    arguments: dict[str, tuple[str, ...]]
    """Argument to ``name: description``."""


_FILE = (
    "file: which file, as a path relative to the repository",
    "file_path: path of the file inside the repository",
    "target: the file's location below the top folder",
)
_GLOB = (
    "pattern: which paths, such as src/*.py",
    "include: glob of the paths to look at",
    "only: shell pattern that paths must match",
)
_SPAN = (
    "line_range: a line or a range of lines, such as 7 or 7-9",
    "rows: line numbers, such as 12 or 12-20",
    "span: first and last line with a dash between them, such as 3-5",
)
_WORDS = (
    "description: what the code is about",
    "question: what you look for, in words",
    "topic: the subject of the code",
)
_BODY = (
    "content: the text that the file gets",
    "new_text: lines to write",
    "body: what to put there",
)

TABLE: dict[str, Words] = {
    "search": Words(
        ("grep", "find_text", "regex_search", "scan_code"),
        (
            "look for a regular expression in all files; for a definition the whole of it is shown",
            "grep the repository",
            "scan the source code for a pattern",
        ),
        {
            "query": (
                "regex: regular expression to look for",
                "expression: what to match, as a regular expression",
                "needle: a regular expression",
            ),
            "glob": _GLOB,
        },
    ),
    "read_file": Words(
        ("open_file", "view", "cat_file", "show_source"),
        ("print a file; every line has its number", "view the numbered lines of a file", "display source text"),
        {
            "path": _FILE,
            "lines": _SPAN,
            "anchors": (
                "hashes: true puts a hash beside every line number, for edits by line",
                "with_hashes: true adds the hash of each line, which an edit can name",
                "marks: true for number#hash in place of the number",
            ),
        },
    ),
    "list_files": Words(
        ("ls", "find_files", "list_dir", "enumerate_paths"),
        ("show which files there are", "the paths of the repository", "enumerate the tree"),
        {"glob": _GLOB},
    ),
    "edit_file": Words(
        ("replace_lines", "patch_lines", "change_lines", "rewrite_span"),
        (
            "put other lines in place of some lines of a file; the range 5-4 inserts before line 5",
            "overwrite a range of lines; a range that ends before it begins (5-4) inserts there",
            "substitute a span of a file by a body; 5-4 adds before line 5",
        ),
        {"path": _FILE, "lines": _SPAN, "text": _BODY},
    ),
    "edit": Words(
        ("str_replace", "replace_text", "search_replace", "swap_text"),
        (
            "exchange a text in a file; it must occur once, so quote enough of its surroundings",
            "search and replace in one file; the quoted text has to be unique",
            "swap an exact passage of a file for another one",
        ),
        {
            "path": _FILE,
            "old": (
                "old_string: the passage to remove, exactly as in the file",
                "find: the exact text that is there now",
                "before: the passage as it is",
            ),
            "at": (
                "anchors: lines by number#hash, in place of a passage: 3#09bc-5#a3f0",
                "where: which lines, as shown with hashes, if no passage is given: 7#12ab",
                "hashed_lines: number#hash, or two with a dash between, when no passage is named",
            ),
            "replace_all": (
                "all: true changes every occurrence",
                "every: true for all places, not only one",
                "global: true swaps each occurrence",
            ),
            "new": (
                "new_string: the passage that takes its place",
                "replacement: what stands there afterwards",
                "after: the passage as it shall be",
            ),
        },
    ),
    "write_file": Words(
        ("create_file", "save_file", "put_file", "store_source"),
        ("write a new file, or all of an old one", "save a file with this content", "store a source file"),
        {"path": _FILE, "text": _BODY},
    ),
    "delete_file": Words(
        ("remove_file", "rm", "unlink", "drop_file"),
        ("delete one file", "take a file out of the repository", "erase a single file"),
        {"path": _FILE},
    ),
    "run_tests": Words(
        ("test", "pytest", "check_tests", "verify"),
        ("execute the test suite", "see which tests pass", "verify the work by its tests"),
        {"path": _FILE},
    ),
    "terminal": Words(
        ("bash", "shell", "run_command", "exec"),
        ("execute a command in a shell", "run a line of sh", "execute a program in the sandbox"),
        {
            "yield_time_ms": (
                "timeout_ms: milliseconds until an answer; 10000 without it",
                "wait_ms: longest wait in milliseconds (10000)",
                "patience_ms: milliseconds before it becomes a session, 10000 if absent",
            ),
            "command": (
                "cmd: the line to execute",
                "script: text for sh -c",
                "line: what the shell executes",
            ),
        },
    ),
    "terminal_session": Words(
        ("bash_session", "shell_continue", "write_stdin", "attach"),
        (
            "continue a command that still runs: wait, give it input, end it, or read its log",
            "poll a running command, write to it, stop it, or see a part of its output",
            "talk to a program that was started before",
        ),
        {
            "session": ("session_id: number of the session", "id: which command", "handle: the program's number"),
            "yield_time_ms": (
                "timeout_ms: milliseconds to wait; 5000 without it",
                "wait_ms: longest wait in milliseconds (5000)",
                "patience_ms: milliseconds until an answer, 5000 if absent",
            ),
            "signal": (
                "stop_with: kill, term or int ends it",
                "kill: how to end it: kill, term or int",
                "terminate: one of kill, term, int",
            ),
            "lines": _SPAN,
            "input": (
                "chars: text to type, line breaks included",
                "stdin: what its standard input gets; end lines yourself",
                "type: text for the program, with its line break",
            ),
        },
    ),
    "lint": Words(
        ("lints", "check_style", "diagnostics", "inspect"),
        ("errors that a linter finds", "static checks of the source files", "inspect files without running them"),
        {"glob": _GLOB},
    ),
    "keyword_search": Words(
        ("rank_code", "word_search", "find_relevant", "lookup"),
        ("the parts of the repository that share words with yours", "code ranked by words", "look code up by terms"),
        {"query": _WORDS},
    ),
    "semantic_search": Words(
        ("codebase_search", "search_by_meaning", "find_code", "explore"),
        ("code that does what you describe", "search the codebase by meaning", "explore code by its purpose"),
        {"query": _WORDS},
    ),
    "web_fetch": Words(
        ("fetch", "browse", "open_url", "read_page"),
        ("get a web page without its markup", "the text behind an address", "load a document of the web"),
        {
            "url": (
                "address: where the page is (http:// or https://)",
                "link: the full link of the page",
                "location: an http or https location",
            ),
            "lines": _SPAN,
        },
    ),
    "web_search": Words(
        ("search_web", "internet_search", "google", "web_lookup"),
        ("ask a search engine", "pages of the web about something, with summaries", "look something up on the web"),
        {"query": ("terms: words for the search engine", "ask: the question", "phrase: words that pages shall have")},
    ),
    "todo": Words(
        ("todo_write", "plan", "update_plan", "checklist"),
        (
            "keep a plan: the whole list, one entry a line; [ ] is open, [~] in progress, [x] done",
            "replace your list of tasks; lines begin with [ ] open, [~] in progress or [x] done",
            "note the steps, one a line: [ ] open, [~] in progress, [x] done",
        ),
        {"items": ("todos: all entries", "entries: the new list", "steps: the lines of the list")},
    ),
    "finish": Words(
        ("finish",),
        ("say that the work is done", "conclude the task", "close the work"),
        {"message": ("summary: a word to the user", "answer: what you say at the end", "note: closing words")},
    ),
}
"""Words of the built-in tools."""


def digest() -> str:
    """The hash of `TABLE`: the nodes of a run have to agree on it."""
    return hashlib.sha256(msgspec.json.encode(sorted(TABLE.items()))).hexdigest()


class Mapping(NamedTuple):
    """One tool under its other words."""

    own: str
    schema: ToolSchema
    arguments: dict[str, str]
    """The tool's own argument to its word."""


def worded(tools: Sequence[ToolSchema], wording: ToolWording) -> tuple[Mapping, ...]:
    """The tools in another order under other words; always the same ones for one wording."""
    mappings = []
    for tool in tools:
        words = TABLE.get(tool.name)
        if words is None:
            mappings.append(Mapping(tool.name, tool, {name: name for name in tool.parameters}))
            continue
        parameters = {
            name: _parameter(parameter, words.arguments[name], wording, f"{tool.name}/{name}")
            for name, parameter in tool.parameters.items()
        }
        attributes = sorted(tool.attributes, key=lambda each: _number(wording, f"{tool.name}/{each.name}/order"))
        schema = ToolSchema(
            name=_drawn(tool.name, words.names, wording, f"{tool.name}/name"),
            about=_drawn(tool.about, words.about, wording, f"{tool.name}/about"),
            attributes=tuple(parameters[attribute.name] for attribute in attributes),
            body=parameters[tool.body.name] if tool.body is not None else None,
        )
        arguments = {name: parameter.name for name, parameter in parameters.items()}
        mappings.append(Mapping(tool.name, schema, arguments))
    return tuple(sorted(mappings, key=lambda each: _number(wording, f"{each.own}/order")))


def _number(wording: ToolWording, place: str) -> int:
    """A number that depends on the seed and the place alone, not on the other tools."""
    return int.from_bytes(hashlib.sha256(f"{wording.seed}/{place}".encode()).digest()[:8], "little")


def _drawn(plain: str, column: Sequence[str], wording: ToolWording, place: str) -> str:
    choices = (plain, *column[:-1])
    return column[-1] if wording.words == "heldout" else choices[_number(wording, place) % len(choices)]


def _parameter(parameter: Parameter, column: Sequence[str], wording: ToolWording, place: str) -> Parameter:
    name, _, about = _drawn(f"{parameter.name}: {parameter.about}", column, wording, place).partition(": ")
    return Parameter(name, about, parameter.required)


class Worded:
    """A renderer whose tools have other words. Callers use the tools' own names; prompts and turns have the words."""

    def __init__(self, renderer: Renderer, tools: Sequence[Mapping]) -> None:
        """renderer: that of the schemas in `tools`."""
        self._renderer = renderer
        self._own = {tool.schema.name: tool for tool in tools}
        self._words = {tool.own: tool for tool in tools}
        self.tokenizer, self.stop_ids, self.bundle = renderer.tokenizer, renderer.stop_ids, renderer.bundle
        self.detailed_results = renderer.detailed_results

    @property
    def parallel(self) -> bool:
        """As `Renderer.parallel`."""
        return self._renderer.parallel

    def prompt(self, task_prompt: str, summary: Sequence[int] = ()) -> list[int]:
        """As `Renderer.prompt`."""
        return self._renderer.prompt(task_prompt, summary)

    def delta(
        self, history: Sequence[Exchange], *, stopped: int | None, summary: bool = False, task: str = ""
    ) -> list[int]:
        """As `Renderer.delta`; templates that name the tool of a result name it as the policy did."""
        named = [Answered(calls=tuple(map(_as_written, turn.calls)), results=turn.results) for turn in history]
        if task:
            return self._renderer.delta(named, stopped=stopped, summary=summary, task=task)
        return self._renderer.delta(named, stopped=stopped, summary=summary)

    def parse(self, ids: Sequence[int], *, prompt: Sequence[int] = ()) -> Parsed:
        """As `Renderer.parse`. A call of a known tool gets its own names, and `alias` says what was written."""
        parsed = self._renderer.parse(ids, prompt=prompt)
        return msgspec.structs.replace(parsed, calls=tuple(map(self._read, parsed.calls)))

    def _read(self, call: ToolCall) -> ToolCall:
        tool = self._own.get(call.name)
        if tool is None:
            return msgspec.structs.replace(call, alias=call.name)
        names = {word: name for name, word in tool.arguments.items()}
        arguments = {names.get(name, name): value for name, value in call.arguments.items()}
        return msgspec.structs.replace(call, name=tool.own, arguments=arguments, alias=call.name)

    def turn(self, calls: Sequence[Call], thought: str = "", *, before: int = 0) -> list[int]:
        """As `Renderer.turn`; calls have the tools' own names."""
        return self._renderer.turn([self._written(call) for call in calls], thought, before=before)

    def _written(self, call: Call) -> Call:
        name, arguments = call
        tool = self._words.get(name)
        if tool is None:
            return call
        return tool.schema.name, {tool.arguments.get(plain, plain): value for plain, value in arguments.items()}


def _as_written(call: ToolCall) -> ToolCall:
    return msgspec.structs.replace(call, name=call.alias)

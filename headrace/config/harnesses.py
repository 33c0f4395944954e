"""Sections of harnesses: which program acts in the sandboxes, and programs of the user's own."""

from typing import Literal

from headrace.config.base import Positive, Section, Text, Token, Variable, Word

HARNESSES = ("mini-swe-agent", "codex", "claude-code", "opencode")
"""Those that headrace knows (headrace/harnesses/programs.py)."""


class Harness(Section, frozen=True, kw_only=True):
    """The program that acts in the sandboxes of training and evaluation (docs/harnesses.md)."""

    name: Token = "own"
    """headrace's own agent (own), one that headrace knows (mini-swe-agent, codex, claude-code, opencode), or one of
    [harnesses]."""
    mix: dict[Token, Positive] = {}
    """Several harnesses by weight, in place of `name`: all attempts of a group have the same one."""
    reward: Literal["all", "main"] = "all"
    """The conversations of an attempt that get its reward: all, or the one with the most turns."""
    arguments: tuple[Word, ...] = ()
    """Further arguments of the harness's command."""


class Program(Section, frozen=True, kw_only=True):
    """A harness of the user's own, as a table [harnesses.NAME]."""

    install: Text
    """The content of its bundle: `pip:` or `npm:` with requirements, or `folder:` with a path."""
    command: tuple[Word, ...]
    """Its command line. `{prompt}`, `{url}`, `{key}`, `{home}` and `{bundle}` are replaced; the first word is a program
    of the bundle, `python` or `node` with a bundle of `pip:` or `npm:`."""
    dialect: Literal["chat", "responses", "messages"] = "chat"
    """The API that it speaks: sets OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY."""
    environment: dict[Variable, Text] = {}
    """Further variables, with the same replacements."""
    version: Text = ""
    """For the record."""

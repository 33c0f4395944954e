"""The functions that generated repositories are made of, each with the ways in which it can be broken.

Idea: a template is the text of a function body in which every point that a bug may hit is written
``«right|wrong|...»``. A bug takes one wrong alternative at one point, so every bug lies on one line and has one
fix, and both can be enumerated. ``{name}`` is filled in per function: parameters and variables (fresh per function,
from small pools), and the numbers {k} (the right constant, which the description tells) and {j} (a wrong one beside
it). Why a grid: aggregates times filters give many multi-line functions that share their parts, so that templates
kept out of training (`UNSEEN`) are partly new combinations of known parts and partly functions that were never seen
at all.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec

Family = Literal["one_line", "multi_line"]


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of function. `takes` names its parameters: a b n (integers), xs (list of integers), s t (strings)."""

    name: str
    family: Family
    about: str
    takes: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def bugs(self) -> list[tuple[int, int, int]]:
        """(line, point on the line, alternative >= 1) of every bug this template can have."""
        return [
            (row, column, choice)
            for row, line in enumerate(_cut(self.body))
            for column, point in enumerate(line[1::2])
            for choice in range(1, len(point))
        ]

    def write(self, names: dict[str, str], bug: tuple[int, int, int] | None = None) -> list[str]:
        """The body's lines, indented by four, right everywhere except at `bug`."""
        lines = []
        for row, line in enumerate(_cut(self.body)):
            text = "    "
            for at, part in enumerate(line):
                text += part[bug[2] if bug and bug[0] == row and at == 2 * bug[1] + 1 else 0]
            lines.append(text.format_map(names))
        return lines


@lru_cache(256)
def _cut(body: tuple[str, ...]) -> list[list[list[str]]]:
    """Lines as alternating plain parts (one choice) and points (several)."""
    return [
        [part.split("|") if at % 2 else [part] for at, part in enumerate(re.split("«(.*?)»", line))] for line in body
    ]


def one_line(name: str, takes: str, about: str, expression: str) -> Template:
    """A template whose body is one `return`; `takes` names its parameters, separated by spaces."""
    return Template(
        name=name, family="one_line", about=about, takes=tuple(takes.split()), body=(f"return {expression}",)
    )


def multi_line(name: str, takes: str, about: str, *body: str) -> Template:
    """A template of several lines."""
    return Template(name=name, family="multi_line", about=about, takes=tuple(takes.split()), body=body)


_ONE_LINE = (
    one_line("add", "a b", "{a} plus {b}", "{a} «+|-|*» {b}"),
    one_line("subtract", "a b", "{a} minus {b}", "{a} «-|+|*» {b}"),
    one_line("multiply", "a b", "{a} times {b}", "{a} «*|+|-» {b}"),
    one_line("plus_constant", "a", "{a} plus {k}", "{a} «+|-» «{k}|{j}»"),
    one_line("minus_constant", "a", "{a} minus {k}", "{a} «-|+» «{k}|{j}»"),
    one_line("times_constant", "a", "{a} times {k}", "{a} «*|+» «{k}|{j}»"),
    one_line("square", "a", "{a} squared", "{a} «*|+|-» {a}"),
    one_line("larger", "a b", "larger of {a} and {b}", "«max|min»({a}, {b})"),
    one_line("smaller", "a b", "smaller of {a} and {b}", "«min|max»({a}, {b})"),
    one_line("distance", "a b", "distance of {a} and {b}", "abs({a} «-|+» {b})"),
    one_line("is_even", "a", "is {a} even", "{a} % 2 «==|!=» 0"),
    one_line("is_odd", "a", "is {a} odd", "{a} % 2 «==|!=» 1"),
    one_line("above", "a b", "is {a} above {b}", "{a} «>|<|>=» {b}"),
    one_line("below", "a b", "is {a} below {b}", "{a} «<|>|<=» {b}"),
    one_line("at_least", "a", "is {a} at least {k}", "{a} «>=|>|<=» «{k}|{j}»"),
    one_line("at_most", "a", "is {a} at most {k}", "{a} «<=|<|>=» «{k}|{j}»"),
    one_line("first", "xs", "first of {xs}", "{xs}[«0|1|-1»]"),
    one_line("last", "xs", "last of {xs}", "{xs}[«-1|0|-2»]"),
    one_line("length_plus", "xs", "length of {xs} plus {k}", "«len|sum»({xs}) «+|-» «{k}|{j}»"),
    one_line("backwards", "xs", "{xs} backwards", "{xs}[::«-1|1»]"),
    one_line("sum_plus", "xs", "sum of {xs} plus {k}", "«sum|len»({xs}) «+|-» «{k}|{j}»"),
    one_line("first_some", "xs", "first {k} of {xs}", "{xs}[:«{k}|{j}»]"),
    one_line("skip_some", "xs", "{xs} without first {k}", "{xs}[«{k}|{j}»:]"),
    one_line("twice_plus", "a b", "twice {a} plus {b}", "2 «*|+» {a} «+|-» {b}"),
    one_line("middle", "a b", "middle of {a} and {b}", "({a} «+|-» {b}) «//|*» 2"),
    one_line("remainder", "a", "rest of {a} by {k}", "{a} «%|//» «{k}|{j}»"),
    one_line("upper", "s", "{s} in upper case", "{s}.«upper|lower»()"),
    one_line("lower", "s", "{s} in lower case", "{s}.«lower|upper»()"),
    one_line("joined", "s t", "{s} then {t}", "«{s} + {t}|{t} + {s}»"),
    one_line("repeated", "s", "{s} {k} times", "{s} * «{k}|{j}»"),
)

_ONE_LINE_UNSEEN = (
    one_line("twice_minus", "a b", "twice {a} minus {b}", "2 «*|+» {a} «-|+» {b}"),
    one_line("cube", "a", "{a} cubed", "{a} «*|+» {a} «*|+» {a}"),
    one_line("spread", "xs", "largest minus smallest of {xs}", "max({xs}) «-|+» min({xs})"),
    one_line("sum_minus", "xs", "sum of {xs} minus {k}", "sum({xs}) «-|+» «{k}|{j}»"),
    one_line("quotient", "a", "{a} divided by {k}", "{a} «//|%|*» «{k}|{j}»"),
    one_line("last_some", "xs", "last {k} of {xs}", "{xs}[-«{k}|{j}»:]"),
    one_line("is_longer", "s t", "is {s} longer than {t}", "len({s}) «>|<» len({t})"),
)

FILTERS = {
    "all": ("{xs}", ""),
    "even": ("even {xs}", "{v} % 2 «==|!=» 0"),
    "odd": ("odd {xs}", "{v} % 2 «==|!=» 1"),
    "above": ("{xs} above {k}", "{v} «>|<» «{k}|{j}»"),
    "below": ("{xs} below {k}", "{v} «<|>» «{k}|{j}»"),
    "negative": ("negative {xs}", "{v} «<|>» 0"),
}

AGGREGATES = {
    "count": ("{o} = «0|1»", "{o} += «1|2»"),
    "total": ("{o} = «0|1»", "{o} «+=|-=» {v}"),
    "product": ("{o} = «1|0»", "{o} «*=|+=» {v}"),
    "list": ("{o} = []", "{o}.append({v})"),
}


def aggregated(
    aggregates: Mapping[str, tuple[str, str]], aggregate: str, filters: Mapping[str, tuple[str, str]], which: str
) -> Template:
    """One cell of a grid: an aggregate (start, action) over the numbers that a filter (words, condition) lets pass."""
    start, act = aggregates[aggregate]
    words, condition = filters[which]
    inner = [f"    if {condition}:", f"        {act}"] if condition else [f"    {act}"]
    return multi_line(
        f"{aggregate}_{which}", "xs", f"{aggregate} of {words}", start, "for {v} in {xs}:", *inner, "return {o}"
    )


_GRID_UNSEEN = (("count", "odd"), ("total", "negative"), ("list", "below"), ("product", "even"))
_GRID_SKIPPED = (("count", "all"), ("list", "all"))

_MULTI_LINE = (
    *(
        aggregated(AGGREGATES, aggregate, FILTERS, filter_name)
        for aggregate in AGGREGATES
        for filter_name in FILTERS
        if (aggregate, filter_name) not in (*_GRID_UNSEEN, *_GRID_SKIPPED)
    ),
    multi_line(
        "largest",
        "xs",
        "largest of {xs}",
        "{o} = {xs}[0]",
        "for {v} in {xs}:",
        "    if {v} «>|<» {o}:",
        "        {o} = {v}",
        "return «{o}|{v}»",
    ),
    multi_line(
        "smallest",
        "xs",
        "smallest of {xs}",
        "{o} = {xs}[0]",
        "for {v} in {xs}:",
        "    if {v} «<|>» {o}:",
        "        {o} = {v}",
        "return «{o}|{v}»",
    ),
    multi_line(
        "where",
        "xs n",
        "place of {n} in {xs}",
        "for {i} in range(len({xs})):",
        "    if {xs}[{i}] «==|!=» {n}:",
        "        return «{i}|{n}»",
        "return «-1|0»",
    ),
    multi_line(
        "running",
        "xs",
        "running totals of {xs}",
        "{o}, {c} = [], «0|1»",
        "for {v} in {xs}:",
        "    {c} «+=|-=» {v}",
        "    {o}.append(«{c}|{v}»)",
        "return {o}",
    ),
    multi_line(
        "scaled",
        "xs",
        "list of {xs} times {k}",
        "{o} = []",
        "for {v} in {xs}:",
        "    {o}.append({v} «*|+» «{k}|{j}»)",
        "return {o}",
    ),
    multi_line(
        "up_to",
        "n",
        "sum of 1 to {n}",
        "{o} = «0|1»",
        "for {i} in range(«1|2», {n} «+|-» 1):",
        "    {o} «+=|-=» {i}",
        "return {o}",
    ),
)

_MULTI_LINE_UNSEEN = (
    *(aggregated(AGGREGATES, kind, FILTERS, which) for kind, which in _GRID_UNSEEN),
    multi_line(
        "factorial",
        "n",
        "product of 1 to {n}",
        "{o} = «1|0»",
        "for {i} in range(1, {n} «+|-» 1):",
        "    {o} «*=|+=» {i}",
        "return {o}",
    ),
    multi_line(
        "power",
        "a n",
        "{a} to the power {n}",
        "{o} = «1|0»",
        "for {i} in range({n}):",
        "    {o} «*=|+=» {a}",
        "return {o}",
    ),
    multi_line(
        "shifted",
        "xs",
        "list of {xs} minus {k}",
        "{o} = []",
        "for {v} in {xs}:",
        "    {o}.append({v} «-|+» «{k}|{j}»)",
        "return {o}",
    ),
)

TRAINED: tuple[Template, ...] = _ONE_LINE + _MULTI_LINE
"""Templates that training, held-out tasks and mid-training draw from."""

UNSEEN: tuple[Template, ...] = _ONE_LINE_UNSEEN + _MULTI_LINE_UNSEEN
"""Templates that no training process ever sees, neither as the broken function nor as a neighbour."""

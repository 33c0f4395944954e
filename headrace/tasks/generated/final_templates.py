"""Function templates for the final measurement: no recipe is chosen on them and no training process sees them.

Why a set of its own: the 14 templates of `templates.UNSEEN` are a development suite, because recipes were compared on
them. A figure for generalisation needs functions that nobody evaluated before the recipe was frozen. None of these
shares its description or its body with a template of `templates.TRAINED` or `templates.UNSEEN` (a test checks it).
"""

from headrace.tasks.generated.templates import Template, multi_line, one_line

_ONE_LINE = (
    one_line("last_digit", "n", "last digit of {n} times {k}", "{n} * «{k}|{j}» «%|//» 10"),
    one_line("round_down", "a", "{a} rounded down to a multiple of {k}", "{a} «-|+» {a} «%|//» «{k}|{j}»"),
    one_line("mean_of_ends", "xs", "mean of first and last of {xs}", "({xs}[«0|1»] «+|-» {xs}[«-1|-2»]) / 2"),
    one_line("third_largest", "xs", "third largest of {xs}", "sorted({xs})[«-3|2|-2»]"),
    one_line("distinct", "xs", "number of distinct {xs}", "len(«set|list»({xs}))"),
    one_line("rotated", "xs", "{xs} with the first moved to the end", "{xs}[«1|0»:] + {xs}[:«1|0|2»]"),
    one_line(
        "halves_swapped",
        "xs",
        "second half of {xs} before its first half",
        "{xs}[len({xs}) // «2|3»:] + {xs}[:len({xs}) // «2|3»]",
    ),
    one_line("bracketed", "s", "{s} in square brackets", "«'['|']'» + {s} + «']'|'['»"),
    one_line("padded", "s", "{s} filled with dots on the left to {k} letters", "{s}.«rjust|ljust»(«{k}|{j}», '.')"),
    one_line("initials", "s t", "first letter of {s} and last letter of {t}", "{s}[«0|-1»] + {t}[«-1|0»]"),
    one_line("without_letter", "s t", "{s} without the first letter of {t}", "{s}.replace({t}[«0|-1»], «''|'-'»)"),
)

_MULTI_LINE = (
    multi_line(
        "alternating",
        "xs",
        "sum of {xs} with alternating signs, the first positive",
        "{o}, {c} = 0, «1|-1»",
        "for {v} in {xs}:",
        "    {o} «+=|-=» {c} * {v}",
        "    {c} = «-{c}|{c}»",
        "return {o}",
    ),
    multi_line(
        "record_highs",
        "xs",
        "how often {xs} reach a new high",
        "{o}, {c} = «0|1», {xs}[0]",
        "for {v} in {xs}[1:]:",
        "    if {v} «>|<» {c}:",
        "        {o}, {c} = {o} + «1|2», {v}",
        "return {o}",
    ),
    multi_line(
        "until_negative",
        "xs",
        "{xs} up to the first negative one",
        "{o} = []",
        "for {v} in {xs}:",
        "    if {v} «<|>» 0:",
        "        «break|continue»",
        "    {o}.append({v})",
        "return {o}",
    ),
    multi_line(
        "collatz_steps",
        "n",
        "Collatz steps from {n} to 1",
        "{o} = «0|1»",
        "while {n} > 1:",
        "    {n} = {n} // 2 if {n} % 2 == «0|1» else 3 * {n} «+|-» 1",
        "    {o} += «1|2»",
        "    if {o} > 99:",
        "        break",
        "return {o}",
    ),
    multi_line(
        "digit_sum",
        "a b",
        "digit sum of {a} times {b} without its sign",
        "{o} = «0|1»",
        "for {v} in str(abs({a} «*|+» {b})):",
        "    {o} «+=|-=» int({v})",
        "return {o}",
    ),
    multi_line(
        "fibonacci",
        "n",
        "Fibonacci number {n}, the first two are 1",
        "{o}, {c} = «1|0», 1",
        "for {i} in range({n} - «2|1»):",
        "    {o}, {c} = {c}, {o} «+|-» {c}",
        "return «{c}|{o}»",
    ),
    multi_line(
        "common_divisor",
        "a n",
        "greatest common divisor of {a} and {n}",
        "{o} = 1",
        "for {i} in range(2, {n} «+|-» 1):",
        "    if {a} % {i} «==|!=» 0 and {n} % {i} «==|!=» 0:",
        "        {o} = «{i}|{n}»",
        "return {o}",
    ),
    multi_line(
        "neighbour_pairs",
        "xs",
        "how many neighbours in {xs} grow",
        "{o} = «0|1»",
        "for {i} in range(len({xs}) - 1):",
        "    if {xs}[{i}] «<|>» {xs}[{i} + 1]:",
        "        {o} «+=|-=» 1",
        "return {o}",
    ),
    multi_line(
        "two_sums",
        "xs",
        "list of the sum of negative and the sum of other {xs}",
        "{o}, {c} = «0|1», 0",
        "for {v} in {xs}:",
        "    if {v} «<|>» 0:",
        "        {o} «+=|-=» {v}",
        "    else:",
        "        {c} «+=|-=» {v}",
        "return [{o}, {c}]",
    ),
    multi_line(
        "vowels_hidden",
        "s t",
        "{s} with every letter of {t} as a star",
        "{o} = ''",
        "for {v} in {s}:",
        "    {o} += «'*'|{v}» if {v} «in|not in» {t} else «{v}|'*'»",
        "return {o}",
    ),
    multi_line(
        "longest_run",
        "s t",
        "length of the longest run of one letter in {s} then {t}",
        "{o}, {c}, {s} = 1, «1|2», {s} + {t}",
        "for {i} in range(1, len({s})):",
        "    {c} = {c} + 1 if {s}[{i}] «==|!=» {s}[{i} - 1] else «1|0»",
        "    {o} = «max|min»({o}, {c})",
        "return {o}",
    ),
    multi_line(
        "merged",
        "xs n",
        "{xs} with {n} put before the first that is larger",
        "for {i} in range(len({xs})):",
        "    if {xs}[{i}] «>|<» {n}:",
        "        return {xs}[:«{i}|{i} + 1»] + [{n}] + {xs}[{i}:]",
        "return {xs} + [{n}]",
    ),
)

FINAL: tuple[Template, ...] = _ONE_LINE + _MULTI_LINE
"""23 templates of the suite `generated/unseen-final`."""

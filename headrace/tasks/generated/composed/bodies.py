"""Rules for bodies of several lines: loops, cases and steps over the expressions."""

from collections.abc import Callable, Sequence

from headrace.tasks.generated.composed.expressions import Expressions
from headrace.tasks.generated.composed.parts import Part, either_order


class Bodies(Expressions):
    """The rules over one function's parameters and one source of random numbers."""

    def several(self) -> tuple[str, list[str]]:
        """Words and lines of a body of several lines."""
        kinds: Sequence[Callable[[], tuple[str, list[str]]]] = (
            self.gathered,
            self.gathered,
            self.gathered,
            self.branches,
            self.steps,
            self.early,
            self.counted,
            self.letters,
            self.letters,
            self.neighbours,
            self.stopped,
            self.split,
            self.until,
        )
        return self.rng.choice(kinds)()

    def looped(self) -> Part:
        """The list of a loop."""
        return self.values(self.pick(0, 0, 1))

    def gathered(self) -> tuple[str, list[str]]:
        """A loop that gathers one value per element."""
        over, change = self.looped(), self.value("{v}")
        word, start, act = self.pick(
            ("sum", "{o} = «0|1»", "{o} «+=|-=» {0}"),
            ("list", "{o} = []", "{o}.append({0})"),
            ("product", "{o} = «1|0»", "{o} «*=|+=» {1}"),
            ("highest, at least 0,", "{o} = 0", "{o} = «max|min»({o}, {0})"),
            ("lowest, at most 0,", "{o} = 0", "{o} = «min|max»({o}, {0})"),
            ("last, or 0,", "{o} = 0", "{o} = {0}"),
            ("list from the end", "{o} = []", f"{{o}} = {either_order(f'[{change.code}]', '{o}')}"),
        )
        act = act.replace("{0}", change.code).replace("{1}", change.inner)
        words = f"{word} of {change.words} for {over.said}"
        lines = [start, f"for {{v}} in {over.code}:"]
        kind = self.rng.randrange(5)
        if kind == 0:
            return words, [*lines, f"    {act}", "return {o}"]
        test = self.test("{v}")
        if kind == 1:
            return f"{words} that are not {test.words}", [
                *lines,
                f"    if {test.code}:",
                "        «continue|break»",
                f"    {act}",
                "return {o}",
            ]
        if kind == 2:
            other = self.test("{v}")
            both, code = self.pick(("and", "«and|or»"), ("or", "«or|and»"))
            return f"{words} that are {test.words} {both} {other.words}", [
                *lines,
                f"    if {test.code} {code} {other.code}:",
                f"        {act}",
                "return {o}",
            ]
        return f"{words} that are {test.words}", [*lines, f"    if {test.code}:", f"        {act}", "return {o}"]

    def branches(self) -> tuple[str, list[str]]:
        """Two or three cases."""
        asked = self.condition(self.pick(1, 1, 2))
        kind = self.pick(self.number, self.values, self.text)
        yes, no = kind(self.pick(0, 1)), kind(1)
        if self.rng.random() < 0.4:
            other, middle = self.condition(1), kind(self.pick(0, 1))
            return f"{yes.said} if {asked.words}, {middle.said} if {other.words}, otherwise {no.said}", [
                f"if {asked.code}:",
                f"    return {yes.code}",
                f"if {other.code}:",
                f"    return {middle.code}",
                f"return {no.code}",
            ]
        words = f"{yes.said} if {asked.words}, otherwise {no.said}"
        if self.rng.random() < 0.3:
            return words, [f"{{o}} = {yes.code} if {asked.code} else {no.code}", "return {o}"]
        return words, [f"if {asked.code}:", f"    return {yes.code}", f"return {no.code}"]

    def steps(self) -> tuple[str, list[str]]:
        """Two steps, one after the other."""
        if self.rng.random() < 0.5:
            values = self.values(1)
            word, code = self.pick(
                ("sum", "«sum|len»({o})"), ("highest", "«max|min»({o})"), ("length", "«len|sum»({o})")
            )
            other = self.number(0)
            sign, sum_code = self.pick(("plus", "«+|-»"), ("minus", "«-|+»"), ("times", "«*|+»"))
            return f"{word} of {values.said} {sign} {other.words}", [
                f"{{o}} = {values.code}",
                f"return {code} {sum_code} {other.code}",
            ]
        text = self.text(1)
        self.takes += [name for name in ("s", "t") if name not in self.takes]
        return f"{text.said} and {{t}} before and after it", [
            f"{{o}} = {text.code}",
            "{o} = «{t} + {o}|{o} + {t}»",
            "return «{o} + {t}|{o}»",
        ]

    def early(self) -> tuple[str, list[str]]:
        """A loop that returns at the first element that passes."""
        over, test = self.looped(), self.test("{v}")
        kind = self.rng.randrange(4)
        if kind == 0:
            return f"whether one of {over.said} is {test.words}", [
                f"for {{v}} in {over.code}:",
                f"    if {test.code}:",
                "        return «True|False»",
                "return «False|True»",
            ]
        if kind == 1:
            change = self.change("{v}")
            return f"{change.words} of the first of {over.said} that is {test.words}, or 0", [
                f"for {{v}} in {over.code}:",
                f"    if {test.code}:",
                f"        return {change.code}",
                "return «0|1»",
            ]
        if kind == 2:
            return f"place of the first of {over.said} that is {test.words}, or -1", [
                f"for {{i}}, {{v}} in enumerate({over.code}):",
                f"    if {test.code}:",
                "        return «{i}|{v}»",
                "return «-1|0»",
            ]
        return f"last of {over.said} that is {test.words}, or 0", [
            "{o} = «0|1»",
            f"for {{v}} in {over.code}:",
            f"    if {test.code}:",
            "        {o} = {v}",
            "return «{o}|{v}»",
        ]

    def counted(self) -> tuple[str, list[str]]:
        """A loop over whole numbers."""
        end = self.name("n")
        change = self.value("{i}")
        word, start, act = self.pick(
            ("sum", "{o} = «0|1»", "{o} «+=|-=» {0}"),
            ("list", "{o} = []", "{o}.append({0})"),
            ("product", "{o} = «1|0»", "{o} «*=|+=» {1}"),
            ("highest, at least 0,", "{o} = 0", "{o} = «max|min»({o}, {0})"),
        )
        act = act.replace("{0}", change.code).replace("{1}", change.inner)
        begin, code = self.pick(
            (f"0 to {end.words}, which is left out", f"range({end.code})"),
            (f"1 to {end.words}", f"range(«1|0», {end.code} «+|-» 1)"),
            (f"{end.words} down to 1", f"range({end.code}, «0|1», -1)"),
            (f"2 to {end.words}", f"range(«2|1», {end.code} «+|-» 1)"),
            (f"{{k}} to {end.words} plus {{k}}", f"range(«{{k}}|{{j}}», {end.code} + {{k}} «+|-» 1)"),
        )
        words = f"{word} of {change.words} for {begin}"
        lines = [start, f"for {{i}} in {code}:"]
        if self.rng.random() < 0.4:
            test = self.test("{i}")
            return f"{words}, if {test.words}", [*lines, f"    if {test.code}:", f"        {act}", "return {o}"]
        return words, [*lines, f"    {act}", "return {o}"]

    def letters(self) -> tuple[str, list[str]]:
        """A loop over the letters of a text."""
        text = self.text(self.pick(0, 0, 1))
        test_word, test = self.pick(
            ("capital letters", "{v}.«isupper|islower»()"),
            ("small letters", "{v}.«islower|isupper»()"),
            ("letters 'a'", "{v} «==|!=» 'a'"),
            ("letters other than 'X'", "{v} «!=|==» 'X'"),
            ("letters after 'b'", "{v} «>|<» 'b'"),
            ("vowels", "{v} «in|not in» 'aeiouAEIOU'"),
        )
        word, start, act = self.pick(
            ("number of", "{o} = «0|1»", "{o} += «1|2»"),
            ("list of the", "{o} = []", "{o}.append({v})"),
            ("text of the", "{o} = ''", "{o} «+= {v}|= {v}»"),
            ("small form of the", "{o} = ''", "{o} += {v}.«lower|upper»()"),
            ("threefold", "{o} = ''", "{o} += {v} * «3|2»"),
            ("places of the", "{o} = []", "{o}.append(«{i}|{v}»)"),
        )
        loop = f"for {{i}}, {{v}} in enumerate({text.code}):" if "{i}" in act else f"for {{v}} in {text.code}:"
        words = f"{word} {test_word} in {text.said}"
        if word == "text of the" and self.rng.random() < 0.5:
            mark, other = self.rng.sample("_.!", 2)
            return f"{text.said} with '{mark}' in place of {test_word}", [
                "{o} = ''",
                f"for {{v}} in {text.code}:",
                f"    if {test}:",
                f"        {{o}} += «'{mark}'|'{other}'|{{v}}»",
                "    else:",
                "        {o} «+= {v}|= {v}»",
                "return {o}",
            ]
        return words, [start, loop, f"    if {test}:", f"        {act}", "return {o}"]

    def neighbours(self) -> tuple[str, list[str]]:
        """A loop that compares each element with the one before it."""
        over = self.name("xs")
        word, code = self.pick(
            ("products", "{v} «*|+» {c}"), ("sums", "{v} «+|-» {c}"), ("higher ones", "«max|min»({v}, {c})")
        )
        if self.rng.random() < 0.5:
            return f"list of {word} of each of {over.words} and the one before", [
                "{o}, {c} = [], {xs}[0]",
                "for {v} in {xs}[«1|0»:]:",
                f"    {{o}}.append({code})",
                "    {c} = «{v}|{c}»",
                "return {o}",
            ]
        test, sign = self.pick(("above", "«>|<»"), ("below", "«<|>»"), ("equal to", "«==|!=»"))
        return f"list of those of {over.words} that are {test} the one before", [
            "{o}, {c} = [], {xs}[0]",
            "for {v} in {xs}[1:]:",
            f"    if {{v}} {sign} {{c}}:",
            "        {o}.append(«{v}|{c}»)",
            "    {c} = «{v}|{c}»",
            "return {o}",
        ]

    def stopped(self) -> tuple[str, list[str]]:
        """A loop that ends when a total is reached."""
        over, limit = self.looped(), self.operand()
        change = self.value("{v}")
        what, result = self.pick(("total", "«{o}|{v}»"), ("number of values", "«{c}|{o}»"))
        return f"{what} of {change.words} for {over.said} when the total first is above {limit.words}", [
            "{o}, {c} = «0|1», «0|1»",
            f"for {{v}} in {over.code}:",
            f"    {{o}} «+=|-=» {change.code}",
            "    {c} += «1|2»",
            f"    if {{o}} «>|<» {limit.code}:",
            "        «break|continue»",
            f"return {result}",
        ]

    def split(self) -> tuple[str, list[str]]:
        """A loop with two cases."""
        over, test = self.looped(), self.test("{v}")
        yes = self.change("{v}")
        word, start, act, put = self.pick(
            ("sum", "{o} = «0|1»", "{o} «+=|-=» {0}", "{o} «+=|-=» {v}"),
            ("list", "{o} = []", "{o}.append({0})", "{o}.append(«{v}|-{v}»)"),
        )
        return f"{word} of {over.said} with {yes.words} for those that are {test.words}", [
            start,
            f"for {{v}} in {over.code}:",
            f"    if {test.code}:",
            f"        {act.replace('{0}', yes.code)}",
            "    else:",
            f"        {put}",
            "return {o}",
        ]

    def until(self) -> tuple[str, list[str]]:
        """A while loop over places."""
        over, test = self.name("xs"), self.test("{xs}[{i}]")
        what, act, start = self.pick(
            ("sum", "{o} «+=|-=» {xs}[{i}]", "{o}, {i} = «0|1», 0"),
            ("list", "{o}.append({xs}[{i}])", "{o}, {i} = [], «0|1»"),
            ("number", "{o} += «1|2»", "{o}, {i} = «0|1», 0"),
        )
        return f"{what} of {over.words} before the first that is {test.words}", [
            start,
            f"while {{i}} < len({over.code}):",
            f"    if {test.code}:",
            "        «break|return 0»",
            f"    {act}",
            "    {i} += «1|2»",
            "return {o}",
        ]

"""Rules for expressions: numbers, lists, texts and conditions over one function's parameters."""

import random
from typing import TypeVar

from headrace.tasks.generated.composed.parts import Part, either_order

T = TypeVar("T")


class Expressions:
    """The rules over one function's parameters and one source of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.takes: list[str] = []
        self._constant = False

    def pick(self, *choices: T) -> T:
        """One of the choices."""
        return self.rng.choice(choices)

    def name(self, *names: str) -> Part:
        """A parameter, which joins the function's own."""
        name = self.pick(*names)
        if name not in self.takes:
            self.takes.append(name)
        return Part(f"{{{name}}}", f"{{{name}}}")

    def constant(self) -> Part:
        """A number: the function's constant once, literal ones after that."""
        if not self._constant:
            self._constant = True
            return Part("{k}", "«{k}|{j}»")
        value = self.rng.randint(2, 9)
        return Part(str(value), f"«{value}|{value + self.pick(-1, 1)}»")

    def operand(self) -> Part:
        """A constant or a parameter."""
        return self.constant() if self.rng.random() < 0.5 else self.number(0)

    def value(self, name: str) -> Part:
        """The value of a loop, as it is or changed."""
        return Part("value", name) if self.rng.random() < 0.5 else self.change(name)

    # Numbers.

    def number(self, depth: int) -> Part:
        """A number of at most so many operations."""
        if depth <= 0:
            return self.name("a", "b", "n")
        return self.pick(self.arithmetic, self.arithmetic, self.of_list, self.of_text, self.one_sided)(depth)

    def arithmetic(self, depth: int) -> Part:
        """Two numbers and an operator."""
        left = self.number(depth - 1)
        right = self.constant() if self.rng.random() < 0.3 else self.number(self.pick(0, depth - 1))
        word, code = self.pick(("plus", "«+|-»"), ("minus", "«-|+»"), ("times", "«*|+»"), ("plus", "«+|*»"))
        return Part(f"{left.said} {word} {right.said}", f"{left.inner} {code} {right.inner}", True)

    def one_sided(self, depth: int) -> Part:
        """A number made of one number."""
        inner, other = self.number(depth - 1), self.number(0)
        kind = self.rng.randrange(5)
        if kind == 0:
            return Part(f"{inner.said} squared", f"{inner.inner} ** «2|3»", True)
        if kind == 1:
            return Part(f"{inner.said} without its sign", f"«abs|-»({inner.code})")
        if kind == 2:
            return Part(f"minus {inner.said}", f"«-|+»{inner.inner}", True)
        word, code = self.pick(("higher", "«max|min»"), ("lower", "«min|max»"))
        return Part(f"{word} of {inner.said} and {other.said}", f"{code}({inner.code}, {other.code})")

    def of_list(self, depth: int) -> Part:
        """A number made of a list."""
        values = self.values(depth - 1)
        word, code = self.pick(
            ("sum", "«sum|max»({0})"),
            ("length", "«len|sum»({0})"),
            ("highest", "«max|min»({0})"),
            ("lowest", "«min|max»({0})"),
            ("first", "{1}[«0|-1|1»]"),
            ("second", "{1}[«1|0»]"),
            ("last", "{1}[«-1|0»]"),
        )
        return Part(f"{word} of {values.said}", code.replace("{0}", values.code).replace("{1}", values.inner))

    def of_text(self, depth: int) -> Part:
        """A number made of a text."""
        text = self.text(depth - 1)
        if self.rng.random() < 0.6:
            return Part(f"length of {text.said}", f"len({text.code})")
        piece = self.name("s", "t")
        return Part(f"how often {piece.words} is in {text.said}", f"{text.inner}.«count|find»({piece.code})")

    # Lists.

    def values(self, depth: int) -> Part:
        """A list of numbers."""
        if depth <= 0:
            return self.name("xs")
        return self.pick(self.slice, self.order, self.each, self.each, self.chosen, self.longer)(depth)

    def slice(self, depth: int) -> Part:
        """Part of a list."""
        values = self.values(depth - 1)
        word, code = self.pick(
            ("without the first", "[«1|0»:]"),
            ("without the last", "[:«-1|1»]"),
            ("without the first two", "[«2|1»:]"),
            ("without the last two", "[:«-2|-1»]"),
            ("at every second place", "[::«2|3»]"),
            ("from the end to the start", "[::«-1|1»]"),
        )
        return Part(f"{values.said} {word}", f"{values.inner}{code}")

    def order(self, depth: int) -> Part:
        """A sorted list."""
        values = self.values(depth - 1)
        word, code = self.pick(("rising", "«sorted|list»({0})"), ("falling", "sorted({0}, reverse=«True|False»)"))
        return Part(f"{values.said} in {word} order", code.replace("{0}", values.code))

    def each(self, depth: int) -> Part:
        """A list with every value changed."""
        values, change = self.values(depth - 1), self.change("{v}")
        return Part(f"{change.words} for each of {values.said}", f"[{change.code} for {{v}} in {values.code}]")

    def chosen(self, depth: int) -> Part:
        """A list of some values."""
        values, test = self.values(depth - 1), self.test("{v}")
        return Part(
            f"those of {values.said} that are {test.words}", f"[{{v}} for {{v}} in {values.code} if {test.code}]"
        )

    def longer(self, depth: int) -> Part:
        """A list and a number."""
        values, number = self.values(depth - 1), self.number(0)
        alone = f"[{number.code}]"
        if self.rng.random() < 0.5:
            return Part(f"{values.said} and {number.words} after them", either_order(values.inner, alone), True)
        return Part(f"{number.words} before {values.said}", either_order(alone, values.inner), True)

    def change(self, value: str) -> Part:
        """A number made of the value of a loop."""
        kind = self.rng.randrange(7)
        if kind < 3:
            word, code = self.pick(("plus", "«+|-»"), ("minus", "«-|+»"), ("times", "«*|+»"))
            other = self.operand()
            return Part(f"value {word} {other.words}", f"{value} {code} {other.code}", True)
        return (
            Part("square", f"{value} «*|+» {value}", True),
            Part("value without sign", f"«abs|-»({value})"),
            Part("negated value", f"«-|+»{value}", True),
            Part("double value", f"«2|3» * {value}", True),
        )[kind - 3]

    def test(self, value: str) -> Part:
        """A condition on the value of a loop."""
        kind = self.rng.randrange(6)
        if kind < 2:
            other = self.operand()
            word, code = self.pick(
                ("above", "«>|<|>=»"), ("below", "«<|>|<=»"), ("at least", "«>=|<=|>»"), ("at most", "«<=|>=|<»")
            )
            return Part(f"{word} {other.words}", f"{value} {code} {other.code}")
        if kind == 2:
            other = self.name("n", "a")
            word, code = self.pick(("equal to", "«==|!=»"), ("other than", "«!=|==»"))
            return Part(f"{word} {other.words}", f"{value} {code} {other.code}")
        if kind == 3:
            other = self.constant()
            return Part(f"a multiple of {other.words}", f"{value} % {other.code} «==|!=» 0")
        word, code = self.pick(
            ("even", "% 2 «==|!=» 0"), ("odd", "% 2 «!=|==» 0"), ("negative", "«<|>» 0"), ("positive", "«>|<» 0")
        )
        return Part(word, f"{value} {code}")

    # Texts.

    def text(self, depth: int) -> Part:
        """A text."""
        if depth <= 0:
            return self.name("s", "t")
        return self.pick(self.method, self.cut, self.both, self.both)(depth)

    def method(self, depth: int) -> Part:
        """A text in another form."""
        text = self.text(depth - 1)
        word, code = self.pick(
            ("in capitals", "{0}.«upper|lower»()"),
            ("in small letters", "{0}.«lower|upper»()"),
            ("with other case", "{0}.«swapcase|lower|upper»()"),
            ("with a capital first", "{0}.«capitalize|lower|upper»()"),
            ("from the end to the start", "{0}[::«-1|1»]"),
            ("with its letters in order", "''.join(«sorted|list»({1}))"),
            ("with commas between its letters", "«','|''».join({1})"),
        )
        return Part(f"{text.said} {word}", code.replace("{0}", text.inner).replace("{1}", text.code))

    def cut(self, depth: int) -> Part:
        """Part of a text."""
        text = self.text(depth - 1)
        word, code = self.pick(
            ("first two letters of", "[:«2|1»]"),
            ("last two letters of", "[«-2|-1»:]"),
            ("last letter of", "[«-1|0»]"),
            ("first letter of", "[«0|-1»]"),
            ("all but the first letter of", "[«1|2»:]"),
            ("all but the last letter of", "[:«-1|1»]"),
        )
        return Part(f"{word} {text.said}", f"{text.inner}{code}")

    def both(self, depth: int) -> Part:
        """Texts beside each other."""
        left = self.text(depth - 1)
        kind = self.rng.randrange(4)
        if kind == 0:
            times = self.constant()
            return Part(f"{left.said} repeated {times.words} times", f"{left.inner} * {times.code}", True)
        if kind == 1:
            sign, other = self.rng.sample("-+:#", 2)
            return Part(f"{left.said} and '{sign}' after it", f"{left.inner} + «'{sign}'|'{other}'»", True)
        if kind == 2:
            number = self.number(0)
            return Part(
                f"{left.said} and {number.words} after it", either_order(left.inner, f"str({number.code})"), True
            )
        after = self.text(0)
        return Part(f"{left.said} and {after.words} after it", either_order(left.inner, after.code), True)

    # Conditions.

    def condition(self, depth: int) -> Part:
        """A condition, worded to follow `whether`."""
        kind = self.rng.randrange(6)
        if kind < 2:
            number, test = self.number(depth - 1), self.test("{0}")
            return Part(f"{number.said} is {test.words}", test.code.replace("{0}", number.inner))
        if kind == 2:
            number, values = self.number(0), self.values(depth - 1)
            word, code = self.pick(("is in", "«in|not in»"), ("is not in", "«not in|in»"))
            return Part(f"{number.words} {word} {values.said}", f"{number.code} {code} {values.code}")
        if kind == 3:
            values, test = self.values(depth - 1), self.test("{v}")
            word, code = self.pick(("all", "«all|any»"), ("any", "«any|all»"))
            return Part(f"{word} of {values.said} are {test.words}", f"{code}({test.code} for {{v}} in {values.code})")
        if kind == 4:
            left, right = self.text(depth - 1), self.name("s", "t")
            word, code = self.pick(("starts", "«startswith|endswith»"), ("ends", "«endswith|startswith»"))
            return Part(f"{left.said} {word} with {right.words}", f"{left.inner}.{code}({right.code})")
        if depth <= 1:
            text = self.name("s", "t")
            word, code = self.pick(("capitals", "«isupper|islower»"), ("small letters", "«islower|isupper»"))
            return Part(f"{text.words} is all {word}", f"{text.code}.{code}()")
        left, right = self.condition(1), self.condition(1)
        word, code = self.pick(("and", "«and|or»"), ("or", "«or|and»"))
        return Part(f"{left.words} {word} {right.words}", f"{left.code} {code} {right.code}", True)

    def result(self, depth: int) -> Part:
        """Any expression that a function can return."""
        if self.rng.random() < 0.25:
            asked = self.condition(depth)
            return Part(f"whether {asked.words}", asked.code)
        return self.pick(self.number, self.number, self.values, self.text)(depth)

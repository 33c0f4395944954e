"""Bug-fixing repositories made from a number: a README, a package of two modules, one broken function, tests.

Everything follows from the task's id alone: the id is a seed as text, and the suites own disjoint ranges of seeds,
so no held-out task can be met in training. The files are tiny because a policy of 0.6 M parameters has to read
them; what a task asks for is still the real thing: find the function, see how it differs from what is wanted,
change one line, test.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import sha256

import msgspec

from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks.generated.broad_templates import BROAD
from headrace.tasks.generated.composed import functions as composed
from headrace.tasks.generated.final_templates import FINAL
from headrace.tasks.generated.templates import TRAINED, UNSEEN, Template
from headrace.tasks.sealing import known, seal

TOOLS = ("search", "read_file", "edit_file", "run_tests", "finish")
"""The tools of generated tasks: enough for a policy that learns from nothing."""
SEEDS: Mapping[str, range] = {
    "heldout": range(0, 2_000),
    "dev": range(10_000, 12_000),
    "unseen": range(20_000, 22_000),
    "unseen-final": range(30_000, 32_000),
    "train": range(1_000_000, 1_000_000_000),
}
"""Which seeds a suite owns. Recipes are chosen on `dev` and `unseen` alone, never on `heldout` and `unseen-final`."""

_POOLS: Mapping[str, Sequence[Template]] = {"unseen": UNSEEN, "unseen-final": FINAL, "broad": BROAD}
"""Templates of the broken function, where they are not those of training. No suite is called broad: traces use it."""
COMPOSED = 0.75
"""Share of the broad functions that are composed at random (composed/); the others are of BROAD."""

VISIBLE, HIDDEN = "test_visible.py", "test_hidden.py"

_PACKAGES = ("kit", "lib", "app")
_MODULES = ("core", "calc", "tools", "basic", "data", "parts", "items", "extra")
_SYLLABLES = tuple(
    "bam cov dax feg gob hib jum kez lox mig nav pob rux sev dij vok wem yab zug fiv hob dum wix kuz".split()
)
_PAIRS = (("a", "b"), ("x", "y"), ("p", "q"))
_TEXTS = (("s", "t"), ("left", "right"))
_LISTS = ("xs", "vals", "nums")
_ELEMENTS = ("v", "e", "u")
_RESULTS = ("out", "res", "acc")

Arguments = tuple[object, ...]


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """One function of a repository, right and, if it is the target, broken."""

    template: Template
    name: str
    names: dict[str, str]

    @property
    def about(self) -> str:
        """The expected result, in words."""
        return self.template.about.format_map(self.names)

    def source(self, bug: tuple[int, int, int] | None = None) -> list[str]:
        """Its lines, `def` first."""
        head = f"def {self.name}({', '.join(self.names[t] for t in self.template.takes)}):"
        return [head, *self.template.write(self.names, bug)]


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A generated repository with everything that is known about it. Only `task` may reach an agent."""

    task: Task
    oracle: Oracle
    target: Function
    bug: tuple[int, int, int]
    path: str
    """Module with the bug."""
    line: int
    """Line of the bug, 1-based."""
    fixed: str
    """The correct form of that line."""


@lru_cache(16384)
def _loaded(source: str) -> Callable[..., object]:
    """Our own function from its source, under a fixed name so that equal bodies are compiled once."""
    space: dict[str, Callable[..., object]] = {}
    exec(compile(source, "<function>", "exec"), space)
    return space["subject"]


_ERRORS = (ArithmeticError, LookupError, NameError, TypeError, ValueError)


def _plain(function: Function, bug: tuple[int, int, int] | None = None) -> Callable[..., object]:
    """A function as Python calls it."""
    head, *body = function.source(bug)
    return _loaded("\n".join([head.replace(function.name, "subject", 1), *body]))


def _callable(function: Function, bug: tuple[int, int, int] | None = None) -> Callable[[Arguments], object]:
    """The result of a function for arguments: a value, or the name of the exception that it raises."""
    run = _plain(function, bug)

    def call(arguments: Arguments) -> object:
        try:
            return run(*arguments)
        except _ERRORS as error:
            return type(error).__name__

    return call


def behaves(made: Made, content: bytes, draws: int = 400) -> bool:
    """Whether a module's text computes what the right target does, for as many random arguments as a certificate tries.
    Only mutations of our own generated functions may run here: they have no loops without an end."""
    space: dict[str, Callable[..., object]] = {}
    try:
        exec(compile(content, "<mutant>", "exec"), space)
    except Exception:
        return False
    right, run = _callable(made.target), space[made.target.name]
    rng = random.Random(f"behaves/{made.task.ref.task}")
    for _ in range(draws):
        arguments = _arguments(rng, made.target.template.takes)
        wanted = right(arguments)
        try:
            got = run(*arguments)
        except Exception as error:
            got = type(error).__name__
        if (type(got), got) != (type(wanted), wanted):
            return False
    return True


def _function(rng: random.Random, template: Template, taken: set[str]) -> Function:
    while (name := rng.choice(_SYLLABLES) + rng.choice(_SYLLABLES)) in taken:
        pass
    taken.add(name)
    a, b = rng.choice(_PAIRS)
    s, t = rng.choice(_TEXTS)
    k = rng.randint(2, 5)
    names = {
        "a": a,
        "b": b,
        "n": "n",
        "i": "i",
        "c": "run",
        "s": s,
        "t": t,
        "xs": rng.choice(_LISTS),
        "v": rng.choice(_ELEMENTS),
        "o": rng.choice(_RESULTS),
        "k": str(k),
        "j": str(k + rng.choice((-1, 1))),
    }
    return Function(template=template, name=name, names=names)


def _arguments(rng: random.Random, takes: Sequence[str]) -> Arguments:
    values: list[object] = []
    for kind in takes:
        if kind in ("a", "b"):
            values.append(rng.randint(-9, 9))
        elif kind == "n":
            last = values[-1] if values else None
            values.append(rng.choice(last) if isinstance(last, list) and rng.random() < 0.7 else rng.randint(1, 6))
        elif kind == "xs":
            values.append([rng.randint(-9, 9) for _ in range(rng.randint(3, 6))])
        else:
            values.append("".join(rng.choice("abcXYZ") for _ in range(rng.randint(1, 4))))
    return tuple(values)


def _edges(function: Function) -> list[Arguments]:
    """Arguments that random ones miss: equal to a function's constants and beside them, and where nothing is found."""
    k = int(function.names["k"])
    values: Mapping[str, Sequence[object]] = {
        "a": (k, k - 1, k + 1, 0, 1),
        "b": (k, k, k, 0, -1),
        "n": (k, k - 1, 6, 1, 2),
        "xs": ([k + 1, k, k - 1, -1], [k, 1, 0, k + 1, -1], [-1, 0, 1, k], [1, -1, k, k + 1], [5, 5, 0, 1, 1]),
        "s": ("ab", "aXX", "X", "abXY", "bbc"),
        "t": ("ba", "Xa", "X", "Y", "bca"),
    }
    return list(zip(*(values[kind] for kind in function.template.takes), strict=True))


def _break(rng: random.Random, function: Function) -> tuple[tuple[int, int, int], list[Arguments], list[Arguments]]:
    """A bug, arguments that show it (two or more), and arguments that don't have to."""
    right = _callable(function)
    while True:
        bug = rng.choice(function.template.bugs)
        broken = _callable(function, bug)
        shown: list[Arguments] = []
        other: list[Arguments] = []
        for _ in range(12):
            arguments = _arguments(rng, function.template.takes)
            good, bad = right(arguments), broken(arguments)
            (shown if (type(good), good) != (type(bad), bad) else other).append(arguments)
        if len(shown) >= 2:
            return bug, shown, other


def every_bug_shows(template: Template) -> bool:
    """Whether there are bugs, each changes what the function gives for two or more of eight random arguments, and the
    right function raises for none."""
    rng = random.Random(f"shows/{template.name}")
    left = set(template.bugs)
    for _ in range(40 if left else 0):
        function = _function(rng, template, set())
        draws = [_arguments(rng, template.takes) for _ in range(8)]
        try:
            right = [repr(_plain(function)(*arguments)) for arguments in draws]
        except _ERRORS:
            return False
        for bug in sorted(left):
            broken = _callable(function, bug)
            if sum(repr(broken(arguments)) != value for arguments, value in zip(draws, right, strict=True)) >= 2:
                left.discard(bug)
        if not left:
            return True
    return False


@cache
def _known() -> frozenset[str]:
    """Words and code of all templates of suites."""
    return frozenset(
        text for template in (*TRAINED, *UNSEEN, *FINAL) for text in (template.about, composed.plain(template))
    )


def _composed(rng: random.Random, family: str) -> Template:
    """A composed function of that family which no suite has and whose bugs all show."""
    while True:
        template = composed.draw(rng.randrange(composed.DRAWS))
        if template.family == family and not {template.about, composed.plain(template)} & _known():
            if every_bug_shows(template):
                return template


def _template(rng: random.Random, suite: str, multi_line: float = 0.5) -> Template:
    """The template that a repository breaks: the first draws of its seed."""
    family = "multi_line" if rng.random() < multi_line else "one_line"
    if suite == "broad" and rng.random() < COMPOSED:
        return _composed(rng, family)
    return rng.choice([t for t in _POOLS.get(suite, TRAINED) if t.family == family])


def _template_of(suite: str, seed: int) -> str:
    """Name of the template that the repository of a seed breaks."""
    return _template(_random(seed), suite).name


def _random(seed: int) -> random.Random:
    return random.Random(f"headrace/{seed}")


def make(suite: str, seed: int, multi_line: float = 0.5, *, judged: bool = True) -> Made:
    """The repository of a seed. `multi_line` is the chance of that family; every suite uses the default.

    judged: with hidden tests; trace making needs none and is a quarter faster without.
    """
    rng = _random(seed)
    template = _template(rng, suite, multi_line)
    family = template.family
    taken: set[str] = set()
    target = _function(rng, template, taken)
    neighbours = [_function(rng, rng.choice(TRAINED), taken) for _ in range(3)]
    bug, shown, other = _break(rng, target)

    package = rng.choice(_PACKAGES)
    modules = rng.sample(_MODULES, 2)
    order = [target, *neighbours]
    rng.shuffle(order)
    right: dict[str, bytes] = {}
    broken: dict[str, bytes] = {}
    path, line, fixed = "", 0, ""
    homes: dict[str, str] = {}
    for module, functions in zip(modules, (order[:2], order[2:]), strict=True):
        file = f"{package}/{module}.py"
        texts: list[list[str]] = [[], []]
        for function in functions:
            homes[function.name] = f"{package}.{module}"
            gap = ["", ""] if texts[0] else []
            good, bad = function.source(), function.source(bug if function is target else None)
            if function is target:
                path, line, fixed = file, len(texts[0]) + len(gap) + 2 + bug[0], good[1 + bug[0]]
            texts[0] += gap + good
            texts[1] += gap + bad
        right[file], broken[file] = (("\n".join(text) + "\n").encode() for text in texts)

    def tests(checks: Sequence[tuple[Function, Sequence[Arguments]]]) -> bytes:
        lines = [f"from {homes[function.name]} import {function.name}" for function, _ in checks]
        for function, cases in checks:
            value = _callable(function)
            lines += ["", "", f"def test_{function.name}():"]
            for case in cases:
                lines.append(f"    assert {function.name}({', '.join(map(repr, case))}) == {value(case)!r}")
        return ("\n".join(lines) + "\n").encode()

    def draws(function: Function, count: int) -> list[Arguments]:
        return [_arguments(rng, function.template.takes) for _ in range(count)]

    readme = "\n".join([f"# {package}", "", *(f"- {f.name}: {f.about}" for f in order)]) + "\n"
    common = {"README.md": readme.encode(), f"{package}/__init__.py": b""}
    visible = tests([(target, shown[:1]), (neighbours[0], draws(neighbours[0], 1))])
    checks = [*shown[1:5], *other[:2], *_edges(target)]
    hidden = tests([(target, checks), *((n, draws(n, 2)) for n in neighbours)]) if judged else b""
    ref = TaskRef(f"generated/{suite}", str(seed))
    task = Task(
        ref=ref,
        family=family,
        prompt=f"{target.name} should give {target.about}",
        files=common | broken | {VISIBLE: visible},
        allowed=(f"{package}/*.py",),
        tools=TOOLS,
        tests=TestPlan(paths=(VISIBLE,)),
    )
    sealed = seal({HIDDEN: hidden})
    oracle = Oracle(
        ref=ref,
        hidden={HIDDEN: hidden},
        sealed=sealed.files,
        answers=known(sealed),
        tests=TestPlan(paths=(HIDDEN,)),
        expected=tuple(f"{HIDDEN}::test_{f.name}" for f in (target, *neighbours)),
        solution={path: right[path]},
    )
    return Made(task=task, oracle=oracle, target=target, bug=bug, path=path, line=line, fixed=fixed)


def source(suite: str) -> str:
    """sha256 of the templates that a suite breaks and of those beside them."""
    return sha256(msgspec.json.encode((_POOLS.get(suite, TRAINED), TRAINED))).hexdigest()


@lru_cache(len(SEEDS))
def _first(suite: str) -> Mapping[str, str]:
    """By template that the suite breaks: the lowest seed, as text."""
    wanted = len(_POOLS.get(suite, TRAINED))
    first: dict[str, str] = {}
    for seed in SEEDS[suite]:
        first.setdefault(_template_of(suite, seed), str(seed))
        if len(first) == wanted:
            break
    return first


def first_of_each(suite: str) -> tuple[str, ...]:
    """The lowest seed, as text, of every template that the suite breaks."""
    return tuple(_first(suite).values())


def first_of(suite: str, seed: int) -> str:
    """The lowest seed, as text, with the template of this one."""
    return _first(suite)[_template_of(suite, seed)]

"""Whether a message belongs on the subject that it was found on.

The broker checks subjects and not the content of messages. A role that may publish on one subject could therefore claim
another run, lane or group inside its message, or put a message of another type there. Readers check the two against
each other (`headrace/bus/nats/received.py`) and treat a contradiction like damaged bytes.
"""

from headrace.messages.subjects import SUBJECTS, Subject, token

_ADDRESSED = frozenset({"run", "lane", "group", "trajectory", "type"})
"""Fields of a template that the message repeats under the same name."""
_PLACED = frozenset(kind for subject in SUBJECTS.values() for kind in subject.types)
"""Types that belong to some family; another type is judged by its fields alone."""
_FAMILIES: dict[tuple[str, ...], list[tuple[Subject, list[str]]]] = {}
for _subject in sorted(SUBJECTS.values(), key=lambda each: -each.template.count(".")):
    _fields = _subject.template.split(".")
    _FAMILIES.setdefault(tuple(_fields[:2]), []).append((_subject, _fields))


def family_of(subject: str) -> Subject | None:
    """The family that a concrete subject belongs to; None for a subject outside the table."""
    tokens = subject.split(".")
    key = tuple(tokens[:2])
    for family, fields in _FAMILIES.get(key, ()):
        if len(tokens) < len(fields) or (len(tokens) > len(fields) and not fields[-1].startswith("{")):
            continue
        if all(field.startswith("{") or field == token for field, token in zip(fields, tokens, strict=False)):
            return family
    return None


def misplaced(subject: str, message: object) -> str:
    """Why a message does not belong on its subject: a type of another family, or another run, lane, group or
    trajectory than the subject names. Empty when they agree, and for subjects outside the table."""
    family = family_of(subject)
    if family is None or not family.types:
        return ""
    kind = getattr(message, "type_name", "")
    if kind in _PLACED and kind not in family.types:
        return f"a {kind or type(message).__name__} does not belong on {family.template}"
    tokens, fields = subject.split("."), family.template.split(".")
    for index, field in enumerate(fields):
        name = field.strip("{}")
        if name not in _ADDRESSED or not field.startswith("{"):
            continue
        written = ".".join(tokens[index:]) if index == len(fields) - 1 else tokens[index]
        claimed = kind if name == "type" else getattr(message, name, "")
        if name == "type" and kind not in _PLACED - {"event"}:
            continue  # a plain event does no harm under any of its publisher's names
        if claimed and written not in (claimed, token(claimed)):
            return f"its {name} is {claimed[:80]!r}, its subject says {written[:80]!r}"
    return ""

"""Certificates of suites: the files, and why a task may not be trained on without one.

A file per suite lies under ``certificates/`` in the folder of suites. A suite of files has a certificate for every
task, bound to the bytes of both sides. A suite that is generated (`source`) has certificates for a sample with every
template in it, bound to the templates and to the bytes of the sample: another template, generator or sealing makes
them void.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from headrace.messages.judging import Certificate, SuiteCertificates
from headrace.messages.tasks import CANARY, Oracle, Task
from headrace.tasks.base import Suite

OPT_IN = "set [tasks] uncertified = true to train on it all the same"


def task_hash(task: Task, oracle: Oracle) -> str:
    """sha256 of both sides of a task."""
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    digest = sha256()
    for side in (task, oracle):
        payload = encoder.encode(side)
        digest.update(len(payload).to_bytes(8, "big") + payload)
    return digest.hexdigest()


def source_of(suite: Suite) -> str:
    """The hash of what a generated suite is made from; empty for a suite without the attribute ``source``."""
    source: str = getattr(suite, "source", "")
    return source


def sample_of(suite: Suite) -> Sequence[str]:
    """The ids that a certificate has to cover: all of them, or the sample that the suite names."""
    sample: Sequence[str] | None = getattr(suite, "sample", None)
    return suite.ids() if sample is None else sample


def file_of(name: str, folder: Path) -> Path:
    """Where the certificates of a suite lie in a folder of them."""
    return folder / (name.replace("/", "-").replace(":", "-") + ".json")


def write(suite: Suite, certificates: Sequence[Certificate], folder: Path) -> Path:
    """Write the file of a suite."""
    folder.mkdir(parents=True, exist_ok=True)
    made = SuiteCertificates(
        suite=suite.name,
        source=source_of(suite),
        address=_address(certificates),
        certificates=tuple(certificates),
    )
    path = file_of(suite.name, folder)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    return path


def read(name: str, root: str | Path) -> SuiteCertificates | None:
    """The certificates of a suite, None where there are none. ValueError where a file holds something else."""
    path = file_of(name, Path(root) / "certificates")
    if not path.is_file():
        return None
    try:
        made = msgspec.json.decode(path.read_bytes(), type=SuiteCertificates)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} does not hold certificates: {error}") from None
    if made.suite != name or made.address != _address(made.certificates):
        raise ValueError(f"{path} was changed after it was written; certify {name} again")
    return made


def _address(certificates: Sequence[Certificate]) -> str:
    return sha256(msgspec.json.encode(tuple(certificates))).hexdigest()


def refusal(suite: Suite, root: str | Path, uncertified: bool) -> str:
    """Why the suite may not be trained on, in one sentence; empty when every task is certified or `uncertified`. A
    generated suite without a file is not refused (`unexamined`)."""
    if uncertified:
        return ""
    for part, ids in _parts(suite):
        try:
            made = read(part.name, root)
        except ValueError as error:
            return f"{error}, or {OPT_IN}"
        make = f"run `headrace tasks certify {part.name}`, or {OPT_IN}"
        if made is None and source_of(part):
            continue  # `unexamined` names it
        if made is None:
            return f"suite {part.name} has no certificates of its tests; {make}"
        if made.source != source_of(part):
            return f"the certificates of suite {part.name} are void, because its templates have changed; {make}"
        known = {certificate.task.task: certificate for certificate in made.certificates}
        missing = [id for id in ids if id not in known]
        if missing:
            return f"{len(missing)} tasks of suite {part.name} have no certificate, such as {missing[0]}; {make}"
        bad = [known[id] for id in ids if known[id].verdict != "certified"]
        if bad:
            why = "; ".join(bad[0].reasons)
            return (
                f"{len(bad)} of {len(ids)} tasks of suite {part.name} are not certified, such as {bad[0].task.task} "
                f"({bad[0].verdict}: {why}); remove them from the suite, or {OPT_IN}"
            )
        if changed := _changed(part, ids, known):
            return f"task {changed} of suite {part.name} was changed after it was certified; {make}"
    return ""


def unexamined(suite: Suite, root: str | Path) -> str:
    """The generated suites without certificates, in one sentence; empty without any. They are trained on all the same:
    their hidden tests are computed from the right function, and no certificates of them are bundled yet."""
    names = [
        part.name
        for part, _ in _parts(suite)
        if source_of(part) and not file_of(part.name, Path(root) / "certificates").is_file()
    ]
    if not names:
        return ""
    listed = ", ".join(dict.fromkeys(names))
    return f"generated suites are trained on without certificates: {listed}; `headrace tasks certify` makes them"


def _changed(suite: Suite, ids: Sequence[str], known: dict[str, Certificate]) -> str:
    """A task whose bytes are not those of its certificate."""
    for id in ids:
        if task_hash(suite.task(id), suite.oracle(id)) != known[id].task_hash:
            return id
    return ""


def _parts(suite: Suite) -> Iterator[tuple[Suite, Sequence[str]]]:
    """The suites of a mix; any other suite alone; each with the ids that need a certificate."""
    parts: Sequence[Suite] = getattr(suite, "parts", (suite,))
    for part in parts:
        # Impossible tasks are never trained on: no group of them is counted.
        if not part.name.startswith(CANARY):
            yield part, sample_of(part)

"""Certificates of suites: the files, and why a task may not be trained on without one.

A file per suite lies under ``certificates/`` in the folder of suites; those of the generated suites come with the
package (`BUNDLED`). A suite of files has a certificate for every task, bound to the bytes of both sides. A suite that
is generated (`source`) has certificates for a sample with every template in it, bound to the templates and to the bytes
of the sample: another template, generator or sealing makes them void.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from headrace.messages.judging import Certificate, SuiteCertificates
from headrace.messages.tasks import Oracle, Task
from headrace.tasks.base import Suite, both_sides, trust_of

BUNDLED = Path(__file__).parent / "generated" / "certificates"
"""The certificates of the generated suites; ``headrace tasks certify --bundled`` writes them."""
OPT_IN = "set [tasks] uncertified = true to train on it nevertheless"
AT_RISK = "set [tasks] at_risk = true to train on it nevertheless"


def task_hash(task: Task, oracle: Oracle) -> str:
    """sha256 of both sides of a task."""
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    digest = sha256()
    for side in (task, oracle):
        # A map of more than 15 fields has a longer header, unset fields included. Written again from its entries, it
        # has the same bytes when a later headrace adds a field that the task does not set.
        payload = msgspec.msgpack.encode(msgspec.msgpack.decode(encoder.encode(side)))
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
    path.write_bytes(_lines(made))
    _unfinished(suite.name, folder).unlink(missing_ok=True)
    return path


def append(name: str, certificate: Certificate, folder: Path) -> None:
    """Note a certificate of a suite whose other tasks are still examined."""
    folder.mkdir(parents=True, exist_ok=True)
    with _unfinished(name, folder).open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(certificate))  # the line before may be cut


def begun(name: str, folder: Path) -> dict[str, Certificate]:
    """The certificates of an examination that ended before its last task, by task hash."""
    file = _unfinished(name, folder)
    made = {}
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            certificate = msgspec.json.decode(line, type=Certificate)
        except ValueError:  # an empty line, or one that an interruption cut
            continue
        made[certificate.task_hash] = certificate
    return made


def _unfinished(name: str, folder: Path) -> Path:
    return file_of(name, folder).with_suffix(".part")


def _lines(made: SuiteCertificates) -> bytes:
    """A file with one line per certificate, so that a diff shows the changed ones."""
    head, _, _ = msgspec.json.encode(msgspec.structs.replace(made, certificates=())).rpartition(b"]")
    return head + b"\n" + b",\n".join(map(msgspec.json.encode, made.certificates)) + b"\n]}\n"


def read(name: str, root: str | Path) -> SuiteCertificates | None:
    """The certificates of a suite, from the folder of suites or from the package; None where there are none.
    ValueError where a file holds something else."""
    path = file_of(name, Path(root) / "certificates")
    if not path.is_file():
        path = file_of(name, BUNDLED)
    if not path.is_file():
        return None
    try:
        made = msgspec.json.decode(path.read_bytes(), type=SuiteCertificates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not hold certificates: {error}") from None
    if made.suite != name or made.address != _address(made.certificates):
        raise ValueError(f"{path} was changed after it was written; certify {name} again")
    return made


def _address(certificates: Sequence[Certificate]) -> str:
    return sha256(msgspec.json.encode(tuple(certificates))).hexdigest()


def forgeable(suite: Suite, at_risk: bool) -> str:
    """Why a suite that only printed lines judge may not be trained on, in one sentence; empty when it may."""
    if trust_of(suite) == "report" or at_risk:
        return ""
    return f"suite {suite.name} reads its verdicts from logs, which a policy in training can forge; {AT_RISK}"


def refusal(suite: Suite, root: str | Path, uncertified: bool, at_risk: bool = False) -> str:
    """Why the suite may not be trained on, in one sentence; empty when every task is certified or `uncertified`, and
    none has a risk or `at_risk`."""
    if uncertified:
        return ""
    for part, ids in _parts(suite):
        try:
            made = read(part.name, root)
        except ValueError as error:
            return f"{error}, or {OPT_IN}"
        make = f"run `headrace tasks certify {part.name}`, or {OPT_IN}"
        if made is None:
            return f"suite {part.name} has no certificates of its tests; {make}"
        if made.source != source_of(part):
            return f"the certificates of suite {part.name} are void, because its templates have changed; {make}"
        by_task = {certificate.task.task: certificate for certificate in made.certificates}
        missing = [id for id in ids if id not in by_task]
        if missing:
            return f"{len(missing)} tasks of suite {part.name} have no certificate, such as {missing[0]}; {make}"
        bad = [by_task[id] for id in ids if by_task[id].verdict != "certified"]
        if bad:
            why = "; ".join(bad[0].reasons)
            return (
                f"{len(bad)} of {len(ids)} tasks of suite {part.name} are not certified, such as {bad[0].task.task} "
                f"({bad[0].verdict}: {why}); remove them from the suite, or {OPT_IN}"
            )
        risky = [] if at_risk else [by_task[id] for id in ids if by_task[id].risks]
        if risky:
            return (
                f"{len(risky)} of {len(ids)} tasks of suite {part.name} are at risk, such as {risky[0].task.task}: "
                f"{'; '.join(risky[0].risks or ())}; remove them from the suite, or {AT_RISK}"
            )
        # A generated suite follows from its templates: one task shows another generator or sealing, and each task of
        # the sample is compared before a task of its template is issued (`AtIssue`).
        for id in ids[:1] if made.source else ids:
            if changed := _changed(part, id, by_task[id]):
                return f"{changed}; {make}"
    return ""


def _changed(suite: Suite, id: str, certificate: Certificate) -> str:
    """A sentence when the task's bytes differ from those of its certificate; empty when they are equal."""
    if task_hash(suite.task(id), suite.oracle(id)) == certificate.task_hash:
        return ""
    return f"task {id} of suite {suite.name} was changed after it was certified"


def wanting(suite: Suite, root: str | Path) -> dict[str, tuple[Suite, str]]:
    """The tasks that have to be examined before the suite may be trained on: hash to suite and id."""
    wanted = {}
    for part, ids in _parts(suite):
        if refusal(part, root, uncertified=False, at_risk=True):
            wanted.update({task_hash(*both_sides(part, id)): (part, id) for id in ids})
    return wanted


class AtIssue:
    """Whether a task is still the one that was certified when it is issued: files may change while a run is on."""

    def __init__(self, suite: Suite, root: str | Path) -> None:
        """For a suite that `refusal` accepts. ValueError as in `read`."""
        self._suite = suite
        self._known: dict[str, dict[str, Certificate]] = {}
        for part, _ in _parts(suite):
            made = read(part.name, root)
            self._known[part.name] = {each.task.task: each for each in made.certificates} if made else {}
        self._generated: set[tuple[str, str]] = set()
        """Sample tasks that were compared; a generator's output does not change within a process."""

    def refusal(self, id: str) -> str:
        """Why the task may not be issued, in one sentence; empty when it may. UnknownSuite."""
        answer = self.of(id)
        return answer if isinstance(answer, str) else ""

    def of(self, id: str) -> Certificate | str:
        """The certificate under which the task may be issued: its own or its template's sample's; in place of it one
        sentence that says why it may not. UnknownSuite."""
        suite = self._suite
        while find := getattr(suite, "find", None):
            suite, id = find(id)
        cover: Callable[[str], str] | None = getattr(suite, "covered_by", None)
        id = cover(id) if cover else id
        certificate = self._known[suite.name].get(id)
        if certificate is None or certificate.verdict != "certified":
            return f"task {id} of suite {suite.name} has no certificate"
        if (suite.name, id) not in self._generated and (changed := _changed(suite, id, certificate)):
            return f"{changed}; run `headrace tasks certify {suite.name}`, or {OPT_IN}"
        if cover:
            self._generated.add((suite.name, id))
        return certificate


def _parts(suite: Suite) -> Iterator[tuple[Suite, Sequence[str]]]:
    """The suites of a mix or a selection; any other suite alone; each with the ids that need a certificate."""
    parts: Sequence[Suite] | None = getattr(suite, "parts", None)
    if parts is not None:
        for part in parts:
            yield from _parts(part)
    elif suite.ids():
        yield suite, sample_of(suite)

"""A purge over a real broker: nothing of the user can be read, and a reader without our code checks the certificate."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from headrace.actors.feedback.actor import Feedback
from headrace.bus.broker.server import Server
from headrace.cli.main import main
from headrace.config import Bus as BusSection
from headrace.gateway.tenants.store import make_secrets
from headrace.ledger.lost_attempts import lost_attempt
from headrace.messages import subjects
from headrace.messages.operations import DeadLetter
from headrace.messages.product import (
    PurgeCertificate,
    PurgeStatement,
    PurgeUser,
)
from headrace.replay.feedback import feedback_books
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.product import BASE, Product, settings

pytestmark = pytest.mark.anyio


@pytest.fixture
def product(connect: Connect, tmp_path: Path) -> Product:
    return Product(connect, tmp_path)


async def test_a_purged_user_is_in_the_books_and_nowhere_else(
    product: Product, connect: Connect, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(product.folder)
    async with asyncio.timeout(120), living(Feedback, config, await connect("feedback"), product.run) as actor:
        await product.opened()
        await product.rate(await product.session(BASE, "gone99"))
        await product.rate(await product.session(BASE, "stays"))
        await product.said("batch_closed")
        await product.step(0)
        await product.rate(await product.session(BASE, "gone99"))
        while actor.book.ends({product.branch: actor.branch.state})["trained"] < 2 or len(actor.book.ratings) < 3:
            await asyncio.sleep(0.01)
        queued = await product.leave_traces("gone99")
        await make_secrets(await product.bus("operator"))
        gateway = await product.bus("gateway")
        subject = subjects.RPC.at(service="feedback", caller="gateway", method="purge")
        answer = await gateway.request(subject, PurgeUser(user="gone99"), timeout=60.0)
        assert isinstance(answer, PurgeCertificate), answer
        said = msgspec.json.decode(answer.statement, type=PurgeStatement)
        assert "after 0 were trained on" in answer.detail and said.absorbed_steps == (0,)
        assert said.ended_requests == (queued.group,)
        counts = Counter[str]()
        for record in said.records:
            counts[record.stream] += record.count
        assert (counts["HR_TASK"], counts["HR_DLQ"], counts["HR_BLOB"], counts["KV_HR_SESSION"]) == (1, 1, 4, 1)
        assert counts["HR_EVENT"] == 1 and counts["HR_TURN"] == 1
        assert (await verified(answer, product, server, tmp_path))["wrong"] == []
        forged = msgspec.structs.replace(answer, statement=answer.statement.replace('"ratings":2', '"ratings":1'))
        assert "signature" in (await verified(forged, product, server, tmp_path))["wrong"][0]

        late = dict(actor.purges._late)
        actor.purges._late.clear()  # a pass every five seconds would delete the later session before the reader looks
        await product.rate(await product.session(BASE, "gone99"))  # a later session: it is never trained on
        await product.rate(await product.session(BASE, "stays"))
        while actor.book.ends({product.branch: actor.branch.state})["opted_out"] < 1:
            await asyncio.sleep(0.01)
        left = (await verified(answer, product, server, tmp_path))["wrong"]
        assert any("HR_TRAJ still holds" in reason for reason in left), "the reader sees what is readable"
        actor.purges._late.update(late)

        folder = product.folder / product.run
        reached = msgspec.structs.replace(config, bus=BusSection(url=server.url, credentials=str(server.credentials)))
        (folder / "config.json").write_bytes(msgspec.json.encode(reached))
        words = ("purge", str(folder), "gone99", "--hash", "--readmit")
        assert await asyncio.to_thread(main, words) == 1
        assert "deletes late records for another" in capsys.readouterr().err
        actor.purges._late.clear()
        assert await asyncio.to_thread(main, words) == 0
        assert "off the deny-list" in capsys.readouterr().out
        assert await asyncio.to_thread(main, words) == 1
        assert "not on the deny-list" in capsys.readouterr().err
        await product.rate(await product.session(BASE, "gone99"))
        await product.said("batch_closed")
    admin = await connect("admin")
    report, _, faults = await feedback_books(admin, product.run)
    assert report is not None and faults == []
    assert (report.received, report.ends["trained"], report.ends["purged"], report.ends["opted_out"]) == (6, 2, 1, 1)
    letters = [received.message async for received in admin.history("HR_DLQ", "hr.dlq.>")]
    lost = [lost_attempt(letter) for letter in letters if isinstance(letter, DeadLetter)]
    assert [attempt.group for attempt in lost if attempt is not None and attempt.run == product.run] == ["gone99.b"]
    ended = await admin.last("HR_LEDGER", subjects.FAIL.at(run=product.run, group=queued.group))
    assert ended is not None and ended.message.reason == "cancelled"


async def verified(
    certificate: PurgeCertificate, product: Product, server: Server, folder: Path
) -> dict[str, list[str]]:
    """The report of the reader that shares no code with headrace."""
    path = folder / "certificate.json"
    path.write_bytes(msgspec.json.encode(certificate))
    key = product.folder / product.run / "purge.pub"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests/foreign/verify_purge.py"), str(path), str(key)),
        *(server.url, str(server.credentials / "operator.nk")),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await process.communicate()
    report: dict[str, list[str]] = json.loads(out)
    return report

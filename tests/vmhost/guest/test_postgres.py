"""Stateful for real: Debian's PostgreSQL runs in a template, and in every clone, fork and restored checkpoint of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, CheckIntegrity, Exec, PullTree, Role, RunTests, WriteFiles
from headrace.messages.tasks import TestPlan
from headrace.tasks.diff import Tree, diff
from headrace.vmhost.images import base, imported, packages
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.templates import task_templates
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(900)]

CACHE = ROOT / ".cache" / "headrace"
LEAVE_OUT = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/i18n/*",
    "/usr/lib/x86_64-linux-gnu/libLLVM*",
    "/usr/lib/postgresql/15/lib/bitcode/*",
)
"""A root lies in the guest's memory."""
STEP = """set -e
bin=/usr/lib/postgresql/15/bin
install -d -o postgres -g postgres /srv/pg /var/run/postgresql
as() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
as $bin/initdb -D /srv/pg -A trust --no-sync
as $bin/pg_ctl -D /srv/pg -o "-c fsync=off -c shared_buffers=16MB -c jit=off -c listen_addresses=" -w -t 300 \
    -l /tmp/pg.log start
psql -U postgres -c "create table users (id serial primary key, name text not null)" \
    -c "insert into users (name) values ('Ada Lovelace'), ('Alan Turing')"
"""
CHECK = """set -e
psql -U postgres -v ON_ERROR_STOP=1 -qf migration.sql
test "$(psql -U postgres -Atc "select string_agg(first || '/' || last, ',' order by id) from users")" \
    = "Ada/Lovelace,Alan/Turing"
! psql -U postgres -c "select name from users"
"""
MIGRATION = b"""alter table users add column first text, add column last text;
update users set first = split_part(name, ' ', 1), last = split_part(name, ' ', 2);
alter table users drop column name;
"""


@pytest.fixture(scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    image_cache = CACHE.parent / "headrace-postgres"
    image_cache.mkdir(exist_ok=True)
    base.ensure(Environment(cache_dir=str(CACHE)))
    for source in (*CACHE.glob("base-*"), CACHE / "probe.json"):
        (image_cache / source.name).unlink(missing_ok=True)
        (image_cache / source.name).symlink_to(source)
    if not (image_cache / "image-pg").exists():
        root = tmp_path_factory.mktemp("root") / "pg.tar"
        words = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEAVE_OUT]
        await asyncio.to_thread(packages.download, root, ("postgresql",), "--variant=minbase", *words)
        imported.take(image_cache, root, "pg")
    prepare = Exec(argv=("sh", "-c", STEP), timeout_s=600.0)
    task_templates.save(image_cache, task_templates.Recipe(name="pg-live", base="pg", steps=(prepare,)))
    opened = await Host.open(Environment(backend="qemu", cache_dir=str(image_cache), warm=0, max_vms=6))
    yield opened
    await opened.close()


def wanted(group: str, slot: int = 0, role: Role = "rollout", **files: bytes) -> Acquire:
    return Acquire(
        run="r",
        lane="train",
        role=role,
        group=group,
        slot=slot,
        attempt=0,
        isolation="episode",
        template="pg-live",
        files={f"{name}.sql": data for name, data in files.items()},
    )


async def query(sandbox: VmSandbox, text: str) -> str:
    done = await sandbox.call(Exec(argv=("psql", "-U", "postgres", "-qAtc", text), timeout_s=120.0))
    assert done.ok, done
    return done.stdout.strip()


async def test_it_runs_in_every_clone_and_each_has_its_own(host: Host) -> None:
    one, two = await asyncio.gather(host.acquire(wanted("a")), host.acquire(wanted("b")))
    await query(one, "insert into users (name) values ('Grace Hopper')")
    assert (await query(one, "select count(*) from users"), await query(two, "select count(*) from users")) == (
        "3",
        "2",
    )
    for sandbox in (one, two):
        host.release(sandbox.id)


async def test_it_survives_a_fork(host: Host) -> None:
    first = await host.acquire(wanted("c"))
    await query(first, "insert into users (name) values ('Grace Hopper')")
    await query(first, "delete from users where id = 1")
    (fork,) = await host.fork(first.id, [wanted("c", 1)])
    await query(fork, "insert into users (name) values ('Only Here')")
    names = "select string_agg(split_part(name, ' ', 1), ',' order by id) from users"
    seen = [await query(sandbox, names) for sandbox in (first, fork)]
    assert seen == ["Alan,Grace", "Alan,Grace,Only"]
    for sandbox in (first, fork):
        looked = await sandbox.call(CheckIntegrity())
        assert looked.ok and looked.tampered == ()
        host.release(sandbox.id)


async def test_a_migration_is_judged_in_a_fresh_clone(host: Host) -> None:
    agent = await host.acquire(wanted("e", migration=b""))
    await agent.call(WriteFiles(files={"migration.sql": MIGRATION}))
    tried = await agent.call(Exec(argv=("psql", "-U", "postgres", "-v", "ON_ERROR_STOP=1", "-f", "migration.sql")))
    assert tried.ok, tried
    tree = await agent.call(PullTree(patterns=("*.sql",)))
    changed = diff(Tree({"migration.sql": b""}), Tree(tree.files), ("*.sql",))[0].changed
    host.release(agent.id)
    plan = TestPlan(kind="command", argv=("sh", "check.sh"), timeout_s=300.0)
    verdicts = []
    for slot, files in enumerate((changed, {"migration.sql": b""}, {"migration.sql": b"drop table users;"})):
        request = wanted("f", slot, "judge")
        judge = await host.acquire(request)
        await judge.call(WriteFiles(files={**files, "check.sh": CHECK.encode()}))
        verdicts.append((await judge.call(RunTests(plan=plan))).ok)
        looked = await judge.call(CheckIntegrity(thorough=True))
        assert looked.ok and looked.tampered == ()
        host.release(judge.id)
    assert verdicts == [True, False, False]

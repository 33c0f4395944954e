"""`headrace vm`: images and templates, what this host can do, and sandboxes by hand."""

import argparse
import json
from pathlib import Path

import msgspec

from headrace.config import Config
from headrace.launch.guests import end_together, prepare_host
from headrace.launch.output import say


def vm(config: Config, args: argparse.Namespace) -> int:
    """One command."""
    from headrace.launch import vm_sandboxes
    from headrace.launch.commands import looped
    from headrace.messages.sandbox import NoRoom, SandboxLost
    from headrace.vmhost.errors import VmhostError

    match args.vm_command:
        case "build":
            return build(config, args)
        case "import":
            return take(config, args)
        case "doctor":
            return doctor(config)
        case "gc":
            return gc(config, args)
    try:
        if args.vm_command == "facts":
            return looped(facts(config, args.template))
        return looped(getattr(vm_sandboxes, args.vm_command)(config, args))
    except (SandboxLost, NoRoom) as error:
        raise VmhostError(str(error)) from None


def build(config: Config, args: argparse.Namespace) -> int:
    """Build and cache a template, and with --base the recipe that makes it."""
    from headrace.messages.sandbox import Exec
    from headrace.vmhost import image, levels

    end_together()
    if args.base:
        steps = tuple(Exec(argv=("sh", "-c", step), timeout_s=3600.0, output_cap=8192) for step in args.step)
        tree = levels.archive(Path(args.push)) if args.push else b""
        image.plan(config.environment, args.base)
        cache = Path(config.environment.cache_dir).absolute()
        before = levels.find(cache, args.name)
        levels.save(cache, levels.Recipe(name=args.name, base=args.base, tree=tree, steps=steps))
        try:
            image.ensure(config.environment, say, (args.name,))
        except BaseException:
            if before is not None:
                levels.save(cache, before)
            else:
                levels.forget(cache, args.name)
            raise
    made = image.ensure(config.environment, say, (args.name,))[args.name]
    if args.name != "light":
        say(f"template {args.name}: {made.manifest.key}, made in {made.manifest.built_s:g} s, {made.folder}")
    return 0


def take(config: Config, args: argparse.Namespace) -> int:
    """Import an image; a JSON line about it."""
    from headrace.vmhost import imported

    image = imported.take(Path(config.environment.cache_dir).absolute(), Path(args.path), args.name, args.tag)
    told = msgspec.to_builtins(image) | {"memory_mb": image.memory_mb}
    say(json.dumps(told))
    return 0


def doctor(config: Config) -> int:
    """Plain words about this host; 1 when it can't run microVMs."""
    from headrace.vmhost import doctor as physician

    findings = physician.doctor(config.environment)
    for finding in findings:
        say(f"{'ok  ' if finding.good else 'BAD '} {finding.text}")
    return 0 if all(finding.good for finding in findings) else 1


def gc(config: Config, args: argparse.Namespace) -> int:
    """A line for everything that goes (or, dry, that is there), then the sum."""
    from headrace.vmhost import collecting

    if args.dry_run:
        held = collecting.holdings(config.environment)
        for one in held:
            verdict, why = ("keep", one.why) if one.why else ("drop", "nothing refers to it")
            say(f"{verdict} {one.mib:8.1f} MiB  {one.what:<28} {why}")
        return 0
    gone = collecting.collect(config.environment, tuple(args.forget))
    for one in gone:
        say(f"gone {one.mib:8.1f} MiB  {one.what:<28} {Path(one.path).name}")
    say(f"{sum(one.mib for one in gone):.1f} MiB freed")
    return 0


async def facts(config: Config, template: str) -> int:
    """The fact sheet of a fresh sandbox."""
    from headrace.launch.vm_sandboxes import fresh
    from headrace.vmhost import fidelity, image

    image.plan(config.environment, template)
    await prepare_host(config)
    async with fresh(config, template) as (_, sandbox):
        say(json.dumps(await fidelity.sheet(sandbox), indent=2))
    return 0

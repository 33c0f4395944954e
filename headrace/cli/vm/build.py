"""`headrace vm build`: build and cache a template, or with `--base` a task's template on top of another."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config
from headrace.launch.guests import end_together
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("build", help="build and cache an image's template, or with --base a task's")
    parser.add_argument(
        "name", nargs="?", default="light", help="light, debian, an imported image, or the name of a new task template"
    )
    parser.add_argument("--base", default="", help="template to build on; NAME then becomes a task template")
    parser.add_argument("--push", default="", metavar="DIR", help="folder to copy into every slot")
    parser.add_argument(
        "--step", action="append", default=[], metavar="COMMAND", help="shell command to run in every slot"
    )
    add_config(parser)
    parser.set_defaults(handler=build)


def build(args: argparse.Namespace) -> int:
    """Build and cache the template; with --base store its recipe, and restore the old one when the build fails."""
    from headrace.launch.admission import own
    from headrace.messages.sandbox import Exec
    from headrace.vmhost.images import base
    from headrace.vmhost.templates import task_templates

    environment = own(args.config, args.set).environment
    end_together()
    if args.base:
        steps = tuple(Exec(argv=("sh", "-c", step), timeout_s=3600.0, output_cap=8192) for step in args.step)
        tree = task_templates.archive(Path(args.push)) if args.push else b""
        base.plan(environment, args.base)
        cache = Path(environment.cache_dir).absolute()
        before = task_templates.find(cache, args.name)
        task_templates.save(cache, task_templates.Recipe(name=args.name, base=args.base, tree=tree, steps=steps))
        try:
            base.ensure(environment, say, (args.name,))
        except BaseException:
            if before is not None:
                task_templates.save(cache, before)
            else:
                task_templates.forget(cache, args.name)
            raise
    made = base.ensure(environment, say, (args.name,))[args.name]
    if args.name != "light":
        say(f"template {args.name}: {made.manifest.key}, built in {made.manifest.built_s:g} s, {made.folder}")
    return 0

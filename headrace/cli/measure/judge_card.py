"""`headrace judge card`: measure a rubric judge against labels, and write its card."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.judging.rubrics.card import Card


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("card", help="measure the judge of [judge] rubric against labels")
    parser.add_argument("labels", metavar="LABELS.jsonl", help="pairs: criterion, task, met, not_met on each line")
    parser.add_argument("--out", default="card.json", help="file of the card; [judge] rubric_card names it")
    add_config(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Write the card and print a line per criterion; 1 if the card gives a criterion no weight."""
    import msgspec

    from headrace.judging.rubrics.client import EndpointFailed, EndpointRefused
    from headrace.judging.rubrics.rubric import RubricError
    from headrace.launch.admission import own
    from headrace.launch.output import say
    from headrace.launch.runs import RunError
    from headrace.launch.session import looped

    made: list[Card] = []

    async def body() -> int:
        made.append(await measure(own(args.config, args.set), args.labels))
        return 0

    try:
        looped(body())
    except EndpointFailed as error:
        raise RunError(str(error), 4) from None
    except (RubricError, EndpointRefused) as error:
        raise RunError(str(error)) from None
    card = made[0]
    Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(card)))
    for item in card.criteria:
        counts = "counts" if item.counts else f"weight 0: {item.reason}"
        say(
            f"{item.id}: kappa {item.kappa:.2f} [{item.kappa_low:.2f}, {item.kappa_high:.2f}], flips {item.flips:.1%}, "
            f"retest {item.retest:.1%}, length bias {item.length_bias:+.2f}, {item.pairs} pairs; {counts}"
        )
    say(f"{card.calls} calls, {card.prompt_tokens} + {card.completion_tokens} tokens, cost {card.cost:.4f}: {args.out}")
    return 0 if all(item.counts for item in card.criteria) else 1


async def measure(config: "Config", path: str) -> "Card":
    """The card of a configuration's judge. RubricError, EndpointFailed, EndpointRefused."""
    import msgspec

    from headrace.judging.rubrics.card import labels
    from headrace.judging.rubrics.judge import RubricJudge
    from headrace.judging.rubrics.measuring import measure as measure_judge
    from headrace.judging.rubrics.rubric import RubricError

    # An existing card would give weak criteria no weight; a new card measures every criterion.
    config = msgspec.structs.replace(config, judge=msgspec.structs.replace(config.judge, rubric_card=""))
    judge = RubricJudge.of(config) if config.judge.rubric else None
    if judge is None:
        raise RubricError("a card needs a rubric and a model: set [judge] rubric, model_url and model")
    try:
        return await measure_judge(judge, config.judge, labels(path))
    finally:
        await judge.close()

"""`headrace replay RUN --trajectory ID`: repeats a trajectory's tool calls in a fresh sandbox of this machine.

The sandbox begins like the recorded one: with the task's repository, the trajectory's seed and isolation, and the run's
backend. A production trajectory cannot be repeated, because the repository belongs to a user and is not stored.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import Config
from headrace.launch.guests import prepare_host
from headrace.replay.calls import CallsReplay, rerun
from headrace.replay.recorded_run import ReplayError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.harness.tools.search.session import SearchSession
    from headrace.messages.rollout import ToolCall, ToolResult, Trajectory
    from headrace.messages.tasks import Task


async def find(bus: "Bus", run: str, id: str) -> "Trajectory":
    """A trajectory by its id, ``<group>-<slot>-<attempt>``. ReplayError when the run has no such trajectory."""
    from headrace.messages import subjects
    from headrace.messages.rollout import Trajectory

    group, *numbers = id.rsplit("-", 2)
    wrong = f"run {run} has no trajectory {id!r} (any more); an id is GROUP-SLOT-ATTEMPT, such as g000003-0-0"
    if len(numbers) != 2:
        raise ReplayError(wrong)
    try:
        subject = subjects.TRAJ.at(run=run, group=group)
    except ValueError:
        raise ReplayError(wrong) from None
    async for received in bus.history("HR_TRAJ", subject):
        if received.error is None and isinstance(received.message, Trajectory) and received.message.id == id:
            return received.message
    raise ReplayError(wrong)


async def replay_calls(config: Config, folder: Path, trajectory: "Trajectory") -> CallsReplay:
    """Run the calls again. folder: the run's, with its renderer bundle. ReplayError; VmhostError without a sandbox."""
    import msgspec

    from headrace.actors.trainer import initial_policy
    from headrace.harness.mcp.connection import Connection, McpError
    from headrace.harness.mcp.tools import LISTING, listings, offer
    from headrace.harness.prompt import toolbox_for, whole_prompt
    from headrace.harness.rendered import differing
    from headrace.harness.steps import step_ended
    from headrace.harness.tools.registry import schemas_of
    from headrace.harness.tools.toolbox import tools_of, with_linter, with_search, with_tools, with_web_search
    from headrace.messages.rollout import RendererBundle
    from headrace.messages.sandbox import Acquire, NoCapacity, PullTree, SandboxLost
    from headrace.messages.search import SearchLost
    from headrace.rendering.base import RendererError
    from headrace.rendering.registry import Renderers
    from headrace.search.models import offers_search
    from headrace.tasks import open_suite
    from headrace.tasks.base import UnknownSuite
    from headrace.tasks.sandboxes import begin_step, for_task
    from headrace.vmhost.node.host import Host

    if trajectory.lane == "production":
        raise ReplayError(
            f"{trajectory.id} belongs to a user: its repository is not stored, so its calls cannot be run again"
        )
    try:
        task = open_suite(trajectory.task.suite, config.tasks.dir).task(trajectory.task.task)
    except UnknownSuite as error:
        raise ReplayError(str(error)) from None
    try:
        offer([Connection(name, section) for name, section in config.tasks.mcp.items()], listings(folder))
    except (McpError, KeyError) as error:
        raise ReplayError(f"the MCP servers of the run cannot be listed from {folder / LISTING}: {error}") from None
    recorded = {result.call_id: result for turn in trajectory.turns for result in turn.results}
    file = folder / initial_policy.BUNDLE  # a run with only scripted policies has none
    renderer, prompts_differ = None, None
    searching = offers_search(config)
    task = with_linter(with_search(with_tools(task, config.tasks.tools), searching), config.tools.lint)
    task = with_web_search(task, config.tools.web_search)
    if file.is_file():
        bundle = msgspec.json.decode(file.read_bytes(), type=RendererBundle)
        try:
            renderer = Renderers(bundle).open(schemas_of(tools_of(task)))
        except RendererError as error:
            raise ReplayError(str(error)) from None
        if task.sandbox and trajectory.renderer == bundle.sha256:
            prompt, most = whole_prompt(task.system, task.prompt), config.limits.max_parallel_calls
            later = [step.prompt for step in task.later]
            prompts_differ = differing(trajectory.turns, prompt, renderer, most, system=task.system, later=later)
    search = _recorded_search(config, task, trajectory) if searching else None
    box = toolbox_for(task, renderer, config.limits.context_tokens, search)
    await prepare_host(config)
    host = await Host.open(config.environment, limits=config.sandboxes)
    try:
        request = Acquire(
            run=trajectory.run,
            lane=trajectory.lane,
            role="rollout",
            group=trajectory.group,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            isolation=trajectory.isolation,
            seed=trajectory.seed,
        )
        sandbox = await host.acquire(for_task(request, task))

        async def run(call: "ToolCall") -> "ToolResult":
            if not box.repeatable(call) and not call.error:
                result = recorded[call.id]  # an external server may give another answer now
            else:
                result = await box.run(call, sandbox, task, f"{trajectory.id}/")
            if ended := step_ended(trajectory.turns, call, task):
                await begin_step(sandbox, task, ended, trajectory.id)
            return result

        async def digest() -> str:
            return (await sandbox.call(PullTree(patterns=()), f"{trajectory.id}-tree")).digest

        return await rerun(trajectory, run, digest, host.backend, prompts_differ)
    except (SandboxLost, SearchLost, NoCapacity) as error:
        raise ReplayError(f"no sandbox for {trajectory.id}: {error}") from None
    finally:
        await host.close()


def _recorded_search(config: Config, task: "Task", trajectory: "Trajectory") -> "SearchSession | None":
    """Semantic search in this process, each call in its recorded mode. None if the trajectory has no search;
    ReplayError if its searches used another model."""
    from headrace.harness.tools.search.session import SearchSession, template_of
    from headrace.search.chunks import PATTERNS
    from headrace.search.local import LocalSearcher
    from headrace.search.models import SearchModelError, find
    from headrace.search.service import open_indexes

    results = [result for turn in trajectory.turns for result in turn.results]
    recorded = {f"{trajectory.id}/{r.call_id}": r.retrieved for r in results if r.retrieved is not None}
    if not recorded:
        return None
    try:
        model = find(config.search.model)
    except SearchModelError as error:
        raise ReplayError(str(error)) from None
    if model is None:
        raise ReplayError(
            f"{trajectory.id} has semantic searches, and [search] model = {config.search.model!r} finds no model here"
        )
    indexes = open_indexes(model, config.search.tokens, Path(config.environment.cache_dir) / "search")
    for made in recorded.values():
        if made.model != indexes.identity:
            raise ReplayError(
                f"{trajectory.id} was searched with model {made.model}, and [search] model is {indexes.identity}; "
                "set the recorded one (MODEL+HASH is a learnt adapter: only the headrace that recorded it has that)"
            )
    return SearchSession(LocalSearcher(indexes), trajectory.run, template_of(task), PATTERNS, recorded)

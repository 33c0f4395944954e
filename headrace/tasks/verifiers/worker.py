"""The side of a verifiers environment: prints the tasks of a taskset, and scores answers with the tasks' own rewards.

    PYTHON worker.py TASKSET CONFIG

The Python belongs to an environment with verifiers and the taskset, so this file imports the standard library and
verifiers alone. CONFIG is the taskset's configuration as JSON. The first line of output gives the versions that are
used, or the reason that none can be (``error``). Each request is one line of JSON and has one line as its answer:
``task`` gives the task of a number or ``end``, ``answer`` a message that its rewards accept, ``score`` the reward of a
message. An answer repeats the number of its request (``request``). The worker ends with its input.

An answer is the one message of a rollout without tools and without a runtime. A task that needs more has the reason
under ``refused``.

Source: verifiers 0.4.0, verifiers/v1/task.py, taskset.py, trace.py and cli/validate.py.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOOKS = ("setup", "finalize", "stage_verifier")
_TRIES = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<answer>\n{}\n</answer>", "Answer: {}")


class _Refused(Exception):
    """The task needs more than one message."""


class Taskset:
    """A taskset of verifiers with its configuration."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._v1 = importlib.import_module("verifiers.v1")
        self._state = importlib.import_module("verifiers.v1.state")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        environment = loaders.environment_class(name)
        if environment is not self._v1.SingleAgentEnv:
            raise ValueError(
                f"{name} has an environment of its own ({environment.__name__}), which directs several agents"
            )
        made = loaders.taskset_config_type(name).model_validate({**config, "id": name})
        self._taskset = loaders.load_taskset(made)
        self._type = self._taskset.task_type()
        self._tasks: Iterator[tuple[int, Any]] | None = None
        self.source = _source(loaders.import_taskset(name))
        self.version = importlib.import_module("verifiers").__version__

    def task(self, number: int, count: int) -> dict[str, Any]:
        """``id``, ``data``, ``prompt``, ``system``, ``time_s`` and ``notes`` of a task, or ``id`` and ``refused``, or
        ``end``. Numbers are asked for in ascending order. count: the most tasks that there are; 0 for all."""
        if self._tasks is None:
            if not count and not self._taskset.bounded:
                raise ValueError("the taskset has no end; say how many tasks to read (--count)")
            self._tasks = enumerate(self._taskset.take(count) if count else self._taskset)
        task = next((task for position, task in self._tasks if position == number), None)
        if task is None:
            return {"end": True}
        data = task.data.model_dump(mode="json")
        line = {"id": task.data.id or task.data.name or f"{task.data.idx:06d}", "data": data}
        try:
            return line | self._message(task) | {"notes": _notes(task)}
        except _Refused as why:
            return line | {"refused": str(why)}

    def answer(self, data: dict[str, Any]) -> str:
        """A message that the task's rewards accept, made from its data's ``answer``; empty where there is none."""
        answer = data.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return ""
        task = self._task(data)
        texts = [form.format(answer) for form in _TRIES]
        return next((text for text in texts if self._score(task, text) >= 1.0), "")

    def score(self, data: dict[str, Any], text: str) -> float:
        """The weighted sum of the task's rewards for one message."""
        return self._score(self._task(data), text)

    def _task(self, data: dict[str, Any]) -> Any:
        return self._type(self._type.data_type().model_validate(data), self._taskset.config.task)

    def _message(self, task: Any) -> dict[str, Any]:
        """Prompt and system text for the policy. _Refused when one message cannot do the task."""
        data = task.data
        if task.NEEDS_CONTAINER or data.image:
            raise _Refused("it needs a container, and its rewards run commands there")
        if changed := [name for name in HOOKS if getattr(type(task), name) is not getattr(self._v1.Task, name)]:
            raise _Refused(f"its {changed[0]} works in a runtime of verifiers")
        if type(task).toolsets(task.config) or type(self._taskset).toolsets(self._taskset.config):
            raise _Refused("it has tool servers of its own")
        if task.config.judges:
            raise _Refused("it asks a judge model")
        if data.skills:
            raise _Refused("it installs skills")
        decorators = importlib.import_module("verifiers.v1.utils.decorators")
        if decorators.discover_decorated(task, "intercept"):
            raise _Refused("it changes the requests to the model")
        rewards = task.hooks("reward")
        if not rewards:
            raise _Refused("it has no reward")
        for function in rewards:
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                raise _Refused(f"its reward {function.__name__} needs a runtime of verifiers")
        again = self._task(data.model_dump(mode="json"))
        if type(again) is not type(task) or again.data != data or again.config != task.config:
            raise _Refused("its class cannot be made again from its data")
        told = [*([("system", data.system_prompt)] if data.system_prompt else []), *_messages(data.prompt)]
        prompt = "\n\n".join(text for role, text in told if role == "user")
        if not prompt:
            raise _Refused("it has no prompt: a user simulator would open the conversation")
        system = "\n\n".join(text for role, text in told if role == "system")
        return {"prompt": prompt, "system": system, "time_s": data.timeout.agent or 0.0}

    def _score(self, task: Any, text: str) -> float:
        return asyncio.run(self._scored(task, text))

    async def _scored(self, task: Any, text: str) -> float:
        vf = self._v1
        roles = {"system": vf.SystemMessage, "user": vf.UserMessage}
        system = [("system", task.data.system_prompt)] if task.data.system_prompt else []
        messages = [roles[role](content=said) for role, said in (*system, *_messages(task.data.prompt))]
        nodes = [
            vf.MessageNode(parent=number - 1 if number else None, message=message)
            for number, message in enumerate(messages)
        ]
        last = len(nodes) - 1
        nodes.append(vf.MessageNode(parent=last, message=vf.AssistantMessage(content=text), sampled=True))
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=self._state.state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
            nodes=nodes,
            calls=[vf.ModelCall(node=last + 1, finish_reason="stop")],
            is_completed=True,
            ok=True,
        )
        await task.score(trace)
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise ValueError(f"the reward {missing[0]} gave nothing")
        if not math.isfinite(trace.reward):
            raise ValueError(f"the rewards add up to {trace.reward}")
        return float(trace.reward)


def _messages(prompt: Any) -> list[tuple[str, str]]:
    """Role and text of a prompt's messages. _Refused for a role or a content that no single prompt can carry."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [("user", prompt)]
    told = []
    for message in prompt:
        if message.role not in ("system", "user"):
            raise _Refused(f"its prompt holds a message of the role {message.role}")
        parts = [message.content] if isinstance(message.content, str) else list(message.content)
        texts = [part if isinstance(part, str) else getattr(part, "text", None) for part in parts]
        if None in texts:
            raise _Refused("its prompt holds something else than text")
        told.append((message.role, "".join(text for text in texts if text)))
    return told


def _notes(task: Any) -> list[str]:
    """Settings of a task that its import leaves out."""
    fields = type(task.data).model_fields
    unused = [
        name
        for name in ("workdir", "agent_user", "network_allow", "network_block", "artifacts", "resources")
        if getattr(task.data, name) != fields[name].get_default(call_default_factory=True)
    ]
    unused += [f"timeout.{name}" for name in ("setup", "finalize", "scoring") if getattr(task.data.timeout, name)]
    unused += [f"@{kind} functions" for kind in ("stop", "metric") if task.hooks(kind)]
    return [f"{name} is not used" for name in unused]


def _source(module: Any) -> str:
    """A digest of the taskset's Python files: its module, or its whole package."""
    path = Path(module.__file__)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    hash = hashlib.blake2b(digest_size=16)
    for file in files:
        hash.update(file.name.encode() + b"\0" + file.read_bytes())
    return hash.hexdigest()


def _why(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main(name: str, config: str) -> None:
    """Answer requests until the input ends. Prints of the taskset go to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: Any) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        taskset = Taskset(name, json.loads(config))
    except Exception as error:  # a taskset may raise anything
        say({"error": _why(error)})
        return
    say({"version": taskset.version, "source": taskset.source})
    for line in sys.stdin:
        request = json.loads(line)
        number = {"request": request["request"]}
        try:
            if request["do"] == "task":
                told = taskset.task(request["number"], request["count"])
            elif request["do"] == "answer":
                told = {"answer": taskset.answer(request["data"])}
            else:
                told = {"reward": taskset.score(request["data"], request["text"])}
            say(told | number)
        except Exception as error:  # as above
            say({"error": _why(error)} | number)


if __name__ == "__main__":
    main(*sys.argv[1:])

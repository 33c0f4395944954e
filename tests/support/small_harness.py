"""A harness of a few lines, as a bundle: it asks for turns with a tool `bash` until the policy makes no call.

Its arguments: the prompt, then what it does besides: `title` asks for a title in a second conversation, `rewrite`
leaves its second message out once, `twice` sends the last request again, `exit=N` ends with that code, `sleep`
leaves a process behind, `forever` asks without end.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from headrace.config import Program

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}  # fmt: skip  # noqa: E501


def with_interpreter() -> Program:
    """This file's program with an interpreter of its own: no requirement, so the bundle is made without a network."""
    text = Path(__file__).read_text().replace("from headrace.config import Program\n", "Program = object\n")
    return Program(install="pip:", command=("python", "-c", text, "{prompt}"))


def program(folder: Path) -> Program:
    """A bundle's folder with this file as a program of this machine's Python."""
    (folder / "bin").mkdir(parents=True)
    text = Path(__file__).read_text().replace("from headrace.config import Program\n", "Program = object\n")
    (folder / "bin" / "small").write_text(f"#!{sys.executable} -S\n{text}")
    (folder / "bin" / "small").chmod(0o755)
    return Program(install=f"folder:{folder}", command=("small", "{prompt}"))


def ask(messages: list[dict[str, Any]], tools: bool = True, again: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": messages} | ({"tools": [TOOL]} if tools else {})
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    headers |= {"X-Stainless-Retry-Count": "1"} if again else {}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def main() -> int:
    prompt, *does = sys.argv[1:]
    code = next((int(word.partition("=")[2]) for word in does if word.startswith("exit=")), 0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if "title" in does:
        ask([{"role": "user", "content": "A title, please."}], tools=False)
    while True:
        message = ask(messages)
        if "twice" in does:
            message = ask(messages, again=True)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            command = json.loads(call["function"]["arguments"])["command"]
            try:
                done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
                said = done.stdout + done.stderr
            except OSError as error:  # a root without a shell
                said = str(error)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        if not message.get("tool_calls"):
            if "forever" not in does:
                break
            messages.append({"role": "user", "content": "go on"})
        if "rewrite" in does and len(messages) > 3:
            messages[2]["content"] = "[left out]"
            does.remove("rewrite")
    if "sleep" in does:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The double as a process: takes the arguments of `sglang.launch_server` that it knows, and ignores the others."""

import argparse
import asyncio
import sys
from pathlib import Path

from headrace.policy.layout import checkpoint
from tests.support.sglang.double import Double


async def serve() -> None:
    """The checkpoint of --model-path on --port, under --weight-version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="default")
    arguments, _ = parser.parse_known_args(
        [word for word in sys.argv[1:] if word not in ("-m", "sglang.launch_server")]
    )
    config, tensors = checkpoint.load(arguments.model_path)
    one = Double(config)
    one.model.load_state(tensors)
    one.version = one.told = arguments.weight_version
    await one.start(arguments.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())

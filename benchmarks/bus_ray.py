"""Ray's side of `python -m benchmarks.bus`: Ray actors and Ray's object store, in an environment of their own.

    python -m venv .cache/ray && .cache/ray/bin/pip install ray numpy

`benchmarks.bus` starts this file with that interpreter and sends it a line per measurement, so that both sides
alternate in one run. It imports nothing of headrace. A trajectory is a dictionary of numpy arrays of the same sizes as
headrace's; Ray puts it into its object store (plasma) and the receiving actor maps it.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

WINDOW = 16


def trajectory(numpy: Any) -> dict[str, Any]:
    """About 1 MB that hardly compresses, with the fields of headrace's trajectories."""
    return {
        "routed": numpy.frombuffer(os.urandom(720_000), numpy.uint8).reshape(30_000, 4, 6),
        "logprobs": numpy.frombuffer(os.urandom(240_000), numpy.float32),
        "ids": numpy.frombuffer(os.urandom(40_000), numpy.int32),
        "prompt_ids": numpy.frombuffer(os.urandom(40_000), numpy.int32),
    }


def actors(ray: Any, numpy: Any) -> tuple[Any, Any]:
    """The two kinds of actor."""

    class Buffer:
        """The consuming side."""

        def __init__(self) -> None:
            self.seen = 0

        def add(self, message: dict[str, Any]) -> bool:
            assert message["logprobs"].nbytes == 240_000
            self.seen += 1
            return True

        def ping(self) -> bool:
            return True

        def look(self, blob: Any) -> int:
            return int(blob.nbytes)

    class Producer:
        """The sending side: sends a number of trajectories, `WINDOW` in flight."""

        def run(self, buffer: Any, count: int) -> None:
            message, flying = trajectory(numpy), list[Any]()
            for _ in range(count):
                if len(flying) == WINDOW:
                    done, flying = ray.wait(flying, num_returns=1)
                    ray.get(done)
                flying.append(buffer.add.remote(message))
            ray.get(flying)

    return ray.remote(Buffer), ray.remote(Producer)


def times_ms(count: int, once: Any) -> list[float]:
    """Seconds of each of several calls."""
    milliseconds = []
    for _ in range(count):
        since = time.perf_counter()
        once()
        milliseconds.append((time.perf_counter() - since) * 1e3)
    return milliseconds


def main() -> None:
    """Answer a line per measurement: its name and its count."""
    since = time.perf_counter()
    ray, numpy = importlib.import_module("ray"), importlib.import_module("numpy")
    ray.init(
        num_cpus=4, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    buffer_class, producer_class = actors(ray, numpy)
    buffer, producers = buffer_class.remote(), [producer_class.remote() for _ in range(2)]
    ray.get([buffer.ping.remote(), *(producer.run.remote(buffer, 1) for producer in producers)])
    message = trajectory(numpy)
    print(json.dumps({"version": ray.__version__, "start_s": time.perf_counter() - since}), flush=True)
    for line in sys.stdin:
        name, count = line.split()[0], int(line.split()[1])
        answer: dict[str, Any] = {}
        if name == "call":
            answer["ms"] = times_ms(count, lambda: ray.get(buffer.ping.remote()))
        elif name == "pipelined":
            since = time.perf_counter()
            for _ in range(count // 200):
                ray.get([buffer.ping.remote() for _ in range(200)])
            answer["per_s"] = count // 200 * 200 / (time.perf_counter() - since)
        elif name == "one":
            answer["ms"] = times_ms(count, lambda: ray.get(buffer.add.remote(message)))
        elif name == "flow":
            since = time.perf_counter()
            ray.get([producer.run.remote(buffer, count) for producer in producers])
            answer["s"] = time.perf_counter() - since
        elif name == "blob":
            blob = numpy.frombuffer(os.urandom(count << 20), numpy.uint8)
            since = time.perf_counter()
            reference = ray.put(blob)
            answer["put_s"] = time.perf_counter() - since
            since = time.perf_counter()
            assert ray.get(reference).nbytes == count << 20
            answer["get_s"] = time.perf_counter() - since
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

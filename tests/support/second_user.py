"""Becomes a user without rights, tries to get at a run of another user, and prints its successes as JSON."""

import encodings.idna  # noqa: F401  # other users cannot read this Python's folder
import http.client
import json
import os
import socket
import sys


def opened(path: str) -> bool:
    """Whether a file can be read, or a folder listed."""
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except OSError:
        return False
    return True


def answered(host: str, port: int, method: str, path: str, headers: "dict[str, str]") -> int:
    """The status of an HTTP request; 0 for a server that does not speak HTTP."""
    connection = http.client.HTTPConnection(host, port, timeout=20)
    body = b"{}" if method == "POST" else None
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def signed_in(host: str, port: int, options: "dict[str, object]") -> bool:
    """Whether the broker lets a client in."""
    with socket.create_connection((host, port), 20) as connection:
        lines = connection.makefile("rb")
        assert lines.readline().startswith(b"INFO ")
        connection.sendall(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())
        return lines.readline().startswith(b"PONG")


if __name__ == "__main__":
    told = json.load(sys.stdin)
    host, port = told["broker"]
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    print(
        json.dumps(
            {
                "files": [path for path in told["files"] if opened(path)],
                "answers": [[*asked[:4], answered(*asked)] for asked in told["requests"]],
                "brokers": [options for options in told["connects"] if signed_in(host, port, options)],
            }
        )
    )

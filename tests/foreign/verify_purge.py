"""Checks the certificate of a purge, and that the user is unreadable, without any code of headrace.

    python verify_purge.py CERTIFICATE.json PUBLIC_KEY_FILE nats://HOST:PORT OPERATOR.nk

Needs PyNaCl alone; the NATS protocol is spoken here. Prints a JSON report; exit code 1 with a reason for every check
that failed. Written from docs/feedback.md, docs/subjects.md and docs/wire.md.
"""

import base64
import binascii
import json
import secrets
import socket
import struct
import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nacl.exceptions
import nacl.signing

TIMEOUT_S = 20.0
NO_MESSAGE = 10037
NAMED = (
    ("HR_FEEDBACK", "hr.feedback.*.{user}"),
    ("HR_FEEDBACK", "hr.fate.*.{user}"),
    ("HR_TRAJ", "hr.traj.*.{user}.*"),
    ("HR_TURN", "hr.turn.*.{user}.*"),
    ("HR_SCORE", "hr.score.*.*.{user}.*"),
    ("HR_BLOB", "hr.blob.{user}.>"),
    ("KV_HR_SESSION", "$KV.HR_SESSION.*.session.{user}.>"),
    ("KV_HR_SESSION", "$KV.HR_SESSION.*.session.*.{user}.>"),
)
"""Subjects that name a user: all of them have to be empty, whatever the certificate says."""
SEARCHED = (("HR_TASK", "hr.task.>"), ("HR_EVENT", "hr.event.>"), ("HR_DLQ", "hr.dlq.>"))
"""Streams whose content must not name the user."""


class Broker:
    """A connection to a NATS server that makes requests, one at a time."""

    def __init__(self, url: str, seed_text: str) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port or 4222), TIMEOUT_S)
        self.file = self.socket.makefile("rb")
        info = json.loads(self.file.readline().removeprefix(b"INFO "))
        key = nacl.signing.SigningKey(base64.b32decode(seed_text + "=" * (-len(seed_text) % 8))[2:34])
        public = bytes([20 << 3]) + bytes(key.verify_key)
        public += binascii.crc_hqx(public, 0).to_bytes(2, "little")
        signature = base64.urlsafe_b64encode(key.sign(info["nonce"].encode()).signature).decode().rstrip("=")
        hello = {"verbose": False, "pedantic": False, "lang": "python", "version": "1", "protocol": 1}
        hello |= {"nkey": base64.b32encode(public).decode().rstrip("="), "sig": signature, "headers": True}
        self.inbox = f"_INBOX.operator.{secrets.token_hex(8)}"
        self.socket.sendall(b"CONNECT " + json.dumps(hello).encode() + b"\r\nPING\r\n")
        self._line(b"PONG")
        self.socket.sendall(f"SUB {self.inbox}.* 1\r\n".encode())
        self.number = 0

    def _line(self, wanted: bytes) -> bytes:
        while True:
            line = self.file.readline()
            if not line or line.startswith(b"-ERR"):
                raise SystemExit(f"the broker ended the connection: {line.decode().strip() or 'closed'}")
            if line.startswith(b"PING"):
                self.socket.sendall(b"PONG\r\n")
            elif line.startswith(wanted):
                return line

    def api(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """A call of the JetStream API. A refusal is in `error`."""
        self.number += 1
        reply, body = f"{self.inbox}.{self.number}", json.dumps(request).encode()
        self.socket.sendall(f"PUB $JS.API.{name} {reply} {len(body)}\r\n".encode() + body + b"\r\n")
        while True:
            tokens = self._line(b"MSG ").split()
            data = self.file.read(int(tokens[-1]) + 2)[:-2]
            if tokens[1].decode() == reply:
                answer: dict[str, Any] = json.loads(data)
                return answer

    def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """The subjects of a stream under a filter, with their numbers of messages."""
        answer = self.api(f"STREAM.INFO.{stream}", {"subjects_filter": filter})
        if "error" in answer:
            raise SystemExit(f"{stream} cannot be looked up: {answer['error']}")
        counts: dict[str, int] = answer["state"].get("subjects") or {}
        return counts

    def get(self, stream: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """One stored message: subject, seq, data, headers. None when there is none."""
        answer = self.api(f"STREAM.MSG.GET.{stream}", request)
        if "error" in answer:
            if answer["error"].get("err_code") == NO_MESSAGE:
                return None
            raise SystemExit(f"{stream} cannot be read: {answer['error']}")
        message = answer["message"]
        lines = base64.b64decode(message.get("hdrs", "")).decode("latin-1").split("\r\n")[1:]
        headers = dict(line.split(": ", 1) if ": " in line else line.split(":", 1) for line in lines if ":" in line)
        record: dict[str, Any] = message | {"data": base64.b64decode(message.get("data", "")), "headers": headers}
        return record


def lz4(frame: bytes) -> bytes:
    """The content of an LZ4 frame (lz4_Frame_format.md, lz4_Block_format.md)."""
    flags, at, out = frame[4], 6, bytearray()
    at += (8 if flags & 8 else 0) + (4 if flags & 1 else 0) + 1
    while size := struct.unpack_from("<I", frame, at)[0]:
        at += 4
        block, stored = frame[at : at + (size & 0x7FFFFFFF)], size >> 31
        at += len(block) + (4 if flags & 16 else 0)
        if stored:
            out += block
            continue
        i = 0
        while i < len(block):
            token = block[i]
            i += 1
            length = token >> 4
            if length == 15:
                while True:
                    length += block[i]
                    i += 1
                    if block[i - 1] != 255:
                        break
            out += block[i : i + length]
            i += length
            if i >= len(block):
                break
            offset = block[i] | block[i + 1] << 8
            i += 2
            length = token & 15
            if length == 15:
                while True:
                    length += block[i]
                    i += 1
                    if block[i - 1] != 255:
                        break
            for _ in range(length + 4):
                out.append(out[-offset])
    return bytes(out)


def contents(message: dict[str, Any]) -> list[bytes]:
    """The content of a message, and of the LZ4 frames inside of it: a dead letter holds a message."""
    data = message["data"]
    if message["headers"].get("Hr-Encoding") == "lz4":
        data = lz4(data)
    texts, at = [data], data.find(b"\x04\x22\x4d\x18", 1)
    while at > 0:
        try:
            texts.append(lz4(data[at:]))
        except (IndexError, struct.error):
            pass  # these four bytes do not begin a frame
        at = data.find(b"\x04\x22\x4d\x18", at + 1)
    return texts


def verify(certificate: dict[str, Any], public_key: str, broker: Broker) -> tuple[dict[str, Any], list[str]]:
    """Returns a report of the checks, and a reason for every check that failed."""
    wrong: list[str] = []
    try:
        key = nacl.signing.VerifyKey(bytes.fromhex(public_key))
        key.verify(certificate["statement"].encode(), bytes.fromhex(certificate["signature"]))
    except (nacl.exceptions.BadSignatureError, ValueError) as error:
        return {}, [f"the signature does not fit the statement and the public key: {error}"]
    said = json.loads(certificate["statement"])
    user, run = said["user"], said["run"]
    checked: dict[str, Any] = {
        "user": user,
        "seconds": round(said["ended"] - said["asked"], 3),
        "subjects": 0,
        "sequences": 0,
    }
    for stream, template in NAMED:
        checked["subjects"] += 1
        left = broker.subjects(stream, template.format(user=user))
        if left:
            wrong.append(f"{stream} still holds {sum(left.values())} messages on {min(left)} and others")
    for record in said["records"]:
        for first, last in record["sequences"]:
            for seq in range(first, last + 1):
                checked["sequences"] += 1
                if broker.get(record["stream"], {"seq": seq}) is not None:
                    wrong.append(f"{record['stream']} #{seq} can still be read")
        counted = sum(last - first + 1 for first, last in record["sequences"])
        if record["sequences"] and counted != record["count"]:
            wrong.append(f"{record['stream']} {record['filter']}: {record['count']} records, {counted} sequences")
    for stream, filter in SEARCHED:
        seq, searched = 1, 0
        while (message := broker.get(stream, {"seq": seq, "next_by_subj": filter})) is not None:
            seq, searched = message["seq"] + 1, searched + 1
            bare = message["headers"].get("Hr-Id", "").startswith("purged-")
            if not bare and any(user.encode() in content for content in contents(message)):
                wrong.append(f"{stream} #{message['seq']} ({message['subject']}) names the user")
        checked[stream] = searched
    denied = broker.get("KV_HR_PRODUCT", {"last_by_subj": f"$KV.HR_PRODUCT.feedback.{run}.denied.{user}"})
    if denied is None or denied["headers"].get("KV-Operation"):
        wrong.append("the user is not on the deny-list")
    else:
        checked["denied"] = True
    batches = broker.subjects("HR_SCORE", f"hr.close.{said['branch']}.{user}.*")
    for subject in batches:
        closing = broker.get("HR_SCORE", {"last_by_subj": subject})
        group = ".".join(subject.split(".")[-2:])
        if closing is None or not closing["headers"].get("Hr-Type", "").startswith("group_closed"):
            continue
        if datetime.fromisoformat(closing["time"][:19] + "+00:00").timestamp() > said["ended"] + 1:
            wrong.append(f"{group} was given a place in a batch after the purge")
        steps, pending = said["absorbed_steps"], said["pending_groups"]
        if not steps and group not in pending:
            wrong.append(f"{group} has a place in a batch of {said['branch']}, and the certificate names no step")
    checked["absorbed_steps"] = said["absorbed_steps"]
    checked["last_version_before"] = said["last_version_before"]
    return checked, wrong


def main() -> int:
    """The command."""
    if len(sys.argv) != 5:
        print(__doc__, file=sys.stderr)
        return 2
    certificate, public_key, url, seed = sys.argv[1:]
    broker = Broker(url, Path(seed).read_text().strip())
    checked, wrong = verify(json.loads(Path(certificate).read_text()), Path(public_key).read_text().strip(), broker)
    print(json.dumps({"ok": not wrong, "checked": checked, "wrong": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

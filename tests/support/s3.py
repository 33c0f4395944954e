"""A local S3 server (moto's), which is found as a real one is: by variables of the environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from secrets import token_hex

import pytest

NEEDS_S3 = pytest.mark.skipif(not (find_spec("moto") and find_spec("s3fs")), reason="pip install 'headrace[dev,s3]'")


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket of a server on loopback."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        name = f"weights-{token_hex(4)}"
        s3fs.S3FileSystem.clear_instance_cache()  # it knows the server of the test before
        boto3.client("s3").create_bucket(Bucket=name)
        yield f"s3://{name}"
    finally:
        server.stop()

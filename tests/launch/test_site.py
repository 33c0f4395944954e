"""The live page of a deployed run: its addresses, and a real broker that admits its origins."""

import re
import ssl
from pathlib import Path

import aiohttp
import msgspec
import pytest
import trustme

from headrace.bus.broker import credentials
from headrace.bus.broker.server import CONF, Server
from headrace.config import Config, ConfigError
from headrace.config.nodes import Dashboard
from headrace.launch.site import Site, site_of
from tests.support.region_brokers import free_port

pytestmark = pytest.mark.anyio


def site(**keys: object) -> Site:
    opened = site_of(Config(dashboard=msgspec.convert(keys, Dashboard)))
    assert opened is not None
    return opened


def test_page_and_websocket_are_on_loopback_until_an_address_is_configured() -> None:
    plain = site()
    assert (plain.page, plain.websocket) == ("http://127.0.0.1:8090/", "ws://127.0.0.1:8091")
    assert plain.forwards == "-L 8090:127.0.0.1:8090 -L 8091:127.0.0.1:8091"
    open_page = site(host="10.0.0.1", port=80)
    assert open_page.page == "http://10.0.0.1:80/" and open_page.websocket == "ws://10.0.0.1:81"
    assert {"http://10.0.0.1:80", "http://127.0.0.1:80"} <= set(open_page.origins)
    secure = site(host="10.0.0.1", websocket="https://10.0.0.1:443")
    assert (secure.page, secure.websocket) == ("https://10.0.0.1:8090/", "wss://10.0.0.1:443")
    assert 'cert_file: "/c/server.pem"' in secure.conf("/c")
    assert site(host="0.0.0.0").page == "http://127.0.0.1:8090/"
    assert site_of(Config(dashboard=Dashboard(enabled=False))) is None


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"port": 65535}, "dashboard.port: expected less than 65535"),
        ({"websocket": "http://h:x"}, "dashboard.websocket: http://h:x is no address"),
        ({"websocket": "http://:80"}, "names no host; expected http://HOST:PORT"),
        ({"host": "h", "port": 9, "websocket": "http://h:9"}, "is the page's own port; choose another"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_sentence(keys: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        site(**keys)


async def test_a_broker_takes_the_block_and_admits_the_pages_origins_by_tls(tmp_path: Path) -> None:
    folder, authority, port = tmp_path / "credentials", trustme.CA(), free_port()
    folder.mkdir()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "server.key")
    certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
    there = site(websocket=f"https://127.0.0.1:{port}")
    (tmp_path / "nats.conf").write_text(CONF.read_text() + there.conf(str(folder)))
    credentials.write(folder)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with Server(tmp_path, prepared=True), aiohttp.ClientSession() as client:
        for origin, admitted in ((there.origins[0], True), ("http://elsewhere:8090", False)):
            address = there.websocket.replace("wss", "https")
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Origin": origin}
            upgrade |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
            async with client.get(address, ssl=trusting, headers=upgrade) as answer:
                assert (answer.status == 101) is admitted, (origin, answer.status)
    context = there._replace(host="10.0.0.1").context(folder)
    assert context is not None and there.context(folder) is None
    with pytest.raises(ConfigError, match=r"server\.key cannot be used"):
        there._replace(host="10.0.0.1").context(tmp_path)

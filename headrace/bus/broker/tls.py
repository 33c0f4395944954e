"""TLS between actors and a broker: certificates lie in the credentials folder, beside the seeds.

| file | where | meaning |
|---|---|---|
| `server.pem`, `server.key` | broker | its certificate chain and key: `users.conf` then requires TLS |
| `clients.pem` | broker | authorities of clients: `users.conf` then requires a certificate of every client |
| `ca.pem` | actors | the only authority that they accept; without TLS they do not connect |
| `client.pem`, `client.key` | actors | their certificate, for a broker that requires one |

All are PEM, keys without a passphrase. The broker's certificate names the host of `[bus] url`. Seeds and permissions
stay as they are: TLS protects the bytes on the way, an NKEY proves the role of their sender.
"""

import ssl
from pathlib import Path

_SERVER, _SERVER_KEY, _CLIENTS = "server.pem", "server.key", "clients.pem"
_CA, _CLIENT, _CLIENT_KEY = "ca.pem", "client.pem", "client.key"


def server_conf(folder: Path) -> str:
    """The ``tls`` block of a broker's configuration; empty where the folder has no certificate. ValueError: a file is
    missing beside it."""
    certificate, key, clients = (folder.resolve() / name for name in (_SERVER, _SERVER_KEY, _CLIENTS))
    if not certificate.exists():
        return ""
    if not key.exists():
        raise ValueError(f"{certificate} has no key: expected {key}")
    lines = [f'cert_file: "{certificate}"', f'key_file: "{key}"']
    if clients.exists():
        lines += [f'ca_file: "{clients}"', "verify: true"]
    return "\n".join(["tls {", *(f"  {line}" for line in lines), "}", ""])


def link_conf(folder: Path) -> str:
    """The ``tls`` block of a region's link to its hub; empty where the folder has no ``ca.pem``."""
    ca, client, key = (folder.resolve() / name for name in (_CA, _CLIENT, _CLIENT_KEY))
    if not ca.exists():
        return ""
    lines = [f'ca_file: "{ca}"']
    if client.exists():
        lines += [f'cert_file: "{client}"', f'key_file: "{key}"']
    return "\n".join(["tls {", *(f"  {line}" for line in lines), "}", ""])


def client_context(credentials: Path) -> ssl.SSLContext | None:
    """The context of actors with this folder of seeds, or with an account's folder in it; None where there is no
    ``ca.pem``. ValueError: a file cannot be used."""
    folder = next((place for place in (credentials, credentials.parent) if (place / _CA).exists()), None)
    if folder is None:
        return None
    path = folder / _CA
    try:
        context = ssl.create_default_context(cafile=path)
        if (folder / _CLIENT).exists():
            path = folder / _CLIENT
            context.load_cert_chain(path, folder / _CLIENT_KEY, password="")
    except OSError as error:  # SSLError is one
        raise ValueError(f"{path} cannot be used ({error}): expected PEM, and a key without a passphrase") from None
    return context


def server_context(credentials: Path) -> ssl.SSLContext:
    """The context of another listener beside the broker, with the broker's certificate. credentials: a folder of seeds,
    or an account's folder in it. ValueError: there is none, or it cannot be used."""
    folder = next((place for place in (credentials, credentials.parent) if (place / _SERVER).exists()), credentials)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(folder / _SERVER, folder / _SERVER_KEY, password="")
    except OSError as error:  # SSLError is one
        raise ValueError(
            f"{folder / _SERVER} and {_SERVER_KEY} cannot be used ({error}): expected PEM, and a key without a "
            "passphrase"
        ) from None
    return context

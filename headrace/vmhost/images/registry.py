"""Pulls container images from registries: the manifest for linux/amd64, then the layers that the store lacks.

An interrupted download continues where it stopped, also in a later pull, and no blob is used before its digest was
checked. Credentials come from docker's ``config.json``, its credential helpers included. Loopback registries are asked
over HTTP, all others over HTTPS.

Sources: OCI distribution specification 1.1 ("Pulling manifests", "Pulling blobs"); Distribution's token authentication
specification; RFC 9110, 14 (range requests).
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from headrace import timed_commands
from headrace.backoff import Backoff
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, oci, store
from headrace.vmhost.images.rootfs import BadImage, Tree

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_DOCKER_HUB = "registry-1.docker.io"
_LARGEST = 16 << 20
"""Bytes of the largest manifest or configuration."""
_PIECE = 1 << 20
TRIES = 6
"""Consecutive requests without data after which a download is given up."""
RETRY_S = (0.5, 8.0)
HELPER_S = 60.0
"""How long a credential helper may take; it may wait for somebody to unlock its store."""
STALL_S = 60.0
"""Time limit for a connection without data."""


class Reference(NamedTuple):
    """An image's name at a registry."""

    registry: str
    repository: str
    version: str
    """A tag, or a digest."""
    full: str

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """VmhostError when the text is no reference."""
        full = imported.full(text)
        name, at, digest = full.partition("@")
        registry, _, rest = name.partition("/")
        repository, colon, tag = rest.rpartition(":")
        if not colon:
            repository, tag = rest, ""
        if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository):
            raise VmhostError(f"expected an image such as docker.io/org/app:1.2, got {text!r}")
        return cls(registry, repository, digest if at else tag, full)

    @property
    def url(self) -> str:
        """The repository's address."""
        host = self.registry.partition(":")[0].strip("[]")
        scheme = "http" if host in ("localhost", "127.0.0.1") else "https"
        server = _DOCKER_HUB if self.registry == "docker.io" else self.registry
        return f"{scheme}://{server}/v2/{self.repository}"


class _Blob(msgspec.Struct):
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]


class _Manifest(msgspec.Struct):
    config: _Blob
    layers: list[_Blob]


class _Contents(msgspec.Struct):
    diff_ids: list[str]


class _Config(msgspec.Struct):
    rootfs: _Contents


class Refusal(VmhostError):
    """The registry answers, and repeating the request would not help."""


def pull(cache: Path, text: str, request: imported.Request, say: Any = lambda line: None) -> imported.Image:
    """The image of a reference, in the store. Blocks; VmhostError. say: gets one line for each download."""
    reference = Reference.parse(text)
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    try:
        manifest, config = asyncio.run(_download(cache, downloads, reference, say))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise VmhostError(f"{reference.full} can't be pulled: {error or type(error).__name__}") from None
    pulled = Pulled(downloads, reference, manifest, config)
    image = imported.take_from(cache, reference.full, request, pulled.read)
    for layer in manifest["layers"]:
        _place(downloads, layer["digest"]).unlink(missing_ok=True)
    return image


class Pulled:
    """A pulled manifest and its blobs, as `oci.read` takes them."""

    def __init__(self, downloads: Path, reference: Reference, manifest: Any, config: bytes) -> None:
        self._downloads, self._reference, self._manifest, self._config = downloads, reference, manifest, config

    def read(self, stack: ExitStack, outer: IO[bytes], tree: Tree, builder: store.Builder) -> oci.Settings:
        """Apply the layers; see imported.Read."""
        return oci.apply(self, self._manifest, (self._reference.full,), tree, builder)

    def open(self, name: str) -> IO[bytes]:
        """A blob. BadImage when it was not downloaded."""
        path = self._downloads / name.rpartition("/")[2]
        if not path.is_file():
            raise BadImage(f"it has no {name}: another pull removed it; pull again")
        return path.open("rb")

    def json(self, name: str, digest: str = "") -> Any:
        """The configuration, whose digest was checked."""
        return json.loads(self._config)


async def _download(cache: Path, downloads: Path, reference: Reference, say: Any) -> tuple[Any, bytes]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=STALL_S)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        client = Client(session, reference)
        manifest = await client.manifest(reference.version)
        config = await client.small(f"blobs/{manifest['config']['digest']}", manifest["config"]["digest"])
        try:
            diffs = msgspec.json.decode(config, type=_Config).rootfs.diff_ids
        except msgspec.DecodeError:
            raise Refusal(f"{reference.full} is no container image: its configuration has no layers") from None
        missing = msgspec.convert(manifest, _Manifest).layers[_present(cache, diffs) :]
        size = sum(layer.size for layer in missing)
        free = shutil.disk_usage(downloads).free
        if size > min(free, imported.LARGEST):
            raise Refusal(
                f"{reference.full}: its layers have {size >> 20} MiB; expected at most {imported.LARGEST >> 20} MiB, "
                f"and {free >> 20} MiB are free below {downloads}"
            )
        for number, layer in enumerate(missing, 1):
            say(f"layer {number} of {len(missing)}: {layer.digest[:19]}, {layer.size / (1 << 20):.1f} MiB")
            await client.blob(layer.digest, layer.size, _place(downloads, layer.digest))
        return manifest, config


def _present(cache: Path, diffs: list[str]) -> int:
    """Layers that the store has already."""
    stored_images = [(image.layers, image.boundaries) for image in imported.images(cache)]
    with ExitStack() as stack, open(os.devnull, "w+b") as spool:
        return store.Builder(cache, cache, Tree(spool), stack, stored_images).begin(diffs)


def _place(downloads: Path, digest: str) -> Path:
    kind, _, name = digest.partition(":")
    if kind != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", name):
        raise Refusal(f"the registry names a blob {digest!r}; only sha256 is known here")
    return downloads / name


class Client:
    """Requests to one repository."""

    def __init__(self, session: aiohttp.ClientSession, reference: Reference) -> None:
        self._session, self._reference = session, reference
        self._authorization = ""

    async def manifest(self, version: str, depth: int = 0) -> Any:
        """The manifest for linux/amd64. VmhostError."""
        accept = {"Accept": ", ".join((*_MANIFESTS, *_INDEXES))}
        digest = version if version.startswith("sha256:") else ""
        data = await self.small(f"manifests/{version}", digest, accept)
        try:
            manifest = json.loads(data)
            if "manifests" not in manifest:
                msgspec.convert(manifest, _Manifest)
                return manifest
            platforms = {}
            for entry in manifest["manifests"]:
                platform = entry.get("platform") or {}
                platforms[f"{platform.get('os')}/{platform.get('architecture')}"] = str(entry["digest"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Refusal(f"{self._reference.full}: the registry's manifest cannot be read") from None
        if "linux/amd64" not in platforms or depth > 2:
            names = ", ".join(sorted(name for name in platforms if "unknown" not in name)) or "no platform"
            raise Refusal(f"{self._reference.full} has no image for linux/amd64; it has {names}")
        return await self.manifest(platforms["linux/amd64"], depth + 1)

    async def small(self, path: str, digest: str, headers: dict[str, str] | None = None) -> bytes:
        """A manifest or configuration, its digest checked where it is known. VmhostError."""
        retry = Backoff(*RETRY_S)
        for attempt in range(TRIES):
            try:
                async with await self._get(path, headers or {}) as answer:
                    data = await answer.content.read(_LARGEST + 1)
                    while len(data) <= _LARGEST and (more := await answer.content.read(_LARGEST)):
                        data += more
                break
            except (aiohttp.ClientError, TimeoutError):
                if attempt == TRIES - 1:
                    raise
                await retry.sleep()
        if len(data) > _LARGEST:
            raise Refusal(f"{self._reference.full}: {path} is larger than any manifest")
        if digest and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise Refusal(f"{self._reference.full}: {path} is damaged: its digest is not {digest}")
        return data

    async def blob(self, digest: str, size: int, place: Path) -> None:
        """A layer into a file, from where an earlier download of it stopped. VmhostError."""
        if place.exists():
            return
        part = place.with_suffix(".part")
        retry, idle = Backoff(*RETRY_S), 0
        while (have := part.stat().st_size if part.exists() else 0) < size:
            try:
                await self._go_on(digest, part, have, size)
                if part.stat().st_size <= have:  # of an answer that was whole
                    raise aiohttp.ClientError("the registry sends less than the layer")
            except (aiohttp.ClientError, TimeoutError) as error:
                idle = 0 if part.exists() and part.stat().st_size > have else idle + 1
                if idle == TRIES:
                    raise VmhostError(
                        f"{self._reference.full}: the download of {digest[:19]} stopped at {have} of {size} bytes "
                        f"({error or type(error).__name__}); pull again to go on"
                    ) from None
                await retry.sleep()
        with part.open("rb") as file:
            actual = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        if f"sha256:{actual.hexdigest()}" != digest:
            part.unlink()
            raise Refusal(f"{self._reference.full}: a layer is damaged: its digest is not {digest}; pull again")
        part.replace(place)

    async def _go_on(self, digest: str, part: Path, have: int, size: int) -> None:
        headers = {"Range": f"bytes={have}-"} if have else {}
        async with await self._get(f"blobs/{digest}", headers) as answer:
            # A registry without ranges sends all of it.
            with part.open("ab" if answer.status == 206 else "wb") as out:
                async for piece in answer.content.iter_chunked(_PIECE):
                    out.write(piece)
                    if out.tell() > size:
                        part.unlink()
                        raise Refusal(f"{self._reference.full}: {digest[:19]} is larger than its {size} bytes")

    async def _get(self, path: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """A successful answer. Refusal for errors that a repeat would not remove; aiohttp's errors for the rest."""
        url = f"{self._reference.url}/{path}"
        for _ in range(2):
            authorization = {"Authorization": self._authorization} if self._authorization else {}
            answer = await self._session.get(url, headers=headers | authorization)
            if answer.status != 401:
                break
            challenge = answer.headers.get("WWW-Authenticate", "")
            answer.release()
            self._authorization = await self._authorize(challenge)
        if answer.status in (200, 206):
            return answer
        text = (await answer.content.read(500)).decode("utf-8", "replace")
        answer.release()
        if answer.status == 429 or answer.status >= 500:
            raise aiohttp.ClientError(f"{self._reference.registry} answers {answer.status}")
        why = {401: "it needs credentials: run docker login", 403: "access is denied", 404: "there is no such image"}
        reason = why.get(answer.status, " ".join(text.split())[:200])
        raise Refusal(f"{self._reference.full}: {self._reference.registry} answers {answer.status}: {reason}")

    async def _authorize(self, challenge: str) -> str:
        """The Authorization header that a challenge asks for. Refusal."""
        kind, _, rest = challenge.partition(" ")
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        login = credentials(self._reference.registry)
        if kind.lower() == "basic" and login is not None:
            return _basic(login)
        if kind.lower() != "bearer" or "realm" not in fields:
            raise Refusal(f"{self._reference.full}: {self._reference.registry} needs credentials: run docker login")
        server = URL(self._reference.url)
        try:
            realm = URL(fields["realm"])
        except ValueError:
            realm = URL()
        if realm.scheme != server.scheme or (realm.scheme == "http" and realm.host != server.host):
            raise Refusal(
                f"{self._reference.full}: {self._reference.registry} names {fields['realm'][:200]!r} as the place of "
                "tokens; a login is sent over HTTPS alone, or to the machine of a registry on loopback"
            )
        query = {"scope": f"repository:{self._reference.repository}:pull"}
        query |= {"service": fields["service"]} if "service" in fields else {}
        authorization = {"Authorization": _basic(login)} if login is not None else {}
        async with self._session.get(realm, params=query, headers=authorization) as answer:
            if answer.status != 200:
                raise Refusal(f"{self._reference.full}: {fields['realm']} gives no token: {answer.status}")
            token = await answer.json(content_type=None)
        return f"Bearer {token.get('token') or token.get('access_token')}"


def _basic(login: tuple[str, str]) -> str:
    return f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"


class _Docker(msgspec.Struct):
    auths: dict[str, dict[str, Any]] = {}
    creds_store: str = msgspec.field(default="", name="credsStore")
    cred_helpers: dict[str, str] = msgspec.field(default={}, name="credHelpers")


def credentials(registry: str) -> tuple[str, str] | None:
    """User and password of a registry from docker's configuration; None where it has none. VmhostError."""
    path = Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Docker)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise VmhostError(f"{path} cannot be read: {error}") from None
    names = ("https://index.docker.io/v1/", "docker.io") if registry == "docker.io" else (registry,)
    for name in (*names, *(f"https://{name}" for name in names)):
        helper = config.cred_helpers.get(name, "")
        entry = config.auths.get(name)
        if not helper and entry is not None and not entry.get("auth"):
            helper = config.creds_store
        if helper:
            return _helped(helper, name)
        if entry is not None:
            try:
                user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
            except (ValueError, KeyError):
                raise VmhostError(f"{path}: the login of {name} is damaged: run docker login again") from None
            return user, password
    return None


def _helped(helper: str, name: str) -> tuple[str, str]:
    program = f"docker-credential-{helper}"
    if shutil.which(program) is None:
        raise VmhostError(f"{program} is not installed, which docker's configuration names for {name}")
    try:
        done = timed_commands.run([program, "get"], HELPER_S, data=name.encode())
    except subprocess.TimeoutExpired:
        raise VmhostError(
            f"{program} gave no login for {name} within {HELPER_S:g} s: unlock its store, or run docker login again"
        ) from None
    try:
        answer = json.loads(done.stdout)
        return str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        text = (done.stdout or done.stderr).decode("utf-8", "replace").strip()[:200]
        raise VmhostError(f"{program} has no login for {name}: {text}") from None

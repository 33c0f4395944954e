"""The base of every section of the configuration, the ranges of values, and the error.

A range is part of a key's type, so it is checked when a file is read and appears in the schema. Values that code sets
directly are not checked.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.errors import WRONG_INPUT, HeadraceError


class ConfigError(HeadraceError, exit_status=WRONG_INPUT):
    """The configuration cannot be used; the text names the key, its line, the expected value and the actual one."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


_MOST = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=_MOST)]
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Threads = Annotated[int, Meta(ge=1, le=1024)]

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A finite number that is not negative."""
Above0 = Annotated[float, Meta(gt=0.0, le=1e12)]
Rate = Annotated[float, Meta(gt=0.0, le=1e3)]
"""A learning rate."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Duration = Annotated[float, Meta(gt=0.0, le=1e9)]
"""Seconds, more than 0."""

TOKEN = r"^[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?$"
TOKEN_OR_EMPTY = r"^([a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?)?$"
ACTOR = r"^[a-z][a-z_]{0,31}(:[a-z0-9][a-z0-9_-]{0,62})?$"
PATH = r"^[^\x00-\x1f\x7f]+$"
PATH_OR_EMPTY = r"^[^\x00-\x1f\x7f]*$"
HOST = r"^[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?$"
ADDRESS = r"^((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?):[1-9][0-9]{0,4})?$"
BROKERS = r"^((nats|tls|ws|wss)://[^\s,/]+(,(nats|tls|ws|wss)://[^\s,/]+)*)?$"
HTTP_URL = r"^(https?://[^\s]+)?$"
MODULE_ATTRIBUTE = r"^[A-Za-z_][\w./:-]{0,254}$"
PUBLIC_KEY = r"^U[A-Z2-7]{55}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"
DEVICE = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"

WORDS = {
    TOKEN: "1 to 64 lower-case letters, digits, '-' and '_', the first and last a letter or digit",
    TOKEN_OR_EMPTY: "at most 64 lower-case letters, digits, '-' and '_', the first and last a letter or digit",
    ACTOR: "an actor's name, or name:id",
    PATH: "not empty, without control characters",
    PATH_OR_EMPTY: "text without control characters",
    HOST: "a host name or address",
    ADDRESS: "HOST:PORT, or nothing",
    BROKERS: "nats://host:port, several separated by commas without spaces, or nothing",
    HTTP_URL: "an http:// or https:// address without spaces, or nothing",
    MODULE_ATTRIBUTE: "a name, or module:attribute",
    PUBLIC_KEY: "the public key of a user: U and 55 more letters and digits",
    VARIABLE: "the name of an environment variable",
    DEVICE: "auto, cpu, cuda or cuda:N",
}
"""Description of each pattern, for error messages."""

Token = Annotated[str, Meta(pattern=TOKEN)]
"""One token of a subject and one part of a path."""
ActorName = Annotated[str, Meta(pattern=ACTOR)]
OptionalToken = Annotated[str, Meta(pattern=TOKEN_OR_EMPTY)]
Path = Annotated[str, Meta(pattern=PATH, max_length=4096)]
OptionalPath = Annotated[str, Meta(pattern=PATH_OR_EMPTY, max_length=4096)]
Text = Annotated[str, Meta(pattern=PATH_OR_EMPTY, max_length=4096)]
Host = Annotated[str, Meta(pattern=HOST, max_length=253)]
Address = Annotated[str, Meta(pattern=ADDRESS, max_length=260)]
Brokers = Annotated[str, Meta(pattern=BROKERS, max_length=4096)]
HttpUrl = Annotated[str, Meta(pattern=HTTP_URL, max_length=2048)]
Reference = Annotated[str, Meta(pattern=MODULE_ATTRIBUTE)]
"""The name of something registered, or ``module:attribute``."""
PublicKey = Annotated[str, Meta(pattern=PUBLIC_KEY)]
Variable = Annotated[str, Meta(pattern=VARIABLE)]
Device = Annotated[str, Meta(pattern=DEVICE)]
Word = Annotated[str, Meta(pattern=PATH, max_length=4096)]
"""One word of a command line, or one name whose meaning its own key defines."""
Prompt = Annotated[str, Meta(max_length=1 << 20)]
"""Text of many lines."""
Option = float | int | str | bool
"""Value of a plugin's option."""

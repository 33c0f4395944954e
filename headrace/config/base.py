"""What every section of the configuration is, and the error that all of them end in."""

import msgspec


class ConfigError(Exception):
    """The configuration can't be used; the text says which key, what was expected, and the line."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""

"""Opens the file of API keys for the commands of `headrace keys`."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.tenants.keys import ApiKeys


def keys_of(args: argparse.Namespace) -> "ApiKeys":
    """The keys of the configuration: ``[production] keys``, or keys.json in the folder of runs."""
    from headrace.config import load
    from headrace.gateway.tenants.keys import ApiKeys, key_file

    return ApiKeys(key_file(load(args.config, args.set)))

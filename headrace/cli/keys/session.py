"""Opens the file of API keys for the commands of `headrace keys`."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.tenants.keys import ApiKeys


def keys_of(args: argparse.Namespace) -> "ApiKeys":
    """The keys of the configuration: ``[production] keys``, or keys.json in the folder of runs."""
    from headrace.gateway.tenants.keys import ApiKeys, key_file
    from headrace.launch.admission import own

    return ApiKeys(key_file(own(args.config, args.set)))

"""Renderers of a bundle: the tools of a node are compared with the run's, once for each set."""

import msgspec
import pytest

from headrace.rendering import schemas
from headrace.rendering.base import RendererError
from headrace.rendering.registry import Renderers
from tests.support.chat_formats import bundle_of_run


def test_a_set_of_tools_counts_as_opened_only_after_it_was_compared_with_the_runs() -> None:
    bundle, tools = bundle_of_run("hermes"), schemas.TABLE
    changed = {name: "{}" for name in schemas.functions_json(tools)}
    other = Renderers(msgspec.structs.replace(bundle, tools={**bundle.tools, **changed}))
    other.for_conversations()  # opens the same tools without a comparison
    for _ in range(2):
        assert other.opened(tools) is None
        with pytest.raises(RendererError, match="differs"):
            other.open(tools)
    same = Renderers(msgspec.structs.replace(bundle, tools=schemas.functions_json(tools)))
    assert same.opened(tools) is None
    assert same.open(tools) is same.opened(tools)

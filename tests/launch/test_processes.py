"""Which processes a run starts: without a model there is no search actor, and its tasks do not offer its tool."""

import pytest

from headrace.config import Config, Processes, Search
from headrace.launch.processes import process_groups
from headrace.search import models
from headrace.search.models import offers_search


def test_the_search_actor_is_started_where_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Config(search=Search(model="some/folder"))
    assert ("search",) in process_groups(named) and offers_search(named)
    none = Config(search=Search(model="none"))
    assert ("search",) not in process_groups(none) and not offers_search(none)
    assert len(process_groups(none)) == len(process_groups(named)) - 1
    monkeypatch.setattr(models, "packaged", lambda: None)
    assert ("search",) not in process_groups(Config()) and not offers_search(Config())


def test_a_run_without_the_actor_does_not_offer_its_tool() -> None:
    groups = tuple(group for group in Processes().groups if group != ("search",))
    assert not offers_search(Config(search=Search(model="some/folder"), processes=Processes(groups=groups)))

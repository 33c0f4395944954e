"""The names of actors and the locations of their classes. `load_class` imports them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.bus.runtime.actor import Actor

ACTORS = {
    "curriculum": "headrace.actors.curriculum:Curriculum",
    "evaluator": "headrace.actors.evaluator:Evaluator",
    "certifier": "headrace.actors.certifier:Certifier",
    "dead_letter": "headrace.actors.dead_letter:DeadLetter",
    "gateway": "headrace.actors.gateway:Gateway",
    "feedback": "headrace.actors.feedback.actor:Feedback",
    "scavenger": "headrace.actors.scavenger.actor:Scavenger",
    "environment": "headrace.actors.environment.actor:Environment",
    "search": "headrace.actors.search:Search",
    "judge": "headrace.actors.judge:Judge",
    "rollout": "headrace.actors.rollout.actor:Rollout",
    "trainer": "headrace.actors.trainer.actor:Trainer",
    "weight_sender": "headrace.actors.weight_sender:WeightSender",
    "weight_receiver": "headrace.actors.weight_receiver:WeightReceiver",
}


def load_class(name: str) -> "type[Actor]":
    """The class of an actor. LookupError names the actors that exist."""
    if name not in ACTORS:
        raise LookupError(f"unknown actor {name!r}; expected one of {', '.join(ACTORS)}")
    module, _, attribute = ACTORS[name].partition(":")
    loaded: type[Actor] = getattr(importlib.import_module(module), attribute)
    return loaded

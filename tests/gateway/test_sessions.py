"""Which session a request continues, what a repeated request gets, and how sessions end: cases, then interleavings."""

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from headrace.gateway.conversation import ModelRequest
from headrace.gateway.http import HttpRefused
from headrace.gateway.sessions import Caller, Placed, Run, Sessions, Under, root_of, user_of
from headrace.messages.product import ApiKey, ClientCall, ClientMessage, ClientSession, ClientTool
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling, Trajectory, TurnDone
from headrace.messages.tasks import TaskRef

READ = ClientTool(name="read")
USER, CALLED = ClientMessage(role="user", text="fix it"), ClientCall(id="c1", name="read", arguments='{"p": "a"}')
TURN = ClientMessage(role="assistant", text="I look.", calls=(CALLED,))
RESULT = ClientMessage(role="tool", text="one", call_id="c1")
KEYS = {name: ApiKey(id=name, tenant="acme", training=name != "k2", created=0.0) for name in ("k1", "k2")}
OTHER = ApiKey(id="k3", tenant="other", created=0.0)


def caller(session: str = "", name: str = "", key: ApiKey = KEYS["k1"], **changes: object) -> Caller:
    return msgspec.structs.replace(Caller(key=key, session=session, name=name), **changes)


def asked(*messages: ClientMessage, tools: tuple[ClientTool, ...] = (READ,), temperature: float = 1.0) -> ModelRequest:
    return ModelRequest(model="latest", messages=messages, tools=tools, temperature=temperature)


def place(
    sessions: Sessions, request: ModelRequest, by: Caller | None = None, user: str = "u1", sure: bool = True
) -> Placed:
    placed = sessions.place(request, by or caller(), user, lambda _: PolicyRef(), sure)
    assert placed is not None
    return placed


def turn(
    sessions: Sessions,
    *messages: ClientMessage,
    by: Caller | None = None,
    user: str = "u1",
    reply: ClientMessage = TURN,
    tools: tuple[ClientTool, ...] = (READ,),
) -> tuple[str, int]:
    """The session of a whole turn, and how many of the messages it knew."""
    placed = place(sessions, asked(*messages, tools=tools), by, user)
    assert placed.turn is not None
    sessions.took(placed.turn, reply)
    return placed.group, placed.known


def test_a_history_goes_on_with_its_session() -> None:
    sessions = Sessions()
    group, prefix = turn(sessions, USER)
    spelled = ClientMessage(
        role="assistant", text=" I look.\n", calls=(ClientCall(id="c1", name="read", arguments='{"p":"a"}'),)
    )
    assert prefix == 0 and turn(sessions, USER, spelled, RESULT) == (group, 2)
    assert sessions.turns == {"turns_begun": 1, "turns_named": 0, "turns_by_history": 1, "turns_unattributed": 0}


def test_a_history_that_two_sessions_had_goes_on_with_neither() -> None:
    """Nobody can tell whose it is, also once one of them has gone on or has ended."""
    sessions = Sessions()
    first, _ = turn(sessions, USER)
    assert turn(sessions, USER, TURN, RESULT)[0] == first, "so far it is the only one"
    second, _ = turn(sessions, USER)
    sessions.ended(first, rated=True)
    third, prefix = turn(sessions, USER, TURN, RESULT)
    assert prefix == 0 and len({first, second, third}) == 3
    assert root_of(third) == third, "it begins a tree, because it is nobody's branch"
    assert turn(sessions, USER, TURN, RESULT, by=caller(session=second)) == (second, 2), "an id decides"
    opened = sessions.open(caller(), "u1", lambda _: PolicyRef(), {}).group
    assert turn(sessions, USER, by=caller(session=opened)) == (opened, 0)
    assert turn(sessions, USER, TURN, RESULT, by=caller(session=opened)) == (opened, 2), (
        "in its tree it is the only one"
    )


def test_branches_of_one_history_are_sampled_at_once() -> None:
    sessions = Sessions()
    root, _ = turn(sessions, USER)
    places = [place(sessions, asked(USER, TURN, RESULT)) for _ in range(3)]
    assert [placed.known for placed in places] == [2, 0, 0] and places[0].group == root
    assert len({placed.group for placed in places}) == 3
    assert {root_of(placed.group) for placed in places} == {root}, "they are branches of one tree"
    for number, placed in enumerate(places):
        assert placed.turn is not None
        sessions.took(placed.turn, ClientMessage(role="assistant", text=f"{number}"))
    again, prefix = turn(sessions, USER, TURN, RESULT, ClientMessage(role="assistant", text="1"), USER)
    assert (again, prefix) == (places[1].group, 4), "each goes on by its own record"


def test_a_client_program_and_its_agents_are_one_tree() -> None:
    sessions = Sessions()
    other = ClientMessage(role="user", text="search")
    main, _ = turn(sessions, USER, by=caller(name="uuid"))
    agent, _ = turn(sessions, other, by=caller(name="uuid"), tools=())
    assert root_of(agent) == main != agent
    assert turn(sessions, USER, TURN, RESULT, by=caller(name="uuid")) == (main, 2)
    assert turn(sessions, other, TURN, RESULT, by=caller(name="uuid"), tools=()) == (agent, 2)
    compacted, prefix = turn(sessions, ClientMessage(role="user", text="summary"), by=caller(name="uuid"))
    assert prefix == 0 and root_of(compacted) == main and sessions.tree(main)[0].group == main
    for user, key in (("u2", KEYS["k1"]), ("u1", KEYS["k2"])):
        assert root_of(turn(sessions, USER, by=caller(name="uuid", key=key), user=user)[0]) != main
    sessions.ended(main, rated=True)
    assert root_of(turn(sessions, USER, by=caller(name="uuid"))[0]) != main, "the program goes on after its rating"


def test_an_opened_session_takes_its_first_turn_and_an_unknown_id_none() -> None:
    sessions = Sessions()
    opened = sessions.open(caller(), "u7", lambda _: PolicyRef(), {"task": "t"})
    assert turn(sessions, USER, by=caller(session=opened.group), user="u1") == (opened.group, 0), "its user counts"
    for by in (caller(session="u1.none"), caller(session=opened.group, key=OTHER)):
        with pytest.raises(HttpRefused) as refused:
            place(sessions, asked(USER), by)
        assert refused.value.status == 404
    sessions.ended(opened.group, rated=False)
    later, prefix = turn(sessions, USER, TURN, RESULT, by=caller(session=opened.group))
    assert prefix == 0 and root_of(later) == opened.group != later
    session = sessions.get(later)
    assert session is not None and session.labels == {"task": "t"} and not session.ended


def test_no_key_and_no_user_finds_anothers_session() -> None:
    sessions = Sessions()
    group, _ = turn(sessions, USER)
    for user, key in (("u2", KEYS["k1"]), ("u1", KEYS["k2"]), ("u1", OTHER)):
        assert turn(sessions, USER, TURN, RESULT, by=caller(key=key), user=user)[0] != group


def test_a_repeated_request_gets_the_recorded_turn() -> None:
    sessions = Sessions()
    group, _ = turn(sessions, USER, by=caller(retry="i1"))
    assert place(sessions, asked(USER), caller(retry="i1"))[:4] == (group, 0, None, 0)
    assert place(sessions, asked(USER), caller(again=True))[:4] == (group, 0, None, 0)
    with pytest.raises(HttpRefused) as refused:
        place(sessions, asked(RESULT), caller(retry="i1"))
    assert refused.value.status == 409
    placed = place(sessions, asked(USER))
    assert placed.turn is not None and placed.group != group, "another sample"
    waiting = place(sessions, asked(USER), caller(retry="i2"))
    assert waiting.turn is not None
    assert place(sessions, asked(USER), caller(retry="i2")).wait is waiting.turn
    sessions.over(waiting.turn)
    assert waiting.turn.over.is_set()
    assert place(sessions, asked(USER), caller(retry="i2")).turn is not None, "it failed, so it is sampled"


def test_the_same_body_after_a_lost_answer_gets_the_recorded_turn() -> None:
    sessions, gone = Sessions(), [False]
    placed = place(sessions, asked(USER), caller(gone=lambda: gone[0]))
    assert place(sessions, asked(USER)).turn is not None
    gone[0] = True
    assert placed.turn is not None and place(sessions, asked(USER)).wait is placed.turn
    sessions.took(placed.turn, TURN)
    assert place(sessions, asked(USER))[:4] == (placed.group, 0, None, 0)
    assert sessions.answered(placed.group, 0, lost=False) is not None
    assert place(sessions, asked(USER)).turn is not None


def test_a_program_gets_no_turn_of_a_session_without_its_name() -> None:
    """Later its history would go on with an equal one of its own tree, whose turn it was never given."""
    sessions = Sessions()
    other, _ = turn(sessions, USER)
    placed = place(sessions, asked(USER), caller(name="uuid", again=True))
    assert placed.turn is not None and placed.group != other
    sessions.took(placed.turn, TURN)
    sessions.ended(placed.group, rated=True)
    again = place(sessions, asked(USER), caller(name="uuid", again=True))
    assert again[:4] == (placed.group, 0, None, 0), "its own tree has ended, and has the turn"


def test_other_tools_and_other_temperatures() -> None:
    sessions = Sessions()
    group, _ = turn(sessions, USER)
    branch, prefix = turn(sessions, USER, TURN, RESULT, by=caller(session=group), tools=())
    assert prefix == 0 and root_of(branch) == group != branch
    placed = place(sessions, asked(USER, TURN, RESULT, temperature=0.5))
    assert placed.group == group and placed.turn is not None
    assert "temperatures 1 and 0.5" in sessions.took(placed.turn, TURN).untrainable


def test_a_key_that_has_not_opted_in_takes_the_consent_away() -> None:
    sessions = Sessions()
    group, _ = turn(sessions, USER)
    assert turn(sessions, USER, TURN, RESULT, by=caller(session=group, key=KEYS["k2"])) == (group, 2)
    session = sessions.get(group)
    assert session is not None and not session.training_allowed


def test_indexes_end_with_their_sessions() -> None:
    sessions = Sessions()
    for by in (caller(), caller(name="n", retry="i"), caller(name="n")):
        turn(sessions, USER, by=by)
    turn(sessions, USER, by=caller(), user="u2")
    assert sessions.idle(60.0) == [] and len(sessions.idle(-1.0)) == 4 and sessions.expired(-1.0) == []
    for session in sessions.idle(-1.0):
        sessions.ended(session.group, rated=False)
    assert len(sessions.expired(-1.0)) == 4 and sessions.expired(60.0) == []
    for session in (*sessions.of_user("u1"), *sessions.of_user("u2")):
        sessions.drop(session.group)
    assert not sessions._sessions and not sessions._index and not sessions._under


def test_a_turn_of_a_purged_user_is_refused() -> None:
    sessions = Sessions()
    placed = place(sessions, asked(USER))
    sessions.drop(placed.group)
    assert placed.turn is not None
    with pytest.raises(HttpRefused) as refused:
        sessions.took(placed.turn, TURN)
    assert refused.value.status == 409 and placed.turn.over.is_set()


STEPS = (
    *("begin", "fork", *["say"] * 3, *["finish"] * 3),
    *("fail", "lose", "repeat", "end", "restart", "purge", "run", "attempt", "attempt"),
)


class Conversation:
    """A client that sends its whole history, and what it was given."""

    def __init__(self, key: str, user: str, session: str, name: str) -> None:
        self.key, self.user, self.session, self.name = key, user, session, name
        self.messages: list[ClientMessage] = []
        self.given: set[tuple[str, int]] = set()
        self.open: tuple[ModelRequest, str] | None = None
        """The request whose answer is missing, and its Idempotency-Key."""
        self.gone = False
        self.connection = 0
        """Counts the requests that were sent: an answer comes on the connection of its own."""


class World(RuleBasedStateMachine):
    """Two gateways of one run, the record of each session, and conversations of few words."""

    ids = itertools.count()
    """Of sessions: chance would make a failure another one when it is played again."""

    def __init__(self) -> None:
        super().__init__()
        World.ids = itertools.count()
        self.random = random.Random()
        self.gateways = [Sessions(), Sessions()]
        self.stored: dict[str, ClientSession] = {}
        self.record: dict[str, int] = {}
        """Turns of each session in the turn log."""
        self.under: list[tuple[int, Placed, Under, Conversation, int, int]] = []
        """Gateway, place, turn, conversation, turns of the record when it began, and the client's connection."""
        self.conversations: list[Conversation] = []
        self.runs: list[Run] = []
        self.texts: dict[tuple[str, int], str] = {}
        self.numbers = 0

    def keep(self, session: ClientSession) -> None:
        self.stored[session.group] = session
        for gateway in self.gateways:
            gateway.put(session)

    @rule(step=st.sampled_from(STEPS), chance=st.integers(0, 2**16))
    def step(self, step: str, chance: int) -> None:
        """chance: decides what the step leaves open."""
        self.random.seed(chance)
        getattr(self, step)()

    def begin(self) -> None:
        pick = self.random.choice
        session = name = ""
        key, user = pick(("k1", "k2")), pick(("u1", "u2"))
        mode = pick(("none", "none", "name", "id", "shared"))
        if mode == "name":
            name = pick(("n1", "n2"))
        elif mode == "id":
            opened = self.gateways[0].open(caller(key=KEYS[key]), user, lambda _: PolicyRef(), {})
            self.keep(opened)
            session = opened.group
        elif mode == "shared" and self.stored:
            session = pick(sorted(self.stored))
        self.conversations.append(Conversation(key, user, session, name))

    def chosen(self, waiting: bool) -> Conversation | None:
        fit = [each for each in self.conversations if (each.open is not None) == waiting]
        return self.random.choice(fit) if fit else None

    def fork(self) -> None:
        if (one := self.chosen(waiting=False)) is not None:
            other = Conversation(one.key, one.user, one.session, one.name)
            other.messages, other.given = [*one.messages], {*one.given}
            self.conversations.append(other)

    def say(self) -> None:
        if (one := self.chosen(waiting=False)) is not None:
            if len(one.messages) > 2 and self.random.random() < 0.15:
                del one.messages[-2:]  # the user edits an earlier message
            text = self.random.choice("ab")
            self.numbers += 1
            retry = f"i{self.numbers}" if self.random.random() < 0.2 else ""
            messages = (*one.messages, ClientMessage(role="user", text=text))
            one.open, one.gone = (asked(*messages, tools=()), retry), False
            self.send(one)

    def send(self, one: Conversation, again: bool = False) -> None:
        assert one.open is not None
        request, retry = one.open
        one.connection += 1
        connection = one.connection
        number = self.random.randrange(2)
        gateway = self.gateways[number]
        by = caller(
            one.session,
            one.name,
            KEYS[one.key],
            retry=retry,
            again=again,
            gone=lambda: one.gone or one.connection != connection,
        )
        try:
            placed = gateway.place(request, by, one.user, lambda _: PolicyRef())
        except HttpRefused as refused:
            assert refused.status == 404 and one.session not in gateway._sessions, "an id that was purged"
            self.conversations.remove(one)
            return
        assert placed is not None
        if one.session:
            assert root_of(placed.group) == root_of(one.session), "an id is looked up in its tree"
        else:
            assert user_of(placed.group) == one.user
        if placed.turn is not None:
            session = gateway.get(placed.group)
            assert session is not None and not session.ended
            assert sum(turn is placed.turn for turn in gateway._under.values()) == 1
            self.under.append((number, placed, placed.turn, one, len(session.turns), connection))
        elif placed.wait is None:
            session = gateway.get(placed.group)
            assert session is not None and session.turns[placed.recorded].asked, "it has such a turn"
            self.give(one, placed.group, placed.recorded)
        # A request that waits is sent again by `repeat`.

    def give(self, one: Conversation, group: str, index: int) -> None:
        """The client gets its answer."""
        assert one.open is not None
        one.messages = [*one.open[0].messages, ClientMessage(role="assistant", text=self.texts[group, index])]
        one.given = {*one.given, (group, index)}
        one.open = None
        for gateway in self.gateways:
            if (session := gateway.answered(group, index, lost=False)) is not None:
                self.keep(session)

    def finish(self) -> None:
        """A turn is recorded, unless the other gateway recorded one of its session first; then in a branch."""
        if not self.under:
            return
        number, placed, turn, one, before, connection = self.under.pop(self.random.randrange(len(self.under)))
        gateway = self.gateways[number]
        prefix = placed.known
        try:
            if self.record.get(turn.group, 0) != before:
                gateway.branch(turn, lambda _: PolicyRef())
                before = prefix = 0
            text = self.random.choice("xxy")
            if prefix:
                given = (turn.group, before - 1) in one.given or turn.group == one.session  # an id decides
                assert given, "nobody goes on with a turn that it was not given"
            session = gateway.took(turn, ClientMessage(role="assistant", text=text))
        except HttpRefused as refused:
            assert refused.status == 409 and turn.over.is_set()
            return
        assert len(session.turns) == before + 1 and turn.over.is_set() and turn.group not in gateway._under
        self.record[session.group] = before + 1
        self.texts[session.group, before] = text
        self.keep(session)
        if one in self.conversations and one.connection == connection and not one.gone:
            self.give(one, session.group, before)

    def fail(self) -> None:
        if self.under:
            number, _, turn, *_ = self.under.pop(self.random.randrange(len(self.under)))
            self.gateways[number].over(turn)
            assert turn.over.is_set()

    def lose(self) -> None:
        """The connection of a client that waits is lost."""
        if (one := self.chosen(waiting=True)) is not None:
            one.gone = True

    def repeat(self) -> None:
        """A client sends its request again, with or without saying so."""
        if (one := self.chosen(waiting=True)) is not None and (
            one.gone or not any(each[3] is one for each in self.under)
        ):
            one.gone = False
            self.send(one, again=self.random.random() < 0.5)

    def end(self) -> None:
        if self.stored:
            group, gateway = self.random.choice(sorted(self.stored)), self.random.choice(self.gateways)
            if any(turn.group == group for _, _, turn, *_ in self.under):
                gateway.ending(group)  # it waits for the turn
                placed = [each for each in gateway._under.values() if each.group == group]
                request = asked(ClientMessage(role="user", text="c"), tools=())
                at = gateway.place(request, caller(session=group, key=KEYS["k1"]), "u1", lambda _: PolicyRef())
                assert at is not None and at.turn is not None and at.group != group, "no turn begins in it meanwhile"
                gateway.over(at.turn)
                gateway.stays(group)
                assert [each for each in gateway._under.values() if each.group == group] == placed
                return
            gateway.ending(group)
            ended = gateway.ended(group, rated=self.random.random() < 0.5)
            assert ended is not None and ended.ended
            self.keep(ended)

    def run(self) -> None:
        """A user asks headrace's own agent."""
        self.numbers += 1
        slot: dict[str, Any] = {"run": "r", "lane": "production", "group": f"u1.{self.numbers}", "slot": 0}
        asked = RolloutRequest(**slot, attempt=0, task=TaskRef("s", "t"), seed=0)
        self.runs.append(Run(asked, 0.0))
        self.gateways[0].runs[asked.group] = self.runs[-1]

    def attempt(self) -> None:
        """A record of an attempt comes, also of one that is over: what has ended stays as it is."""
        if not self.runs:
            return
        run = self.random.choice(self.runs)
        before, ended, asked = run.view() | {"seconds": 0}, run.over, run.request
        changed, attempt = run.changed, self.random.randrange(asked.attempt + 1)
        now = run.at(attempt)
        assert now == (not ended and attempt == asked.attempt)
        event = self.random.choice(("turn", "end", "retry", "fail"))
        if event == "turn":
            run.on_turn(TurnDone(run="r", trajectory=f"{asked.group}-0-{attempt}", index=0, results=()))
            assert run.state == ("running" if now else before["state"])
        elif event == "end":
            slot = {name: getattr(asked, name) for name in ("run", "lane", "group", "slot", "task", "seed", "policy")}
            end = Trajectory(
                **slot, attempt=attempt, id="t", family="", sampling=Sampling(), outcome="finished", turns=(), diff={}
            )
            assert run.on_trajectory(end, 1.0) != ended and run.over
        elif now and event == "retry":
            run.on_retry("sandbox_lost", "")
            assert (run.state, run.turns, run.request.attempt) == ("queued", [], attempt + 1)
        elif now:
            run.on_failure("timed_out")
            assert run.state == "failed" and len(run.failures) == attempt + 1
        assert not ended or run.view() | {"seconds": 0} == before, "an end is final"
        assert changed.is_set() == (run.changed is not changed), "a request that waits for a change hears of it"

    def restart(self) -> None:
        """A gateway is replaced: what it had not stored is gone, and so are its clients' connections."""
        if self.random.random() < 0.3:
            number = self.random.randrange(2)
            for each in [each for each in self.under if each[0] == number]:
                self.under.remove(each)
                each[3].gone = True
            self.gateways[number] = Sessions(self.stored.values())

    def purge(self) -> None:
        if self.random.random() < 0.2:
            user = self.random.choice(("u1", "u2"))
            for gateway in self.gateways:
                for session in gateway.of_user(user):
                    gateway.drop(session.group)
                assert gateway.of_user(user) == []
            self.stored = {group: each for group, each in self.stored.items() if user_of(group) != user}
            self.conversations = [
                each
                for each in self.conversations
                if each.user != user and not (each.session and user_of(each.session) == user)
            ]


def interleave(examples: int, steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.gateway.sessions.secrets.token_hex", lambda size: f"{next(World.ids):0{2 * size}x}")
        run_state_machine_as_test(
            World,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                derandomize=examples < 1000,
            ),
        )


def test_interleavings() -> None:
    interleave(500, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_thousand_interleavings() -> None:
    interleave(50_000, steps=30)

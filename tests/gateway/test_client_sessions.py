"""Which request goes on with which session: by name, by history, and where a history was rewritten."""

from headrace.gateway.client_sessions import ClientSessions, Placed
from headrace.gateway.conversation import ModelRequest
from headrace.messages.product import ClientCall, ClientMessage, ClientTool
from headrace.messages.rollout import PolicyRef

READ = ClientTool(name="read")
USER, CALLED = ClientMessage(role="user", text="fix it"), ClientCall(id="c1", name="read", arguments='{"p": "a"}')
TURN = ClientMessage(role="assistant", text="I look.", calls=(CALLED,))
RESULT = ClientMessage(role="tool", text="one", call_id="c1")


def asked(*messages: ClientMessage, session: str = "", tools: tuple[ClientTool, ...] = (READ,)) -> ModelRequest:
    return ModelRequest(model="latest", messages=messages, tools=tools, session=session)


def place(sessions: ClientSessions, request: ModelRequest, tenant: str = "acme", user: str = "u1") -> Placed:
    return sessions.go_on(sessions.place(request, tenant, user, True, lambda _: PolicyRef()).group, request)


def begun(sessions: ClientSessions, session: str = "") -> str:
    placed = place(sessions, asked(USER, session=session))
    assert placed.known == 0
    return sessions.took(placed.session, asked(USER, session=session), TURN).group


def test_a_history_finds_its_session() -> None:
    sessions = ClientSessions()
    first, second = begun(sessions), begun(sessions)
    assert first != second and len(sessions) == 2, "two agents may ask the same"
    spelled = ClientMessage(
        role="assistant", text=" I look.\n", calls=(ClientCall(id="c1", name="read", arguments='{"p":"a"}'),)
    )
    placed = place(sessions, asked(USER, spelled, RESULT))
    assert placed.session.group in (first, second) and placed.known == 2


def test_the_longest_history_wins_and_indexes_end_with_their_sessions() -> None:
    sessions = ClientSessions()
    assert begun(sessions, "s1") == begun(sessions, "s1") != begun(sessions, "s2")
    short = begun(sessions)
    other = begun(sessions)
    longer = sessions.get(other)
    assert longer is not None
    request = asked(USER, TURN, RESULT)
    sessions.took(sessions.go_on(other, request).session, request, TURN)
    assert place(sessions, asked(USER, TURN, RESULT, TURN, USER)).session.group == other
    assert place(sessions, asked(USER, TURN, RESULT)).session.group == short
    for group in [each.group for each in sessions.of_user("u1")]:
        assert sessions.close(group) is not None and sessions.close(group) is None
    empty = ClientSessions()
    empty.turns = sessions.turns
    assert not sessions.of_user("u1") and vars(sessions) == vars(empty), "nothing is left in an index"


def test_a_named_session_goes_on_and_counts_rewrites() -> None:
    sessions = ClientSessions()
    group = begun(sessions, "s1")
    placed = place(sessions, asked(USER, TURN, RESULT, session="s1"))
    assert (placed.session.group, placed.known, placed.session.segment) == (group, 2, 0)
    rewritten = place(sessions, asked(ClientMessage(role="user", text="summary"), session="s1"))
    assert rewritten.session.group == group and rewritten.known == 0
    assert (rewritten.session.segment, rewritten.session.rewrites) == (1, 1)


def test_other_tools_begin_a_segment() -> None:
    sessions = ClientSessions()
    group = begun(sessions, "s1")
    placed = place(sessions, asked(USER, TURN, RESULT, session="s1", tools=(READ, ClientTool(name="write"))))
    assert placed.session.group == group and placed.known == 0 and placed.session.segment == 1


def test_turns_are_counted_by_the_way_in_which_they_came_to_their_session() -> None:
    sessions = ClientSessions()
    begun(sessions)
    begun(sessions, "s1")
    place(sessions, asked(USER, TURN, RESULT))
    place(sessions, asked(RESULT, TURN, RESULT))
    assert sessions.turns == {"turns_begun": 1, "turns_named": 1, "turns_by_history": 1, "turns_unattributed": 1}


def test_no_tenant_and_no_user_finds_anothers_session() -> None:
    sessions = ClientSessions()
    group = begun(sessions, "s1")
    for tenant, user in (("other", "u1"), ("acme", "u2")):
        assert place(sessions, asked(USER, TURN, RESULT, session="s1"), tenant, user).session.group != group
    assert place(sessions, asked(USER, TURN, RESULT)).session.group != group, "a named session is found by name alone"


def test_a_first_turn_that_failed_is_no_rewrite() -> None:
    sessions = ClientSessions()
    group = place(sessions, asked(USER, session="s1")).session.group
    placed = place(sessions, asked(USER, session="s1"))
    assert placed.session.group == group and placed.session.rewrites == 0 and placed.session.segment == 0


def test_a_gateway_that_restarts_finds_its_sessions() -> None:
    sessions = ClientSessions()
    group = begun(sessions)
    session = sessions.get(group)
    assert session is not None
    again = ClientSessions([session])
    placed = place(again, asked(USER, TURN, RESULT))
    assert (placed.session.group, placed.known) == (group, 2)
    assert again.idle(-1.0) == [placed.session] and again.close(group) == placed.session and not len(again)

"""The debugger stops before the backward pass with everything loaded, and the continued step gives the same bits."""

import io
import json

import pytest

from headrace.bus.broker.server import Server
from tests.replay.conftest import Finished, Run


def under_debugger(
    run: Run, patch: pytest.MonkeyPatch, folder: str, step: int, *commands: str
) -> tuple[int, list[str], str]:
    """A person's words on standard input, without a terminal."""
    patch.setattr("sys.stdin", io.StringIO("".join(f"{command}\n" for command in commands)))
    return run("replay", folder, "--step", str(step), "--debug")


def test_it_stops_before_anything_is_changed_and_then_goes_on(
    finished: Finished, opened: Server, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = under_debugger(
        headrace,
        monkeypatch,
        str(finished.folder),
        1,
        "p 'gradients', [p.grad for p in model.parameters() if p.grad is not None]",
        "p 'at the start', loaded.trainer.state.hash() == manifest.base_hash",
        "p 'batch', len(trajectories), len(scores), len(micro.segments) > 0, tokens.advantage.shape == logp.shape",
        "p 'loss', token_loss.loss.requires_grad",
        "u",
        "p 'above', manifest.step, len(trajectories)",
        "c",
    )
    text = "\n".join(out)
    assert "stopped before the first backward pass" in text
    for told in (
        "'gradients', []",
        "'at the start', True",
        "'batch', 4, 4, True, True",
        "'loss', True",
        "'above', 1, 4",
    ):
        assert f"({told})" in text
    assert "torch.autograd.backward" in text
    report = json.loads(out[-1])
    assert (code, report["bitwise_equal"], report["step"]) == (0, True, 1)


@pytest.mark.parametrize(
    ("step", "place", "ask", "told"),
    [
        (2, "the batch is refused here", "p 'why', reason, detail", "lacks log-probabilities"),
        (3, "it raised RuntimeError: value cannot be converted", "p 'what', self.advantage", "('what', 5e+299)"),
    ],
)
def test_a_step_that_fails_earlier_stops_where_it_fails(
    finished: Finished,
    opened: Server,
    headrace: Run,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    place: str,
    ask: str,
    told: str,
) -> None:
    code, out, _ = under_debugger(headrace, monkeypatch, str(finished.folder), step, ask, "c")
    text = "\n".join(out)
    assert place in text
    assert told in text
    assert (code, json.loads(out[-1])["bitwise_equal"]) == (0, True)


def test_leaving_is_no_replay(
    finished: Finished, opened: Server, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("q",), ()):  # the end of the input leaves too
        code, _, err = under_debugger(headrace, monkeypatch, str(finished.folder), 1, *words)
        assert code == 1
        assert "the debugger was quit before step 1 ended" in err

"""What the loop says, for people and for programs."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from leyden.cli.progress import JsonProgress, TextProgress, step_line

ROW: dict[str, Any] = {
    "stage": "rl", "step": 2, "reward_mean": 0.5, "reward_low": 0.25, "reward_high": 0.75, "success": 0.5,
    "num_zero_variance": 1, "num_groups": 4, "grad_norm": 1.5, "gap_mean": 1e-6,
    "seconds": {"rollouts": 2.0, "update": 1.0},
}  # fmt: skip


def test_a_step_is_one_line_with_its_interval() -> None:
    line = step_line(ROW)
    assert line.startswith("step 3: reward 0.500 [0.250, 0.750], solved 50 %, 1/4 groups all equal")
    assert "2.0 s running + 1.0 s learning" in line


def test_a_step_says_when_much_of_its_credit_was_for_smaller_parts_of_the_reward() -> None:
    assert "1/4 groups all equal, 43 % of credit at equal success, gradient" in step_line({**ROW, "minor_credit": 0.43})
    assert all("credit" not in step_line({**ROW, "minor_credit": share}) for share in (None, 0.0, 0.2))


def test_a_step_without_rewards_or_ends_has_no_numbers_made_up() -> None:
    line = step_line({**ROW, "reward_mean": None, "reward_low": None, "reward_high": None, "success": None})
    assert line.startswith("step 3: reward none, 1/4 groups")
    assert "[" not in step_line({**ROW, "reward_low": None, "reward_high": None})


def test_an_imitation_step_is_its_loss() -> None:
    assert step_line({"stage": "sft", "step": 0, "loss": 2.5}) == "imitation step 1: loss 2.500"


def test_people_without_a_terminal_get_plain_lines() -> None:
    out = io.StringIO()
    progress = TextProgress(console=Console(file=out, width=200, highlight=False))
    progress.say("hello [not markup]")
    progress.begin("working", 3)
    progress.advance(3, "mean reward 0.5")
    progress.end()
    progress.begin("one unit", 1)
    progress.end()
    text = out.getvalue()
    assert "hello [not markup]" in text and "working: 3/3 in" in text and "mean reward 0.5" in text
    assert "one unit" not in text and "\x1b" not in text


def test_people_at_a_terminal_get_a_bar_that_goes_away() -> None:
    out = io.StringIO()
    progress = TextProgress(console=Console(file=out, width=200, force_terminal=True, highlight=False))
    progress.begin("working", 2)
    progress.advance(1, "half")
    progress.begin("next", 2)
    progress.end()
    assert "working" in out.getvalue()


def test_programs_get_one_object_a_line(capsys: "pytest.CaptureFixture[str]") -> None:
    rows: list[Any] = []
    progress = JsonProgress(rows.append)
    progress.say("hello")
    progress.begin("working", 3)
    progress.advance(2)
    progress.end()
    progress.metrics(ROW)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in said] == ["say", "begin", "end", "step"]
    assert said[1] == {"event": "begin", "phase": "working", "total": 3}
    assert rows == [ROW] and said[3]["reward_low"] == 0.25

"""Prompts improve through the real loop and gateway, with a scripted model whose best prompt is known."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.prompts_room import SYSTEM, Harness, Room, Said, needs, prompts_room, tasks

from leyden.base.errors import ConfigError, Interrupted, LearningError
from leyden.base.prompts import make_slot, slots_from_json
from leyden.base.recipes import PROMPT_ALGORITHMS
from leyden.base.tasks import Demo
from leyden.house import House
from leyden.learning.algorithms.prompts import OPTIMISERS
from leyden.learning.algorithms.prompts.reflection import Reflector
from leyden.loop import Improvement
from leyden.prompt_loop import check_reflection, improve_prompts, split_tasks
from leyden.store import ledger
from leyden.testing.scripted import Faults

SHOUT = "Answer in capitals."


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with prompts_room(tmp_path) as opened:
        yield opened


def reflector(house: House) -> Reflector:
    config, alias = house.config, house.config.prompts.reflection
    return Reflector(
        config.prompts,
        house.folder / "reflections.jsonl",
        base_url=lambda: config.policies[alias].engine + "/v1",
        key="",
        model=alias,
        price=config.price_of(alias),
        stop_requested=house.stop_requested,
    )


def run(house: House) -> Improvement:
    return asyncio.run(improve_prompts(house, reflector(house)))


def said(house: House) -> list[str]:
    assert isinstance(house.progress, Said)
    return house.progress.sentences


def rows(house: House) -> Any:
    assert isinstance(house.progress, Said)
    return house.progress.rows


def played(house: House) -> list[Any]:
    assert isinstance(house.services, Harness)
    return house.services.played


def final(house: House) -> str:
    return (house.folder / "prompts" / "final.txt").read_text()


def advice(prompt: str) -> str:
    """A reflection model that understands APO's questions and gives the right advice."""
    if "Write better prompts" not in prompt:
        return "It should answer in capitals."
    return f'<slot name="system">\n{SYSTEM} {SHOUT}\n</slot>'


def fenced(prompt: str) -> str:
    """The same for the questions of the gepa library."""
    return f"Here it is:\n```\n{SYSTEM} {SHOUT}\n```"


def test_demonstrations_from_successes_are_found_and_judged_better(room: Room) -> None:
    def solve(system: str, word: str) -> str:
        """Right with a demonstration; without one, for words of the first half of the alphabet only."""
        return word.upper() if "WORD" in system or word[-1] in "abc" else word

    room.solves(solve)
    with room.house(room.config("bootstrap_demos", candidates=4, first_rung=2)) as house:
        done = run(house)
    assert done.evaluations["base"].pass1.mean == 0 and done.evaluations["final"].pass1.mean == 1
    assert done.verdicts["base"].answer == "better"
    assert "Example:\nworda\nAnswer:\nWORDA" in final(house) or "WORDB" in final(house) or "WORDC" in final(house)
    assert not re.search(r"WORD[G-Z]", final(house)), "a validation or holdout task was demonstrated"
    assert room.reflection.asked == []
    assert [row["step"] for row in rows(house)] == list(range(len(rows(house))))
    # Rungs share rollouts with earlier rungs; each costs once.
    assert sum(row["cost"]["num_rollouts"] for row in rows(house)) == rows(house)[-1]["num_rollouts"]
    assert all(row["seconds"]["rollouts"] > 0 for row in rows(house)[:-1])
    tried = rows(house)[-1]["tried"]
    assert tried and all(one["score"] == 1 and version.startswith("main@") for version, one in tried.items())


def test_the_budget_of_the_run_stops_a_search_which_goes_on_with_more(room: Room) -> None:
    room.solves(needs(SHOUT))
    room.reflection.answers(advice)
    config = room.config("apo", rounds=3, edits=2)
    spent = config.model_copy(update={"budget": config.budget.model_copy(update={"tokens": 1})})
    with room.house(spent, holdout_tasks=[]) as house, pytest.raises(Interrupted, match=r"budget\.tokens"):
        run(house)
    with room.house(config, holdout_tasks=[]) as house:
        run(house)
    assert SHOUT in final(house)


def test_a_set_that_does_not_help_loses_to_the_prompts_as_they_are(room: Room) -> None:
    room.solves(lambda system, word: word if "Example" in system else word.upper())
    with room.house(room.config("bootstrap_demos", candidates=3, search="random")) as house:
        done = run(house)
    assert list(done.evaluations) == ["base"] and done.verdicts == {}
    assert any("No other prompts did better" in sentence for sentence in said(house))


def test_without_one_success_there_is_nothing_to_demonstrate(room: Room) -> None:
    room.solves(lambda system, word: "no")
    with room.house(room.config("bootstrap_demos")) as house, pytest.raises(LearningError, match="none of 6 rollouts"):
        run(house)


def test_approved_demonstrations_are_used_but_none_of_a_validation_task(room: Room) -> None:
    room.solves(lambda system, word: word.upper() if "APPROVED" in system else "no")
    demos = [
        Demo(
            task=task,
            messages=[
                {"role": "system", "content": "never shown"},
                {"role": "user", "content": "say it"},
                {"role": "assistant", "content": answer},
            ],
        )
        for task, answer in (("somewhere", "APPROVED"), ("val-wordg", "FORBIDDEN"))
    ]
    with room.house(room.config("bootstrap_demos", candidates=2), demos=demos) as house:
        assert run(house).verdicts["base"].answer == "better"
    assert "Example:\nsay it\nAnswer:\nAPPROVED" in final(house)
    assert "FORBIDDEN" not in final(house) and "never shown" not in final(house)


def test_apo_finds_the_instruction_that_the_task_needs(room: Room) -> None:
    room.solves(needs(SHOUT))
    room.reflection.answers(advice)
    with room.house(room.config("apo", rounds=2, edits=1, minibatch=2)) as house:
        done = run(house)
    assert done.verdicts["base"].answer == "better" and done.evaluations["final"].pass1.mean == 1
    assert SHOUT in final(house)
    critique, edit = room.reflection.asked[:2]
    assert SYSTEM in critique and "[answer] word" in critique and '[expected] "WORD' in critique
    assert "right = 0" in critique and "It should answer in capitals." in edit
    versions = room.store.read(lambda c: ledger.policy_versions(c, "main"))
    best = next(v for v in versions if v.name == done.verdicts["base"].candidate)
    assert best.kind == "prompt" and best.parent == 0
    assert slots_from_json(best.prompts)[0].text.shown == f"{SYSTEM} {SHOUT}"
    assert f"+{SYSTEM} {SHOUT}" in (house.folder / "prompts" / "final.diff").read_text()


def test_apo_edits_several_slots_at_once(room: Room) -> None:
    room.system = "Be kind. Be brief."
    room.slots = [make_slot("kind", "Be kind.", part=True), make_slot("brief", "Be brief.", part=True)]
    room.solves(lambda system, word: word.upper() if system == "Be exact. Be loud." else word)
    both = '<slot name="kind">Be exact.</slot>\n<slot name="brief">Be loud.</slot>'
    room.reflection.answers(lambda prompt: both if "Write better" in prompt else "both are wrong")
    with room.house(room.config("apo", rounds=1, edits=1)) as house:
        assert run(house).verdicts["base"].answer == "better"


def test_gepa_finds_the_instruction_through_its_library(room: Room) -> None:
    room.solves(needs(SHOUT))
    room.reflection.answers(fenced)
    with room.house(room.config("gepa", minibatch=2, max_rollouts=200)) as house:
        done = run(house)
    assert done.verdicts["base"].answer == "better" and SHOUT in final(house)
    assert "[answer] word" in room.reflection.asked[0] and SYSTEM in room.reflection.asked[0]


def test_gepa_ends_with_its_budget_and_keeps_the_prompts_as_they_are(room: Room) -> None:
    room.solves(lambda system, word: "never")
    room.reflection.answers(fenced)
    with room.house(room.config("gepa", minibatch=2, max_reflections=3)) as house:
        done = run(house)
    assert done.verdicts == {} and len(room.reflection.asked) == 3


def test_a_placeholder_survives_the_search_and_is_filled_for_each_task(room: Room) -> None:
    room.slots = [make_slot("system", "You are {who}.")]
    room.solves(needs("Now an assistant: shout {x}."))
    edit = '<slot name="system">Now {who}: shout {x}.</slot>'
    room.system = "You are an assistant."
    room.reflection.answers(lambda prompt: edit if "Write better" in prompt else "shout")
    with room.house(room.config("apo", rounds=1, edits=1)) as house:
        # {who} is filled with "an assistant"; {x} is no placeholder of the slot, so its braces are literal.
        assert run(house).verdicts["base"].answer == "better"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("I cannot help with that.", "without <slot> block"),
        ('<slot name="other">x</slot>', "unknown slot 'other'"),
        ('<slot name="system">No part.</slot>', r"lost {who}"),
        ('<slot name="system">You are {who}.</slot>', "changes nothing"),
        ('<slot name="system"> </slot>', "lost {who}"),
        ("", "empty critique"),
    ],
)
def test_replies_of_no_use_are_counted_and_never_run(room: Room, reply: str, why: str) -> None:
    room.slots = [make_slot("system", "You are {who}.")]
    room.reflection.answers(lambda prompt: reply if "Write better" in prompt or not reply else "a critique")
    room.solves(needs(SHOUT))
    with room.house(room.config("apo", rounds=2, edits=2)) as house:
        done = run(house)
    assert done.verdicts == {}
    assert sum(why in sentence for sentence in said(house)) == 4
    assert rows(house)[-1]["num_garbage"] == 4 and rows(house)[-1]["num_versions"] == 1


def test_too_many_replies_of_no_use_stop_the_search(room: Room) -> None:
    room.reflection.answers(lambda prompt: "???")
    room.solves(needs(SHOUT))
    with (
        room.house(room.config("apo", rounds=9, edits=4, max_garbage=3)) as house,
        pytest.raises(LearningError, match=r"3 replies .* no use.*prompts\.max_garbage"),
    ):
        run(house)


@pytest.mark.parametrize("algorithm", ["apo", "gepa"])
def test_a_reflection_model_that_goes_down_stops_the_run_and_a_resumed_one_pays_for_nothing_twice(
    room: Room, algorithm: str
) -> None:
    room.solves(needs(SHOUT))
    count = 0

    def reply(prompt: str) -> str:
        """The first replies are of no help; only the last one is."""
        nonlocal count
        count += 1
        good = advice(prompt) if algorithm == "apo" else fenced(prompt)
        return (
            good
            if count > 3 or ("Write better" not in prompt and algorithm == "apo")
            else good.replace(SHOUT, f"No {count}.")
        )

    room.reflection.answers(reply)
    config = room.config(algorithm, rounds=4, edits=1, minibatch=2, reflection_tries=3, max_rollouts=200)
    with room.house(config) as house:
        whole = reflector(house)

        async def ask(prompt: str, after: int = 2) -> str | None:
            if whole.spent.calls == after:
                room.reflection.engine.behaviour.faults = Faults(status=503)
            return await Reflector.ask(whole, prompt)

        whole.ask = ask  # type: ignore[method-assign]
        with pytest.raises(LearningError, match=r"no reply in 3 tries: status 503.*--resume"):
            asyncio.run(improve_prompts(house, whole))
        before = {rollout.id for rollout in played(house)}
    assert len(room.reflection.engine.requests) == 2 + 3 and before
    room.reflection.engine.behaviour.faults = Faults()
    with room.house(config) as house:
        done = run(house)
        assert before.isdisjoint(rollout.id for rollout in played(house)), "a rollout was run twice"
    assert done.verdicts["base"].answer == "better"
    evaluations = room.store.read(lambda c: ledger.evaluations(c, run_id="run-1"))
    assert [e.label for e in evaluations] == ["base", "final"]
    journal = [json.loads(line) for line in (house.folder / "reflections.jsonl").read_text().splitlines()]
    assert len(journal) == len(room.reflection.engine.requests) - 3, "a reply was asked for twice"
    steps = room.store.read(lambda c: ledger.steps(c, "run-1"))
    assert [s.step for s in steps] == sorted({s.step for s in steps})


def test_a_wish_to_stop_is_heard_and_the_run_goes_on_to_the_same_end(room: Room) -> None:
    room.solves(needs(SHOUT))
    room.reflection.answers(fenced)
    looks = 0

    def stop() -> None:
        nonlocal looks
        looks += 1
        if looks > 4:
            raise Interrupted("stopped as asked")

    config = room.config("gepa", minibatch=2)
    with room.house(config, stop_requested=stop) as house, pytest.raises(Interrupted):
        run(house)
    with room.house(config) as house:
        assert run(house).verdicts["base"].answer == "better"


@pytest.mark.parametrize("limit", [{"max_reflection_tokens": 1}, {"max_reflection_usd": 1e-9}])
def test_budgets_of_tokens_and_money_end_the_search(room: Room, limit: Any) -> None:
    room.solves(needs("never there"))
    room.reflection.answers(advice)
    with room.house(room.config("apo", rounds=3, edits=2, **limit), holdout_tasks=[]) as house:
        run(house)
    assert len(room.reflection.asked) == 1
    row = rows(house)[-1]
    usage = room.reflection.engine.requests[0]
    assert usage["model"] == "thinker" and row["num_reflections"] == 1
    assert 0 < row["reflection_usd"] < 2 * row["reflection_tokens"] / 1e6


def test_a_slot_that_the_harness_never_sends_stops_the_run(room: Room) -> None:
    room.slots = [make_slot("system", "You are a poet."), make_slot("other", SYSTEM)]
    room.solves(needs(SHOUT))
    with (
        room.house(room.config("apo"), holdout_tasks=[]) as house,
        pytest.raises(
            LearningError, match=r"slot 'system' was not found in any call of 6 rollouts.*leyden prompts discover"
        ),
    ):
        run(house)


def test_slots_that_fit_the_same_text_stop_the_run_with_both_names(room: Room) -> None:
    room.slots = [make_slot("a", SYSTEM), make_slot("b", "an assistant", part=True)]
    room.solves(needs(SHOUT))
    with room.house(room.config("apo"), holdout_tasks=[]) as house, pytest.raises(LearningError) as caught:
        run(house)
    assert "slots 'a' and 'b' match the same text of messages[0].content" in str(caught.value)


def test_bounds_that_contradict_each_other_are_refused_before_anything_runs(room: Room) -> None:
    config = room.config("apo", max_rollouts=5, samples=2)
    with pytest.raises(ConfigError, match=r"max_rollouts is 5, but scoring one candidate takes 12 rollouts"):
        split_tasks(config, tasks("train", 6), tasks("val", 6))
    with pytest.raises(ConfigError, match="1 training and 0 validation tasks are too few"):
        split_tasks(room.config("apo"), tasks("train", 1), [])
    learned, chosen = split_tasks(room.config("apo"), tasks("train", 5), [])
    assert len(learned) == 2 and len(chosen) == 3
    assert {t.id for t in learned}.isdisjoint(t.id for t in chosen)
    for wrong, message in (
        ({"reflection": ""}, "needs a reflection model"),
        ({"reflection": "other"}, "'other', which is no policy"),
        ({"reflection": "main", "max_reflection_usd": 1.0}, r"'main' has no price, .*policies\.main\.usd_per_million"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_reflection(room.config("gepa", **wrong))
    served = room.config("gepa", reflection="bare")
    check_reflection(served)
    alone = served.model_copy(update={"policies": {**served.policies, "main": served.policies["bare"]}})
    itself = alone.model_copy(update={"prompts": alone.prompts.model_copy(update={"reflection": "main"})})
    with pytest.raises(ConfigError, match=r"set policies\.main\.provider or policies\.main\.engine"):
        check_reflection(itself)


def test_a_reward_can_be_what_candidates_are_compared_by(room: Room) -> None:
    room.solves(needs(SHOUT))
    room.reflection.answers(advice)
    with room.house(room.config("apo", rounds=1, edits=1, metric="reward", samples=2)) as house:
        assert run(house).verdicts["base"].answer == "better"


def test_the_names_of_the_configuration_are_those_of_the_registry() -> None:
    assert set(PROMPT_ALGORITHMS) == set(OPTIMISERS)
    for name, optimiser in OPTIMISERS.items():
        assert optimiser.name == name and optimiser.reflects == (name != "bootstrap_demos")

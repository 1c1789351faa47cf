"""What is like a task of the holdout: planted leaks are found, other tasks of one mould are not."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.base.paraphrases import QUESTIONS

from leyden.base.errors import HoldoutError
from leyden.base.leaks import Guard, Leak, Meaning, Vectors, refuse
from leyden.base.records import Task
from leyden.base.tasks import Demo


def task(name: str, question: str, **more: object) -> Task:
    return Task(id=name, input={"question": question, **more})


HELD = [task(f"held-{n}", one.original) for n, one in enumerate(QUESTIONS)]
GUARD = Guard(HELD)


def test_every_verbatim_leak_is_found_whatever_its_id_case_and_spacing() -> None:
    planted = [task(f"p{n}", f"  {one.original.upper().replace(' ', '  ')} ") for n, one in enumerate(QUESTIONS)]
    found = GUARD.of_tasks(planted)
    assert [(leak.asked, leak.holdout, leak.similarity) for leak in found] == [
        (f"p{n}", f"held-{n}", 1.0) for n in range(len(QUESTIONS))
    ]
    assert len(Guard(HELD, threshold=1.0).of_tasks(planted)) == len(QUESTIONS)
    assert [leak.holdout for leak in GUARD.of_tasks([task("held-3", "something else")])] == ["held-3"]


def test_the_recall_of_planted_paraphrases_is_what_the_docs_say() -> None:
    light = GUARD.of_tasks([task(f"l{n}", one.light) for n, one in enumerate(QUESTIONS)])
    heavy = GUARD.of_tasks([task(f"h{n}", one.heavy) for n, one in enumerate(QUESTIONS)])
    other = GUARD.of_tasks([task(f"o{n}", one.other) for n, one in enumerate(QUESTIONS)])
    assert all(leak.asked[1:] == leak.holdout.removeprefix("held-") for leak in light)
    assert (len(light), len(heavy), len(other), len(QUESTIONS)) == (17, 0, 0, 20)


def embedding(*alike: tuple[str, ...]) -> Meaning:
    """A sentence model for which the texts of a group mean nearly the same, and all others something else."""
    known = {text: number for number, group in enumerate(alike) for text in group}

    def embed(texts: Sequence[str]) -> Vectors:
        rows = []
        for text in texts:
            row = np.zeros(len(alike) + 2, np.float32)
            row[known.get(text, len(alike))] = 1.0
            row[-1] = 0.2 if text in known else 0.0
            rows.append(row / np.linalg.norm(row))
        return np.stack(rows) if rows else np.zeros((0, len(alike) + 2), np.float32)

    return Meaning(embed=embed, cosine=0.8)


def test_what_only_means_the_same_is_found_with_a_sentence_model_and_said_to_be() -> None:
    groups = [(one.original, one.heavy) for one in QUESTIONS]
    guard = Guard(HELD, meaning=embedding(*groups))
    planted = [task(f"h{n}", one.heavy) for n, one in enumerate(QUESTIONS)]
    found = guard.of_tasks([*planted, task("else", "Something else entirely?"), task("v", QUESTIONS[0].original)])
    *heavy, verbatim = found
    # "Six people" and "half a dozen guests": a number in a word is none, and the others have the same.
    assert all(leak.asked[1:] == leak.holdout.removeprefix("held-") and leak.by_meaning for leak in heavy)
    assert len(heavy) == len(QUESTIONS) and str(heavy[0]) == "'h0' is 100 % like 'held-0' (by meaning)"
    assert (verbatim.similarity, verbatim.by_meaning) == (1.0, False)
    assert Guard(HELD, threshold=1.0, meaning=embedding(*groups)).of_tasks(planted) == []
    assert Guard([], meaning=embedding(*groups)).of_tasks(planted) == []


def test_another_number_is_another_task_whatever_it_means() -> None:
    held, asked = "What comes after 7 days?", "A week later (8 days), what follows?"
    guard = Guard([task("a", held)], meaning=embedding((held, asked)))
    assert guard.of_tasks([task("b", asked)]) == []


def test_a_context_that_many_tasks_share_is_not_part_of_what_is_meant() -> None:
    schema = "CREATE TABLE t (a INT)"
    held = [task(f"t{n}", text, schema=schema) for n, text in enumerate(("red?", "green?", "blue?"))]
    guard = Guard(held, meaning=embedding(("green?", "of which hue is grass?")))
    found = guard.of_tasks([task("x", "of which hue is grass?", schema=schema)])
    assert [(leak.holdout, leak.by_meaning) for leak in found] == [("t1", True)]


def test_a_demonstration_is_found_by_what_any_of_its_messages_means() -> None:
    guard = Guard([task("a", "Who painted it?")], meaning=embedding(("Who painted it?", "Name the artist.")))

    def demo(*said: str) -> Demo:
        roles = ("system", "user", "assistant")
        return Demo(task="d", messages=[{"role": r, "content": s} for r, s in zip(roles, said, strict=True)])

    asks, answers = demo("Be brief.", "Name the artist.", "A."), demo("Be brief.", "Hello.", "Name the artist.")
    assert guard.of_demos([answers]) == []
    assert [(leak.holdout, leak.by_meaning) for leak in guard.of_demos([answers, asks])] == [("a", True)]


def test_similarity_is_the_weighted_jaccard_index_worked_out_by_hand() -> None:
    guard = Guard([task("a", "red fox"), task("b", "red hen")])
    # Words: red in 2 of 2 tasks, fox in 1. Pairs weigh a quarter. Asked: red, dog, and the pair of both.
    common, rare = math.log1p(2 / 2), math.log1p(2 / 1)
    expected = common / (common + rare + 0.25 * rare + rare + 0.25 * rare)
    assert guard.similarity([task("x", "red dog")]) == [pytest.approx(expected)]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["lake", "river", "fox", "hen", "7", "tall"]), min_size=1, max_size=6), st.randoms())
def test_similarity_does_not_depend_on_the_order_of_the_holdout(words: list[str], rng: random.Random) -> None:
    held = [task(f"t{n}", text) for n, text in enumerate(("a tall fox", "the lake", "7 rivers", "river 7 hen"))]
    shuffled = held[:]
    rng.shuffle(shuffled)
    asked = [task("q", " ".join(words))]
    assert Guard(held).similarity(asked) == pytest.approx(Guard(shuffled).similarity(asked))


def test_numbers_and_quoted_texts_must_agree() -> None:
    guard = Guard([task("h", "Show all products with stock under 215 and colour 'red'.")])
    same = "Show all the products with colour 'red' and stock under 215."
    assert len(guard.of_tasks([task("x", same)])) == 1
    for old, new in (("215", "320"), ("'red'", "'blue'")):
        assert guard.of_tasks([task("x", same.replace(old, new))]) == []


def test_a_shared_context_neither_hides_a_leak_nor_makes_one() -> None:
    schema = "CREATE TABLE cities (city TEXT, state TEXT, population INT, elevation INT, founded INT)"
    other = "CREATE TABLE ships (ship TEXT, harbour TEXT, tonnage INT, launched INT, crew INT)"
    held = [task(f"h{n}", one.original, schema=schema) for n, one in enumerate(QUESTIONS[:8])]
    guard = Guard(held)
    assert guard.of_tasks([task("x", one.other, schema=schema) for one in QUESTIONS]) == []
    assert guard.of_tasks([task("x", QUESTIONS[0].original, schema=other)]) == []
    assert [leak.holdout for leak in guard.of_tasks([task("x", QUESTIONS[0].light, schema=schema)])] == ["h0"]


def test_demonstrations_are_known_by_the_task_they_name_and_by_what_they_were_asked() -> None:
    def demo(name: str, question: str) -> Demo:
        asked = {"role": "user", "content": f"Use the tables given. Answer shortly.\n{question}\nThank you."}
        return Demo(task=name, messages=[asked, {"role": "assistant", "content": "done"}])

    leaked = demo("fresh", QUESTIONS[4].original)
    assert GUARD.of_demos([demo("held-2", "anything")])[0].similarity == 1.0
    assert [leak.holdout for leak in GUARD.of_demos([leaked, demo("ok", QUESTIONS[4].other)])] == ["held-4"]
    # What the assistant says is no question.
    answer = Demo(task="t", messages=[leaked.messages[1], {"role": "assistant", "content": QUESTIONS[4].original}])
    assert GUARD.of_demos([answer]) == []
    recall = GUARD.of_demos([demo(f"d{n}", one.original) for n, one in enumerate(QUESTIONS)])
    assert len(recall) == len(QUESTIONS)


def test_a_refusal_names_the_leaks_and_the_key_to_change() -> None:
    leaks = GUARD.of_tasks([task(f"p{n}", one.original) for n, one in enumerate(QUESTIONS)])
    with pytest.raises(HoldoutError, match=r"20 of the tasks .*'p0' is 'held-0'.*and 15 more.*tasks\.near"):
        refuse(leaks, "tasks")
    refuse([], "tasks")
    assert "72 % like" in str(Leak(asked="a", holdout="b", similarity=0.72))


def test_an_empty_holdout_and_empty_tasks_leak_nothing() -> None:
    assert Guard([]).of_tasks(HELD) == [] and Guard([]).similarity(HELD) == [0.0] * len(HELD)
    assert GUARD.of_tasks([]) == [] and GUARD.of_demos([]) == []
    assert GUARD.of_tasks([Task(id="empty", input={}), Task(id="flag", input={"x": True, "y": None})]) == []
    assert Guard([Task(id="h", input={})]).of_tasks([Task(id="x", input={})]) == []
    with pytest.raises(HoldoutError, match="threshold"):
        Guard(HELD, threshold=0.0)

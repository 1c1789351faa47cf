"""Task and demonstration files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.errors import TaskError
from leyden.base.records import Task
from leyden.base.tasks import Demo, check_splits, fingerprint, load_demos, load_tasks


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), "utf-8")
    return path


def test_a_task_file_becomes_tasks_in_its_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"id": "b", "domain": "d", "input": {"q": "\u00c4\u2028?"}, "answer": [1], "purpose": "eval"},
        "",
        {"id": "a", "input": {}},
    )
    first, second = load_tasks(path)
    assert first == Task(id="b", domain="d", input={"q": "\u00c4\u2028?"}, answer=[1], purpose="eval")
    assert second == Task(id="a")


def test_the_use_of_a_file_is_the_default_split(tmp_path: Path) -> None:
    assert load_tasks(write(tmp_path / "t.jsonl", {"id": "a", "input": {}}), split="holdout")[0].split == "holdout"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"id": "a", "input": {}', "not JSON"),
        ('{"id": "a", "input": {}, "answer": NaN}', "NaN is not a JSON number"),
        ('{"id": "a", "id": "b", "input": {}}', "'id' appears twice"),
        ("[1]", "a list, not an object"),
        ({"input": {}}, "'id' is missing"),
        ({"id": "a"}, "'input' is missing"),
        ({"id": "a b", "input": {}}, "'a b' cannot be an id"),
        ({"id": 1, "input": {}}, "1 cannot be an id"),
        ({"id": "a", "input": "q"}, "'input' is a str"),
        ({"id": "a", "input": {}, "anwser": 1}, "unknown key 'anwser'; did you mean 'answer'?"),
        ({"id": "a", "input": {}, "zzz": 1}, "known keys: id, split"),
        ({"id": "a", "input": {}, "domain": 3}, "'domain' is 3"),
        ({"id": "a", "input": {}, "split": "test"}, "'split' is 'test'; it is one of"),
        (
            {"id": "a", "input": {}, "split": "holdout"},
            "'split' is 'holdout', but this file is used as 'train'",
        ),
        ({"id": "first", "input": {}}, "id 'first' is also on line 1"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_field(tmp_path: Path, row: Any, says: str) -> None:
    path = write(tmp_path / "t.jsonl", {"id": "first", "input": {}}, row)
    with pytest.raises(TaskError) as caught:
        load_tasks(path, split="train")
    assert f"{path}, line 2" in str(caught.value) and says in str(caught.value)


def test_a_file_that_is_missing_empty_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no task file"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="holds no task"):
        load_tasks(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="cannot be read as UTF-8"):
        load_tasks(tmp_path / "binary")


def test_a_task_in_training_and_holdout_is_refused_by_id_and_by_input() -> None:
    train = [Task(id="a", input={"q": 1, "r": 2})]
    check_splits(train, [Task(id="b", input={"q": 2})])
    with pytest.raises(TaskError, match="'a' is in the training tasks and in the holdout"):
        check_splits(train, [Task(id="a", input={"q": 3})])
    with pytest.raises(TaskError, match="'b' has the same input as training task 'a'"):
        check_splits(train, [Task(id="b", input={"r": 2, "q": 1})])


@given(st.lists(st.tuples(st.text(max_size=3), st.integers()), max_size=6), st.randoms())
def test_a_fingerprint_does_not_depend_on_the_order_of_tasks(rows: list[tuple[str, int]], random: Any) -> None:
    tasks = [Task(id=f"t{i}", domain=domain, input={"q": q}) for i, (domain, q) in enumerate(rows)]
    shuffled = random.sample(tasks, len(tasks))
    assert fingerprint(shuffled) == fingerprint(tasks)


def test_a_fingerprint_changes_with_anything_that_is_asked_or_checked() -> None:
    base = Task(id="a", split="holdout", domain="d", input={"q": 1}, answer="x")
    others = [replace(base, **change) for change in (
        {"id": "b"}, {"split": "val"}, {"domain": "e"}, {"input": {"q": 2}}, {"answer": "y"}
    )]  # fmt: skip
    assert len({fingerprint([task]) for task in [base, *others]}) == 6


def test_a_fingerprint_depends_on_input_and_answer() -> None:
    prints = {fingerprint([Task(id="a", input=i, answer=a)]) for i, a in (({}, None), ({"q": 1}, None), ({}, 1))}
    assert len(prints) == 3


def test_demonstrations_are_loaded_with_their_task(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path / "d.jsonl", {"task": "t", "messages": messages}, {"task": {"id": "u"}, "messages": messages})
    assert load_demos(path) == [Demo(task="t", messages=messages), Demo(task="u", messages=messages)]


def test_every_demonstration_is_for_one_of_the_policies_that_are_trained(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    bare = write(tmp_path / "bare.jsonl", {"task": "t", "messages": messages})
    mine = write(tmp_path / "mine.jsonl", {"task": "t", "messages": messages, "policy": "writer"})
    assert [demo.policy for demo in load_demos(bare, ["main"])] == ["main"], "there is no other"
    assert [demo.policy for demo in load_demos(bare)] == [""]
    assert [demo.policy for demo in load_demos(mine, ["planner", "writer"])] == ["writer"]
    with pytest.raises(TaskError, match=r"line 1: 'policy' is missing, and planner, writer are trained together"):
        load_demos(bare, ["planner", "writer"])
    with pytest.raises(
        TaskError, match=r"line 1: 'policy' is 'writer', which this run does not train \(it trains main"
    ):
        load_demos(mine, ["main"])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"task": "t", "messages": [{"role": "assistant", "content": "a"}], "policy": 3}, "'policy' is 3"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "'task' is None"),
        ({"task": "t"}, "'messages' is no list"),
        ({"task": "t", "messages": []}, "'messages' is no list"),
        ({"task": "t", "messages": [{"role": "bot"}]}, "messages[0] has no 'role'"),
        ({"task": "t", "messages": [{"role": "user", "content": "q"}]}, "the last message is from 'user'"),
        ({"task": "t", "messages": [{"role": "assistant", "content": ""}]}, "is empty"),
        ({"task": "t", "mesages": []}, "did you mean 'messages'?"),
    ],
)
def test_a_bad_demonstration_is_named(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_demos(write(tmp_path / "d.jsonl", row))
    assert "line 1" in str(caught.value) and says in str(caught.value)

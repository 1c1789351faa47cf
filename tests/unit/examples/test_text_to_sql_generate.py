"""The generated tasks: same seed same bytes, splits apart, every reference right and no constant right."""

import ast
import collections
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generate
import pytest
from harness import build_messages
from schemas import SCHEMAS, Schema
from shapes import SHAPES
from verify import run_query, verify

from leyden.rewards.library.sql_rows import is_ordered, same_rows

Load = Callable[[Path], list[dict[str, Any]]]
SMALL = {"train": 30, "val": 5, "holdout": 10, "demos": 8}


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def read_all(data: Path, load: Load) -> dict[str, list[dict[str, Any]]]:
    tasks = {name: load(data / "tasks" / f"{name}.jsonl") for name in ("train", "val", "holdout")}
    return {**tasks, "demos": [demo["task"] for demo in load(data / "tasks" / "demos.jsonl")]}


def words(schema: Schema) -> set[str]:
    names = set()
    for table in schema.tables:
        names |= {table.name, table.label, *table.categories, *table.numbers, *table.optional}
        for values in table.categories.values():
            names |= set(values.split(","))
    return names


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        generate.generate(tmp_path / name, seed=3, counts=SMALL)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_generating_twice_into_one_folder_changes_nothing(tmp_path: Path) -> None:
    generate.generate(tmp_path, seed=3, counts=SMALL)
    before = digests(tmp_path)
    generate.generate(tmp_path, seed=3, counts=SMALL)
    assert digests(tmp_path) == before


def test_another_seed_gives_other_tasks(tmp_path: Path, data: Path) -> None:
    generate.generate(tmp_path, seed=1, counts=SMALL)
    mine, theirs = digests(tmp_path), digests(data)
    assert mine["tasks/val.jsonl"] != theirs["tasks/val.jsonl"]


def test_demonstrations_and_holdout_do_not_depend_on_the_number_of_training_tasks(tmp_path: Path) -> None:
    generate.generate(tmp_path / "few", seed=0, counts=SMALL)
    generate.generate(tmp_path / "many", seed=0, counts={**SMALL, "train": 60})
    few, many = digests(tmp_path / "few"), digests(tmp_path / "many")
    assert {name for name in few if few[name] != many[name]} == {"tasks/train.jsonl"}


def test_no_question_occurs_twice_in_or_across_splits(data: Path, load: Load) -> None:
    asked = [(t["domain"], t["input"]["question"]) for ts in read_all(data, load).values() for t in ts]
    assert len(asked) == len(set(asked))


def test_ids_are_unique_and_splits_are_named_as_the_protocol_says(data: Path, load: Load) -> None:
    splits = read_all(data, load)
    ids = [task["id"] for tasks in splits.values() for task in tasks]
    assert len(ids) == len(set(ids))
    for name, tasks in splits.items():
        assert {task["split"] for task in tasks} == {"train" if name == "demos" else name}
        assert all(
            set(task) == {"id", "split", "domain", "input", "answer", "purpose"}
            and set(task["input"]) == {"question", "schema", "database"}
            for task in tasks
        )


def test_holdout_schemas_share_no_name_and_no_category_with_train_schemas() -> None:
    train = set().union(*(words(schema) for schema in SCHEMAS if not schema.is_holdout))
    holdout = set().union(*(words(schema) for schema in SCHEMAS if schema.is_holdout))
    assert train & holdout == set()
    assert sum(schema.is_holdout for schema in SCHEMAS) >= 4
    assert sum(not schema.is_holdout for schema in SCHEMAS) >= 8


def test_holdout_tasks_come_from_holdout_schemas_only(data: Path, load: Load) -> None:
    holdout = {schema.name for schema in SCHEMAS if schema.is_holdout}
    for name, tasks in read_all(data, load).items():
        domains = {task["domain"] for task in tasks}
        assert domains == holdout if name == "holdout" else not domains & holdout


def test_about_half_of_the_tasks_are_easy_and_every_shape_is_demonstrated_or_trained(data: Path, load: Load) -> None:
    tasks = read_all(data, load)
    easy = sum(task["answer"]["difficulty"] == "easy" for task in tasks["train"])
    assert 0.45 < easy / len(tasks["train"]) < 0.55
    seen = {task["answer"]["shape"] for task in tasks["train"] + tasks["demos"]}
    assert seen == {shape.name for shape in SHAPES}


def test_every_reference_verifies_as_correct(on_data: Path, load: Load, tmp_path: Path) -> None:
    for tasks in read_all(on_data, load).values():
        for task in tasks:
            (tmp_path / "answer.sql").write_text(task["answer"]["sql"])
            scores = verify(task, {"num_completion_tokens": 7}, tmp_path)
            assert scores == {"correct": 1.0, "executes": 1.0, "safe": 1.0, "tokens": 7.0}, task


def test_reference_results_say_something_and_differ_between_the_two_databases(data: Path, load: Load) -> None:
    for tasks in read_all(data, load).values():
        for task in tasks:
            sql = task["answer"]["sql"]
            first, second = (run_query(sql, data / name).rows for name in task["answer"]["databases"])
            assert first is not None and second is not None
            assert any(v for row in first for v in row) and any(v for row in second for v in row), task
            assert not same_rows(first, second, ordered=False), task


def test_a_reference_without_order_has_no_limit(data: Path, load: Load) -> None:
    for tasks in read_all(data, load).values():
        for task in tasks:
            sql = task["answer"]["sql"]
            assert is_ordered(sql) or "LIMIT" not in sql, sql


def test_every_name_and_value_of_a_reference_stands_in_its_question(data: Path, load: Load) -> None:
    keywords = set(re.findall(r"[A-Z]+", " ".join(shape_sql(data, load))))
    for tasks in read_all(data, load).values():
        for task in tasks:
            sql, question = task["answer"]["sql"], task["input"]["question"]
            used = re.findall(r"'[^']*'|\w+", sql)
            missing = [w for w in used if w not in question and w not in keywords and not w.isdigit()]
            assert missing == [], (question, sql)


def shape_sql(data: Path, load: Load) -> list[str]:
    """References with their quoted values taken out."""
    tasks = [task for group in read_all(data, load).values() for task in group]
    return [re.sub(r"'[^']*'", "", task["answer"]["sql"]) for task in tasks]


def test_each_shape_has_at_least_three_paraphrases() -> None:
    for name in ("easy", "medium", "hard"):
        tree = ast.parse((Path(generate.__file__).parent / "shapes" / f"{name}.py").read_text())
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "say"
        ]
        assert calls and all(len(call.args) >= 3 for call in calls)


def test_a_demonstration_is_what_the_harness_sends_with_the_reference_as_answer(data: Path, load: Load) -> None:
    for demo in load(data / "tasks" / "demos.jsonl"):
        given = demo["task"]["input"]
        opening = build_messages(given["schema"], given["question"])
        answer = {"role": "assistant", "content": demo["task"]["answer"]["sql"]}
        assert demo["messages"] == [*opening, answer]


def test_the_same_shape_is_spelled_the_same_way(data: Path, load: Load) -> None:
    forms = collections.defaultdict(set)
    for task in read_all(data, load)["train"]:
        skeleton = re.sub(r"'[^']*'|\b[a-z_]+\b|\d+", "x", task["answer"]["sql"])
        forms[task["answer"]["shape"]].add(re.sub("MAX|MIN|SUM|AVG", "F", skeleton))
    assert all(len(skeletons) <= 4 for skeletons in forms.values()), forms


def test_asking_for_more_tasks_than_there_are_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ask for fewer tasks"):
        generate.generate(tmp_path, seed=0, counts={**SMALL, "holdout": 9000})

"""The GeoQuery importer: on a fixture of three entries, and on the published folder where it is at hand."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import import_geoquery
import pytest
from harness import build_messages
from import_geoquery import compact_sql, filler, import_folder
from verify import run_query, verify

from leyden.rewards.library.sql_rows import same_rows

Load = Callable[[Path], list[dict[str, Any]]]
PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "geoquery"
STATES = ("ash", "birch", "cedar", "dale", "elm", "fern", "glen", "hill", "isle", "jade")


def sentence(text: str, split: str, state: str) -> dict[str, Any]:
    return {"text": text, "question-split": split, "variables": {"state_name0": state}}


ENTRIES = [
    {
        "query-split": "test",
        "sql": [
            'SELECT CITYalias0.CITY_NAME FROM CITY AS CITYalias0 WHERE CITYalias0.STATE_NAME = "state_name0" ;',
            "SELECT 'a second variant that is not used' ;",
        ],
        "sentences": [
            sentence("cities in state_name0", "train", "ash"),
            sentence("what cities are in state_name0", "train", "birch"),
            sentence("name the cities of state_name0", "dev", "cedar"),
            sentence("which cities has state_name0", "test", "dale"),
        ],
    },
    {
        "query-split": "train",
        "sql": ["SELECT MAX( STATEalias0.POPULATION ) FROM STATE AS STATEalias0 ;"],
        "sentences": [{"text": "most people in a state", "question-split": "test", "variables": {}}],
    },
    {
        "query-split": "dev",
        "sql": ["SELECT STATEalias1.CAPITAL FROM STATE AS STATEalias0 ;"],
        "sentences": [{"text": "a broken one", "question-split": "test", "variables": {}}],
    },
]

TABLES: dict[str, list[tuple[Any, ...]]] = {
    "border_info": list(pairwise(STATES)),
    "city": [(f"{state}ton{i}", 1000 * (k + i + 1), "land", state) for k, state in enumerate(STATES) for i in (0, 1)],
    "highlow": [(state, str(100 + k), "sea", f"{state} peak", str(k)) for k, state in enumerate(STATES)],
    "lake": [(f"{state} lake", 10.0 + k, "land", state) for k, state in enumerate(STATES)],
    "mountain": [(f"{state} peak", 100 + k, "land", state) for k, state in enumerate(STATES)],
    "river": [(f"{state} river", 200 + k, "land", state) for k, state in enumerate(STATES)],
    "state": [
        (state, 9000 + k, 30.0 + k, "land", f"{state}ton0", (9000 + k) / (30.0 + k)) for k, state in enumerate(STATES)
    ],
}
COLUMNS = {
    "border_info": "state_name text, border text",
    "city": "city_name text, population int, country_name text, state_name text",
    "highlow": "state_name text, highest_elevation text, lowest_point text, highest_point text, lowest_elevation text",
    "lake": "lake_name text, area double, country_name text, state_name text",
    "mountain": "mountain_name text, mountain_altitude int, country_name text, state_name text",
    "river": "river_name text, length int, country_name text, traverse text",
    "state": "state_name text, population int, area double, country_name text, capital text, density double",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "geography.json").write_text(json.dumps(ENTRIES))
    with closing(sqlite3.connect(folder / "geography-db.sqlite")) as connection:
        for table, rows in TABLES.items():
            connection.execute(f"CREATE TABLE {table} ({COLUMNS[table]})")
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.commit()
    return folder


def questions(load: Load, out: Path, name: str) -> list[str]:
    return [task["input"]["question"] for task in load(out / "tasks" / f"{name}.jsonl")]


def test_the_published_question_split_is_kept_and_values_are_filled_in(
    source: Path, tmp_path: Path, load: Load
) -> None:
    import_folder(source, tmp_path, "question-split", sft_share=0.0, seed=0)
    assert questions(load, tmp_path, "train") == ["cities in ash", "what cities are in birch"]
    assert questions(load, tmp_path, "val") == ["name the cities of cedar"]
    assert questions(load, tmp_path, "holdout") == ["which cities has dale", "most people in a state"]
    task = load(tmp_path / "tasks" / "holdout.jsonl")[0]
    assert '"dale"' in task["answer"]["sql"] and "second variant" not in task["answer"]["sql"]
    assert (task["split"], task["domain"], task["purpose"]) == ("holdout", "city", "evaluation")


def test_the_query_split_follows_the_entry(source: Path, tmp_path: Path, load: Load) -> None:
    import_folder(source, tmp_path, "query-split", sft_share=0.0, seed=0)
    assert questions(load, tmp_path, "train") == ["most people in a state"]
    assert len(questions(load, tmp_path, "holdout")) == 4


def test_a_reference_that_does_not_run_is_named_counted_and_left_out(source: Path, tmp_path: Path) -> None:
    report = import_folder(source, tmp_path, "question-split", sft_share=0.5, seed=0)
    assert report["num_questions"] == 6 and report["num_excluded"] == 1
    assert report["num_published_holdout"] == 3 and report["num_per_split"]["holdout"] == 2
    (excluded,) = report["excluded"]
    assert excluded["question"] == "a broken one" and "no such column" in excluded["error"]
    assert json.loads((tmp_path / "import_report.json").read_text()) == report


def test_demonstrations_and_training_tasks_share_the_train_split(source: Path, tmp_path: Path, load: Load) -> None:
    import_folder(source, tmp_path, "question-split", sft_share=0.5, seed=0)
    (demo,) = load(tmp_path / "tasks" / "demos.jsonl")
    (task,) = load(tmp_path / "tasks" / "train.jsonl")
    asked = demo["task"]["input"]
    assert {asked["question"], task["input"]["question"]} == {"cities in ash", "what cities are in birch"}
    assert demo["messages"][:-1] == build_messages(asked["schema"], asked["question"])
    value = asked["question"].split()[-1]
    assert demo["messages"][-1]["content"] == f"SELECT city_name FROM city WHERE state_name = '{value}'"


def test_importing_twice_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        import_folder(source, tmp_path / name, "question-split", sft_share=0.5, seed=4)
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert len(files) == 7
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)


def test_the_second_database_keeps_every_dependency_and_changes_the_numbers(source: Path, tmp_path: Path) -> None:
    import_folder(source, tmp_path, "question-split", sft_share=0.5, seed=0)
    copy = tmp_path / "databases" / "geography-renamed.sqlite"
    left = len(STATES) - import_geoquery.NUM_STATES_OUT
    states = run_query("SELECT state_name, population, area, density FROM state", copy).rows
    assert states is not None and len(states) == left
    assert all(density == pytest.approx(population / area, rel=1e-3) for _, population, area, density in states)
    queries = {
        "each capital is a city of its state": "SELECT count(*) FROM state s JOIN city c "
        "ON s.capital = c.city_name AND s.state_name = c.state_name",
        "each highest point is a mountain of its state": "SELECT count(*) FROM highlow h JOIN mountain m ON "
        "h.highest_point = m.mountain_name AND h.state_name = m.state_name AND "
        "h.highest_elevation = m.mountain_altitude || ''",
    }
    for fact, sql in queries.items():
        assert run_query(sql, copy).rows == ((left,),), fact
    names = {name for name, *_ in states}
    borders = run_query("SELECT state_name, border FROM border_info", copy).rows
    assert borders is not None and all(set(pair) <= names for pair in borders)
    original = run_query("SELECT state_name, population, area, density FROM state", source / "geography-db.sqlite")
    assert original.rows is not None
    assert {row[1] for row in states}.isdisjoint(row[1] for row in original.rows)


def test_a_share_outside_zero_to_one_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--sft-share 1\.5"):
        import_folder(source, tmp_path, "question-split", sft_share=1.5, seed=0)


def test_longer_variable_names_are_filled_first() -> None:
    assert filler({"x1": "a", "x10": "b"})("x1 x10") == "a b"
    assert filler({"x0": "x1", "x1": "z"})("x0 x1") == "x1 z"


def test_a_self_join_keeps_its_aliases_when_shortened(source: Path) -> None:
    sql = (
        "SELECT CITYalias0.CITY_NAME FROM CITY AS CITYalias0 , CITY AS CITYalias1 "
        'WHERE CITYalias0.POPULATION < CITYalias1.POPULATION AND CITYalias1.CITY_NAME = "ashton1" ;'
    )
    database = source / "geography-db.sqlite"
    short = compact_sql(sql, [database])
    assert short == (
        "SELECT city0.city_name FROM city AS city0, city AS city1 "
        "WHERE city0.population < city1.population AND city1.city_name = 'ashton1'"
    )
    rows = run_query(short, database).rows, run_query(sql, database).rows
    assert rows[0] is not None and rows[1] is not None and same_rows(rows[0], rows[1], ordered=False)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published folder is not beside the project")
def test_the_published_folder_gives_872_of_877_tasks_that_all_verify(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = import_folder(PUBLISHED, tmp_path, "question-split", sft_share=0.5, seed=0)
    counts = report["num_per_split"]
    assert (report["num_questions"], report["num_excluded"], report["num_published_holdout"]) == (877, 5, 279)
    assert (sum(counts.values()), counts["holdout"], counts["val"]) == (872, 277, 48)
    assert report["num_empty_result"] == 28
    assert report["num_same_on_both"] < 30
    monkeypatch.setenv("TEXT_TO_SQL_DATA", str(tmp_path))
    tasks = [task for name in ("train", "val", "holdout") for task in load(tmp_path / "tasks" / f"{name}.jsonl")]
    demos = load(tmp_path / "tasks" / "demos.jsonl")
    answers = [(task, task["answer"]["sql"]) for task in tasks]
    answers += [(demo["task"], demo["messages"][-1]["content"]) for demo in demos]
    for task, sql in answers:
        (tmp_path / "answer.sql").write_text(sql)
        assert verify(task, {"num_completion_tokens": 1}, tmp_path)["correct"] == 1.0, (task, sql)

"""The verifier against bad, lazy and hostile answers."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verify import BrokenTaskError, run_query, statement_verbs, verify

from leyden.rewards.library.sql_rows import is_ordered, same_rows

GOLD = "SELECT title FROM books WHERE genre = 'crime'"
TRACE = {"num_completion_tokens": 9}


def write(path: Path, rows: list[tuple[str, str, int]]) -> str:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE books (title TEXT, genre TEXT, pages INT)")
        connection.executemany("INSERT INTO books VALUES (?, ?, ?)", rows)
        connection.commit()
    return str(path)


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    first = write(tmp_path / "a.sqlite", [("Dust", "crime", 100), ("Ember", "crime", 90), ("Frost", "art", 80)])
    second = write(tmp_path / "b.sqlite", [("Dust", "art", 100), ("Glass", "crime", 95), ("Iron", "art", 20)])
    return {"id": "t", "input": {}, "answer": {"sql": GOLD, "databases": [first, second]}}


def score(task: dict[str, Any], folder: Path, answer: str | bytes | None) -> dict[str, float]:
    if answer is not None:
        (folder / "answer.sql").write_bytes(answer.encode() if isinstance(answer, str) else answer)
    scores = verify(task, TRACE, folder)
    assert scores.pop("tokens") == 9.0
    return scores


@pytest.mark.parametrize(
    ("answer", "correct", "executes", "safe"),
    [
        pytest.param(GOLD, 1, 1, 1, id="reference"),
        pytest.param(GOLD + " ORDER BY title DESC;", 1, 1, 1, id="order does not matter"),
        pytest.param("select b.title t from books b where b.genre like 'crime'", 1, 1, 1, id="other words"),
        pytest.param("SELECT 1", 0, 1, 1, id="constant"),
        pytest.param("SELECT 'Dust' UNION SELECT 'Ember'", 0, 1, 1, id="right on the first only"),
        pytest.param("SELECT title FROM books WHERE pages > 85", 0, 1, 1, id="right by chance on the first"),
        pytest.param("SELECT title, genre FROM books WHERE genre = 'crime'", 0, 1, 1, id="one column more"),
        pytest.param("", 0, 0, 1, id="empty"),
        pytest.param(None, 0, 0, 1, id="no file"),
        pytest.param("I do not know.", 0, 0, 1, id="prose"),
        pytest.param("-- SELECT", 0, 0, 1, id="comment"),
        pytest.param("SELECT title FROM", 0, 0, 1, id="syntax error"),
        pytest.param("SELECT nothing FROM books", 0, 0, 1, id="no such column"),
        pytest.param("SELECT '\x00'", 0, 0, 1, id="null character"),
        pytest.param(b"SELECT '\xff'", 0, 0, 1, id="not UTF-8"),
        pytest.param("SELECT " + "(" * 3000, 0, 0, 1, id="too deep"),
        pytest.param("SELECT 1 /* " + "x" * 9000, 0, 0, 1, id="too long"),
        pytest.param("DELETE FROM books", 0, 0, 0, id="delete"),
        pytest.param("DELETE FROM nowhere", 0, 0, 0, id="delete from a table that is not there"),
        pytest.param(GOLD + "; DROP TABLE books", 0, 0, 0, id="write after read"),
        pytest.param(GOLD + "; " + GOLD, 0, 0, 1, id="two reads"),
        pytest.param("WITH x AS (SELECT 1) DELETE FROM books", 0, 0, 0, id="write behind WITH"),
        pytest.param("/* SELECT */ UPDATE books SET pages = 1", 0, 0, 0, id="write behind a comment"),
        pytest.param("ATTACH 'other.sqlite' AS other", 0, 0, 0, id="attach"),
        pytest.param("PRAGMA writable_schema = 1", 0, 0, 0, id="pragma"),
        pytest.param("VACUUM INTO 'copy.sqlite'", 0, 0, 0, id="vacuum into"),
        pytest.param("SELECT title FROM books WHERE title <> 'DELETE; DROP'", 0, 1, 1, id="quoted verbs"),
        pytest.param(
            "SELECT count(*) FROM " + ", ".join(f"books b{i}" for i in range(30)),
            0, 0, 1, id="cross join bomb",
        ),
        pytest.param(
            "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r",
            0, 0, 1, id="endless rows",
        ),
        pytest.param(
            "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT max(x) FROM r",
            0, 0, 1, id="endless recursion",
        ),
        pytest.param("SELECT zeroblob(900000000)", 0, 0, 1, id="giant value"),
    ],
)  # fmt: skip
def test_each_kind_of_answer_gets_its_components(
    task: dict[str, Any],
    tmp_path: Path,
    answer: str | bytes | None,
    correct: float,
    executes: float,
    safe: float,
) -> None:
    before = [Path(name).read_bytes() for name in task["answer"]["databases"]]
    scores = score(task, tmp_path, answer)
    assert scores == {"correct": correct, "executes": executes, "safe": safe}
    assert [Path(name).read_bytes() for name in task["answer"]["databases"]] == before
    assert not (tmp_path / "copy.sqlite").exists()


def test_an_answer_file_that_is_a_folder_counts_as_no_answer(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "answer.sql").mkdir()
    assert score(task, tmp_path, None) == {"correct": 0.0, "executes": 0.0, "safe": 1.0}


def test_a_pipe_in_place_of_the_answer_does_not_block(task: dict[str, Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "answer.sql")
    assert score(task, tmp_path, None)["executes"] == 0.0


def test_order_counts_where_the_reference_orders(task: dict[str, Any], tmp_path: Path) -> None:
    task["answer"]["sql"] = "SELECT title FROM books ORDER BY pages"
    assert score(task, tmp_path, "SELECT title FROM books ORDER BY pages ASC")["correct"] == 1.0
    assert score(task, tmp_path, "SELECT title FROM books ORDER BY pages DESC")["correct"] == 0.0


def test_repeated_rows_count(task: dict[str, Any], tmp_path: Path) -> None:
    task["answer"]["sql"] = "SELECT DISTINCT genre FROM books"
    assert score(task, tmp_path, "SELECT genre FROM books")["correct"] == 0.0


def test_one_database_is_enough(task: dict[str, Any], tmp_path: Path) -> None:
    task["answer"]["databases"] = task["answer"]["databases"][:1]
    assert score(task, tmp_path, "SELECT title FROM books WHERE pages > 85")["correct"] == 1.0


@pytest.mark.parametrize(
    "answer", [{"sql": "SELECT nope FROM books"}, {"databases": ["gone.sqlite"]}, {"databases": []}]
)
def test_a_broken_task_raises_by_name(task: dict[str, Any], tmp_path: Path, answer: dict[str, Any]) -> None:
    task["answer"].update(answer)
    with pytest.raises(BrokenTaskError, match=r"no such column|gone\.sqlite|names no database"):
        score(task, tmp_path, GOLD)


def test_a_verdict_on_a_bomb_takes_bounded_steps(task: dict[str, Any]) -> None:
    bomb = "SELECT a.pages FROM " + ", ".join(f"books {name}" for name in "abcdefghijklmnop") + " ORDER BY 1"
    outcome = run_query(bomb, Path(task["answer"]["databases"][0]))
    assert outcome.rows is None and outcome.is_safe and "interrupted" in outcome.error


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order  by a limit 1", True),
        ("SELECT a FROM t WHERE b = 'order by'", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY (b)) WHERE a IN (SELECT 1)", False),
    ],
)
def test_only_the_outermost_order_counts(sql: str, expected: bool) -> None:
    assert is_ordered(sql) is expected


def test_numbers_are_compared_within_a_tolerance_and_types_are_kept_apart() -> None:
    assert same_rows([(1,), (0.1 + 0.2,)], [(0.3,), (1.0,)], ordered=False)
    assert not same_rows([(1.001,)], [(1.0,)], ordered=True)
    assert not same_rows([("1",)], [(1,)], ordered=True)
    assert not same_rows([(None,)], [(0,)], ordered=True)


VALUES = st.none() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3) | st.binary(max_size=3)
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=6)


def test_rows_that_agree_to_six_digits_only_are_still_told_apart_in_any_order() -> None:
    rows = [(1.0000001, "a"), (1.000002, "a")]
    assert same_rows(rows[::-1], rows, ordered=False)
    assert not same_rows([rows[0], rows[0]], rows, ordered=False)


@given(ROWS, st.randoms(use_true_random=False))
def test_shuffled_rows_are_the_same_rows(rows: list[tuple[Any, ...]], rng: Any) -> None:
    shuffled = list(rows)
    rng.shuffle(shuffled)
    assert same_rows(shuffled, rows, ordered=False)
    assert not same_rows([*rows, (1, 1)], rows, ordered=False)


@given(st.text(max_size=60))
def test_no_text_makes_the_verifier_raise(text: str) -> None:
    assert isinstance(statement_verbs(text), list)
    is_ordered(text)

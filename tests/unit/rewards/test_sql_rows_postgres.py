"""The built-in measure of SQL results at a real PostgreSQL server."""

import math
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.contract.test_reward_library import HOSTILE, trace
from tests.postgres_cluster import Cluster

from leyden.base.config import from_tree
from leyden.base.errors import VerifierError
from leyden.base.records import Attempt, Rollout, Task, Trace
from leyden.rewards import library
from leyden.rewards.verifiers import open_verifier

REFERENCE = "select item, sum(paid) from orders group by item order by item"


@pytest.fixture(scope="module")
def urls(postgres_cluster: Cluster) -> list[str]:
    """Two databases with one schema and other rows."""
    urls = []
    for rows in ([("tea", 2.5), ("tea", 1), ("milk", 1)], [("tea", 7), ("rum", None)]):
        urls.append(postgres_cluster.new_database())
        with psycopg.connect(urls[-1]) as connection:
            connection.execute("create table orders (item text, paid numeric, at timestamptz default '2026-03-01')")
            connection.execute("create sequence numbers")
            connection.cursor().executemany("insert into orders values (%s, %s)", rows)
    return urls


@pytest.fixture
def shops(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those databases, in FIRST and SECOND."""
    for name, url in zip(("FIRST", "SECOND"), urls, strict=True):
        monkeypatch.setenv(name, url)
    return urls


def score(sql: str, reference: str = REFERENCE, databases: Any = ("env:FIRST", "env:SECOND")) -> dict[str, float]:
    task = {"id": "t", "answer": {"sql": reference, "databases": list(databases)}}
    return library.make("builtin:sql_rows", {}, Path())(task, trace(sql), Path())


RIGHT = {"sql_rows": 1.0, "sql_executes": 1.0, "sql_reads_only": 1.0}
WRONG = {**RIGHT, "sql_rows": 0.0}
FAILS = {**WRONG, "sql_executes": 0.0}
WRITES = {**FAILS, "sql_reads_only": 0.0}


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        (REFERENCE + ";", RIGHT),
        ("select item, sum(paid)::float8 from orders group by 1 order by 1", RIGHT),
        ("select item, sum(paid) from orders group by 1 order by 1 desc", WRONG),
        ("select item, sum(paid) from orders where paid is not null group by 1 order by 1", WRONG),
        ("select 'milk', 1 union all select 'tea', 3.5 order by 1", WRONG),
        ("select item from orders", WRONG),
        ("select x, x from generate_series(1, 100000) x", FAILS),
        ("select nothing", FAILS),
        ("select 1 / (select 0)", FAILS),
        ("delete from orders", WRITES),
        ("  DROP TABLE orders", WRITES),
        ("with gone as (delete from orders returning *) select item, paid from gone", WRITES),
        ("select item, paid from orders for update", WRITES),
        ("select 1; drop table orders", FAILS),
        ("select nextval('numbers')", WRITES),
        ("", FAILS),
    ],
)
def test_a_query_is_right_when_every_database_gives_the_rows_of_the_reference(
    shops: list[str], sql: str, says: dict[str, float]
) -> None:
    assert score(sql) == says
    for url, num_rows in zip(shops, (3, 2), strict=True):
        with psycopg.connect(url) as connection:
            assert connection.execute("select count(*) from orders").fetchone() == (num_rows,)


@pytest.mark.parametrize(
    "same",
    [
        ("select 'nan'::float8, 'nan'::numeric", "select 'nan'::numeric, 'nan'::float8"),
        ("select 1e400::numeric", "select 1e400::numeric"),
        ("select at from orders", "select at from orders"),
        ("select array_agg(item order by item) from orders", "select array_agg(item order by item) from orders"),
        ("select '\\x00ff'::bytea, null::int, true", "select decode('00ff', 'hex'), null::text, 1 = 1"),
        ("select 0.1::float8 + 0.2::float8", "select 0.3"),
    ],
)
def test_values_that_are_no_json_are_compared(shops: list[str], same: tuple[str, str]) -> None:
    assert score(same[0], same[1]) == RIGHT


def test_values_that_differ_differ(shops: list[str]) -> None:
    assert score("select 1e400::numeric", "select 1e500::numeric")["sql_rows"] == 0.0
    assert score("select '\\x00ff'::bytea", "select '\\x00fe'::bytea")["sql_rows"] == 0.0
    assert score("select at + interval '1 us' from orders", "select at from orders")["sql_rows"] == 0.0
    assert score("select null", "select ''")["sql_rows"] == 0.0


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_that_an_agent_says_raises(shops: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.rewards.library.sql_rows.MAX_SECONDS", 0.5)  # an endless query is among them
    found = score(text, databases=["env:FIRST"])
    assert all(math.isfinite(value) for value in found.values()) and found["sql_rows"] == 0.0
    assert found == score(text, databases=["env:FIRST"]), "equal evidence gives equal numbers"


def test_a_slow_query_is_wrong_and_bounded(shops: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.rewards.library.sql_rows.MAX_SECONDS", 0.3)
    assert score("select pg_sleep(3600)", databases=["env:FIRST"]) == FAILS


def test_what_the_task_lacks_and_a_server_that_is_down_are_no_fault_of_the_agent(
    shops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VerifierError, match=r"reference query fails on env:SECOND.*nothing"):
        score("select 1", "select nothing", ["env:SECOND"])
    with pytest.raises(VerifierError, match="env:THIRD names an environment variable that is not set"):
        score("select 1", databases=["env:THIRD"])
    monkeypatch.setenv("FIRST", "postgresql:///none?host=/nowhere")
    with pytest.raises(VerifierError, match="no PostgreSQL server"):
        score("select 1")


async def test_the_process_of_the_verifier_finds_the_server(shops: list[str], tmp_path: Path) -> None:
    rewards = {
        "verifier": "builtin:sql_rows", "weights": {"sql_rows": 1.0}, "settings": {"sql_rows": {"source": "stdout"}},
    }  # fmt: skip
    verifier = open_verifier(from_tree({"rewards": rewards}, base_dir=tmp_path), num_workers=1)
    assert verifier is not None
    task = Task(id="t", answer={"sql": REFERENCE, "databases": ["env:FIRST", "env:SECOND"]})
    attempt = Attempt(id="a", rollout_id="r", number=1, started_at=0.0, stdout_tail=REFERENCE)
    seen = Trace(rollout=Rollout(id="r", task=task), attempt=attempt, calls=())
    try:
        assert await verifier.verify(task, seen, tmp_path) == RIGHT
    finally:
        await verifier.close()

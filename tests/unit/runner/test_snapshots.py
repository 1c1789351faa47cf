"""The state before and after an attempt, as the runner records it."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runner.conftest import SUCCEEDED, Bench

from leyden.base.config import from_tree
from leyden.base.errors import HarnessError
from leyden.base.records import Task
from leyden.runner.snapshots import Snapshots, check_snapshots

TASK = Task(id="t", input={"shop": "shop"}, answer="secret")


def snapshots(folder: Path, **tree: Any) -> Snapshots:
    return Snapshots(from_tree({"harness": {"snapshots": tree}}, base_dir=folder))


def make_shop(path: Path, *rows: Any) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table orders (id, item, photo)")
        connection.executemany("insert into orders values (?, ?, ?)", rows)
    connection.close()


def test_rows_of_a_query_are_the_state_and_more_than_the_bound_are_counted(tmp_path: Path) -> None:
    make_shop(tmp_path / "shop.db", (1, "tea", b"\x01"), (2, None, float("inf")), (3, "x", None))
    lite = {"orders": {"path": "{input.shop}.db", "query": "select * from orders order by id"}}
    found = snapshots(tmp_path, sqlite=lite, max_rows=2).take(TASK, tmp_path, before=True)["orders"]
    assert found == {"rows": [[1, "tea", "01"], [2, None, "inf"]], "num_rows": 3, "num_unlisted": 1}


def test_a_state_is_bounded_in_bytes_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    make_shop(tmp_path / "shop.db", *((i, "x" * 300_000, None) for i in range(5)))
    lite = {"orders": {"path": "shop.db", "query": "select id, item from orders order by id"}}
    found = snapshots(tmp_path, sqlite=lite).take(TASK, tmp_path, before=True)["orders"]
    assert [row[0] for row in found["rows"]] == [0, 1, 2] and (found["num_rows"], found["num_unlisted"]) == (5, 2)


def test_a_query_cannot_write_and_cannot_run_on(tmp_path: Path) -> None:
    make_shop(tmp_path / "shop.db", (1, "tea", None))
    endless = "with recursive r(x) as (select 1 union all select x + 1 from r) select count(*) from r"
    lite = {"gone": {"path": "shop.db", "query": "delete from orders"}, "long": {"path": "shop.db", "query": endless}}
    found = snapshots(tmp_path, sqlite=lite, timeout_s=0.5).take(TASK, tmp_path, before=False)
    assert "readonly" in found["gone"]["error"] and "interrupted" in found["long"]["error"]


def test_what_cannot_be_taken_before_is_a_broken_environment_and_after_is_said(tmp_path: Path) -> None:
    taking = snapshots(tmp_path, sqlite={"orders": {"path": "none.db", "query": "select 1"}})
    with pytest.raises(HarnessError, match="'orders' cannot be taken: no database"):
        taking.take(TASK, tmp_path, before=True)
    assert "no database" in taking.take(TASK, tmp_path, before=False)["orders"]["error"]


def test_small_text_files_that_match_are_kept_with_their_text(tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_text("select 1")
    (tmp_path / "b.sql").write_text("x" * 100)
    (tmp_path / "c.sql").write_bytes(b"\xff\xfe")
    (tmp_path / "d.txt").write_text("no")
    (tmp_path / "e.sql").symlink_to("/etc/hostname")
    files = snapshots(tmp_path, content=["*.sql"], max_content_bytes=50).take(TASK, tmp_path, before=True)["workspace"]
    assert {name: entry.get("text") for name, entry in files["files"].items()} == {
        "a.sql": "select 1", "b.sql": None, "c.sql": None, "d.txt": None, "e.sql": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "print('noise'); return {'n': len(list(workspace.iterdir())), 'id': task['id']}",
            {"value": {"n": 1, "id": "t"}},
        ),
        ("return float('nan')", "Out of range"),
        ("raise KeyError('gone')", "KeyError: 'gone'"),
        ("import time; time.sleep(60)", "took more than 2 s"),
        ("return object()", "not JSON serializable"),
    ],
)
def test_a_function_of_the_user_gives_a_state_or_a_reason(tmp_path: Path, body: str, expected: Any) -> None:
    (tmp_path / "state.py").write_text(f"def capture(task, workspace):\n    {body}\n")
    found = snapshots(tmp_path, callable="state.py:capture", timeout_s=2.0).take(TASK, tmp_path, before=False)[
        "callable"
    ]
    if isinstance(expected, str):
        assert expected in found["error"]
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"sqlite": {"workspace": {"path": "a", "query": "b"}}}, "the name 'workspace' is taken"),
        ({"sqlite": {"x": {"path": "a"}}}, "needs path and query"),
        (
            {"postgres": {"x": {"url_env": "NOT_SET_ANYWHERE", "query": "select 1"}}},
            "NOT_SET_ANYWHERE, which is not set",
        ),
        ({"postgres": {"x": {"query": "select 1"}}}, "needs url_env and query"),
        ({"callable": "none.py:capture"}, "is not file.py:function"),
    ],
)
def test_snapshots_that_could_never_be_taken_are_found_before_the_run(tmp_path: Path, tree: Any, says: str) -> None:
    with pytest.raises(HarnessError, match=says):
        check_snapshots(from_tree({"harness": {"snapshots": tree}}, base_dir=tmp_path))


async def test_both_states_are_spans_of_the_attempt_and_the_verifier_sees_the_difference(bench: Bench) -> None:
    (bench.folder / "template").mkdir()
    make_shop(bench.folder / "template" / "shop.db", (1, "tea", None))
    bench.agent(
        """
        import sqlite3, model
        model.call()
        with sqlite3.connect("shop.db") as connection:
            connection.execute("insert into orders values (2, 'milk', null)")
        """,
        workspace="template",
        env={"PYTHONPATH": str(bench.folder)},
        snapshots={"sqlite": {"orders": {"path": "shop.db", "query": "select id, item from orders"}}},
    )
    bench.tree["rewards"] = {
        "verifier": "builtin:safety", "weights": {"safe": 1.0},
        "settings": {"safety": {"append_only_rows": ["orders"], "protected_files": ["keep/*"]}},
    }  # fmt: skip
    rollout, attempt = await bench.one()
    assert rollout.state is SUCCEEDED and rollout.reward == 1.0, attempt.detail
    spans = [(s.name, s.kind) for s in bench.trace().spans if s.kind.startswith("state_")]
    assert sorted(spans) == [(n, k) for n in ("orders", "workspace") for k in ("state_after", "state_before")]
    after = next(s for s in bench.trace().spans if (s.name, s.kind) == ("orders", "state_after"))
    assert after.attributes["rows"] == [[1, "tea"], [2, "milk"]]

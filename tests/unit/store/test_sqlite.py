"""What only the SQLite store has: a file with all that can be wrong with it, a disk that fills up, a process
that is killed."""

import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, func, select
from tests.unit.store.builders import call_row, completion_row, finished, script

from leyden.base.errors import ConfigError, SchemaTooNew, StoreUnusable
from leyden.store import open_store
from leyden.store.schema import SCHEMA_VERSION, calls, completions, control, metadata
from leyden.store.sqlite import SqliteStore

BOUND_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(f"sqlite:///{path}")
    yield opened
    opened.close()


def _made(path: Path) -> Path:
    open_store(f"sqlite:///{path}").close()
    return path


def _row(key: str, value: str = "1") -> dict[str, str]:
    return {"key": key, "value": value}


def test_a_migrated_file_has_the_tables_of_the_schema(path: Path) -> None:
    engine = create_engine(f"sqlite:///{_made(path)}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_a_finished_file_is_opened_without_the_migration_library(path: Path) -> None:
    code = """
import sys
from leyden.store import open_store
open_store(sys.argv[1]).close()
print('alembic' in sys.modules)
"""
    assert finished(script(code, f"sqlite:///{_made(path)}")).strip() == "False"


def test_the_file_has_a_write_ahead_log_and_the_asked_for_durability(path: Path) -> None:
    for name, number in (("full", 2), ("normal", 1)):
        store = SqliteStore(f"sqlite:///{path}", synchronous=name)  # type: ignore[arg-type]
        found = store.write(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar_one()).result(BOUND_S)
        assert found == number
        assert store.read(lambda c: c.exec_driver_sql("PRAGMA journal_mode").scalar_one()) == "wal"
        store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("leyden.db", "not a URL"),
        ("postgresql://localhost/leyden", "planned as an extra named postgres"),
        ("mysql://localhost/leyden", "supported is sqlite"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///a.db?mode=ro", "not understood"),
        ("sqlite+aiosqlite:///a.db", "not understood"),
    ],
)
def test_a_url_that_cannot_be_used_is_a_configuration_error(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match=r"no folder .*nowhere.*create it"):
        open_store(f"sqlite:///{tmp_path}/nowhere/store.db")


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="is a folder"):
        open_store(f"sqlite:///{tmp_path}")


def test_a_missing_file_is_made_only_if_asked(path: Path) -> None:
    with pytest.raises(StoreUnusable, match="no store"):
        open_store(f"sqlite:///{path}", create=False)
    assert not path.exists()


def test_a_file_of_something_else_is_no_store_and_stays_as_it_is(path: Path) -> None:
    path.write_bytes(b"dear diary, " * 1000)
    with pytest.raises(StoreUnusable, match="not a store"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes() == b"dear diary, " * 1000


@pytest.mark.parametrize("version", [None, "a1b2c3d4"])
def test_an_sqlite_file_of_another_program_stays_as_it_is(path: Path, version: str | None) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
        if version:
            other.execute("CREATE TABLE alembic_version (version_num TEXT)")
            other.execute("INSERT INTO alembic_version VALUES (?)", (version,))
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=r"no store of Leyden.*recipes"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_newer_store_is_refused_and_not_touched(path: Path) -> None:
    with sqlite3.connect(_made(path)) as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.close()
    before = path.read_bytes()
    with pytest.raises(SchemaTooNew, match=f"9999.*{SCHEMA_VERSION}.*upgrade"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_migration_that_fails_leaves_an_empty_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr("alembic.op.create_index", fail)
    with pytest.raises(RuntimeError, match="half way"):
        open_store(f"sqlite:///{path}")
    monkeypatch.undo()
    reopened = open_store(f"sqlite:///{path}")
    assert reopened.count("anything") == 0
    reopened.close()


def test_opening_a_locked_file_gives_up_and_names_it(path: Path) -> None:
    holder = sqlite3.connect(_made(path), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnusable, match=r"store\.db was locked by another process for more than 0\.05 s"):
        SqliteStore(f"sqlite:///{path}", busy_timeout_s=0.05)
    holder.close()


def test_writing_to_a_locked_file_gives_up_and_works_again_afterwards(path: Path) -> None:
    store = SqliteStore(f"sqlite:///{path}", busy_timeout_s=0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnusable, match="locked"):
        store.append(control, [_row("a")]).result(BOUND_S)
    with pytest.raises(StoreUnusable, match="locked"):
        store.write(lambda c: store.changed(c, "things")).result(BOUND_S)
    holder.execute("ROLLBACK")
    store.append(control, [_row("b")]).result(BOUND_S)
    assert store.read(lambda c: c.execute(select(control.c.key)).scalars().all()) == ["b"]
    holder.close()
    store.close()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_read_only_is_named(what: str) -> None:
    code = """
import os, sys
import sqlalchemy, sqlalchemy.dialects.sqlite
from leyden.store import open_store
import leyden.store.sqlite
from leyden.base.errors import StoreUnusable
if os.getuid() == 0:
    os.setuid(65534)  # permissions do not hold for the superuser
try:
    open_store(sys.argv[1])
except StoreUnusable as error:
    print(error)
"""
    # Not below pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory() as folder:
        path = _made(Path(folder) / "store.db")
        path.chmod(0o444 if what == "file" else 0o666)
        Path(folder).chmod(0o777 if what == "file" else 0o555)
        said = finished(script(code, f"sqlite:///{path}"))
        Path(folder).chmod(0o700)
    assert "read-only" in said
    assert str(path if what == "file" else folder) in said
    assert "make it writable" in said


def test_a_full_disk_fails_the_group_and_the_store_goes_on_when_there_is_space(store: SqliteStore) -> None:
    def limit(connection: Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 20}")

    def unlimit(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1073741823")

    store.append(control, [_row("before")]).result(BOUND_S)
    store.write(limit).result(BOUND_S)
    started, go = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        started.set()
        go.wait(BOUND_S)

    held = store.write(hold)
    assert started.wait(BOUND_S)  # so that what follows is a group of its own
    group = [store.append(control, [_row(f"big-{n}", "x" * 50_000)]) for n in range(4)]
    go.set()
    for future in group:
        with pytest.raises(StoreUnusable, match=r"full.*free space"):
            future.result(BOUND_S)
    assert held.exception(BOUND_S) is None
    store.append(control, [_row("small")]).result(BOUND_S)
    with pytest.raises(StoreUnusable, match="full"):
        store.write(lambda c: c.execute(control.insert(), [_row("job", "x" * 500_000)])).result(BOUND_S)
    store.write(unlimit).result(BOUND_S)
    store.append(control, [_row("after", "x" * 500_000)]).result(BOUND_S)
    assert set(store.read(lambda c: c.execute(select(control.c.key)).scalars().all())) == {
        "before",
        "small",
        "after",
    }


def test_a_process_forked_from_one_with_a_store_is_told_so(path: Path) -> None:
    code = """
import os, sys
from leyden.store import open_store
from leyden.store.schema import control
store = open_store(sys.argv[1])
child = os.fork()
if child == 0:
    print(store.append(control, [{"key": "a", "value": "1"}]).exception(10), flush=True)
    os._exit(0)
os.waitpid(child, 0)
store.append(control, [{"key": "a", "value": "1"}]).result(10)
store.close()
"""
    assert "forked" in finished(script(code, f"sqlite:///{path}"))


WRITER = """
import sys, threading
from leyden.store import open_store
from leyden.store.schema import calls, choices, completions, control
from tests.unit.store.builders import call_row, choice_row, completion_row
store = open_store(sys.argv[1])
first = int(sys.argv[2])
room = threading.Semaphore(200)
lock = threading.Lock()

def say(name):
    def done(future):
        assert future.exception() is None, future.exception()
        with lock:
            print(name, flush=True)
        room.release()
    return done

number = first
while True:
    room.acquire(timeout=20)
    store.append(calls, [call_row(number)])
    ended = [(completions, [completion_row(number)]), (choices, [choice_row(number, i) for i in range(3)])]
    store.append_all(ended).add_done_callback(say(f"call {number}"))
    def job(connection, number=number):
        for part in range(2):
            connection.execute(control.insert(), {"key": f"{number}/{part}", "value": "1"})
    if number % 10 == 0:
        room.acquire(timeout=20)
        store.write(job).add_done_callback(say(f"job {number}"))
    number += 1
"""


def test_a_killed_process_loses_nothing_that_was_acknowledged_and_leaves_nothing_half_done(
    path: Path,
) -> None:
    acknowledged: set[str] = set()
    _made(path)
    for round_ in range(3):
        process = script(WRITER, f"sqlite:///{path}", str(round_ * 1_000_000 + 1))
        assert process.stdout is not None
        for _ in range(100 + 60 * round_):
            line = process.stdout.readline()
            assert line.endswith("\n"), process.communicate(timeout=10)
            acknowledged.add(line.strip())
        process.kill()
        rest, _ = process.communicate(timeout=10)
        # The last line may be cut: then it was not heard.
        acknowledged.update(line.strip() for line in rest.splitlines(keepends=True) if line.endswith("\n"))
        store = SqliteStore(f"sqlite:///{path}", create=False)
        found = store.read(_inventory)
        store.close()
        assert acknowledged <= found, sorted(acknowledged - found)[:5]
    assert len(acknowledged) > 3 * 100


def _inventory(connection: Connection) -> set[str]:
    """What is there, checked to be whole: every completion has its call and three choices, every job both
    rows."""
    assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
    assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    whole = "SELECT (SELECT count(*) FROM choices), 3 * (SELECT count(*) FROM completions)"
    num_choices, expected = connection.exec_driver_sql(whole).one()
    assert num_choices == expected
    found = {
        f"call {name.removeprefix('call_')}" for name in connection.execute(select(completions.c.call_id)).scalars()
    }
    halves: dict[str, int] = {}
    for key in connection.execute(select(control.c.key)).scalars():
        halves[key.partition("/")[0]] = halves.get(key.partition("/")[0], 0) + 1
    assert set(halves.values()) <= {2}
    return found | {f"job {number}" for number in halves}


def test_the_process_may_end_without_closing(path: Path) -> None:
    code = """
import sys
from leyden.store import open_store
from leyden.store.schema import control
store = open_store(sys.argv[1])
store.append(control, [{"key": "a", "value": "1"}]).result(10)
store.subscribe("things", 0)
"""
    finished(script(code, f"sqlite:///{path}"), timeout_s=20)
    store = SqliteStore(f"sqlite:///{path}")
    assert store.read(lambda c: c.execute(select(control.c.key)).scalars().all()) == ["a"]
    store.close()


def test_a_group_is_bounded_and_larger_bursts_are_several_groups(store: SqliteStore) -> None:
    futures = [store.append(calls, [call_row(number)]) for number in range(1500)]
    futures += [store.append(completions, [completion_row(number)]) for number in range(1500)]
    for future in futures:
        future.result(BOUND_S)
    assert store.read(lambda c: c.execute(select(func.count()).select_from(completions)).scalar_one()) == 1500


def test_only_what_was_handed_in_lazily_alone_is_committed_without_a_sync(path: Path) -> None:
    store = SqliteStore(f"sqlite:///{path}", synchronous="full")
    said: list[str] = []
    store._raw.set_trace_callback(said.append)
    done = threading.Event()
    store.hand_in([(control, [_row("a")])], lambda failure: done.set(), lazily=True)
    store.flush()
    assert done.wait(BOUND_S)
    store.append(control, [_row("b")]).result(BOUND_S)
    store.close()
    order = [text for text in said if text.startswith(("PRAGMA synchronous", "INSERT"))]
    assert [text.split("(")[0].strip() for text in order] == [
        "PRAGMA synchronous = NORMAL", "INSERT INTO control", "PRAGMA synchronous = FULL", "INSERT INTO control",
    ]  # fmt: skip


def test_rows_of_any_number_are_inserted_whole(path: Path) -> None:
    store = SqliteStore(f"sqlite:///{path}")
    for start, count in ((0, 1), (1, 3), (4, 63), (67, 64), (131, 200)):
        store.append(control, [_row(str(start + k)) for k in range(count)]).result(BOUND_S)
    assert store.read(lambda c: c.execute(select(func.count()).select_from(control)).scalar_one()) == 331
    store.close()

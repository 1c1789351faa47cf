"""Rows of a real PostgreSQL server as the state before and after an attempt."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.unit.runner.conftest import SUCCEEDED, Bench
from tests.unit.runner.test_snapshots import TASK, snapshots

from leyden.base.errors import HarnessError
from leyden.rewards.state import row_changes

TYPES = r"""
select 1::int8, 1.50::numeric, 'NaN'::numeric, 'infinity'::float8, 0.1::float8, true, null::int,
       timestamp '2026-03-01 12:00:00.5', timestamptz '2026-03-01 12:00:00+02', timestamp 'infinity',
       date '0044-03-15 BC', interval '1 day 2 hours', '\x00ff'::bytea,
       array[1, null, 3], array['a', 'b c'], array[[1.5, 2], [3, 4]], array[timestamp 'infinity'],
       '{"a": 1.10}'::jsonb, '5f0c6a52-6f7e-4a45-a1a5-0c57bb9a2a35'::uuid,
       '10.0.0.0/8'::inet, int4range(1, 5), row(1, 'a'), point(1, 2), 'a % b'
"""
AS_JSON = [
    1, "1.50", "NaN", "inf", 0.1, True, None,
    "2026-03-01 12:00:00.5", "2026-03-01 10:00:00+00", "infinity", "0044-03-15 BC",
    "1 day 02:00:00", "00ff", [1, None, 3], ["a", "b c"], [["1.5", "2"], ["3", "4"]],
    ["infinity"], '{"a": 1.10}', "5f0c6a52-6f7e-4a45-a1a5-0c57bb9a2a35",
    "10.0.0.0/8", "[1, 5)", ["1", "a"], "(1,2)", "a % b",
]  # fmt: skip


@pytest.fixture
def shop(postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with two orders, and its connection string in SHOP_URL."""
    with psycopg.connect(postgres) as connection:
        connection.execute("create table orders (id int primary key, item text, paid numeric)")
        connection.execute("insert into orders values (1, 'tea', 2.50), (2, null, 10)")
    monkeypatch.setenv("SHOP_URL", postgres)
    return postgres


def take(folder: Path, query: str, *, before: bool = False, **settings: Any) -> Any:
    tree = {"orders": {"url_env": "SHOP_URL", "query": query}}
    return snapshots(folder, postgres=tree, **settings).take(TASK, folder, before=before)["orders"]


def test_rows_of_postgres_are_a_state_and_more_than_the_bound_are_counted(shop: str, tmp_path: Path) -> None:
    found = take(tmp_path, "select * from orders order by id;")
    assert found == {"rows": [[1, "tea", "2.50"], [2, None, "10"]], "num_rows": 2}
    many = take(tmp_path, "select x from generate_series(1, 5000) x", max_rows=3)
    assert many == {"rows": [[1], [2], [3]], "num_rows": 5000, "num_unlisted": 4997}
    assert take(tmp_path, "select 1 where false") == {"rows": [], "num_rows": 0}


def test_what_json_does_not_know_is_text_that_keeps_every_digit(shop: str, tmp_path: Path) -> None:
    assert take(tmp_path, TYPES)["rows"] == [AS_JSON]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select nothing from orders", "nothing"),
        ("selec 1", "syntax error"),
        ("select 1 / 0", "division by zero"),
        ("delete from orders", "syntax error"),
        ("with gone as (delete from orders returning id) select * from gone", "data-modifying"),
        ("select 1; delete from orders", "multiple commands"),
        ("select nextval('numbers')", "read-only transaction"),
        ("select id from orders for update", "read-only transaction"),
        ("select set_config('transaction_read_only', 'off', false)", "read-write mode"),
        ("select '\0'", "NUL"),
        ("select '\ud800'", "surrogates not allowed"),
    ],
)  # fmt: skip
def test_a_query_that_fails_or_writes_says_so_and_changes_nothing(
    shop: str, tmp_path: Path, query: str, says: str
) -> None:
    with psycopg.connect(shop) as connection:
        connection.execute("create sequence numbers")
    assert says in take(tmp_path, query)["error"]
    with pytest.raises(HarnessError, match="'orders' cannot be taken: "):
        take(tmp_path, query, before=True)
    assert take(tmp_path, "select count(*) from orders")["rows"] == [[2]]
    assert take(tmp_path, "select last_value, is_called from numbers")["rows"] == [[1, False]]


def test_a_slow_query_is_ended_by_the_server(shop: str, tmp_path: Path) -> None:
    assert "statement timeout" in take(tmp_path, "select pg_sleep(3600)", timeout_s=0.3)["error"]
    with psycopg.connect(shop) as connection:
        active = "select count(*) from pg_stat_activity where query like '%pg_sleep%' and pid <> pg_backend_pid()"
        row = connection.execute(active).fetchone()
    assert row == (0,), "the query runs on"


def test_a_query_that_lifts_its_own_limit_is_cut_off(
    shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.rewards.postgres.GRACE_S", 0.2)
    lifts = "select set_config('statement_timeout', '0', false), pg_sleep(case when x > 1 then 3600 else 0 end)"
    found = take(tmp_path, f"{lifts} from generate_series(1, 2) x", max_rows=1, timeout_s=0.3)
    assert found["error"] == "no answer within 0.3 s; the connection was cut"


def test_a_server_that_falls_silent_is_cut_off(
    shop: str, silent: "Relay", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.rewards.postgres.GRACE_S", 0.2)
    monkeypatch.setenv("SHOP_URL", silent.url(shop))
    assert take(tmp_path, "select 1")["rows"] == [[1]]
    silent.stop_after = b"leyden"  # the name of the cursor: everything up to its declaration was answered
    assert "the connection was cut" in take(tmp_path, "select 1", timeout_s=0.3)["error"]


def test_a_server_that_is_down_is_said(shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_URL", "postgresql:///none?host=/nowhere&user=nobody")
    assert "no PostgreSQL server: " in take(tmp_path, "select 1")["error"]
    monkeypatch.setenv("SHOP_URL", "postgresql://nobody@127.0.0.1:9/none")
    assert "refused" in take(tmp_path, "select 1")["error"]
    monkeypatch.setenv("SHOP_URL", shop.replace("/test_", "/gone_"))
    assert "does not exist" in take(tmp_path, "select 1")["error"]
    monkeypatch.setenv("SHOP_URL", "postgresql://[")
    assert "no PostgreSQL server: " in take(tmp_path, "select 1")["error"]


async def test_what_the_agent_changed_in_postgres_is_seen_by_the_verifier(bench: Bench, shop: str) -> None:
    bench.agent(
        """
        import os, psycopg, model
        model.call()
        with psycopg.connect(os.environ["SHOP"]) as connection:
            connection.execute("insert into orders values (3, 'milk', 1.20)")
            connection.execute("update orders set paid = 3 where id = 1")
        """,
        env={"PYTHONPATH": str(bench.folder), "SHOP": shop},
        snapshots={"postgres": {"orders": {"url_env": "SHOP_URL", "query": "select * from orders"}}},
    )
    bench.tree["rewards"] = {
        "verifier": "builtin:safety", "weights": {"safe": 1.0},
        "settings": {"safety": {"append_only_rows": ["orders"]}},
    }  # fmt: skip
    rollout, attempt = await bench.one()
    assert rollout.state is SUCCEEDED and rollout.reward == 0.0, attempt.detail
    spans = [{"name": s.name, "kind": s.kind, "attributes": s.attributes} for s in bench.trace().spans]
    changes = row_changes({"spans": spans}, "orders")
    assert changes.removed == ((1, "tea", "2.50"),)
    assert changes.added == ((1, "tea", "3"), (3, "milk", "1.20"))


class Relay:
    """A TCP port in front of a server's socket that hands nothing on once a client has said `stop_after`."""

    def __init__(self) -> None:
        self.stop_after: bytes | None = None
        self.target = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, direct: str) -> str:
        """The connection string that leads through here."""
        path, _, options = direct.partition("?")
        folder = next(word for word in options.split("&") if word.startswith("host=")).removeprefix("host=")
        self.target = f"{folder}/.s.PGSQL.5432"
        return f"{path}?host=127.0.0.1&port={self._listener.getsockname()[1]}&user=postgres&sslmode=disable"

    def close(self) -> None:
        """Close every socket."""
        for one in (self._listener, *self._open):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self.target)
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink, source is client), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        try:
            while data := source.recv(65536):
                if watched and self.stop_after is not None and self.stop_after in data:
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.fixture
def silent() -> Iterator[Relay]:
    """A relay that still relays."""
    relay = Relay()
    yield relay
    relay.close()

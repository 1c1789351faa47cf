"""The harness as a subprocess against a scripted server in the shape of OpenAI's API."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import harness
import pytest

SCHEMA = "CREATE TABLE books (title TEXT, genre TEXT);"
QUESTION = "How many books are there?"
GOOD = "SELECT COUNT(*) FROM books"


@contextmanager
def scripted_server(answers: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives `answers` in turn; yields its base URL and the requests it got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append({"path": self.path, "authorization": self.headers["authorization"], **body})
            message = {"role": "assistant", "content": answers[len(requests) - 1]}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "main",
                "choices": [choice],
            }
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (name of the base class)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "books.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(SCHEMA)
        connection.execute("INSERT INTO books VALUES ('Dust', 'crime')")
        connection.commit()
    return path


def run_harness(url: str, database: str, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    ours = ("OPENAI_", "TEXT_TO_", "MAX_TOKENS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    task = {"QUESTION": QUESTION, "SCHEMA": SCHEMA, "DATABASE": database}
    api = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key-of-the-attempt"}
    return subprocess.run(
        [sys.executable, harness.__file__],
        cwd=folder,
        env={**kept, **task, **api, **extra},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_query_that_runs_takes_one_call(database: Path, tmp_path: Path) -> None:
    with scripted_server([f"```sql\n{GOOD};\n```"]) as (url, requests):
        done = run_harness(url, str(database), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == GOOD
    assert (tmp_path / "answer.sql").read_text() == GOOD
    (request,) = requests
    assert request["path"] == "/v1/chat/completions"
    assert request["authorization"] == "Bearer key-of-the-attempt"
    assert (request["model"], request["max_tokens"]) == ("main", harness.DEFAULT_MAX_TOKENS)
    assert request["messages"] == harness.build_messages(SCHEMA, QUESTION)


def test_a_query_that_fails_is_shown_its_error_once(database: Path, tmp_path: Path) -> None:
    with scripted_server(["SELECT COUNT(*) FROM novels", GOOD]) as (url, requests):
        done = run_harness(url, str(database), tmp_path, MAX_TOKENS="64")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answer.sql").read_text() == GOOD
    first, second = requests
    assert second["messages"][: len(first["messages"])] == first["messages"]
    answer, complaint = second["messages"][len(first["messages"]) :]
    assert answer == {"role": "assistant", "content": "SELECT COUNT(*) FROM novels"}
    assert "no such table: novels" in complaint["content"]
    assert {request["max_tokens"] for request in requests} == {64}


def test_two_failures_end_the_run_with_the_last_query(database: Path, tmp_path: Path) -> None:
    with scripted_server(["SELECT x FROM books", "SELECT y FROM books"]) as (url, requests):
        done = run_harness(url, str(database), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SELECT y FROM books"
    assert len(requests) == 2


def test_no_query_at_all_leaves_an_empty_answer(database: Path, tmp_path: Path) -> None:
    with scripted_server(["I would select the books.", ""]) as (url, _):
        done = run_harness(url, str(database), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answer.sql").read_text() == ""
    assert done.stdout.splitlines()[-1] == "-- no query"


def test_a_write_does_not_reach_the_database(database: Path, tmp_path: Path) -> None:
    before = database.read_bytes()
    with scripted_server(["DROP TABLE books", "DELETE FROM books"]) as (url, requests):
        done = run_harness(url, str(database), tmp_path)
    assert done.returncode == 0, done.stderr
    assert database.read_bytes() == before
    assert "readonly" in requests[1]["messages"][-1]["content"]
    assert (tmp_path / "answer.sql").read_text() == "DELETE FROM books"


def test_a_relative_database_is_found_in_the_data_folder(database: Path, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    with scripted_server([GOOD]) as (url, _):
        done = run_harness(url, database.name, folder, TEXT_TO_SQL_DATA=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_missing_database_is_an_error_that_says_where_it_looked(tmp_path: Path) -> None:
    done = run_harness("http://127.0.0.1:9/v1", "databases/gone.sqlite", tmp_path)
    assert done.returncode != 0
    assert "databases/gone.sqlite" in done.stderr and "generate.py" in done.stderr


def test_a_bomb_is_stopped(database: Path) -> None:
    bomb = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT max(x) FROM r"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        harness.run_sql(bomb, database)


@pytest.mark.parametrize(
    ("answer", "sql"),
    [
        (GOOD, GOOD),
        (f"{GOOD};", GOOD),
        ("  select 1 ;\n", "select 1"),
        ("SELECT a\nFROM t\nWHERE b = 1", "SELECT a FROM t WHERE b = 1"),
        (f"```sql\n{GOOD};\n```\nIt counts the books.", GOOD),
        (f"```\n{GOOD}\n```", GOOD),
        (f"```sql\n{GOOD}", GOOD),
        (f"`{GOOD}`", GOOD),
        (f"Here is the query:\n\n{GOOD};\n\nIt counts.", GOOD),
        (f"Here is the query: {GOOD.lower()}", GOOD.lower()),
        (f"Sure! {GOOD}", GOOD),
        (f"{GOOD}\n\nThis counts the books.", GOOD),
        ("SELECT a FROM t WHERE b = 'x; y'; DROP TABLE t", "SELECT a FROM t WHERE b = 'x; y'"),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "WITH x AS (SELECT 1) SELECT * FROM x"),
        ("DROP TABLE books", "DROP TABLE books"),
    ],
)
def test_the_query_is_found_in_an_answer(answer: str, sql: str) -> None:
    assert harness.extract_sql(answer) == sql


@pytest.mark.parametrize("answer", ["", "   ", "42", "I would select the books.", "books", "```\n```", "selection"])
def test_an_answer_without_a_query_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="no SQL query"):
        harness.extract_sql(answer)


def test_a_long_error_is_cut() -> None:
    _, complaint = harness.build_retry("SELECT", "x " * 500)
    assert len(complaint["content"]) < harness.MAX_ERROR_CHARS + 60

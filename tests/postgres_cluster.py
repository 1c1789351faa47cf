"""A PostgreSQL server of the test session's own: made in a temporary folder, asked over a socket there, and removed.

The fixture `postgres` gives the connection string of an empty database that is new for each test. It skips where
PostgreSQL's server programs are not installed (`scripts/postgres.sh` installs them where it can); a server that is
installed and does not start is an error.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 60.0
"""Far above what a start takes; it only bounds the wait for a server that never comes."""
STOP_S = 30.0
USER = "postgres"
"""PostgreSQL does not run as root; its packages make this user."""
SETTINGS = {"listen_addresses": "", "fsync": "off", "shared_buffers": "16MB", "max_connections": "40", "port": "5432"}
"""No TCP: a socket in a folder of our own cannot clash with another server."""


class Cluster:
    """A running server."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._num_databases = 0
        self._log = (folder / "log").open("wb")
        self._become: list[str] = []
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        if os.geteuid() == 0:
            shutil.chown(folder, USER, USER)
            # The server ends with the tests, also when they are killed.
            self._become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--pdeathsig=INT"]
        self._run("initdb", "--pgdata", str(folder / "data"), "--username", USER, "--auth", "trust", "--no-sync")
        settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        self._server = subprocess.Popen(
            [*self._become, str(programs / "postgres"), "-D", str(folder / "data"), "-k", str(folder), *settings],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=folder, start_new_session=True,
            env=self._environment,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def new_database(self) -> str:
        """Connection string of a database that nobody has used."""
        self._num_databases += 1
        name = f"test_{self._num_databases}"
        self._run("createdb", "--host", str(self._folder), "--port", "5432", "--username", USER, name)
        return f"postgresql:///{name}?host={self._folder}&port=5432&user={USER}"

    def stop(self) -> None:
        """End it; with force after STOP_S."""
        self._server.send_signal(signal.SIGINT)
        try:
            self._server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(STOP_S)
        self._log.close()

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [*self._become, str(self._programs / program), *words],
            capture_output=True, text=True, timeout=START_S, cwd=self._folder, env=self._environment,
        )  # fmt: skip
        assert not done.returncode, f"{program} failed: {done.stderr}"

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        ready = [str(self._programs / "pg_isready"), "--quiet", "--host", str(self._folder), "--port", "5432"]
        while subprocess.run(ready, timeout=START_S, check=False).returncode:
            log = (self._folder / "log").read_text(errors="replace")[-2000:]
            assert self._server.poll() is None, f"the PostgreSQL server ended: {log}"
            assert time.monotonic() < deadline, f"the PostgreSQL server did not start within {START_S:g} s: {log}"
            time.sleep(0.05)


def programs() -> Path | None:
    """Folder with `initdb` and `postgres`, of the newest version; None where there is none."""
    on_path = shutil.which("initdb")
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: float(path.parts[-3]) if path.parts[-3].replace(".", "", 1).isdigit() else 0.0,
    )
    if found:
        return found[-1].parent
    return Path(on_path).resolve().parent if on_path else None


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[Cluster]:
    """One server for the session."""
    folder = programs()
    if folder is None:
        pytest.skip("needs PostgreSQL's server (initdb); scripts/postgres.sh installs it as root on Debian")
    home = Path(tempfile.mkdtemp(prefix="ley-pg-"))  # short: the path of a socket has at most 107 bytes
    try:
        cluster = Cluster(folder, home)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(home)


@pytest.fixture
def postgres(postgres_cluster: Cluster) -> str:
    """Connection string of an empty database, as its superuser."""
    return postgres_cluster.new_database()

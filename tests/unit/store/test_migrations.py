"""A store of the first schema is brought to the newest with everything in it."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import leyden.store
from leyden.base.records import PolicyVersion
from leyden.store import ledger, open_store


def old_store(path: Path) -> None:
    """A file as the first revision left it, with one policy version."""
    with create_engine(f"sqlite:///{path}", poolclass=NullPool).connect() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(leyden.store.__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(
            text(
                "INSERT INTO policies (policy, version, kind, serving, created_at) VALUES ('main', 3, 'weights', 1, 5)"
            )
        )
        connection.commit()


def test_a_version_of_the_first_schema_has_no_prompts_and_new_ones_can_have(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    old_store(path)
    store = open_store(f"sqlite:///{path}", create=False)
    try:
        assert store.read(lambda c: ledger.policy_versions(c, "main")) == [
            PolicyVersion(policy="main", version=3, created_at=5.0)
        ]
        new = PolicyVersion(policy="main", version=4, kind="prompt", created_at=6.0, prompts={"s": {"original": "a"}})
        store.write(lambda c: ledger.add_policy_version(c, store, new)).result(10)
        assert store.read(lambda c: ledger.prompts_of(c, "main", 4)) == {"s": {"original": "a"}}
        assert store.read(lambda c: ledger.prompts_of(c, "main", 3)) == {}
        assert store.read(lambda c: ledger.prompts_of(c, "main", 5)) == {}
        assert store.read(lambda c: ledger.policy_versions(c, "main"))[1] == new
        assert store.read(ledger.all_serving) == {"main": 3}
    finally:
        store.close()

"""Numbers of policy versions: the next free one, whatever ran before and whatever runs now.

Numbers that a run has set aside for itself are kept as a control value, so a run that starts while another one is
stopped does not take them.
"""

from sqlalchemy import Connection

from leyden.store import ledger
from leyden.store.base import Store


def next_version(connection: Connection, store: Store, policy: str, *, num_after: int = 0) -> int:
    """The next free number of `policy`; `num_after` more after it are set aside. Inside a `write` job."""
    key = f"versions.{policy}"
    known = [version.version for version in ledger.policy_versions(connection, policy)]
    number = max([*known, ledger.get_control(connection, key) or -1, -1]) + 1
    ledger.set_control(connection, store, key, number + num_after)
    return number

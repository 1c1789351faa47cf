"""What holds for every test."""

from hypothesis import settings
from tests.postgres_cluster import postgres, postgres_cluster

__all__ = ["postgres", "postgres_cluster"]  # fixtures

# A deadline per example measures the machine, not the code: with other work beside it, a test that takes 5 ms took 300.
# The suite tries the same examples every time, so that a change is judged by what it changed; to look for new ones:
# `sh scripts/test.sh tests/unit --hypothesis-profile=search`.
settings.register_profile("leyden", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("leyden")

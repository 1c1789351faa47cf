"""What holds for every test."""

from hypothesis import settings

# A deadline per example measures the machine, not the code: with other work beside it, a test that takes 5 ms took 300.
settings.register_profile("leyden", deadline=None)
settings.load_profile("leyden")

"""Fakes that follow the real contracts. They ship with Leyden, so that a harness can be tested without a
model."""

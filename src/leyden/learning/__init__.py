"""Traces in, a better policy out: credit, batches, schedule, and the backends that move the weights."""

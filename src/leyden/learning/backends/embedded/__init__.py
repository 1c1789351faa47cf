"""The embedded backend: torch in this process, on a CPU or one GPU; sampler and trainer share the same
parameters."""

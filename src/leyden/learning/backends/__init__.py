"""Backends: who samples from a policy and moves its weights. Each is blind to the algorithm.

Importing this package imports no backend; `base` has the contract and is free of torch.
"""

"""The critic of PPO: a linear value head on the hidden state of the last prompt token of each call.

It begins at 0, so that the first advantages are the returns themselves; it is float32 whatever the model computes in.
Its gradient also reaches the model below it. It is trained and checkpointed by the trainer; it is no part of the
policy: neither the sampler nor an exported model has it.

    T columns   E hidden size   A actions   K actions of a pass with a target
"""

import torch
from torch import Tensor, nn

from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded.layouts import Pass
from leyden.learning.backends.embedded.losses import value_loss
from leyden.learning.batch import Batch


class Critic(nn.Module):
    """Hidden states (..., E) to values (...)."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_size, 1, device=device)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden_KE: Tensor) -> Tensor:
        """(K, E) -> (K,)."""
        value_K1: Tensor = self.out(hidden_KE.to(self.out.weight.dtype))
        return value_K1.squeeze(-1)

    def of_pass(self, hidden_BTE: Tensor, one: Pass, batch: Batch) -> tuple[Tensor, list[int]]:
        """(value_K, actions) for the actions whose first label is in the pass: its source is the last prompt token."""
        first = batch.offset_N[one.label_L] == 0
        source_K = torch.from_numpy(one.source_L[first]).to(hidden_BTE.device)
        value_K = self(hidden_BTE.flatten(0, 1).index_select(0, source_K))
        return value_K, batch.action_N[one.label_L[first]].tolist()

    def loss(self, hidden_BTE: Tensor, one: Pass, batch: Batch, objective: Objective) -> Tensor:
        """Sum over the actions of the pass with a target of their loss by the number of such actions in the batch."""
        assert batch.target_A is not None and batch.value_A is not None
        value_A, actions = self.of_pass(hidden_BTE, one, batch)
        target_A = torch.from_numpy(batch.target_A[actions]).to(value_A)
        before_A = torch.from_numpy(batch.value_A[actions]).to(value_A)
        has_A = ~torch.isnan(target_A)
        num = int((batch.target_A == batch.target_A).sum())
        return value_loss(value_A[has_A], before_A[has_A], target_A[has_A], objective.value_clip).sum() / max(1, num)

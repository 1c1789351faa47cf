"""Attention of the tokens of one pass over the slots of a `SlotCache`, for passes whose tokens stand in one row.

Promises: a token sees exactly the tokens before it in its own slot, and in the trunk above it, that the window of the
layer allows. `DecodeAttention` is for one new token in each of the first slots; `FillAttention` for several tokens of
several slots, of which only the real ones are computed. Both are made for one pass and hold what all its layers share.

    T tokens of a pass   B slots   C columns   H query heads   K key-value heads, H = K * G   D head size
    n tokens of one segment
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from leyden.learning.backends.embedded.cache import SlotCache, Trunk


class _Store:
    """Where the new keys and values of a pass go."""

    def __init__(self, cache: SlotCache, slots_T: np.ndarray, columns_T: np.ndarray) -> None:
        self.cache = cache
        heads_K = np.arange(cache.num_kv_heads)
        rows_TK = (slots_T[:, None] * cache.num_kv_heads + heads_K) * cache.num_columns + columns_T[:, None]
        # Into a view of (slots * heads * columns, D): one index instead of three takes a third of the time.
        self._index = (torch.from_numpy(rows_TK).to(cache.device),)
        self._num = len(slots_T)

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Keep the keys and values of the real tokens."""
        D = self.cache.head_dim
        self.cache.keys_LRKCD[layer].view(-1, D).index_put_(self._index, k_TKD[: self._num])
        self.cache.values_LRKCD[layer].view(-1, D).index_put_(self._index, v_TKD[: self._num])


class DecodeAttention(_Store):
    """One new token for each of the slots 0..T-1.

    What a slot holds stands behind the trunk of its sequence, if it has one. Sequences of one trunk read its keys
    together: their queries are rows of one product, and the two parts of a softmax are put together by the logarithms
    of their sums. Without that each row reads the trunk anew, which took half of the time of 64 rows of 150 tokens.
    """

    def __init__(self, cache: SlotCache, columns_T: np.ndarray, trunks: Sequence[Trunk | None] = ()) -> None:
        """`columns_T`: where the new token of each slot stands; all before it are filled. `trunks` may be shorter than
        the slots are many."""
        super().__init__(cache, np.arange(len(columns_T)), columns_T)
        self._num_columns = int(columns_T.max()) + 1
        self._columns_T = torch.from_numpy(columns_T).to(cache.device)
        self._biases: dict[int | None, Tensor] = {}
        rows: dict[Trunk, list[int]] = {}
        for row, trunk in enumerate(trunks):
            if trunk is not None:
                rows.setdefault(trunk, []).append(row)
        self._rows_of = rows
        self._order: Tensor | None = None

    def attend(self, layer: int, q_THD: Tensor, scaling: float, window: int | None) -> Tensor:
        """out_THD."""
        T, H, D = q_THD.shape
        C = self._num_columns
        # The query heads of one key-value head are rows of one product, so keys are read once for all of them.
        q_TKGD = q_THD.reshape(T, self.cache.num_kv_heads, -1, D)
        keys_TKCD = self.cache.keys_LRKCD[layer, :T, :, :C]
        values_TKCD = self.cache.values_LRKCD[layer, :T, :, :C]
        bias = self._bias(window)
        if not self._rows_of:
            out_TKGD = scaled_dot_product_attention(q_TKGD, keys_TKCD, values_TKCD, attn_mask=bias, scale=scaling)
            return out_TKGD.reshape(T, H, D)
        assert window is None or window >= C, "a trunk has no window"
        out_TKGD, sums_TKG = _attend_with_sums(q_TKGD, keys_TKCD, values_TKCD, bias, scaling)
        out_ND = out_TKGD.reshape(-1, D)
        order = self._order_of(H)
        above_ND, sums_above_N = self._above(layer, q_TKGD.reshape(-1, D).index_select(0, order), scaling)
        share_N1 = (sums_above_N - sums_TKG.reshape(-1).index_select(0, order)).sigmoid_()[:, None]
        own_ND = out_ND.index_select(0, order).float()
        out_ND.index_copy_(0, order, own_ND.lerp_(above_ND.float(), share_N1).to(out_ND.dtype))
        return out_ND.view(T, H, D)

    def _above(self, layer: int, q_ND: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Attention to the trunks, and the logarithms of the sums, in the order of `_order_of`."""
        outs, sums, first = [], [], 0
        K, D = self.cache.num_kv_heads, self.cache.head_dim
        num_queries = len(q_ND) // sum(len(rows) for rows in self._rows_of.values())
        for trunk, rows in self._rows_of.items():
            end = first + len(rows) * num_queries
            out_1KND, sums_1KN = _attend_with_sums(
                q_ND[first:end].view(1, K, -1, D), *trunk.of_layer[layer], None, scaling
            )
            outs.append(out_1KND.reshape(-1, D))
            sums.append(sums_1KN.reshape(-1))
            first = end
        return torch.cat(outs), torch.cat(sums)

    def _order_of(self, num_heads: int) -> Tensor:
        """For each query of a trunk its place among all (T, H): by trunk, then head of keys, row, query head."""
        if self._order is None:
            heads_K1G = np.arange(num_heads).reshape(self.cache.num_kv_heads, 1, -1)
            parts = [np.asarray(rows)[:, None] * num_heads + heads_K1G for rows in self._rows_of.values()]
            self._order = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
        return self._order

    def _bias(self, window: int | None) -> Tensor:
        """Additive mask (T, 1, 1, C)."""
        if window is not None and window >= self._num_columns:
            window = None
        if window not in self._biases:
            columns_C = torch.arange(self._num_columns, device=self._columns_T.device)
            seen_TC = columns_C <= self._columns_T[:, None]
            if window is not None:
                seen_TC &= columns_C > self._columns_T[:, None] - window
            self._biases[window] = _additive(seen_TC, self.cache.dtype)[:, None, None]
        return self._biases[window]


def _attend_with_sums(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """out as of `scaled_dot_product_attention`, and the logarithm of the sum of exponentials of each query."""
    out, sums = _flash(q, k, v, 0.0, False, attn_mask=bias, scale=scaling)
    return out, sums


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""What `scaled_dot_product_attention` calls on a CPU."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one slot that are computed in one pass."""

    slot: int
    """Where they belong."""
    start: int
    """Column of the first; those before it are filled."""
    num: int
    """How many."""
    trunk: Trunk | None = None
    """What comes before the slot."""

    @property
    def above(self) -> int:
        """Tokens of the trunk."""
        return len(self.trunk) if self.trunk is not None else 0


class FillAttention(_Store):
    """Tokens of several slots, segment behind segment. Tokens behind the last segment are padding: they are not stored,
    and what comes out for them is 0."""

    def __init__(self, cache: SlotCache, segments: Sequence[Segment]) -> None:
        slots_T = np.concatenate([np.full(s.num, s.slot) for s in segments])
        columns_T = np.concatenate([np.arange(s.start, s.start + s.num) for s in segments])
        super().__init__(cache, slots_T, columns_T)
        self._segments = segments
        self._biases: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, layer: int, q_THD: Tensor, scaling: float, window: int | None) -> Tensor:
        """out_THD."""
        parts, first = [], 0
        for one in self._segments:
            q_HnD = q_THD[first : first + one.num].transpose(0, 1)
            first += one.num
            num_seen = one.above + one.start + one.num
            shown = None if window is None or window >= num_seen else window
            is_plain = num_seen == one.num and shown is None
            keys_1KCD, values_1KCD = self._seen_by(one, layer)
            out_1HnD = scaled_dot_product_attention(
                q_HnD[None],
                keys_1KCD,
                values_1KCD,
                attn_mask=None if is_plain else self._bias(one, shown),
                is_causal=is_plain,
                scale=scaling,
                enable_gqa=True,
            )
            parts.append(out_1HnD[0].transpose(0, 1))
        if first < len(q_THD):
            parts.append(q_THD.new_zeros(len(q_THD) - first, *q_THD.shape[1:]))
        return torch.cat(parts)

    def _seen_by(self, one: Segment, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a segment and of what comes before it."""
        own = (slice(one.slot, one.slot + 1), slice(None), slice(one.start + one.num))
        keys, values = self.cache.keys_LRKCD[layer][own], self.cache.values_LRKCD[layer][own]
        if one.trunk is None:
            return keys, values
        above = one.trunk.of_layer[layer]
        return torch.cat([above[0], keys], 2), torch.cat([above[1], values], 2)

    def _bias(self, one: Segment, window: int | None) -> Tensor:
        """Additive mask (n, C)."""
        before = one.above + one.start
        key = (before, one.num, window)
        if key not in self._biases:
            device = self.cache.device
            places_n1 = torch.arange(before, before + one.num, device=device)[:, None]
            columns_C = torch.arange(before + one.num, device=device)
            seen_nC = columns_C <= places_n1
            if window is not None:
                seen_nC &= columns_C > places_n1 - window
            self._biases[key] = _additive(seen_nC, self.cache.dtype)
        return self._biases[key]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

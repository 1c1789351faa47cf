"""Keys and values of running sequences in slots, and of recent prompts for reuse.

`SlotCache` holds the active sequences in slots 0..B-1 without a hole, so that a decode step reads one view
and copies nothing; it grows in blocks of rows and columns. `PrefixStore` keeps the keys and values of recent
sequences by their token ids, within a bound in bytes. Both know nothing of requests, and both must be emptied
when the weights change.

    L layers   B active slots   R rows of one forward pass (consecutive slots)   Q new tokens per row
    C columns (positions) of the cache   K key-value heads   G query heads per key-value head   D head size
"""

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from leyden.base.records import IntArray

COLUMN_BLOCK = 128
"""Columns are allocated in multiples of this."""
ROW_BLOCK = 8
"""Rows are allocated in multiples of this, then doubled."""
MATCH_BLOCK = 16
"""Shared prefixes are looked up at multiples of this many tokens."""


class SlotCache:
    """Keys and values of the active sequences; used by one thread."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.num_rows = self.num_columns = 0
        self.keys_LRKCD = self._empty(0, 0)
        self.values_LRKCD = self._empty(0, 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def _empty(self, rows: int, columns: int) -> Tensor:
        # Zeros: a masked column is multiplied by 0, and 0 * NaN of fresh memory would be NaN.
        return torch.zeros(
            self.num_layers,
            rows,
            self.num_kv_heads,
            columns,
            self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` slots of `columns` tokens; what is stored stays."""
        if rows <= self.num_rows and columns <= self.num_columns:
            return
        new_rows, new_columns = self.num_rows, self.num_columns
        if rows > new_rows:
            new_rows = max(-(-rows // ROW_BLOCK) * ROW_BLOCK, 2 * self.num_rows)
        if columns > new_columns:
            new_columns = -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK
        for name in ("keys_LRKCD", "values_LRKCD"):
            old, new = getattr(self, name), self._empty(new_rows, new_columns)
            new[:, : self.num_rows, :, : self.num_columns] = old
            setattr(self, name, new)
        self.num_rows, self.num_columns = new_rows, new_columns

    def release(self) -> None:
        """Give all memory back; nothing may be active."""
        self.num_rows = self.num_columns = 0
        self.keys_LRKCD = self._empty(0, 0)
        self.values_LRKCD = self._empty(0, 0)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for store in (self.keys_LRKCD, self.values_LRKCD):
            store[:, target, :, :length] = store[:, source, :, :length]

    def read(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first `length` tokens of a slot: keys and values (L, K, length, D)."""
        return (self.keys_LRKCD[:, slot, :, :length].clone(), self.values_LRKCD[:, slot, :, :length].clone())

    def write(self, slot: int, keys_LKCD: Tensor, values_LKCD: Tensor, start: int) -> None:
        """Put stored keys and values into a slot, the first at column `start`."""
        end = start + keys_LKCD.shape[2]
        self.keys_LRKCD[:, slot, :, start:end] = keys_LKCD
        self.values_LRKCD[:, slot, :, start:end] = values_LKCD


class SlotKernel:
    """Attention of one forward pass: writes the new keys and values, then attends to all of each row's slot.

    Row r of the pass is slot `first + r`; its new tokens stand at `positions_RQ`. A query at position p sees
    the columns 0..p of its slot, in a layer with a window the last of them. Padded queries repeat the last position;
    what they write there is overwritten by the real token because they are sent to the column behind all real ones.
    """

    def __init__(self, cache: SlotCache, first: int, positions_RQ: Tensor, columns_RQ: Tensor) -> None:
        self.cache = cache
        num_rows, self.num_new = positions_RQ.shape
        self.rows = slice(first, first + num_rows)
        self.num_columns = int(positions_RQ.max()) + 1
        self.columns_RQ = columns_RQ
        self.row_index_R1 = torch.arange(first, first + num_rows, device=positions_RQ.device)[:, None]
        seen_RQC = torch.arange(self.num_columns, device=positions_RQ.device) <= positions_RQ[:, :, None]
        self.positions_RQ, self.seen_RQC = positions_RQ, seen_RQC
        self.biases: dict[tuple[int, int | None], Tensor] = {}

    def __call__(
        self,
        module: nn.Module,
        q_RHQD: Tensor,
        k_RKQD: Tensor,
        v_RKQD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """out_RHQD; `module.layer_idx` says which layer of the cache is meant."""
        layer = module.layer_idx
        assert isinstance(layer, int)
        keys_RKCD, values_RKCD = self.cache.keys_LRKCD[layer], self.cache.values_LRKCD[layer]
        # Indices around a slice put the indexed axes first: (R, Q, K, D).
        keys_RKCD[self.row_index_R1, :, self.columns_RQ] = k_RKQD.transpose(1, 2)
        values_RKCD[self.row_index_R1, :, self.columns_RQ] = v_RKQD.transpose(1, 2)
        R, H, Q, D = q_RHQD.shape
        K = k_RKQD.shape[1]
        groups = H // K
        # The query heads of one key-value head are rows of one product, so keys are read once for all of
        # them.
        out_RKGD = nn.functional.scaled_dot_product_attention(
            q_RHQD.reshape(R, K, groups * Q, D),
            keys_RKCD[self.rows, :, : self.num_columns],
            values_RKCD[self.rows, :, : self.num_columns],
            attn_mask=self._bias(groups, window),
            scale=scaling,
        )
        return out_RKGD.reshape(R, H, Q, D)

    def _bias(self, groups: int, window: int | None) -> Tensor:
        """Additive mask (R, 1, Q * groups, C); made once per window of a layer."""
        if window is not None and window >= self.num_columns:
            window = None
        key = (1 if self.num_new == 1 else groups, window)
        if key not in self.biases:
            seen_RQC = self.seen_RQC
            if window is not None:
                columns_C = torch.arange(self.num_columns, device=seen_RQC.device)
                seen_RQC = seen_RQC & (columns_C > self.positions_RQ[:, :, None] - window)
            bias_RQC = torch.zeros(seen_RQC.shape, dtype=self.cache.dtype, device=seen_RQC.device)
            bias_RQC.masked_fill_(~seen_RQC, float("-inf"))
            # With one new token the mask is the same for all heads, and broadcast over them.
            self.biases[key] = bias_RQC[:, None] if key[0] == 1 else bias_RQC[:, None].repeat(1, 1, groups, 1)
        return self.biases[key]


class Trunk:
    """Keys and values (L, K, P, D) of P tokens that several sequences begin with, kept and read once for all."""

    def __init__(self, keys_LKPD: Tensor, values_LKPD: Tensor) -> None:
        self.keys_LKPD, self.values_LKPD = keys_LKPD, values_LKPD
        # Views, made once because every pass takes each of them.
        self.of_layer = [(k[None], v[None]) for k, v in zip(keys_LKPD, values_LKPD, strict=True)]
        """Keys and values (1, K, P, D) of each layer."""

    def __len__(self) -> int:
        return self.keys_LKPD.shape[2]

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return self.keys_LKPD.nbytes + self.values_LKPD.nbytes


@dataclass(slots=True)
class Entry:
    """A stored sequence: its trunk, if it has one, and what comes behind."""

    ids: IntArray
    trunk: Trunk | None
    keys_LKCD: Tensor
    values_LKCD: Tensor
    block_keys: list[bytes]

    @property
    def num_above(self) -> int:
        """Tokens of the trunk."""
        return len(self.trunk) if self.trunk is not None else 0

    def write(self, cache: SlotCache, slot: int, start: int, end: int) -> None:
        """Put the tokens `start` to `end` at the beginning of a slot."""
        at = 0
        above, own = max(0, min(end, self.num_above) - start), max(start, self.num_above) - self.num_above
        if self.trunk is not None and above:
            keys, values = self.trunk.keys_LKPD, self.trunk.values_LKPD
            cache.write(slot, keys[:, :, start : start + above], values[:, :, start : start + above], 0)
            at = above
        behind = slice(own, end - self.num_above)
        if end > self.num_above:
            cache.write(slot, self.keys_LKCD[:, :, behind], self.values_LKCD[:, :, behind], at)


class PrefixStore:
    """Keys and values of recent sequences, found by the longest shared prefix of token ids; used by one
    thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_tokens_reused = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._by_block: dict[bytes, bytes] = {}
        self._trunks: Counter[Trunk] = Counter()
        """How many entries have a trunk; its bytes are counted once."""

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._entries.clear()
        self._by_block.clear()
        self._trunks.clear()
        self.num_bytes = 0

    def longest(self, ids: IntArray) -> tuple[int, Entry] | None:
        """(shared length, sequence) of the stored sequence that shares the longest prefix with `ids`."""
        for key in reversed(_block_keys(ids)):
            name = self._by_block.get(key)
            if name is None:
                continue
            entry = self._entries[name]
            self._entries.move_to_end(name)
            limit = min(len(ids), len(entry.ids))
            differs = np.flatnonzero(entry.ids[:limit] != ids[:limit])
            length = int(differs[0]) if len(differs) else limit
            # A hash that lies would show here; no length is taken on trust.
            return (length, entry) if length else None
        return None

    def share(self, entry: Entry) -> Trunk:
        """The whole of a stored sequence as a trunk, which it is from then on; nothing is copied if it has none yet."""
        if entry.trunk is not None and not entry.keys_LKCD.shape[2]:
            return entry.trunk
        self._count(entry, -1)
        keys, values = entry.keys_LKCD, entry.values_LKCD
        if entry.trunk is not None:
            keys = torch.cat([entry.trunk.keys_LKPD, keys], 2)
            values = torch.cat([entry.trunk.values_LKPD, values], 2)
        entry.trunk = Trunk(keys, values)
        entry.keys_LKCD, entry.values_LKCD = keys[:, :, :0].clone(), values[:, :, :0].clone()
        self._count(entry, 1)
        return entry.trunk

    def add(self, ids: IntArray, keys_LKCD: Tensor, values_LKCD: Tensor, trunk: Trunk | None = None) -> None:
        """Store a sequence: the keys and values behind its trunk. The least recently used ones go when the bound in
        bytes is met."""
        blocks = _block_keys(ids)
        entry = Entry(ids, trunk, keys_LKCD, values_LKCD, blocks)
        whole = keys_LKCD.nbytes + values_LKCD.nbytes + (trunk.num_bytes if trunk is not None else 0)
        if whole > self.max_bytes or not blocks:
            return
        name = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        if name in self._entries:
            self._entries.move_to_end(name)
            return
        self._entries[name] = entry
        self._count(entry, 1)
        for key in blocks:
            self._by_block[key] = name
        while self.num_bytes > self.max_bytes:
            self._drop_oldest()

    def _count(self, entry: Entry, sign: int) -> None:
        """Add or take away the bytes of an entry; those of its trunk with the first and the last that has it."""
        self.num_bytes += sign * (entry.keys_LKCD.nbytes + entry.values_LKCD.nbytes)
        if entry.trunk is None:
            return
        before = self._trunks[entry.trunk]
        self._trunks[entry.trunk] = before + sign
        if before + sign == 0:
            del self._trunks[entry.trunk]
        if 0 in (before, before + sign):
            self.num_bytes += sign * entry.trunk.num_bytes

    def _drop_oldest(self) -> None:
        name, entry = self._entries.popitem(last=False)
        self._count(entry, -1)
        orphans = [key for key in entry.block_keys if self._by_block.get(key) == name]
        for key in orphans:
            del self._by_block[key]
        if not orphans:
            return
        # Another entry may share these blocks; without this a shared system prompt would be lost with its
        # last user.
        wanted = set(orphans)
        for other_name, other in self._entries.items():
            for key in wanted.intersection(other.block_keys):
                self._by_block[key] = other_name


def _block_keys(ids: IntArray) -> list[bytes]:
    """A digest of the first 16, 32, ... tokens."""
    running = hashlib.blake2b(digest_size=16)
    keys = []
    raw = np.ascontiguousarray(ids, np.int64)
    for end in range(MATCH_BLOCK, len(raw) + 1, MATCH_BLOCK):
        running.update(raw[end - MATCH_BLOCK : end].tobytes())
        keys.append(running.copy().digest())
    return keys

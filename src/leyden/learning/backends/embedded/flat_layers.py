"""Decoder layers of the usual shape over flat tokens, in fewer operations than their modules take.

Promises: hidden states equal those of the modules up to rounding; whether they do is tried on a probe when the model is
wrapped, and after each change of the weights by the sampler. Queries, keys and values come from one product over joined
weights, rotations are products of complex numbers, nothing is padded to rows of equal length, and a pass that only
fills the cache leaves out what no key depends on. Models with other layers (see `anatomy`), or that compute something
else than the probe expects, are not wrapped: `flat_model` says None and their own modules are used. Rows of one pass
may have different low-rank updates over the same base; see `adapters`.

    T tokens of a pass, of any sequences   E hidden size   H query heads   K key-value heads   D head size
    P = H + K heads that are rotated   N = H + 2K heads of one product
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from leyden.learning.backends.embedded.adapters import LowRank, base_of, is_known, low_rank
from leyden.learning.backends.embedded.anatomy import Anatomy, Norm, anatomy_of, norm_of
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.precision import LOW
from leyden.learning.backends.embedded.rowwise import reciprocal_rms
from leyden.learning.backends.embedded.shadow import JoinedLinear, ShadowLinear

PROBE_TOLERANCE = {LOW: 0.05, torch.float32: 1e-3}
"""Largest distance of the hidden states of modules and layers here, relative to their norm, by the type of the
computation. Rounding gives a tenth of it; a forgotten norm or a wrong rotation gives 0.3 and more."""


class FlatAttention(Protocol):
    """Keys and values of one pass; see `flat`."""

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Keep what the tokens of this pass bring."""

    def attend(self, layer: int, q_THD: Tensor, scaling: float, window: int | None) -> Tensor:
        """out_THD, after `store` of the same layer."""


Adapter = list[dict[str, LowRank]]
"""The low-rank updates of a policy: for each layer those of its products, "qkv", "o", "gate", "up" and "down"."""
Turns = dict[str | None, Tensor]
"""The rotation of each position (T, 1, D/2), complex, by the kind of layer."""
Adapted = Sequence[tuple[slice, Adapter]]
"""Which rows of a pass have which adapter."""


@dataclass(slots=True)
class _Layer:
    """Parts of the layer of the clone; parameters are read from them at each pass."""

    module: Any
    about: Anatomy
    turns: str | None
    """Which rotation, where layers have different ones."""
    qkv: tuple[Any, Any, Any]
    joined: JoinedLinear | None
    """`qkv` in one product, where they are bfloat16."""
    o: Any
    gate: Any
    up: Any
    down: Any


class FlatModel:
    """The base model of a clone (see `shadow`) without its head. Reads its parameters at each pass."""

    def __init__(self, base: Any, norm: Norm, found: Sequence[Anatomy]) -> None:
        """`norm` is the last one, `found` the layers."""
        attention = base.layers[0].self_attn
        self._base, self._last_norm = base, norm
        self._head_dim = int(attention.head_dim)
        self._num_heads = base_of(attention.q_proj).out_features // self._head_dim
        self._num_kv_heads = base_of(attention.k_proj).out_features // self._head_dim
        self._low = LOW if any(isinstance(m, ShadowLinear) for m in base.modules()) else torch.float32
        turns = _turns_of(base)
        self._layers = [_layer_of(*one) for one in zip(base.layers, found, turns, strict=True)]
        self.adapter: Adapter = [_adapter_of(layer, self._low) for layer in self._layers]

    @property
    def windows(self) -> list[int | None]:
        """Of the layers."""
        return [layer.about.window for layer in self._layers]

    @property
    def embedding(self) -> Tensor:
        """Shared by all models over one base, and by no others."""
        weight: Tensor = self._base.embed_tokens.weight
        return weight

    def refresh(self) -> None:
        """Take the weights that the source has now."""
        for copied in self._copies():
            copied.refresh()

    def stale(self) -> int:
        """Joined layers and updates whose copy was made before the last change of their sources."""
        return sum(copied.is_stale() for copied in self._copies())

    def _copies(self) -> list[JoinedLinear | LowRank]:
        joined = [layer.joined for layer in self._layers if layer.joined is not None]
        return [*joined, *(update for updates in self.adapter for update in updates.values())]

    def fill(self, ids_T: Tensor, positions_T: Tensor, attention: FlatAttention) -> None:
        """Store keys and values only: of the last layer nothing else is computed."""
        x_TE, turns = self._start(ids_T, positions_T)
        last, adapted = len(self._layers) - 1, self._own()
        for n in range(last):
            self._layer(n, x_TE, turns, attention, adapted)
        self._project(last, x_TE, turns, attention, adapted)

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, attention: FlatAttention, adapted: Adapted | None = None
    ) -> Tensor:
        """Last hidden states (T, E) after the final norm, in the type of the linear layers. `adapted`: rows and their
        adapters, if not all have the model's own."""
        x_TE, turns = self._start(ids_T, positions_T)
        adapted = self._own() if adapted is None else adapted
        for n in range(len(self._layers)):
            self._layer(n, x_TE, turns, attention, adapted)
        return self._last_norm.of(x_TE).to(self._low)

    def _own(self) -> Adapted:
        return [(slice(None), self.adapter)]

    def _start(self, ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Turns]:
        """Embeddings (T, E), which the layers add to, and the rotations of each position."""
        x_TE: Tensor = self._base.embed_tokens(ids_T)
        turns = {}
        for kind in {layer.turns for layer in self._layers}:
            named = {} if kind is None else {"layer_type": kind}
            cos_1TD, sin_1TD = self._base.rotary_emb(x_TE[None], position_ids=positions_T[None], **named)
            half = self._head_dim // 2
            turns_TC = torch.complex(cos_1TD[0, :, :half].float(), sin_1TD[0, :, :half].float())
            turns[kind] = turns_TC[:, None]
        return x_TE, turns

    def _layer(self, n: int, x_TE: Tensor, turns: Turns, attention: FlatAttention, adapted: Adapted) -> None:
        """Add attention and MLP of a layer to `x_TE`."""
        layer, about = self._layers[n], self._layers[n].about
        q_THD = self._project(n, x_TE, turns, attention, adapted)
        out_T = attention.attend(n, q_THD, about.scaling, about.window).flatten(1)
        branch_TE = _adapt(layer.o(out_T), out_T, n, "o", adapted)
        x_TE.add_(about.after[0].of(branch_TE.float()) if about.after else branch_TE)
        inner_TE = about.before[1].of(x_TE).to(self._low)
        gate_TI = _adapt(layer.gate(inner_TE), inner_TE, n, "gate", adapted)
        up_TI = _adapt(layer.up(inner_TE), inner_TE, n, "up", adapted)
        inner_TI = layer.module.mlp.act_fn(gate_TI).mul_(up_TI)
        branch_TE = _adapt(layer.down(inner_TI), inner_TI, n, "down", adapted)
        x_TE.add_(about.after[1].of(branch_TE.float()) if about.after else branch_TE)

    def _project(self, n: int, x_TE: Tensor, turns: Turns, attention: FlatAttention, adapted: Adapted) -> Tensor:
        """Rotated queries (T, H, D); keys and values go to `attention`."""
        layer, about = self._layers[n], self._layers[n].about
        inner_TE = about.before[0].of(x_TE).to(self._low)
        if layer.joined is not None:
            all_T = layer.joined(inner_TE)
        else:
            all_T = torch.cat([linear(inner_TE) for linear in layer.qkv], -1)
        _adapt(all_T, inner_TE, n, "qkv", adapted)
        all_TND = all_T.view(len(all_T), -1, self._head_dim)
        num_turned = self._num_heads + self._num_kv_heads
        qk_TPD = all_TND[:, :num_turned].float()
        if about.heads:
            qk_TPD = self._norm_heads(qk_TPD, *about.heads, paired=layer.joined is not None)
        qk_TPD = _rotate(qk_TPD, turns[layer.turns], paired=layer.joined is not None).to(all_T.dtype)
        attention.store(n, qk_TPD[:, self._num_heads :], all_TND[:, num_turned:])
        return qk_TPD[:, : self._num_heads]

    def _norm_heads(self, qk_TPD: Tensor, q_norm: Norm, k_norm: Norm, *, paired: bool) -> Tensor:
        """The norms of queries and keys at once; `paired` says that heads are in the order of `_pairs`."""
        scale_PD = torch.cat([q_norm.scale.expand(self._num_heads, -1), k_norm.scale.expand(self._num_kv_heads, -1)])
        out: Tensor = qk_TPD * reciprocal_rms(qk_TPD, q_norm.eps)
        return out.mul_(scale_PD[:, _pairs(self._head_dim)] if paired else scale_PD)


def flat_model(causal: Any, loaded: LoadedModel) -> FlatModel | None:
    """The flat layers of a clone of `loaded`, or None if its layers are of no known shape or the probe comes out
    different."""
    base = causal.base_model
    if not all(hasattr(base, name) for name in ("layers", "norm", "embed_tokens", "rotary_emb")):
        return None
    seen: list[tuple[float, int | None]] = []

    def noting(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        seen.append((scaling, window))
        return causal_kernel(module, q, k, v, scaling, window)

    num = 7
    ids_T = torch.arange(num, device=loaded.device) * 5 % loaded.vocab_size
    with torch.no_grad(), attention_scope(noting):
        expected_TE = loaded.hidden(ids_T[None], torch.arange(num, device=loaded.device)[None])[0].float()
    norm = norm_of(base.norm)
    found = [
        anatomy_of(layer, *asked, is_low=loaded.dtype == "bfloat16")
        for layer, asked in zip(base.layers, seen, strict=True)
    ]
    known = [about for about in found if about is not None]
    if norm is None or len(known) < len(found) or not all(is_known(module) for module in base.modules()):
        return None
    if any(about.heads[0].eps != about.heads[1].eps for about in known if about.heads):
        return None
    try:
        model = FlatModel(base, norm, known)
        distance = float((probe(model, ids_T).float() - expected_TE).norm() / expected_TE.norm())
    except (AttributeError, RuntimeError, TypeError):  # parts that look like ours and take other arguments
        return None
    return model if distance <= PROBE_TOLERANCE[model._low] else None


def probe(model: FlatModel, ids_T: Tensor) -> Tensor:
    """Last hidden states (T, E) of one sequence, without a cache."""
    with torch.no_grad():
        return model.hidden(ids_T, torch.arange(len(ids_T), device=ids_T.device), _Alone())


class _Alone:
    """Attention of one sequence that nothing precedes."""

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        self._k_TKD, self._v_TKD = k_TKD, v_TKD

    def attend(self, layer: int, q_THD: Tensor, scaling: float, window: int | None) -> Tensor:
        T = len(q_THD)
        seen_TT = torch.ones(T, T, dtype=torch.bool, device=q_THD.device).tril()
        if window is not None:
            seen_TT = seen_TT.triu(1 - window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, self._k_TKD, self._v_TKD))
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def _turns_of(base: Any) -> list[str | None]:
    """The kind of rotation of each layer, where the model has several."""
    if "layer_type" not in inspect.signature(base.rotary_emb.forward).parameters:
        return [None] * len(base.layers)
    return list(base.config.layer_types)


def _layer_of(module: Any, about: Anatomy, turns: str | None) -> _Layer:
    own, mlp = module.self_attn, module.mlp
    qkv = (base_of(own.q_proj), base_of(own.k_proj), base_of(own.v_proj))
    joined = JoinedLinear(qkv, _order(own)) if all(type(part) is ShadowLinear for part in qkv) else None
    o, gate, up, down = (base_of(part) for part in (own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return _Layer(module, about, turns, qkv, joined, o, gate, up, down)


def _adapter_of(layer: _Layer, dtype: torch.dtype) -> dict[str, LowRank]:
    own, mlp = layer.module.self_attn, layer.module.mlp
    order = _order(own) if layer.joined is not None else None
    found = {"qkv": low_rank([own.q_proj, own.k_proj, own.v_proj], order, dtype)}
    for name, linear in (("o", own.o_proj), ("gate", mlp.gate_proj), ("up", mlp.up_proj), ("down", mlp.down_proj)):
        found[name] = low_rank([linear], None, dtype)
    return {name: update for name, update in found.items() if update is not None}


def _adapt(out_TO: Tensor, x_TI: Tensor, n: int, name: str, adapted: Adapted) -> Tensor:
    """The product of a layer and, in place, what the adapter of each row adds to it."""
    for rows, adapter in adapted:
        update = adapter[n].get(name)
        if update is not None:
            update.add_to(out_TO[rows], x_TI[rows])
    return out_TO


def _order(own: Any) -> Tensor:
    """Of the outputs of queries, keys and values in one product; see `_pairs`."""
    q, k, v = (base_of(part).out_features for part in (own.q_proj, own.k_proj, own.v_proj))
    turned = torch.arange(q + k).view(-1, own.head_dim)[:, _pairs(own.head_dim)].flatten()
    return torch.cat([turned, torch.arange(q + k, q + k + v)])


def _pairs(size: int) -> Tensor:
    """The order of a head in which the two numbers that are rotated together are neighbours. Queries and keys have it
    alike, so no product of them shows it."""
    return torch.arange(size).view(2, -1).T.flatten()


def _rotate(x_TPD: Tensor, turns_T1C: Tensor, *, paired: bool) -> Tensor:
    """The rotary embedding of float32 heads; those that are not in the order of `_pairs` are brought into it."""
    if paired:
        pairs_TPC = torch.view_as_complex(x_TPD.view(*x_TPD.shape[:-1], -1, 2))
    else:
        half = x_TPD.shape[-1] // 2
        pairs_TPC = torch.complex(x_TPD[..., :half], x_TPD[..., half:])
    return torch.view_as_real(pairs_TPC * turns_T1C).flatten(-2)

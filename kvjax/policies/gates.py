"""Gates: small networks that score a token once, from its hidden state or its query, key and value."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import PolicyError
from kvjax.policies.parameters import ModelSizes, Parameters, Parts
from kvjax.policies.written import Token, Written

Array = jax.Array
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
OUTPUTS = {"none": lambda x: x, "sigmoid": jax.nn.sigmoid, "log_sigmoid": jax.nn.log_sigmoid}
EPSILON = 1e-6  # of RMS norms
EXACT = jax.lax.Precision.HIGHEST
SMALLEST = -1e30  # the logit of padding
CHUNK = 512  # tokens of a prompt whose logits are computed at once


@dataclasses.dataclass(frozen=True)
class Gate(Parameters):
    """A pure function of a layer's parameters and a token that scores the token for each KV head.

    Attributes:
      matrices: the names of the parts that are matrices, contracted over their last axis; other parts are biases.
      hidden_only: whether the gate reads the hidden state alone, and neither queries nor keys nor values.
      output: the function applied to the result: ``none``, ``sigmoid`` or ``log_sigmoid``.
      whole_prompt: whether the score of a token depends on the other tokens of the prompt, later ones included.
    """

    output: str = dataclasses.field(default="none", kw_only=True)
    trained = True
    hidden_only: ClassVar[bool] = False
    whole_prompt: ClassVar[bool] = False
    matrices: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        choice_argument("output", self.output, tuple(OUTPUTS))

    def raw(self, params: Parts, token: Token) -> Array:
        """Returns the scores before `output`, [B, K, n] float32."""
        raise NotImplementedError

    def __call__(self, params: Parts, token: Token) -> Array:
        """Returns the scores of tokens, [B, K, n] float32.

        Args:
          params: of one layer, see `parts`.
          token: the tokens.
        """
        return OUTPUTS[self.output](self.raw(params, token))

    def initial(self, key: Array, sizes: ModelSizes) -> dict[str, Array]:
        """Returns one layer's initial parameters, [K or 1, ...]: random normal matrices, and biases of 0.

        Args:
          key: [] random key.
          sizes: of the model.
        """
        made = {}
        for number, (part, shape) in enumerate(sorted(self.parts(sizes).items())):
            matrix = part in self.matrices
            scale = math.sqrt(1 / shape[-1]) if matrix else 0.0
            made[part] = scale * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
        return made


@dataclasses.dataclass(frozen=True)
class LinearGate(Gate):
    """A linear function of the hidden state for each KV head (KVzap, arXiv:2601.07891).

    Arrays of a layer: ``kernel`` [K, E], ``bias`` [K].
    """

    name = "linear_gate"
    hidden_only = True
    matrices = frozenset({"kernel"})

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        return {"kernel": (sizes.kv_heads, sizes.hidden), "bias": (sizes.kv_heads,)}

    def raw(self, params: Parts, token: Token) -> Array:
        hidden = token.hidden.astype(jnp.float32)
        score = jnp.einsum("bne,ke->bkn", hidden, params["kernel"], precision=EXACT)
        return score + params["bias"][:, None]


@dataclasses.dataclass(frozen=True)
class MlpGate(Gate):
    """A network with one hidden layer, on the hidden state (KVzap, arXiv:2601.07891; TRIM-KV, arXiv:2512.03324).

    Arrays of a layer: ``up`` [1, width, E], ``up_bias`` [1, width], ``down`` [K, width], ``down_bias`` [K].

    Attributes:
      width: features of the hidden layer.
      activation: ``gelu`` (x·Φ(x), not its approximation by tanh), ``relu`` or ``silu``.
    """

    width: int = 512
    activation: str = "gelu"
    name = "mlp_gate"
    hidden_only = True
    matrices = frozenset({"up", "down"})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", count_argument("width", self.width, minimum=1))
        choice_argument("activation", self.activation, tuple(ACTIVATIONS))

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        return _network(self.width, sizes.hidden, sizes.kv_heads)

    def raw(self, params: Parts, token: Token) -> Array:
        return _run_network(params, token.hidden, self.activation)


@dataclasses.dataclass(frozen=True)
class QkvGate(Gate):
    """A network with one hidden layer, on the layer's queries, keys and values (Locret, arXiv:2410.01805, sec. 3.2).

    Arrays of a layer: those of `MlpGate` with (H + 2 K) D inputs: the queries of all heads before rotation, the keys
    before rotation, and the values. All KV heads of a layer must be under one policy.

    Attributes:
      width: features of the hidden layer.
      activation: ``gelu``, ``relu`` or ``silu``.
    """

    width: int = 1024
    activation: str = "silu"
    name = "qkv_gate"
    matrices = frozenset({"up", "down"})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", count_argument("width", self.width, minimum=1))
        choice_argument("activation", self.activation, tuple(ACTIVATIONS))

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        inputs = sizes.kv_heads * (sizes.queries + 2) * sizes.dim
        return _network(self.width, inputs, sizes.kv_heads)

    def raw(self, params: Parts, token: Token) -> Array:
        batch, kv_heads, queries, n, dim = token.query.shape
        heads = (token.query.reshape(batch, kv_heads * queries, n, dim), token.key, token.value)
        # [B, n, (H + 2 K) D]
        inputs = jnp.concatenate(
            [jnp.swapaxes(x.astype(jnp.float32), 1, 2).reshape(batch, n, -1) for x in heads], axis=2
        )
        if inputs.shape[2] != params["up"].shape[2]:
            raise PolicyError(
                f"a qkv gate reads all KV heads of a layer ({params['up'].shape[2]} inputs), but this policy ranks "
                f"{kv_heads} of them ({inputs.shape[2]} inputs); put all heads under one policy."
            )
        return _run_network(params, inputs, self.activation)


@dataclasses.dataclass(frozen=True)
class SinkGate(Gate):
    """Attention of the token to itself, in competition with learned sinks (Fast KVzip, arXiv:2601.17668, section 3).

    With q = rms(W_q x) for each query head, k = rms(W_k x) for each KV head and the logit l = k·q / √w + c, the score
    is the mean over the query heads that share a KV head of 1 / (1 + Σ exp(base·q / √w - l)), over the sinks.

    Arrays of a layer: ``query`` [K, G, w, E], ``key`` [K, w, E], ``bias`` [K, G], ``base`` [K, sinks, w].

    Attributes:
      width: w, the number of features of its queries and keys.
      sinks: the number of learned sinks.
    """

    width: int = 16
    sinks: int = 16
    name = "sink_gate"
    hidden_only = True
    matrices = frozenset({"query", "key", "base"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("width", "sinks"):
            object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=1))

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        kv_heads, queries, hidden = sizes.kv_heads, sizes.queries, sizes.hidden
        return {
            "query": (kv_heads, queries, self.width, hidden), "key": (kv_heads, self.width, hidden),
            "bias": (kv_heads, queries), "base": (kv_heads, self.sinks, self.width),
        }  # fmt: skip

    def raw(self, params: Parts, token: Token) -> Array:
        hidden, scale = token.hidden.astype(jnp.float32), self.width**-0.5
        # [B, K, G, n, w] and [B, K, n, w]
        query = _rms(jnp.einsum("bne,kgwe->bkgnw", hidden, params["query"], precision=EXACT))
        key = _rms(jnp.einsum("bne,kwe->bknw", hidden, params["key"], precision=EXACT))
        # [B, K, G, n]
        own = scale * jnp.einsum("bkgnw,bknw->bkgn", query, key, precision=EXACT) + params["bias"][:, :, None]
        # [B, K, G, n, sinks]
        others = scale * jnp.einsum("bkgnw,krw->bkgnr", query, params["base"], precision=EXACT)
        return jnp.mean(1 / (1 + jnp.sum(jnp.exp(others - own[..., None]), axis=4)), axis=2)


@dataclasses.dataclass(frozen=True)
class ChannelGate(Gate):
    """A feature of the first query of each KV head, or of its key, times a weight (DMS, arXiv:2506.05345).

    The model computes the feature in any case. DMS trains the model so that the feature is the logit of a token's
    eviction, which does not enter attention; the weight is -1 before training. Under a model that is constant, the
    feature remains a part of attention.

    Arrays of a layer: ``weight`` [K], ``bias`` [K].

    Attributes:
      source: ``query`` or ``key``, before rotation.
      channel: the index of the feature.
    """

    source: str = "query"
    channel: int = 0
    name = "channel_gate"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice_argument("source", self.source, ("query", "key"))
        object.__setattr__(self, "channel", count_argument("channel", self.channel))

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        if self.channel >= sizes.dim:
            raise PolicyError(
                f"channel={self.channel} is not valid: a head has {sizes.dim} features; give 0 to {sizes.dim - 1}."
            )
        return {"weight": (sizes.kv_heads,), "bias": (sizes.kv_heads,)}

    def initial(self, key: Array, sizes: ModelSizes) -> dict[str, Array]:
        return {
            part: jnp.full(shape, -1.0 if part == "weight" else 0.0, jnp.float32)
            for part, shape in self.parts(sizes).items()
        }

    def raw(self, params: Parts, token: Token) -> Array:
        # [B, K, n, D]
        found = token.query[:, :, 0] if self.source == "query" else token.key
        feature = found[..., self.channel].astype(jnp.float32)
        return params["weight"][:, None] * feature + params["bias"][:, None]


@dataclasses.dataclass(frozen=True)
class AttentionGate(Gate):
    """A small attention over all tokens of the prompt, later ones included (Attention-Gate, arXiv:2410.12876).

    The hidden states attend to those of the prompt, in `heads` heads of `width` features without rotation. A linear
    function of the result is the score. A token is therefore scored when the whole prompt is known: the policy must be
    a compressor, ``learned(..., every=None)``, and the prompt in one block.

    Arrays of a layer: ``query``, ``key`` and ``value`` [1, heads, width, E], ``out`` [K, heads * width], ``bias`` [K].

    Attributes:
      width: features of a head.
      heads: the number of heads.
    """

    width: int = 16
    heads: int = 4
    output: str = dataclasses.field(default="sigmoid", kw_only=True)
    name = "attention_gate"
    whole_prompt = True
    matrices = frozenset({"query", "key", "value", "out"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("width", "heads"):
            object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=1))

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        inner = (1, self.heads, self.width, sizes.hidden)
        out = (sizes.kv_heads, self.heads * self.width)
        return {"query": inner, "key": inner, "value": inner, "out": out, "bias": (sizes.kv_heads,)}

    def raw(self, params: Parts, token: Token) -> Array:
        hidden = token.hidden.astype(jnp.float32)
        # [B, n, A, w] each
        query, key, value = (
            jnp.einsum("bne,awe->bnaw", hidden, params[part][0], precision=EXACT) for part in ("query", "key", "value")
        )
        counted = (token.position >= 0)[:, None, None]

        def attend(query: Array) -> Array:
            """Returns the scores [B, K, t] of some queries [B, t, A, w]."""
            logits = self.width**-0.5 * jnp.einsum("btaw,bnaw->batn", query, key, precision=EXACT)
            weights = jax.nn.softmax(jnp.where(counted, logits, SMALLEST), axis=3)
            made = jnp.einsum("batn,bnaw->btaw", weights, value, precision=EXACT)
            made = made.reshape(*made.shape[:2], -1)
            return jnp.einsum("bti,ki->bkt", made, params["out"], precision=EXACT) + params["bias"][:, None]

        batch, n = token.position.shape
        if n <= CHUNK:
            return attend(query)
        # The logits of all queries at once would take memory that grows with the square of the prompt.
        query = jnp.pad(query, ((0, 0), (0, -n % CHUNK), (0, 0), (0, 0)))
        chunks = jnp.moveaxis(query.reshape(batch, -1, CHUNK, self.heads, self.width), 1, 0)
        # [B, K, chunks, t]
        found = jnp.moveaxis(jax.lax.map(attend, chunks), 0, 2)
        return found.reshape(batch, found.shape[1], -1)[:, :, :n]


#: Gates by their names in text specs such as ``learned(gate=mlp(width=64))``.
GATES: dict[str, Callable[..., Gate]] = {
    "linear": LinearGate, "mlp": MlpGate, "qkv": QkvGate, "sink": SinkGate, "channel": ChannelGate,
    "attention": AttentionGate,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GateScore(Written):
    """The score of a gate, computed once per token.

    Attributes:
      gate: the gate.
    """

    gate: Gate

    @property
    def name(self) -> str:
        return f"{self.gate.name}_score"

    @property
    def whole_prompt(self) -> bool:
        return self.gate.whole_prompt

    @property
    def reads(self) -> tuple[Parameters, ...]:
        return (self.gate,)

    def write(self, token: Token, params: Mapping[str, Parts]) -> Array:
        return self.gate(params[self.gate.name], token)


def _network(width: int, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a network with one hidden layer that all KV heads share, and one output per KV head."""
    return {"up": (1, width, inputs), "up_bias": (1, width), "down": (outputs, width), "down_bias": (outputs,)}


def _run_network(params: Parts, x: Array, activation: str) -> Array:
    """Returns [B, K, n] float32 for x [B, n, inputs]."""
    up = jnp.einsum("bni,wi->bnw", x.astype(jnp.float32), params["up"][0], precision=EXACT) + params["up_bias"][0]
    down = jnp.einsum("bnw,kw->bkn", ACTIVATIONS[activation](up), params["down"], precision=EXACT)
    return down + params["down_bias"][:, None]


def _rms(x: Array) -> Array:
    """Divides [..., w] by the root of the mean square of its last axis."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON)

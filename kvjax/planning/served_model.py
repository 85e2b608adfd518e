"""The numbers of a model that plans of serving depend on, and the slots that a policy has in each layer."""

import collections
import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.arguments import check_type, count_argument
from kvjax.cache.planning.head_groups import branches_of, by_head
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.errors import InputError, shown
from kvjax.inputs import LARGEST_COUNT, check_count
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import active_parameter_count, parameter_count
from kvjax.parallel.host_memory import HOST
from kvjax.policies.base import Policy
from kvjax.storage.base import Storage

#: The slots of each layer: one number for all, one for each layer, or None for a full cache, of all layers or of one.
Budget = int | Sequence[int | None] | None
#: The slots of requests of different prompts: the same for all, or a function of the number of tokens of a prompt.
BudgetOfPrompt = Budget | Callable[[int], Budget]

#: The largest number of parameters.
LARGEST = 1 << 50

#: The dtype of numbers of 2 and of 4 bytes, by name; NumPy has no bfloat16.
DTYPES = {2: "float16", 4: "float32"}


class LayerRun(NamedTuple):
    """Layers whose slots have the same bytes and the same budget.

    Attributes:
      layers: how many these are.
      slot_bytes: of the key and the value of a token, in one of them.
      budget: the slots of each; None = a full cache.
      host_bytes: those of `slot_bytes` that are in host memory.
    """

    layers: int
    slot_bytes: int
    budget: int | None
    host_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of a token in all of them."""
        return self.layers * self.slot_bytes

    @property
    def on_host(self) -> int:
        """Those of `total` that are in host memory."""
        return self.layers * self.host_bytes

    @property
    def on_device(self) -> int:
        """Those of `total` that are in the device's memory."""
        return self.total - self.on_host

    def held(self, tokens: int) -> int:
        """Returns the live slots of a text in each of them."""
        return tokens if self.budget is None else min(tokens, self.budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The numbers of a model that its costs depend on.

    Attributes:
      params: of the whole model.
      layers: the number of layers.
      heads: query heads.
      kv_heads: KV heads.
      dim: features of a head.
      width: bytes of a number of weights, keys and values.
      active_params: those that a token is multiplied by, in a model of experts; None = all.
      layer_slot_bytes: bytes of the key and the value of a token in each layer, for storages that encode, or layers
        that differ; None = `2 * kv_heads * dim * width` in each.
      layer_host_bytes: those of them that are in host memory; None = 0 in each layer.

    Raises:
      InputError: a number that is not a whole number of at least 1, KV heads that do not divide the query heads, or
        `layer_slot_bytes` that is not a sequence with such a number for each layer; or `layer_host_bytes` that exceeds
        these.
    """

    params: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    width: int = 2
    active_params: int | None = None
    layer_slot_bytes: tuple[int, ...] | None = None
    layer_host_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("params", "layers", "heads", "kv_heads", "dim", "width", "active_params"):
            if (value := getattr(self, name)) is not None or name != "active_params":
                most = LARGEST if "params" in name else None
                count_argument(name, value, minimum=1, maximum=most, error=InputError)
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads must divide heads={self.heads}; got {self.kv_heads}.")
        for name, least in (("layer_slot_bytes", 1), ("layer_host_bytes", 0)):
            if (given := getattr(self, name)) is None:
                continue
            if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != self.layers:
                raise InputError(
                    f"{name} must be a sequence with one number for each of {self.layers} layers; got {shown(given)}."
                )
            for layer, each in enumerate(given):
                most = self.by_layer[layer] if name == "layer_host_bytes" else None
                count_argument(f"{name}[{layer}]", each, minimum=least, maximum=most, error=InputError)
            object.__setattr__(self, name, tuple(given))

    @classmethod
    def of(cls, config: DecoderConfig, width: int = 2, storage: Storage | None = None) -> "ServedModel":
        """Returns the numbers of a decoder.

        Args:
          config: the decoder.
          width: see `ServedModel`; 2 or 4.
          storage: that holds keys and values, with as many bytes as `Storage.bytes_per_slot` says of each layer and
            each memory; None = numbers of `width` bytes on the device.

        Raises:
          InputError: another width, or a storage whose slots are not all of the same bytes.
          StorageError: a storage that cannot hold the decoder's heads.
        """
        if width not in DTYPES:
            raise InputError(f"width must be 2 or 4 bytes; got {shown(width)}.")
        by_layer = on_host = None
        check_type("config", config, DecoderConfig, "a DecoderConfig, such as kvjax.models.shapes.by_name('llama2-7b')")
        if storage is not None:
            check_type("storage", storage, Storage, "a storage, such as kvjax.storage.int8()")
            _check_slots_alike(storage)
            held = by_head(storage.bound(config.num_kv_heads), config.num_layers, config.num_kv_heads)

            def of_memory(memory: str | None) -> tuple[int, ...]:
                dtype = np.dtype(DTYPES[width])
                return tuple(sum(each.bytes_per_slot(config.head_dim, dtype, memory) for each in own) for own in held)

            by_layer = of_memory(None)
            on_host = of_memory(HOST) if storage.on_host else None
        return cls(
            params=parameter_count(config), layers=config.num_layers, heads=config.num_heads,
            kv_heads=config.num_kv_heads, dim=config.head_dim, width=width,
            active_params=active_parameter_count(config), layer_slot_bytes=by_layer, layer_host_bytes=on_host,
        )  # fmt: skip

    @property
    def active(self) -> int:
        """The parameters that a token is multiplied by."""
        return self.params if self.active_params is None else self.active_params

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.params * self.width

    @property
    def by_layer(self) -> tuple[int, ...]:
        """Bytes of the key and the value of a token in each layer."""
        if self.layer_slot_bytes is not None:
            return self.layer_slot_bytes
        return (2 * self.kv_heads * self.dim * self.width,) * self.layers

    @property
    def host_by_layer(self) -> tuple[int, ...]:
        """Those of `by_layer` that are in host memory."""
        return (0,) * self.layers if self.layer_host_bytes is None else self.layer_host_bytes

    def check_on_device(self, plan: str) -> None:
        """Checks that no slots are in host memory.

        Args:
          plan: the plan that takes only slots in the device's memory, for the message.

        Raises:
          InputError: some are.
        """
        if any(self.host_by_layer):
            raise InputError(
                f"{plan}: slots are in the device's memory; this model's storage holds {sum(self.host_by_layer)} of "
                f"{self.token_bytes} bytes of a token in host memory. Leave out the storage's memory."
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes of the key and the value of a token in one layer, where all layers are alike.

        Raises:
          InputError: layers differ; see `by_layer`.
        """
        if len({*self.by_layer}) != 1:
            raise InputError(
                "layers have slots of different bytes; read by_layer or token_bytes instead of slot_bytes."
            )
        return self.by_layer[0]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and the values of a token in all layers."""
        return sum(self.by_layer)

    def runs(self, budget: Budget) -> tuple[LayerRun, ...]:
        """Returns the layers with a budget of slots, those that are alike together.

        Args:
          budget: slots of each layer, or of one each, such as `layer_budgets` returns; None = a full cache.

        Raises:
          InputError: a budget below 1, or another number of budgets than layers.
        """
        if budget is None or isinstance(budget, numbers.Integral):
            own: tuple[Any, ...] = (budget,) * self.layers
        elif isinstance(budget, Sequence) and not isinstance(budget, str):
            own = tuple(budget)
        else:
            raise InputError(f"budget must be a number of slots, or one per layer; got {shown(budget)}.")
        if len(own) != self.layers:
            raise InputError(f"budget must have a number for each of {self.layers} layers; got {len(own)}.")
        for each in own:
            if each is not None:
                check_count("budget", each)
        own = tuple(each if each is None else int(each) for each in own)
        counts = collections.Counter(zip(self.by_layer, own, self.host_by_layer, strict=True))
        return tuple(LayerRun(layers, slot, each, host) for (slot, each, host), layers in counts.items())

    def runs_of(self, budget: BudgetOfPrompt, prompt: int) -> tuple[LayerRun, ...]:
        """Returns the `runs` of a request with a prompt of `prompt` tokens."""
        return self.runs(budget(prompt) if callable(budget) else budget)

    def cache_bytes(self, tokens: int, budget: Budget = None) -> int:
        """Returns the bytes of the live slots of a text, of which each layer holds at most its budget; see `runs`.

        Args:
          tokens: of the text.
          budget: see `runs`.

        Raises:
          InputError: `tokens` is not a whole number of at least 0, or see `runs`.
        """
        count_argument("tokens", tokens, error=InputError)
        return sum(each.total * each.held(tokens) for each in self.runs(budget))

    def prefill_flops(self, tokens: int, *, statistics_layers: int = 0) -> float:
        """Returns the FLOPs of a prompt: weights, and the two causal products of attention.

        Args:
          tokens: of the prompt.
          statistics_layers: the number of layers in which probabilities are summed over queries, which takes half as
            much as attention.

        Raises:
          InputError: `tokens` is not a whole number of at least 0, or `statistics_layers` not one from 0 to `layers`.
        """
        count_argument("tokens", tokens, error=InputError)
        summed = count_argument("statistics_layers", statistics_layers, maximum=self.layers, error=InputError)
        attention = self.heads * self.dim * tokens**2
        return 2 * self.active * tokens + (2 * self.layers + summed) * attention


def _check_slots_alike(storage: Storage) -> None:
    """Checks that all slots of a layer have the same bytes, and that a row has nothing else.

    Raises:
      InputError: if not.
    """
    layout, reason = storage.resolved_layout, None
    if storage.residual and storage.new_tokens_separate:
        reason = f"its newest {storage.residual} are exact, on the device"
    elif storage.sinks and storage.new_tokens_separate:
        reason = f"its first {storage.sinks} are exact, on the device"
    elif layout.block_size is not None:
        reason = f"its newest are exact, until {layout.block_size} are encoded together"
    elif not layout.uniform:
        reason = f"its slots lie in {type(layout).__name__.lower()}, which hold tokens in more than one form"
    elif storage.sides_of("prompt"):
        reason = "besides them, a row holds what its prompt's vectors share"
    if reason is not None:
        raise InputError(
            f"bytes of {storage.name} depend on the number of tokens: {reason}. Plans take storages whose slots are "
            "all alike, such as int8."
        )


def evicting_layers(runs: Sequence[LayerRun]) -> int:
    """Returns the number of layers that have a budget."""
    return sum(each.layers for each in runs if each.budget is not None)


def layer_budgets(policy: Policy | CacheSpec, config: DecoderConfig, tokens: int) -> tuple[int | None, ...]:
    """Returns the slots that a policy has in each layer after a prompt, for `ServedModel.runs`.

    These are the slots that `kvjax.cache.planning.lowering.lower` allocates for a prompt and for any number of tokens
    after it, without the one for the newest token: a policy that evicts every m tokens has m - 1 more than its budget,
    and ``phases(full(), policy)`` has those of the prompt besides.

    Args:
      policy: such as ``split_layers(full(), h2o(64), shares=(1, 3))``.
      config: the decoder.
      tokens: of the prompt; a budget such as 0.2 is a share of them, and so is one such as `TextFraction(0.2)`.

    Raises:
      InputError: heads of a layer have different numbers of slots, the policy compresses prompts alone, or a storage
        whose slots are not all of the same bytes.
      PolicyError: see `kvjax.generate`.
    """
    check_count("tokens", tokens)
    check_type("config", config, DecoderConfig, "a DecoderConfig, such as model.config")
    spec = as_spec(policy)
    _check_slots_alike(spec.storage)
    lengths = np.array([tokens], np.int32)
    branches = branches_of(spec.policy, spec.selection, config)
    budgets = [policy.budget for branch in branches for policy in (branch.prompt, branch.decode)]
    of_text = any(each is not None and each.of_text for each in budgets)
    # With room for all that may follow, no number of slots is limited by the length of the text.
    limits = Limits(tokens, 1 if of_text else LARGEST_COUNT, shortest=tokens)
    sizes = sizes_for(lengths, 0, width=tokens, block=None, limits=limits, last_fed=not of_text)
    lowered = lower(spec, config, sizes, lengths, implementation="xla", dtype=np.float32, totals=lengths)
    newest = 0 if spec.storage.new_tokens_separate else 1
    found: list[int | None] = []
    for number, (before, groups) in enumerate(zip(lowered.layout.prompt, lowered.layout.decode, strict=True)):
        if any(own.policy.budget is not None for own in before) and not any(group.evicts for group in groups):
            raise InputError(
                f"policy {before[0].policy.name} compresses prompts and keeps all that follows; plans take policies "
                "that evict while decoding, and full."
            )
        own = {group.capacity - newest if group.evicts else None for group in groups}
        if len(own) != 1:
            raise InputError(f"the heads of layer {number} have different numbers of slots, {shown(own)}.")
        found.append(own.pop())
    return tuple(found)

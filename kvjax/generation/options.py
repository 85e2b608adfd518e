"""Options of a cache that `generate`, `log_likelihood`, `score_choices`, plans and servers have in common."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from kvjax.arguments import check_type, did_you_mean, plain_signature
from kvjax.attention import Implementation
from kvjax.cache.planning.limits import Limits
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.models.calibrate import calibrated
from kvjax.models.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.selection.base import Selection
from kvjax.storage.base import Storage
from kvjax.storage.calibration import Calibration

F = TypeVar("F", bound=Callable[..., Any])


class CacheKeywords(TypedDict, total=False):
    """The fields of `CacheOptions`, as keyword arguments."""

    storage: Storage | None
    selection: Selection | None
    prefill_block: int | None
    implementation: Implementation
    limits: Limits | None
    calibration: Calibration | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of the cache of a run: how it is stored, read and computed.

    Functions take it as ``options=``, and each of its fields as a keyword argument of that name, which has precedence.

    Attributes:
      storage: how slots are held, such as ``kvjax.storage.int8()``; None for the model's dtype.
      selection: which slots a query reads, such as ``kvjax.selection.quest(budget=512)``; None for all.
      prefill_block: the number of prompt tokens per block; None for the whole prompt in one shot. Blocks change what is
        kept: a policy evicts after each block, by what the queries so far have attended to, and later blocks attend to
        the slots that are left.
      implementation: of attention and eviction; see `kvjax.attention`.
      limits: the sizes that programs are compiled for; None for buckets, see `kvjax.cache.planning.limits`.
      calibration: of the storage or the policy, if it needs one: from `kvjax.calibrate` or `kvjax.load_calibration`.
    """

    storage: Storage | None = None
    selection: Selection | None = None
    prefill_block: int | None = None
    implementation: Implementation = "auto"
    limits: Limits | None = None
    calibration: Calibration | None = None

    def updated(self, keywords: Mapping[str, Any], function: str) -> "CacheOptions":
        """Returns the options with other fields.

        Args:
          keywords: the other fields, by name.
          function: whose keyword arguments they are, for the error.

        Raises:
          TypeError: there is no such field.
        """
        valid = [field.name for field in dataclasses.fields(self)]
        for name in keywords:
            if name not in valid:
                raise TypeError(
                    f"{function}() got an unexpected keyword argument {name!r}; {did_you_mean(name, valid)}options of "
                    f"the cache are {', '.join(valid)}."
                )
        return dataclasses.replace(self, **keywords)

    def spec(self, policy: Policy | CacheSpec) -> CacheSpec:
        """Returns the specification of a cache: the policy with this storage and selection.

        Raises:
          PolicyError: a policy of another type, or a spec that has another storage or selection already.
        """
        return as_spec(policy, self.storage, self.selection)

    def resolve(self, model: Model, policy: Policy | CacheSpec) -> tuple[Model, CacheSpec]:
        """Returns the model with the calibration of the cache, and the specification of the cache.

        Raises:
          InputError: the model is of another type.
          PolicyError: see `spec`; or the calibration of the policy is missing, or belongs to another policy.
          StorageError: the storage needs a calibration and has none, or the calibration is for another one.
        """
        check_model(model)
        spec = self.spec(policy)
        return calibrated(model, spec, self.calibration), spec


def options_of(
    options: CacheOptions | None, keywords: Mapping[str, Any], function: str, **defaults: Any
) -> CacheOptions:
    """Returns the options of a call: ``options=``, with the fields that were given one by one.

    Args:
      options: those that were given; None = the defaults.
      keywords: the fields that were given one by one, by name.
      function: that is called, for errors.
      **defaults: fields that have another default in this function.

    Raises:
      InputError: `options` is no `CacheOptions`.
      TypeError: there is no such field.
    """
    if options is None:
        options = CacheOptions(**defaults)
    check_type("options", options, CacheOptions, "kvjax.CacheOptions(...), or None")
    return options.updated(keywords, function)


def cache_keywords(**defaults: Any) -> Callable[[F], F]:
    """Returns a decorator: the last parameter of a function, ``**cache``, is shown as the fields of `CacheOptions`.

    Args:
      defaults: of fields that have another default in this function.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        fields = {field.name: defaults.get(field.name, field.default) for field in dataclasses.fields(CacheOptions)}
        keyword = inspect.Parameter.KEYWORD_ONLY
        shown = [inspect.Parameter(name, keyword, default=default) for name, default in fields.items()]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return plain_signature(function)

    return decorate

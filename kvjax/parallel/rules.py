"""Rules: over which axes of a mesh each logical axis of an array is divided. A run may override them."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax

from kvjax.arguments import check_type
from kvjax.errors import ConfigError

#: The axes of a mesh. Rows are divided over ``data``, heads and weights over ``model``, slots and weights over
#: ``context``.
AXES = ("data", "model", "context")

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Maps each logical axis to the mesh axes that it is divided over, the outermost first; () = it is replicated.

    A dimension is divided over those of its mesh axes whose sizes divide it. Each field takes a tuple of names, one
    name, ``"model+context"``, or None for ``()``.

    Attributes:
      batch: rows.
      kv_heads: KV heads of a cache, and the query heads that attend to it.
      slots: slots of a cache, over those axes that do not divide its heads. Each device attends to its own, and partial
        results are combined.
      tokens: the queries of a prompt, in attention, over those axes that do not divide its heads.
      heads: features of all heads, of the projections of queries, keys, values and outputs. Weights may be divided
        inside a head.
      mlp: hidden features of an MLP.
      vocab: rows of the token embedding and columns of the output head.
      embed: the width of the model in a matrix, over those axes that divide no other dimension of it.

    Raises:
      ConfigError: an axis that no mesh has, one that occurs twice, or one that divides rows and another dimension
        of a cache.
    """

    batch: MeshAxes = ("data",)
    kv_heads: MeshAxes = ("model",)
    slots: MeshAxes = ("model", "context")
    tokens: MeshAxes = ("model", "context")
    heads: MeshAxes = ("model", "context")
    mlp: MeshAxes = ("model", "context")
    vocab: MeshAxes = ("model", "context")
    embed: MeshAxes = ("model", "context")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            axes = _as_axes(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, axes)
        for name in ("kv_heads", "slots", "tokens"):
            if both := [axis for axis in getattr(self, name) if axis in self.batch]:
                raise ConfigError(
                    f"rules batch={both[0]} and {name}={both[0]}: a cache has both dimensions, which cannot be divided "
                    f"over the same mesh axis; remove {both[0]!r} from one of them."
                )

    @classmethod
    def parse(cls, text: str) -> "Rules":
        """Reads ``"mlp=model,vocab=none"``: the fields that differ from the defaults.

        Raises:
          ConfigError: text of another form, or an unknown field; see `Rules`.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, str | None] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, axes = (each.strip() for each in part.partition("="))
            if not equals or name not in names or name in given:
                raise ConfigError(
                    f"rules {text!r}: {part!r} is not valid; write NAME=AXES, separated by commas, with each NAME once "
                    f"and one of {', '.join(names)}, and AXES such as model, model+context or none."
                )
            given[name] = None if axes == "none" else axes
        return cls(**given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The fields that differ from the defaults, in the form that `parse` reads."""
        return ",".join(
            f"{field.name}={'+'.join(getattr(self, field.name)) or 'none'}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )

    def of(self, axis: str) -> MeshAxes:
        """Returns the mesh axes of a logical axis, one of the fields."""
        found: MeshAxes = getattr(self, axis)
        return found


def _as_axes(name: str, given: str | Sequence[str] | None) -> MeshAxes:
    """Returns the checked mesh axes of a field."""
    if given is not None:
        valid = "axes of a mesh, such as 'model', 'model+context' or None"
        check_type(f"rule {name}", given, (str, Sequence), valid, error=ConfigError)
    axes = tuple(given.split("+")) if isinstance(given, str) else tuple(given or ())
    axes = tuple(each.strip() if isinstance(each, str) else each for each in axes)
    if unknown := [each for each in axes if each not in AXES]:
        raise ConfigError(f"rule {name}={given!r}: mesh axis {unknown[0]!r} is unknown; valid axes: {', '.join(AXES)}.")
    if len(set(axes)) < len(axes):
        raise ConfigError(f"rule {name}={given!r} names a mesh axis twice.")
    return axes


_DEFAULT = Rules()
# Compiled programs depend on the rules, as they do on the mesh.
_current = jax.make_user_context(default_value=_DEFAULT)


def rules() -> Rules:
    """Returns the rules in force."""
    found: Rules = _current.value
    return found


def using(given: Rules) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `given` are the rules in force."""
    context: contextlib.AbstractContextManager[None] = _current(given)
    return context

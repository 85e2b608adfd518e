"""Names of types that annotations can say only at length, or not at all."""

from typing import Any, Literal, TypeAlias, get_args

#: A tree of arrays, as `jax.tree` takes it: nested tuples, lists, dicts and registered classes.
PyTree: TypeAlias = Any

#: A value that JSON can hold.
Json: TypeAlias = Any

#: A JSON object; a row of a results file.
JsonObject: TypeAlias = dict[str, Any]

#: An instance of a class of another program, which has no types here.
Foreign: TypeAlias = Any

#: A reference of a Pallas kernel, or what a backend's module gives in its place.
Ref: TypeAlias = Any

#: An equation of a jaxpr, or a jaxpr: jax's own types do not say that abstract values have shapes.
Equation: TypeAlias = Any

#: How attention and eviction are computed; see `kvjax.attention`.
Implementation = Literal["auto", "xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS = get_args(Implementation)

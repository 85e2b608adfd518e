"""How a checkpoint wants text to be generated: its generation_config.json, as transformers defines it."""

import dataclasses
from typing import Any

from kvjax.errors import ConfigError, InputError, shown
from kvjax.generation.sampling import Greedy, Sample, Sampler
from kvjax.inputs import LARGEST_COUNT
from kvjax.models import values
from kvjax.models.values import Json

FILE = "generation_config.json"
TOP_K = 50  # of a file that asks for sampling and says nothing else, as in transformers
#: Settings that kvjax does not have, with the value, besides null, that changes nothing.
_OTHERS: Json = {
    "num_beams": 1, "penalty_alpha": 0, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0,
    "min_new_tokens": 0, "exponential_decay_length_penalty": None, "guidance_scale": 1, "stop_strings": None,
    "watermarking_config": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """The defaults of `kvjax.generate_text`.

    Attributes:
      eos_token_ids: token ids that end a text; None = those of the `DecoderConfig`.
      sampler: how a token is chosen.
      max_new_tokens: the maximum number of new tokens; None = not set.
      unsupported: settings of the file that change what transformers generates, and that kvjax does not have.
      content: the file, which `kvjax.save` writes again; None = there is none.
    """

    eos_token_ids: tuple[int, ...] | None = None
    sampler: Sampler = dataclasses.field(default_factory=Greedy)
    max_new_tokens: int | None = None
    unsupported: tuple[str, ...] = ()
    content: bytes | None = dataclasses.field(default=None, repr=False)


def read(raw: Json, content: bytes | None = None) -> GenerationConfig:
    """Reads a generation_config.json. Null, or no value, is transformers' default; `max_length` is not used.

    Args:
      raw: the parsed file.
      content: the file.

    Raises:
      ConfigError: a value that is not valid.
    """
    try:
        sampler = _sampler(raw)
    except InputError as error:
        raise ConfigError(f"{FILE}: {error}") from None
    ids = raw.get("eos_token_id")
    ids = ids if isinstance(ids, list) or ids is None else [ids]
    if ids is not None and not all(values.is_whole(each, 0, values.MAX_ID) for each in ids):
        raise ConfigError(f"{FILE}: eos_token_id must be a token id, a list of them or null, but is {shown(ids)}.")
    maximum = raw.get("max_new_tokens")
    if maximum is not None and not values.is_whole(maximum, 1, LARGEST_COUNT):
        raise ConfigError(
            f"{FILE}: max_new_tokens must be a whole number of at least 1 or null, and at most {LARGEST_COUNT}, but is "
            f"{shown(maximum)}."
        )
    unsupported = tuple(name for name, plain in _OTHERS.items() if raw.get(name) not in (None, plain))
    return GenerationConfig(None if ids is None else tuple(ids), sampler, maximum, unsupported, content)


def _sampler(raw: Json) -> Sampler:
    """Returns the sampling method. Without ``do_sample``, or at temperature 0, only the penalty counts."""

    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        # Only the type: files that do not sample may have a number that sampling could not use, such as 0.0 for none.
        if raw.get(name) is not None and (isinstance(raw[name], bool) or not isinstance(raw[name], int | float)):
            raise ConfigError(f"{FILE}: {name} must be a number or null, but is {shown(raw[name])}.")
    if not isinstance(raw.get("do_sample"), bool | None):
        raise ConfigError(f"{FILE}: do_sample must be true, false or null, but is {shown(raw['do_sample'])}.")

    def given(name: str, default: object, none: object = None) -> Any:
        """Returns a value; `default` for null, and None for the value `none`, which changes nothing."""
        value = raw.get(name)
        value = default if value is None else value
        return None if none is not None and value == none else value

    penalty = given("repetition_penalty", 1.0)
    # Files ask to sample at a temperature of 0, which other programs take for the most probable token.
    if not given("do_sample", False) or raw.get("temperature") == 0:
        return Greedy(penalty)
    return Sample(
        temperature=given("temperature", 1.0), top_k=given("top_k", TOP_K, none=0), top_p=given("top_p", None, none=1),
        min_p=given("min_p", None, none=0), repetition_penalty=penalty,
    )  # fmt: skip

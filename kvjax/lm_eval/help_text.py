"""The arguments of ``--model kvjax`` for ``--help``, which does not import jax; `KVJaxLM` takes them."""

import textwrap

from kvjax.specs import names
from kvjax.typing import IMPLEMENTATIONS

WIDTH = 120  # columns
NEW_TOKENS, MIN_SLOTS = 256, 32  # defaults
#: Group -> argument -> its default and its meaning.
ARGUMENTS: dict[str, dict[str, tuple[object, str]]] = {
    "model": {
        "path": (
            None,
            "a folder, a GGUF file, a Hugging Face hub id, or kvjax-tiny (must be given)",
        ),
        "pretrained": (None, "another name of path"),
        "dtype": (None, f"{', '.join(names.DTYPES)}; none = float32 on a CPU, bfloat16 elsewhere"),
        "weights": (None, f"the codes to quantize the projections to: {', '.join(names.names('weights'))}, or stored"),
        "implementation": ("auto", f"of attention and eviction: {', '.join(IMPLEMENTATIONS)}"),
        "max_length": (None, "the most tokens of one request; none = the trained context of the model"),
        "device": (None, "not used; JAX_PLATFORMS in the environment chooses"),
    },
    "cache": {
        "policy": ("full", "which slots the cache keeps, such as h2o or roco(guard=4)"),
        "budget": (None, "slots per KV head (256), or a fraction of each context with a decimal point (0.2)"),
        "least_slots": (MIN_SLOTS, "slots that are kept of short contexts if budget is a fraction"),
        "storage": ("dense", "how slots are held, such as int8"),
        "selection": ("everything", "which slots a query reads, such as quest(page=16, budget=512)"),
        "calibration": (None, "a file of python -m experiments.calibrate, if the storage needs one"),
    },
    "requests": {
        "batch_size": (None, "rows of a batch, or auto for 16; none = 1; --batch_size of lm_eval sets it"),
        "max_batch_size": (None, "not used"),
        "prefill_block": (None, "tokens of a block of a prompt; none = the whole prompt in one block"),
        "rolling_prompt": (0.5, "the share of a window that is its prompt, in tasks that score whole texts"),
        "max_gen_toks": (NEW_TOKENS, "new tokens of generation tasks that do not say how many"),
        "add_bos_token": (None, "whether texts begin with BOS; none = as the tokenizer says"),
        "prefix_token_id": (None, "the context of texts that have none; none = BOS, or EOS in a model without BOS"),
        "think_end_token": (None, "the text after which the answer of a generation begins"),
        "seed": (0, "of sampling"),
    },
}


def arguments() -> str:
    """Returns the arguments in groups, each with its meaning and default, and the names that they take."""
    lines = ["--model_args of --model kvjax, as NAME=VALUE,NAME=VALUE:"]
    for title, group in ARGUMENTS.items():
        lines += ["", f"{title}:"]
        for name, (default, meaning) in group.items():
            shown = "" if "must be given" in meaning else f" (default {'none' if default is None else default})"
            lines.append(_filled(f"{name}: {meaning}{shown}", "  ", "      "))
    for kind in ("policies", "storages", "selections"):
        lines += ["", f"{kind}, or FILE.py:factory:", _filled(", ".join(names.names(kind)), "  ", "  ")]
    return "\n".join(lines)


def _filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)

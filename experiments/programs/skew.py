"""Finds the skew of a model and saves it; see `experiments.skew`."""

from absl import flags

import kvjax
from experiments import results
from experiments.config import DataConfig
from experiments.runs import data
from kvjax.checkpoint.skew import save_skew
from kvjax.models.skew import can_fold, find_skew


def start(values: flags.FlagValues) -> int:
    """Finds what a command line asks for.

    Returns:
      The exit status.
    """
    output = results.make_file(values.output)
    model = kvjax.load(values.model, dtype=values.dtype)
    count = min(values.tokens, model.config.max_positions)
    text = DataConfig(text=values.text, num_sequences=1, prompt_length=count - 1, new_tokens=1)
    # [1, count]
    tokens, _, about = data.load(text, model, seed=0)
    skew = find_skew(model, tokens)
    save_skew(output, skew, model=values.model, sample=tokens)
    use = "folded into its weights" if can_fold(model.config) else "applied by selections at run time"
    print(f"{output}: {list(skew.shape)} from {tokens.size} tokens of {about}; when loaded, it is {use}.")
    return 0

"""Finds the skew of a model from a sample text and saves it, for selections that guess (`kvjax.models.skew`).

python -m experiments.skew --model=kvjax-tiny --text=FILE.txt --output=results/kvjax-tiny-skew.safetensors
python -m experiments.run --config=infinigen_tiny --config.model.skew=results/kvjax-tiny-skew.safetensors
"""

from collections.abc import Sequence

from absl import flags

import kvjax
from experiments import cli, results
from experiments.config import DataConfig
from experiments.runs import data
from kvjax.checkpoint.skew import save_skew
from kvjax.errors import ConfigError
from kvjax.models.skew import can_fold, find_skew

TOKENS = 2048  # of the sample; no longer than the model's context


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "a checkpoint folder or a hub id", flag_values=values)
    flags.DEFINE_string("text", None, "the sample, a text file", flag_values=values)
    flags.DEFINE_integer("tokens", TOKENS, "tokens of the sample", lower_bound=2, flag_values=values)
    flags.DEFINE_string("dtype", None, "of the weights", flag_values=values)
    flags.DEFINE_string("output", None, "the file to write", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if None in (values.model, values.text, values.output):
        raise ConfigError("give --model=FOLDER, --text=FILE.txt and --output=FILE.safetensors.")
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


if __name__ == "__main__":
    cli.main(main)

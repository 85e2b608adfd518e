"""Writes tasks for lm-evaluation-harness that need no network: YAML files and files of JSON lines.

  python -m experiments.lm_eval_tasks --data=DATA/tasks --output=lm_eval_tasks
  python -m kvjax.lm_eval --model kvjax --model_args path=kvjax-tiny --include_path lm_eval_tasks \\
    --tasks kvjax_copa,kvjax_texts,kvjax_passkey

kvjax_copa, kvjax_openbookqa, kvjax_piqa, kvjax_winogrande, kvjax_rte, kvjax_mathqa: multiple choice, from the files in
--data (see `experiments.tasks.multiple_choice`), after --shots examples; only with --data.
kvjax_texts: perplexity of --texts (comma-separated) or of generated stories, 3,000 characters at a time.
kvjax_passkey, kvjax_multi_key, kvjax_associative: recall from prompts of --length tokens of kvjax-tiny.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("data", None, "folder with the multiple-choice tasks", flag_values=values)
    flags.DEFINE_integer("shots", 0, "number of examples before each multiple-choice question", 0, flag_values=values)
    flags.DEFINE_list("texts", [], "comma-separated text files for the perplexity task", flag_values=values)
    flags.DEFINE_string("output", "lm_eval_tasks", "folder to write", flag_values=values)
    flags.DEFINE_integer("length", 512, "number of tokens of a recall prompt", 128, flag_values=values)
    flags.DEFINE_integer("prompts", 32, "number of prompts of each recall task", 1, flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    # It imports jax, which `--help` does without.
    from experiments.programs import lm_eval_tasks

    return lm_eval_tasks.start(values)


if __name__ == "__main__":
    cli.main(main)

"""Measures tables and figures of H2O, RoCo and InfiniGen by name, on a small model, beside the papers' numbers.

    python -m experiments.paper h2o_table6 [--config.model.path=FOLDER]
    python -m experiments.paper all --fast

Names are those of --list, a paper (h2o, roco, infinigen) or all. Each entry prints what the paper has, what was
measured, every comparison and a verdict: CONFIRM, CONTRADICT or INCONCLUSIVE. --fast takes few rows, and decides
nothing. Results, figures and a page of all entries go to --output; measurements are kept below it, in parts/, so that a
run that is killed goes on where it was, and entries share them. --page makes the page of what is in --output. The texts
are found in --data; without any, generated stories take their place.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from experiments.papers.config import OUTPUT, PaperConfig

CONFIG = "--config=papers"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("fast", False, "the same as --sizes=trial", flag_values=values)
    about = "of texts: full for small models, half for larger ones, or trial: a quarter of an hour, no verdict"
    flags.DEFINE_enum("sizes", None, ["full", "half", "trial"], about, flag_values=values)
    flags.DEFINE_bool("list", False, "print the entries and run nothing", flag_values=values)
    flags.DEFINE_bool("page", False, "write the page of the results in --output, and run nothing", flag_values=values)
    flags.DEFINE_bool("rerun", False, "measure what there is a result of, too", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of prompts, draws and bootstraps", lower_bound=0, flag_values=values)
    where = "folder of the texts; else data/ of $KVJAX_SHARED, or of shared/ in or beside the project"
    flags.DEFINE_string("data", None, where, flag_values=values)
    about = "folders of results of other models, whose verdicts stand beside these on the page"
    flags.DEFINE_list("compare", [], about, flag_values=values)
    flags.DEFINE_string("output", None, f"folder of results; else {OUTPUT}, or {OUTPUT}-fast", flag_values=values)


def main(argv: Sequence[str]) -> int:
    names = [argument for argument in argv[1:] if not argument.startswith("-")]
    given = [argument for argument in argv[1:] if argument.startswith("-")]
    config, values = cli.parse([*argv[:1], CONFIG, *given], about=str(__doc__), define=define, cls=PaperConfig)
    # It imports jax, which `--help` does without.
    from experiments.programs import paper

    return paper.start(config, values, names)


if __name__ == "__main__":
    cli.main(main, interrupted="finished measurements were kept; the same command goes on.")

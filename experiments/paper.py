"""Measures tables and figures of H2O, RoCo and InfiniGen on a small model, and compares them with the papers.

    python -m experiments.paper h2o_table6 [--config.model.path=FOLDER]
    python -m experiments.paper all --fast

Give the names of entries (see --list), a paper (h2o, roco, infinigen) or all. Each entry prints the paper's numbers,
the measured ones, every comparison and a verdict: CONFIRM, CONTRADICT or INCONCLUSIVE. --fast uses few rows and gives
no verdicts. Results, figures and a page of all entries are written to --output. Measurements are stored in its
subfolder parts/, so that entries share them and a run that was killed can continue. --page writes the page from the
results in --output. The texts are read from --data; if there are none, generated stories are used instead.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from experiments.papers.config import OUTPUT, PaperConfig

CONFIG = "--config=papers"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("fast", False, "the same as --sizes=trial", flag_values=values)
    about = "sizes of the texts: full for small models, half for larger ones, many for half's with four times the rows "
    about += "and prompts, long for the papers' 2,048 tokens, trial for 15 minutes without verdicts"
    flags.DEFINE_enum("sizes", None, ["full", "half", "many", "long", "trial"], about, flag_values=values)
    flags.DEFINE_bool("list", False, "print the entries and run nothing", flag_values=values)
    flags.DEFINE_bool("page", False, "only write the page of the results in --output", flag_values=values)
    flags.DEFINE_bool("rerun", False, "also measure what already has a result", flag_values=values)
    flags.DEFINE_integer("seed", 0, "random seed of prompts, draws and bootstraps", lower_bound=0, flag_values=values)
    where = "folder of the texts; default: data/ in $KVJAX_SHARED, or in shared/ in or next to the project"
    flags.DEFINE_string("data", None, where, flag_values=values)
    about = "comma-separated folders of results of other models, whose verdicts are shown next to these on the page"
    flags.DEFINE_list("compare", [], about, flag_values=values)
    flags.DEFINE_string("output", None, f"folder of results; default: {OUTPUT}, or {OUTPUT}-fast", flag_values=values)


def main(argv: Sequence[str]) -> int:
    names = [argument for argument in argv[1:] if not argument.startswith("-")]
    given = [argument for argument in argv[1:] if argument.startswith("-")]
    config, values = cli.parse([*argv[:1], CONFIG, *given], about=str(__doc__), define=define, cls=PaperConfig)
    # It imports jax, which `--help` does without.
    from experiments.programs import paper

    return paper.start(config, values, names)


if __name__ == "__main__":
    cli.main(main, interrupted="finished measurements were kept; run the same command again to continue.")

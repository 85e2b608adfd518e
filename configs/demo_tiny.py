"""What keeps a fact, and what it costs: seven caches on kvjax's own small model. `make demo` runs this.

Facts are told 700 to 900 tokens before they are asked for. A policy that evicts cannot know what will be asked. Four
heads of twelve that keep everything find the facts again, and so does a selection that reads a twentieth of what a full
cache holds.

Paper: H2O (arXiv:2306.14048), SnapKV (arXiv:2404.14469), RazorAttention (arXiv:2407.15891) and InfiniGen
(arXiv:2406.19707); none has a model this small.
Expected, on a CPU (perplexity of the story, passkeys and word pairs found, bytes of the full cache's): full 2.90,
100 %, 75 %, 100 %; window 3.79, 0, 0, 19; h2o 3.98, 0, 0, 19; snapkv 5.92, 38, 62, 23; razor_attention 2.83, 100, 75,
46; infinigen 3.28, 100, 75, 110 (5 % read); h2o in int8 3.99, 0, 0, 5. There are 8 prompts of each task.
Prompts of the story are as long as those of the tasks, so that the same programs serve both.
Hardware: any CPU; one to two minutes on two cores, 40 s with programs kept.
Command: python -m experiments.run --config=demo_tiny
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

HEADS = "((1,1),(0,0),(1,0),(1,0),(0,0),(0,0))"  # of kvjax-tiny, by `kvjax.analysis.retrieval_heads`


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="demo_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        storage="int8",
        baselines=(
            "full",
            "window",
            "h2o",
            "snapkv(window=4)",
            f"razor_attention({HEADS})",
            "full + infinigen(alpha=5, cap=0.05, recent=4, first_layer=2)",
        ),
        data=DataConfig(num_sequences=8, prompt_length=984, new_tokens=40),
        recall=RecallConfig(tasks=("passkey", "associative"), prompts=8),
        repeats=0,
    )

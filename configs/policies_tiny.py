"""Every policy of kvjax on its own small model: recall of facts in reach, and perplexity, at one budget.

Paper: H2O (arXiv:2306.14048), RoCo (arXiv:2402.06262) and those of the README's table; none has a model this small.
Facts lie 250 to 450 tokens before the question: outside a window of 20 % (197 tokens), so that a policy finds them only
if it kept them for a reason. Two KV heads of eight, those that `kvjax.analysis.retrieval_heads` names, are enough.
Expected: experiments/measured/zoo-cpu.md.
Hardware: any CPU; about ten minutes on two cores.
Command: python -m experiments.run --config=zoo_tiny --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

HEADS = "((1,0),(1,0),(0,0),(0,0))"  # of kvjax-tiny


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="zoo_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        baselines=(
            "full", "roco", "window", "random", "local_only", "heavy_only", "h2o_decay", "scissorhands", "tova",
            "mean_attention", "strided(stride=4,local=32)", "fixed(block=64,columns=8)",
            "with_heavy_hitters(window)", "value_norm(h2o)", "h2o(merge=d2o())", "snapkv", "pyramidkv", "adakv(snapkv)",
            "knorm", "keydiff", "after_prefill(snapkv,then=roco)", f"duo_attention({HEADS},sinks=4,recent=150)",
            f"razor_attention({HEADS})",
        ),
        data=DataConfig(num_sequences=8, prompt_length=768, new_tokens=128),
        recall=RecallConfig(
            tasks=("passkey", "multi_key", "associative", "copy"), prompts=32, nearest=250, farthest=450
        ),
        repeats=1,
    )  # fmt: skip

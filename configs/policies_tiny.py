"""Policies of several kinds on kvjax's own small model: recall of facts in reach, and perplexity, at one budget.

Paper: H2O (arXiv:2306.14048), RoCo (arXiv:2402.06262) and those of the README's table; none has a model this small.
Facts lie 250 to 450 tokens before the question: outside a window of 20 % (197 tokens), so that a policy finds them only
if it kept them for a reason. RazorAttention keeps everything in four KV heads of twelve, which
`kvjax.analysis.retrieval_heads` names.
Expected, of Great Expectations (perplexity, passkey, word pairs; two CPU cores, jax 0.10.2): full 33.38, 100 %, 88 %;
h2o 36.96, 0, 0; roco 38.71, 0, 0; window 34.16, 0, 0; random 410, 0, 0; tova 38.41, 0, 22 %; razor_attention 33.71,
100 %, 88 %. So h2o and roco are far better than chance here, and no better than a window: on text they are worse, and
the facts are gone as well.
Hardware: any CPU; two to five minutes on two cores, most of it compilation.
Command: python -m experiments.run --config=policies_tiny --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

HEADS = "((1,1),(0,0),(1,0),(1,0),(0,0),(0,0))"  # of kvjax-tiny


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="policies_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.2),
        baselines=("full", "roco", "window", "random", "tova", f"razor_attention({HEADS})"),
        data=DataConfig(num_sequences=8, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "associative"), prompts=32, nearest=250, farthest=450),
        repeats=1,
    )

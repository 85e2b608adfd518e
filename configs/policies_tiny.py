"""Policies of several kinds on kvjax's own small model: recall of facts in reach, and perplexity, at one budget.

Paper: H2O (arXiv:2306.14048), RoCo (arXiv:2402.06262) and those of the README's table; none has a model this small.
Facts lie 250 to 450 tokens before the question: outside a window of 20 % (197 tokens), so that a policy finds them only
if it kept them for a reason. RazorAttention keeps everything in four KV heads of twelve, which
`kvjax.analysis.retrieval_heads` names (three with the weights before).
The numbers that follow are of the weights that configs/train_tiny_4.py made.
Expected, of Great Expectations (perplexity, passkey, word pairs; two CPU cores, jax 0.10.2): full 35.72, 100 %, 91 %;
h2o 36.37, 0, 0; roco 36.45, 0, 0; window 36.35, 0, 0; random 542, 0, 0; tova 37.62, 0, 12 %; razor_attention 35.89,
100 %, 94 %. So h2o and roco are far better than chance here, and no better than a window: on text the same, and the
facts are gone as well.
Hardware: any CPU; five to ten minutes on two cores, most of it compilation.
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

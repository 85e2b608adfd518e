"""The trained gate kvjax-tiny-gate beside other policies of a fifth of the prompt: recall of distant facts, perplexity.

Facts lie 700 to 900 tokens before the question, in words and wordings that the gate was not trained on. Prompts run in
blocks of 32 tokens, after each of which the gate's policies, h2o and window evict: they choose before the question is
there. snapkv and kvzip choose at the end of the prompt, with the question in it. The gate decides in one head of
twelve, which looks facts up, and a window in the others; or the gate decides in all heads.

Paper: KVzap (arXiv:2601.07891), H2O (arXiv:2306.14048), SnapKV (arXiv:2404.14469), KVzip (arXiv:2505.23416); none has a
model this small.
Expected: kvjax/pretrained/kvjax-tiny-gate/README.md.
Hardware: any CPU; some ten minutes on two cores.
Command: python -m experiments.run --config=gate_tiny --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig

GATE = "learned(gate=mlp(width=128), recent=25, sinks=4)"
HEADS = "((0,0),(0,0),(0,0),(1,0),(0,0),(0,0))"


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="gate_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32", calibration="kvjax-tiny-gate"),
        policy=PolicyConfig(name=f"split_heads({HEADS}, {GATE}, window)", budget=0.2),
        baselines=("full", GATE, "h2o", "window", "snapkv", "snapkv(window=4)", "kvzip(plus=true, chunk=256)"),
        data=DataConfig(num_sequences=32, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative", "copy"), prompts=32),
        prefill_block=32,
        repeats=0,
    )

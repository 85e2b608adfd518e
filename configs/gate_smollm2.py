"""A gate of SmolLM2-135M-Instruct beside other policies of a fifth of the prompt: recall of distant facts, perplexity.

As gate_tiny, but for the gate, which is not part of the package: train_gate_smollm2 fits it.

Paper: KVzap (arXiv:2601.07891), H2O (arXiv:2306.14048), SnapKV (arXiv:2404.14469), KVzip (arXiv:2505.23416).
Expected: docs/experiments.md, "The gate of SmolLM2".
Hardware: any CPU; a quarter of an hour on two cores of an EPYC, family 26.
Command: python -m experiments.run --config=gate_smollm2 --config.model.calibration=GATE.safetensors \
  --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig, RecallConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="gate_smollm2",
        model=ModelConfig(path="smollm2-135m-instruct", dtype="float32"),
        policy=PolicyConfig(name="learned(gate=linear(), recent=25, sinks=4)", budget=0.2),
        baselines=("full", "h2o", "window", "snapkv", "snapkv(window=4)", "kvzip(plus=true, chunk=256)"),
        data=DataConfig(num_sequences=16, prompt_length=768, new_tokens=128),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative", "copy"), prompts=16),
        prefill_block=32,
        repeats=0,
    )

"""Every storage under four policies on kvjax's own small model: what a byte buys.

Paper: TurboQuant (arXiv:2504.19874), FlexGen (arXiv:2303.06865), the OCP Microscaling Formats (v1.0) and the policies'
own; none of them at this scale. A generated story: eight rows of 512 tokens of prompt, 128 scored.
Expected perplexity of the story under full: dense 3.050 (31.4 MB), int8 3.050 (8.8), fp8 3.064 (8.3), bfp 3.050 (8.1),
int4 3.060 (4.9), turboquant in 4, 3, 2 bits 3.125, 3.448, 5.047 (4.4, 3.4, 2.5), mxfp4 3.439 (4.2); under h2o: dense
3.567 (12.6), int8 3.564 (3.5), int4 3.565 (2.0), turboquant(4) 3.680 (1.8). experiments/measured/notes.md has all.
Hardware: any CPU; twenty CPU minutes for the sweep. Nothing is timed (repeats=0).
Command: python -m experiments.run --config=storages_tiny
The sweep, whose plot shows perplexity against the bytes held:
  python -m experiments.sweep --config=storages_tiny --sweep=policy.name=full,h2o,roco,snapkv \
    --sweep='storage=dense;int8;int4;int2;integer(4, key_bits=5);fp8;bfp;bfp(4);mxfp4;levels(4);kvquant(4);
      turboquant(4);turboquant(3);turboquant(2);kivi(4);kivi;gear;zipcache;mikv(4);mikv;think;low_rank(32, 48);
      cskv(64, value_rank=96);kv_heads(2);minicache'
What each costs against exact slots, over texts, with recall:
  python -m experiments.sweep --config=storages_tiny --config.data.num_sequences=32 --config.recall.nearest=100 \
    --config.recall.tasks=passkey,multi_key,associative --sweep=seed=0,1,2,3 --sweep=policy.name=full,h2o \
    --sweep='storage=dense;int8;int4;integer(4, key_bits=5);int4(residual=32)'
"""

from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="storages_tiny",
        model=ModelConfig(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o", budget=0.5),
        storage="int4",
        baselines=("full",),
        data=DataConfig(num_sequences=8, prompt_length=512, new_tokens=128),
        repeats=0,
    )

"""Published storages and selections: in what form slots are held, and which of them a query reads."""

from kvjax_site.system import System

FORMATS = "tests/storage/test_formats.py"
LAWS = "tests/laws/test_storage_conformance.py"
CHOICES = "tests/selection/test_choices.py"

HOLD = (
    System("hold", "FP8 formats", "2209.05433", ("kvjax.storage.fp8",), test=LAWS, figure="storages, SmolLM2"),
    System(
        "hold", "FlexGen", "2303.06865",
        (
            "kvjax.storage.int4", "kvjax.storage.integer", "kvjax.storage.int8", "kvjax.storage.int2",
            "kvjax.models.offload.offload",
        ),
        spec=(("storage", "int4(memory='host')"),), test=LAWS, figure="storages",
        form="weights in host memory by a share; without its search for a schedule",
    ),
    System(
        "hold", "KVQuant", "2401.18079", ("kvjax.storage.kvquant", "kvjax.storage.levels", "kvjax.storage.sparse"),
        test="tests/storage/test_kvquant.py", form="a fixed number of outliers", figure="storages",
    ),
    System(
        "hold", "KIVI", "2402.02750", ("kvjax.storage.kivi",), test="tests/storage/test_blocks.py", figure="storages",
    ),
    System(
        "hold", "MiKV", "2402.18096", ("kvjax.storage.mikv",), test="tests/storage/test_tiers.py", figure="storages",
        spec=(("policy", "h2o"), ("storage", "mikv(4)")),
    ),
    System(
        "hold", "GEAR", "2403.05527", ("kvjax.storage.gear",), test="tests/storage/test_gear.py", figure="storages",
        form="a fixed number of outliers",
    ),
    System(
        "hold", "Accurate block quantization", "2403.20137", ("kvjax.storage.permuted", "kvjax.storage.bfp"),
        test=FORMATS, form="`permuted(bfp(), order)` in Python; the order is given",
    ),
    System(
        "hold", "QuaRot", "2404.00456", ("kvjax.storage.rotated",), test=FORMATS, figure="storages, SmolLM2",
        spec=(("storage", "rotated(int4(32))"),), form="of the cache; weights and activations are not rotated",
    ),
    System(
        "hold", "SKVQ", "2405.06219", ("kvjax.storage.permuted", "kvjax.storage.int2"), test=FORMATS,
        form="`permuted(int2(residual=128), order)` in Python; the order is given, and ranges are not clipped",
    ),
    System(
        "hold", "ZipCache", "2405.14256", ("kvjax.storage.zipcache",), test="tests/storage/test_segments.py",
        figure="storages", form="exact mean attention instead of a sample; each token is rounded once",
    ),
    System(
        "hold", "MiniCache", "2405.14366", ("kvjax.storage.minicache",), test="tests/storage/test_minicache.py",
        figure="storages", form="a fixed share of tokens stays exact, and so do all tokens after the prompt",
    ),
    System(
        "hold", "Effectively compress KV heads", "2406.07056", ("kvjax.storage.kv_heads", "kvjax.compress_kv_heads"),
        test="tests/storage/test_joint.py", figure="storages", form="without training the model further",
    ),
    System(
        "hold", "ThinK", "2407.21018", ("kvjax.storage.think",), test="tests/storage/test_sides.py", figure="storages",
    ),
    System(
        "hold", "Palu", "2407.21118", ("kvjax.storage.low_rank",), test="tests/storage/test_ranks.py",
        spec=(("storage", "low_rank(32, 48, center=False, basis='weights')"),),
        form="one head at a time; directions of the weights, scaled by their inputs",
    ),
    System(
        "hold", "CSKV", "2409.10593", ("kvjax.storage.cskv", "kvjax.training.train_reconstruction"),
        test="tests/training/test_reconstruction.py", figure="storages", command="python -m experiments.calibrate",
        form="one matrix compresses and expands, where the authors train two",
    ),
    System(
        "hold", "MatryoshkaKV", "2410.14731",
        ("kvjax.storage.low_rank", "kvjax.analysis.train_directions", "kvjax.analysis.search_ranks"),
        test="tests/analysis/test_directions.py", figure="storages", command="python -m experiments.calibrate",
    ),
    System(
        "hold", "TurboQuant", "2504.19874", ("kvjax.storage.turboquant",), test=FORMATS, figure="storages",
        form="levels of the normal distribution; without the sketch of the residual",
    ),
    System(
        "hold", "KVarN", "2606.03458", ("kvjax.storage.kvarn",), test="tests/storage/test_kvarn.py",
        figure="storages, SmolLM2",
    ),
)  # fmt: skip

LOOK = (
    System(
        "look", "SparQ", "2312.04985", ("kvjax.selection.sparf",), test=CHOICES, figure="selections",
        form="heads of a group choose together; ranking reads keys whole, which are held once",
    ),
    System(
        "look", "ALISA", "2403.17312", ("kvjax.selection.alisa", "kvjax.planning.cache_phases.CachePhases"),
        test=CHOICES, command="python -m experiments.simulate phases",
        form="a number of slots instead of a share; its three phases as a plan", figure="plans of phases",
    ),
    System(
        "look", "TriForce", "2404.11912", ("kvjax.selection.retrieval", "kvjax.speculate"),
        test="tests/speculation/test_speculate.py", figure="drafts",
    ),
    System("look", "Quest", "2406.10774", ("kvjax.selection.quest",), test=CHOICES, figure="slots read"),
    System(
        "look", "InfiniGen", "2406.19707",
        (
            "kvjax.presets.infinigen", "kvjax.selection.infinigen", "kvjax.policies.fifo", "kvjax.policies.lru",
            "kvjax.policies.counter", "kvjax.policies.from_layer",
        ),
        test="tests/selection/test_pools.py", figure="slots read", form="numbers of slots are counted for each row",
    ),
    System(
        "look", "MInference", "2407.02490", ("kvjax.selection.QueryBlocks",), test="tests/selection/test_prompts.py",
        spec=(("selection", "quest(page=16, budget=512, in_prompt=True)"),), figure="pages of prompts",
        form="the A-shape, and pages that blocks of queries choose; neither vertical lines nor a search by head",
    ),
    System(
        "look", "ShadowKV", "2410.21465", ("kvjax.selection.shadowkv",), test=CHOICES, figure="slots read",
        spec=(("selection", "shadowkv(budget=512)"), ("storage", "dense(memory='host')")),
    ),
    System(
        "look", "TokenSelect", "2411.02886", ("kvjax.selection.tokenselect",), test=CHOICES, figure="slots read",
        form="prompts are read whole",
    ),
    System(
        "look", "A²ATS", "2502.12665", ("kvjax.selection.a2ats",), test=CHOICES,
        form="a codebook of each prompt's rotated keys",
    ),
    System("look", "LServe", "2502.14866", ("kvjax.selection.lserve",), test=CHOICES, figure="pages of prompts"),
    System(
        "look", "ReKV", "2503.00540", ("kvjax.selection.rekv",), test="tests/selection/test_turns.py",
        figure="selections",
        spec=(("selection", "rekv(page=16, budget=512, in_prompt=True)"), ("storage", "dense(memory='host')")),
        form="of texts: no encoder of videos; keys keep their positions",
    ),
)  # fmt: skip

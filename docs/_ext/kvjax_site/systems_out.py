"""Published systems that kvjax does not have, and why."""

from kvjax_site.system import System

_SHARED_LAYERS = (
    "A model that is trained so that layers share keys and values; no family that kvjax reads has such layers."
)
_IMAGES = "It ranks tokens of images, and kvjax reads no models with images."

OUT = (
    System(
        "keep", "FastGen", "2310.01801",
        reason="Chooses the policy of each head anew for every prompt. Here the policies of heads are chosen before a "
        "prompt is read (`kvjax.policies.split_heads`).",
    ),
    System(
        "keep", "LESS", "2402.09398",
        reason="A trained recurrent state stands for evicted tokens beside the cache. Here they merge into slots that "
        "stay (`kvjax.policies.lococo` is trained).",
    ),
    System(
        "keep", "Keyformer", "2403.09054",
        reason="Adds up a second softmax, of logits with noise, over all queries. Statistics of attention here are "
        "functions of the probabilities themselves.",
    ),
    System(
        "keep", "DMC", "2403.09636",
        reason="Trains the whole model to add a token to the newest slot or to append it. Its successor DMS is there.",
    ),
    System(
        "keep", "SqueezeAttention", "2404.04793",
        reason="Divides slots among layers by the cosine of hidden states around attention, anew for every prompt. "
        "`kvjax.analysis.budgets` measures attention, once.",
    ),
    System(
        "keep", "PyramidInfer", "2405.12532",
        reason="Later layers do not compute the tokens that earlier ones dropped. Here a policy decides what a layer "
        "holds, and all tokens of a prompt go through all layers.",
    ),
    System("keep", "LOOK-M", "2406.18139", reason=_IMAGES),
    System(
        "keep", "NACL", "2408.03675",
        reason="Mixes attention of the prompt's last tokens with a random draw. `kvjax.policies.snapkv` has the first, "
        "`kvjax.policies.vase` a draw by attention.",
    ),
    System("keep", "VL-Cache", "2410.23317", reason=_IMAGES),
    System("keep", "MustDrop", "2411.10803", reason=f"{_IMAGES} Its first stage is a part of the encoder of images."),
    System(
        "keep", "XKV", "2412.05896",
        reason="Searches the sizes of all layers by runs of a small model. `kvjax.analysis.budgets` measures "
        "attention, and any policy takes a budget for each layer.",
    ),
    System(
        "hold", "WKVQuant", "2402.12065",
        reason="Fits factors of channels through the quantized model, block by block. Its rule that a step reads its "
        "own tokens exactly holds for every storage here.",
    ),
    System(
        "hold", "QAQ", "2403.04643",
        reason="The number of bits differs from token to token. Storages here have one number of bits, or two tiers "
        "(`kvjax.storage.zipcache`, `kvjax.storage.mikv`).",
    ),
    System(
        "hold", "DeepSeek-V2 (latent attention)", "2405.04434",
        reason="Its models hold one vector for all heads instead of keys and values, which policies cannot rank by "
        "head. `kvjax.load` refuses them.",
    ),
    System("hold", "YOCO", "2405.05254", reason=_SHARED_LAYERS),
    System("hold", "LCKV", "2405.10637", reason=_SHARED_LAYERS),
    System("hold", "CLA", "2405.12981", reason=_SHARED_LAYERS),
    System(
        "hold", "QJL", "2406.03482",
        reason="Signs of a random projection estimate products of queries and keys, and no key is decoded. Storages "
        "here decode; `kvjax.storage.turboquant` leaves this part of its paper out.",
    ),
    System("hold", "MLKV", "2406.09297", reason=_SHARED_LAYERS),
    System(
        "hold", "KVSharer", "2410.18517",
        reason="Some layers use the keys and values of other, unlike ones, which a search finds. Here each layer has "
        "its own, or merges them with its neighbour's (`kvjax.storage.minicache`).",
    ),
    System(
        "look", "InfLLM", "2402.04617",
        reason="Ranks blocks by a few representative tokens, and puts them all at one distance. "
        "`kvjax.selection.retrieval` ranks chunks by mean keys, at their true distances.",
    ),
    System(
        "look", "Loki", "2406.02542",
        reason="Ranks by the first principal components of keys. `kvjax.selection.infinigen` with a skew takes columns "
        "of a rotated query instead, guessed from the layer before.",
    ),
    System(
        "look", "RetrievalAttention", "2409.10516",
        reason="A graph on the host finds nearly the largest products. `kvjax.selection.optimal` is what it "
        "approximates; indexes here are arrays of fixed shape, which are read whole.",
    ),
    System(
        "look", "MagicPIG", "2410.16179",
        reason="Samples slots by hashes, and weighs each by its probability. Selections here choose by "
        "scores, without chance.",
    ),
    System(
        "not a KV cache", "SkipDecode", "2307.02628",
        reason="Later tokens skip layers: it changes what is computed, and not what a cache holds.",
    ),
    System(
        "not a KV cache", "DataStates-LLM", "2406.10707",
        reason="Checkpoints of training that are written behind it. Contexts are written so by "
        "`kvjax.contexts.save` with `wait=False`.",
    ),
    System(
        "not a KV cache", "PLDR-LLM", "2502.13502",
        reason="Another attention, with a cache of the tensor that it infers; no family that kvjax reads has it.",
    ),
)  # fmt: skip

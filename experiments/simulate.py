"""Plans of serving from closed forms and seeded simulations; nothing is measured, and no weights are needed.

python -m experiments.simulate serving --shape=opt-30b --topology=h100:1 --tokens=4096
python -m experiments.simulate layouts --shape=llama2-7b --topology=h100:1 --tokens=5000 --budget=1024
python -m experiments.simulate preemption --shape=llama2-7b --topology=h100:1 --budget=512
python -m experiments.simulate pool --shape=llama2-7b --topology=h100:1 --instances=4 --long=60000
python -m experiments.simulate phases --shape=llama2-7b --topology=h100:1 --rows=8 --host_memory=256GB
python -m experiments.simulate storage --shape=llama2-7b --topology=h100:1 --flash_rate=12e9 --channels=16
python -m experiments.simulate activations --shape=llama2-7b --topology=h100:1 --host_memory=256GB
python -m experiments.simulate traffic --shape=llama2-7b --tokens=4096
python -m experiments.simulate blend --shape=llama2-7b --topology=h100:1 --tokens=4096 --load_rates=5e9,1e9
python -m experiments.simulate transfer --shape=llama2-7b --topology=h100:1 --tokens=6000 --slo=0.08 --trace=0:3e10

serving: the rows that fit, and the seconds of a prompt, a token, and an exchange with host memory.
layouts: the bytes of a row: reserved, in pages, in virtual memory and in fixed slots; and of a trace of requests.
preemption: waiting times and fairness of a trace whose priorities change, for a full cache in pages and for slots.
pool: waiting times and use of memory of instances that hold slots of each other's requests, or do not.
phases: from which length on slots are on the host, or computed again, and the seconds of a step.
storage: the pages and bytes of attention in a storage drive that holds the cache.
activations: the share of layers whose results training can move to the host while others are computed.
traffic: the numbers that attention moves between slow and fast memory, beside the order of a lower bound.
blend: the share of a text's tokens that can be computed again while caches of its chunks are loaded (CacheBlend).
transfer: the level at which each chunk of a context is sent, so that the first token comes in time (CacheGen).
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

SUBJECTS = (
    "serving",
    "layouts",
    "preemption",
    "pool",
    "phases",
    "storage",
    "activations",
    "traffic",
    "blend",
    "transfer",
)
BY_LAYER = ("serving", "layouts", "preemption", "pool")  # take slots by layer
BY_BYTES = (*BY_LAYER, "phases", "blend")  # take the bytes of a slot


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("shape", None, "the shape of a known decoder, such as opt-30b", flag_values=values)
    where = "a TPU, e.g. v5e:2x4, or a GPU, e.g. h100:1, of which one device is planned for"
    flags.DEFINE_string("topology", None, where, flag_values=values)
    flags.DEFINE_integer("tokens", 4096, "tokens of a text", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("longest", 8192, "the most tokens that a row may have", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("budget", 512, "slots of a head under an evicting policy", lower_bound=1, flag_values=values)
    policy = "instead of --budget: an evicting policy, such as split_layers(full(), h2o(64), shares=(1, 3)), whose "
    policy += (
        "slots in each layer are planned; a budget that is a share is one of --tokens, of each prompt of a trace, or "
    )
    policy += "of --longest for layouts"
    flags.DEFINE_string("policy", None, policy, flag_values=values)
    storage = (
        "the storage whose bytes a slot has, such as int8, if all slots have the same; without it, numbers of two "
        "bytes. serving and preemption also plan slots in host memory, such as dense(memory=host)"
    )
    flags.DEFINE_string("storage", None, storage, flag_values=values)
    flags.DEFINE_integer(
        "granule", 2 << 20, "bytes that virtual memory is mapped by", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("users", 64, "users of a trace", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("turns", 3, "messages of each user", lower_bound=1, flag_values=values)
    flags.DEFINE_float("rate", 4.0, "users that arrive in a second", lower_bound=1e-6, flag_values=values)
    flags.DEFINE_integer("prompt", 512, "tokens of a message, on average", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("output", 128, "tokens of an answer, on average", lower_bound=1, flag_values=values)
    flags.DEFINE_float("frequency", 0.02, "redraws of priorities in an iteration", lower_bound=1e-6, flag_values=values)
    flags.DEFINE_float("copy_seconds", 1e-5, "seconds of a copy besides its bytes", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer("instances", 4, "servers of a pool", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("requests", 200, "requests to a pool", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("long", 32768, "tokens of a long prompt, on average", lower_bound=1, flag_values=values)
    flags.DEFINE_float(
        "long_share", 0.05, "share of prompts that are long", lower_bound=0.0, upper_bound=1.0, flag_values=values
    )
    flags.DEFINE_integer("rows", 1, "rows of a batch", lower_bound=1, flag_values=values)
    memory = "bytes of host memory for slots, such as 256GB, which serving needs if they are there; without it, all fit"
    flags.DEFINE_string("host_memory", None, memory, flag_values=values)
    flags.DEFINE_float(
        "read_share", 1.0, "share of the slots on the host that a step reads", lower_bound=0.0, upper_bound=1.0,
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_bool("overlap", False, "move slots from the host while the device computes", flag_values=values)
    flags.DEFINE_integer("channels", 16, "features of a key that rank slots", lower_bound=1, flag_values=values)
    rate = "bytes/s of all flash channels of a drive, which storage needs"
    flags.DEFINE_float("flash_rate", None, rate, lower_bound=1.0, flag_values=values)
    flags.DEFINE_integer("page", 4096, "bytes of a page of flash", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the trace and of priorities", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("tile", 128, "rows of a kernel's tile of queries", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("fast_memory", 65536, "numbers that fast memory holds", lower_bound=1, flag_values=values)
    flags.DEFINE_list(
        "percentiles",
        ["50", "99"],
        "percentiles of waiting times that are shown: 50, 95, 99 or 99.9",
        flag_values=values,
    )
    flags.DEFINE_list("load_rates", [], "bytes/s of further places that hold caches of chunks", flag_values=values)
    flags.DEFINE_float("slo", 1.0, "seconds in which a context must have arrived", lower_bound=0.0, flag_values=values)
    trace = "SECONDS:BYTES/S,...: the rate of the link from then on; without it, that of the device's link"
    flags.DEFINE_list("trace", [], trace, flag_values=values)
    flags.DEFINE_list("bits", ["2.5", "3.6", "3.9"], "bits of a number at levels 1, 2 and so on", flag_values=values)
    flags.DEFINE_integer("chunk", 1500, "tokens of a chunk that is sent", lower_bound=1, flag_values=values)
    flags.DEFINE_string("output_file", None, "write the numbers to this JSON file too", flag_values=values)


GROUPS = {
    "Caches": ["budget", "policy", "storage"],
    "Traces": ["users", "turns", "rate", "prompt", "output", "percentiles", "seed"],
    "Preemption": ["frequency", "copy_seconds"],
    "Pools": ["instances", "requests", "long", "long_share"],
    "Phases and storage": ["rows", "host_memory", "read_share", "overlap", "channels", "flash_rate", "page"],
    "Kernels": ["tile", "fast_memory"],
    "Chunks": ["load_rates", "slo", "trace", "bits", "chunk"],
}


def main(argv: Sequence[str]) -> int:
    given, values = cli.parse_flags(argv, about=str(__doc__), define=define, positional=1, groups=GROUPS)
    if len(given) != 1 or given[0] not in SUBJECTS:
        raise ConfigError(f"give what to simulate: {', '.join(SUBJECTS)}.")
    if values.shape is None or (values.topology is None and given[0] != "traffic"):
        raise ConfigError("give --shape=NAME, such as llama2-7b, and --topology=NAME, such as h100:1.")
    if values.policy is not None and given[0] not in BY_LAYER:
        raise ConfigError(f"--policy is for {', '.join(BY_LAYER)}; {given[0]} does not take it.")
    if values.storage is not None and given[0] not in BY_BYTES:
        raise ConfigError(f"--storage is for {', '.join(BY_BYTES)}; {given[0]} plans numbers of two bytes.")
    if values.policy is not None and values["budget"].present:
        raise ConfigError(
            f"--policy={values.policy} contains the budget, so that --budget={values.budget} is not valid with it."
        )
    if given[0] == "storage" and values.flash_rate is None:
        raise ConfigError(
            "storage needs --flash_rate=NUMBER, the bytes/s at which the drive reads flash, such as 12e9."
        )
    # It imports jax, which `--help` does without.
    from experiments.programs import simulate

    return simulate.start(given[0], values)


if __name__ == "__main__":
    cli.main(main)

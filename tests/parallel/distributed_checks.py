r"""Does everything once, in one of several processes or in one alone, for tests/parallel/test_distributed.py.

    python -m tests.parallel.distributed_checks FOLDER MESH --coordinator_address=HOST:PORT \
        --num_processes=N --process_id=I

FOLDER has a checkpoint in ``model``; the first process writes what was found to ``found-N.npz`` and ``found-N.json``.
"""

import contextlib
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import flags
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from experiments import cli
from experiments.config import DataConfig, ExperimentConfig, ModelConfig, PolicyConfig
from experiments.programs import run, train
from experiments.specs import build_spec
from kvjax import analysis, contexts, policies, storage
from kvjax.cache import Limits
from kvjax.checkpoint import orbax
from kvjax.errors import ConfigError, KvjaxError
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.numerics.rope import Rope
from kvjax.parallel import distributed
from kvjax.serve import Runner
from tests import conftest  # noqa: F401, it sets how programs are compiled

ROWS, PROMPT, NEW = 4, 12, 5
#: Large enough that the bytes of its weights are not lost among those of headers and messages.
CONFIG = DecoderConfig(
    family="llama", vocab_size=2048, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    mlp_size=512, max_positions=64, rope=Rope(dim=32), tie_embeddings=False,
)  # fmt: skip


BYTES_RECEIVED = struct.Struct("@128xQ")  # of Linux's struct tcp_info: tcpi_bytes_received


def read() -> int:
    """Bytes that this process has read from files."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def received() -> int:
    """Bytes that this process has received from others, over the connections that it has."""
    total = 0
    for each in Path("/proc/self/fd").iterdir():
        # One that is closed meanwhile, or is not of TCP.
        with contextlib.suppress(OSError):
            if os.readlink(each).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(each.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += BYTES_RECEIVED.unpack_from(info)[0]
    return total


def experiment(folder: Path, mesh: str, count: int) -> ExperimentConfig:
    """An experiment of one policy on the checkpoint and the text."""
    return ExperimentConfig(
        name=f"of{count}", model=ModelConfig(path=str(folder / "model")), policy=PolicyConfig(name="h2o", budget=6),
        data=DataConfig(text=str(folder / "text"), num_sequences=ROWS, prompt_length=PROMPT, new_tokens=NEW),
        baselines=(), repeats=0, implementation="xla", mesh=mesh, output=str(folder / f"runs-{count}"),
    )  # fmt: skip


def everything(folder: Path, axes: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Loads, generates, scores, trains, saves in both formats, restores and runs an experiment.

    Returns:
      Numbers about this process, and arrays that are the same for any number of processes.
    """
    mesh, count = kvjax.make_mesh(axes) if axes else None, distributed.count()
    kvjax.load(folder / "model", mesh=mesh)  # imports what it needs
    files, sockets = read(), received()
    model = kvjax.load(folder / "model", mesh=mesh)
    about: dict[str, Any] = {"read": read() - files, "received": received() - sockets}
    sockets, leaves = received(), jax.tree.leaves(model.params)
    whole = distributed.to_host(model.params)
    about |= {
        "gathered": received() - sockets, "model": sum(leaf.nbytes for leaf in leaves),
        "own": sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards),
    }  # fmt: skip

    text = np.frombuffer((folder / "text").read_bytes(), np.uint8).astype(np.int32)
    text = text[: ROWS * (PROMPT + NEW)].reshape(ROWS, -1)
    settings = experiment(folder, axes, count)
    # As `run` below, which finds the programs compiled.
    spec, limits = build_spec(settings), Limits(prompt=PROMPT, new_tokens=NEW, shortest=PROMPT)
    options: dict[str, Any] = {"limits": limits, "implementation": "xla"}
    with jax.default_matmul_precision("highest"):
        made = kvjax.generate(model, text[:, :PROMPT], spec, max_new_tokens=NEW, **options)
        # On a mesh, prompts call a program of a layer for each of them.
        assert made.layout is not None and (mesh is None or made.layout.calls_layers)
        scored = kvjax.log_likelihood(model, text, spec, prompt_length=PROMPT, **options)

    with model.on_mesh():
        place = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
        batch = [distributed.put(x, place) for x in (text, np.full(text.shape, 1, np.int32))]
        state = TrainState.create(apply_fn=Decoder(CONFIG).apply, params=model.params, tx=optax.sgd(0.1))
        saved = folder / f"orbax-{count}"
        orbax.save_params(saved, model.params)
        kvjax.save(model, folder / f"saved-{count}")
        state, losses = train.train_step(state, *batch, 1.0)
        restored = orbax.restore_params(saved, CONFIG, mesh=mesh)
    about["restored"] = all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(restored), leaves, strict=True))
    run.run(settings, progress=False)
    arrays = {
        "tokens": made.tokens, "logprobs": made.logprobs, "scores": np.asarray(scored.logprobs),
        "positions": distributed.to_host(made.state.layers[0][0].position),
        "loss": distributed.to_host(losses["total"]),
    }  # fmt: skip
    for name, tree in {"loaded": whole, "trained": state.params, "restored": restored}.items():
        leaves, _ = jax.tree_util.tree_flatten_with_path(distributed.to_host(tree))
        arrays |= {f"{name} {jax.tree_util.keystr(path)}": np.asarray(leaf, np.float32) for path, leaf in leaves}
    return about, arrays


def errors(folder: Path, axes: str) -> list[str]:
    """Returns the messages of errors where processes do not agree, and where one process is needed."""
    found = []
    model, text = kvjax.load(folder / "model", mesh=kvjax.make_mesh(axes)), np.ones((1, 8), np.int32)
    for call in (
        lambda: Runner(model, policies.full(), rows=1, limits=Limits(prompt=8, new_tokens=1)),
        lambda: kvjax.calibrate(model, text, storage.low_rank(4, 4)),
        lambda: analysis.sparsity(model, text),
        lambda: contexts.load(folder / "context", model),
        lambda: kvjax.save(model, folder / "text"),
    ):
        try:
            call()
        except KvjaxError as error:
            found.append(str(error))
    try:
        distributed.check_mesh(None)
    except ConfigError as error:
        found.append(str(error))
    try:
        with distributed.collective("reading"):
            if not distributed.is_first():
                raise ConfigError("the disk is gone")
    except KvjaxError as error:
        found.append(str(error))
    return found


def main(argv: list[str]) -> None:
    values = flags.FlagValues()
    cli.define_processes(values)
    folder, axes = values(argv)[1:]
    cli.start_processes(values)
    about, arrays = everything(Path(folder), axes)
    about["silent"] = sys.stdout.name == os.devnull
    about["wide"] = bool(
        (distributed.from_all(2**40 + distributed.number()) == 2**40 + np.arange(distributed.count())).all()
    )
    every = distributed.from_all(np.asarray([about[name] for name in sorted(about)], np.int64))
    said = errors(Path(folder), axes)
    if distributed.is_first():
        count = distributed.count()
        np.savez(Path(folder) / f"found-{count}.npz", **arrays)
        about = [dict(zip(sorted(about), map(int, row), strict=True)) for row in every]
        (Path(folder) / f"found-{count}.json").write_text(json.dumps({"about": about, "errors": said}))


if __name__ == "__main__":
    main(sys.argv)

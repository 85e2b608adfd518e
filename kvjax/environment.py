"""Environment variables that XLA and libtpu read, set before jax makes its backend.

This module does not import jax: `import kvjax` runs it, and imports jax only for what is used.
"""

import os

EXTRA_OPTIONS = "--xla_backend_extra_options"  # a flag of XLA's, whose value may be any option, known or not


def compile_quickly() -> None:
    """Has LLVM unroll no loops in XLA's programs for CPUs, before the first one is compiled in this process.

    It halves the time of compilation (kvjax-tiny under h2o: 5.1 CPU seconds -> 3.2; the demo 170 -> 114, all on an AMD
    EPYC), and a difference in running time could not be measured: products and attention are XLA's libraries and
    kvjax's own code. ``XLA_FLAGS`` that name extra options for the backend are left as they are, and so are programs of
    a process that has compiled some before.
    """
    given = os.environ.get("XLA_FLAGS", "").strip()
    # It may be the name of a file of flags.
    if EXTRA_OPTIONS not in given and (not given or given.startswith("-")):
        os.environ["XLA_FLAGS"] = f"{given} {EXTRA_OPTIONS}=xla_cpu_disable_loop_unrolling".strip()


def prepare_libtpu() -> None:
    """Sets the environment variables that libtpu reads when it is loaded, unless the user has set them."""
    # Otherwise only one process per machine can load libtpu, even if none uses a chip.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    # JAX sets it where there is no chip; the topology then cannot be read from the cloud's metadata server.
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def silence_missing_tpu() -> None:
    """Keeps libtpu from printing errors where jax has found no TPU.

    With the TPU compiler installed, jax makes a backend for TPUs all the same. It says that there is none when it is
    imported, so that this function does nothing before.
    """
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        prepare_libtpu()

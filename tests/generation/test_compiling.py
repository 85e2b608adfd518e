"""A program that takes long to compile is named, once; see `kvjax.generation.compiling`."""

import io
import logging
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.generation import compiling
from tests.tiny import VOCAB, tiny


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Returns a function that makes stderr a terminal, in which programs are named after 0.1 s; pytest has its own."""
    monkeypatch.setattr(compiling, "PATIENCE", 0.1)

    def use() -> Terminal:
        made = Terminal()
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return use


def slow(seconds):
    """Returns a jitted function that takes some time to trace."""

    @jax.jit
    def function(x):
        compiling.traced()
        time.sleep(seconds)
        return x + 1

    return function


def test_a_program_is_named_once(terminal):
    shown, function = terminal(), slow(0.5)
    for _ in range(2):
        with compiling.announced("h2o for prompts to 64 tokens"):
            function(jnp.ones(3))
    first, second = shown.getvalue().splitlines()
    assert first == "compiling h2o for prompts to 64 tokens ..."
    assert second.startswith("compiled: h2o for prompts to 64 tokens, ") and second.endswith(" s")


def test_nothing_is_said_of_what_is_quick(terminal, monkeypatch):
    shown = terminal()
    # Beside other processes, nothing is quick.
    with monkeypatch.context() as patch, compiling.announced("a quick one"):
        patch.setattr(compiling, "PATIENCE", 60)
        slow(0)(jnp.ones(3))
    time.sleep(0.2)
    with compiling.announced("one that runs long, and was compiled before"):
        time.sleep(0.2)
    assert shown.getvalue() == ""


def test_elsewhere_it_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "PATIENCE", 0.1)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "kvjax"), compiling.announced("it"):
        slow(0.5)(jnp.ones(3))
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["compiling", "compiled:"]
    assert sys.stderr.getvalue() == ""


def test_a_program_that_is_not_valid_is_not_compiled(terminal):
    @jax.jit
    def function(x):
        compiling.traced()
        time.sleep(0.5)
        raise ValueError("no")

    shown = terminal()
    with pytest.raises(ValueError, match="no"), compiling.announced("it"):
        function(jnp.ones(3))
    assert shown.getvalue().startswith("compiling it ...\nnot compiled: it, ")


def test_names_say_policy_and_size(terminal, monkeypatch):
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    shown, model = terminal(), tiny(head_dim=16).model
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 70))
    kvjax.generate(model, ids, policies.h2o(23), max_new_tokens=3)
    lines = shown.getvalue().splitlines()
    assert "compiling h2o for prompts to 96 tokens ..." in lines
    assert any(line.startswith("compiling h2o for new tokens, with ") for line in lines)

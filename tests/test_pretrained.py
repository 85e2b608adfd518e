"""kvjax-tiny comes with kvjax: small, offline, the same model in transformers, and able to look things up."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import kvjax
from experiments.config import RecallConfig
from experiments.programs import card
from experiments.tasks import score
from experiments.training import corpus, evaluate
from kvjax import policies
from kvjax.checkpoint.locate import bundled
from kvjax.errors import CheckpointError, StorageError
from kvjax.models.decoder import Decoder
from kvjax.models.parameters import parameter_count
from kvjax.storage.calibration_files import calibration_file
from tests.conftest import ROOT, optimised

pytestmark = pytest.mark.thorough  # what a model has learned does not depend on jax's version
TEXT = "The passage was dark, and Pip said nothing.\n\nHe had 1861 reasons (and é) to be silent."


@pytest.fixture(scope="module", autouse=True)
def fast():
    """The suite compiles without optimisations, for speed; here it is running that takes the time."""
    with optimised():
        yield


@pytest.fixture(scope="module")
def tiny():
    return kvjax.load("kvjax-tiny", dtype="float32")


def test_it_is_what_its_card_says(tiny):
    folder = bundled("kvjax-tiny")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12e6
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    card = (folder / "README.md").read_text()
    for part in (
        "## Data",
        "## Recipe",
        "## Scores",
        "## Licence",
        "great_expectations",
        "python -m experiments.train",
    ):
        assert part in card
    config = tiny.config
    assert 3e6 < parameter_count(config) < 6e6
    assert config.num_kv_heads < config.num_heads
    assert config.max_positions == 1024
    assert tiny.tokenizer.decode(tiny.tokenizer.encode(TEXT)) == TEXT


def test_a_folder_of_that_name_goes_first(tmp_path, monkeypatch):
    (tmp_path / "kvjax-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        kvjax.load("kvjax-tiny")


def test_transformers_agrees(tiny):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = bundled("kvjax-tiny")
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert ids == tiny.tokenizer.encode(TEXT)
    with torch.inference_mode():
        theirs = torch.log_softmax(peer(torch.tensor([ids])).logits, -1).numpy()
    logits, _ = Decoder(tiny.config).apply({"params": tiny.params}, np.asarray([ids], np.int32))
    np.testing.assert_allclose(jax.nn.log_softmax(logits), theirs, atol=1e-4)


@pytest.fixture(scope="module")
def asked(tiny):
    """As many prompts of each task as fill batches: those that are left over would take a program of their own."""
    config = RecallConfig(tasks=("passkey", "variable"), prompts=score.ROWS)
    pairs = RecallConfig(tasks=("associative",), prompts=2 * score.ROWS)
    return score.make_prompts(config, tiny, seed=3) | score.make_prompts(pairs, tiny, seed=3)


def recalled(model, asked, *tasks, policy=None, **options):
    return score.exact_matches(model, {task: asked[task] for task in tasks}, policy or policies.full(), **options)


# The share of associative pairs is 94 % of 384 prompts. Here are 32, a sample whose share has an error of 4 %.
@pytest.mark.sampled(0)
@pytest.mark.parametrize(("task", "least"), [("passkey", 0.95), ("associative", 0.85)])
def test_what_is_in_the_cache_is_found(tiny, asked, task, least):
    assert recalled(tiny, asked, task)[task] >= least


@pytest.mark.sampled(0)
def test_what_is_not_in_the_cache_is_not_found(tiny, asked):
    assert recalled(tiny, asked, "passkey", policy=policies.local_only(budget=0.2))["passkey"] <= 0.05


@pytest.mark.sampled(0)
def test_scoring_in_one_pass_is_generating_greedily(tiny, asked):
    generated = recalled(tiny, asked, "passkey", "variable")
    assert {task: evaluate.exact_match(tiny.params, tiny.config, asked[task]) for task in generated} == generated
    assert len(set(generated.values())) > 1


@pytest.mark.sampled(0)
def test_its_gate_keeps_facts_that_h2o_evicts(tiny, asked):
    """In blocks of a sixth of the prompt, so that both evict long before the question is there."""
    file = calibration_file("kvjax-tiny-gate")
    assert file.stat().st_size < 1e6
    card = (file.parent / "README.md").read_text()
    for part in ("## Scores", "## Data", "## Recipe", "## Limits", "python -m experiments.train_gate"):
        assert part in card
    policy = policies.learned(0.2, gate=policies.MlpGate(128), recent=25, sinks=4)
    passkeys = {"passkey": asked["passkey"][:8]}
    ready = kvjax.calibrated(tiny, policy, kvjax.load_calibration("kvjax-tiny-gate"))
    found = recalled(ready, passkeys, "passkey", policy=policy, prefill_block=164)["passkey"]
    h2o = recalled(tiny, passkeys, "passkey", policy=policies.h2o(0.2), prefill_block=164)["passkey"]
    assert found >= h2o + 0.3
    with pytest.raises(StorageError, match="Gates that kvjax contains: kvjax-tiny-gate"):
        kvjax.load_calibration("kvjax-tiny-gat")


@pytest.mark.sampled(0)
def test_it_reads_a_book_it_never_saw(tiny, shared_data):
    (path,) = (shared_data / "data/lm").rglob("great_expectations*.txt")
    tokenizer = tokenizers.Tokenizer.from_file(str(bundled("kvjax-tiny") / "tokenizer.json"))
    text = corpus.tokenized(path, tokenizer)
    assert text.bytes.sum() == len(path.read_text().encode())
    bits = evaluate.bits_per_byte(
        tiny.params, tiny.config, text, bos=tiny.config.bos_token_id, context=1024, windows=16
    )
    assert bits < 2.0


@pytest.mark.sampled(0)
def test_more_context_helps(tiny, shared_data, monkeypatch):
    """In Alice. In Great Expectations the gain is lost in the noise: 0.001, -0.015, -0.023 bits a byte for 128 windows
    with every eighth token, 64 with every fourth and 64 with every eighth."""
    (path,) = (shared_data / "data/lm").rglob("carroll-alice.txt")
    monkeypatch.setattr(card, "GAIN_WINDOWS", 24)
    # With 128 tokens each token that is asked for takes a row of its own: some of them tell as much.
    monkeypatch.setattr(card, "GAIN_STRIDE", 16)
    tokenizer = tokenizers.Tokenizer.from_file(str(bundled("kvjax-tiny") / "tokenizer.json"))
    far, near = card.context_gain(tiny, corpus.tokenized(path, tokenizer))
    assert far < near - 0.02  # bits a byte


@pytest.mark.sampled(0)
def test_it_loads_offline_from_a_wheel(tmp_path):
    # A copy: setuptools builds in place, and takes what an earlier build left there.
    source = tmp_path / "source"
    for name in ("kvjax", "backend"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    # Without a compiler: tests/test_install.py has a wheel with libraries.
    environment = os.environ | {"CXX": "/bin/false"}
    command = [*pip, "--no-build-isolation", "--wheel-dir", tmp_path, str(source)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import kvjax, pathlib; model = kvjax.load('kvjax-tiny'); kvjax.load_calibration('kvjax-tiny-gate'); "
        "print(pathlib.Path(kvjax.__file__).parent.parent, model.config.vocab_size, model.tokenizer.decode([300]))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(shown.stdout.split()[0]) == tmp_path / "site"

"""A full cache in lm_eval has the results of lm_eval's own ``--model hf``, to the printed digit; without a network."""

import copy
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from experiments.config import TasksConfig
from experiments.programs import lm_eval_tasks
from experiments.tasks import answering, multiple_choice
from experiments.tasks.journal import Journal
from experiments.tasks.story import story
from experiments.tasks.words import HELD_OUT
from kvjax.cache import CacheSpec
from kvjax.checkpoint.locate import PRETRAINED
from kvjax.errors import InputError
from kvjax.lm_eval import __main__ as command
from kvjax.policies import full
from tests.conftest import ROOT
from tests.experiments.test_multiple_choice import EXPECTED

for package in ("lm_eval", "accelerate", "torch", "transformers"):
    if importlib.util.find_spec(package) is None:  # an import takes seconds in each process that collects tests
        pytest.skip("parity needs kvjax[bench-lm-eval]", allow_module_level=True)

DOCUMENTS = 6  # of each task
LAYERS = 2  # of the models; tests/models compares whole ones
TOLERANCE = 1e-5  # relative, between two float32 programs of one model
TINY, STORIES = "kvjax-tiny", "stories"
#: What stories260K was trained on, so that its perplexity has no more digits than float32.
CHILDREN = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    'big red ball. She was very happy. Her mom said, "You can play with it." Lily and her mom played all day. '
)


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Without a network, and without forks of a process that runs JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("DISABLE_MULTIPROC", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks over the published files if these are here, else over a few questions of the same forms."""
    from tests.conftest import find_shared

    folder, shared = tmp_path_factory.mktemp("tasks"), find_shared()
    data = None if shared is None else shared / "data/tasks"
    for task, few in EXPECTED.items():
        found = few if data is None or not data.is_dir() else multiple_choice.read(task, data)
        lm_eval_tasks.write_choices(folder, task, found[:DOCUMENTS])
    # The last text is longer than the context of either model.
    texts = [story(np.random.default_rng(seed), HELD_OUT, size) for seed, size in enumerate((200, 900, 5_000))]
    lm_eval_tasks.write_texts(folder, f"texts_{TINY}", texts)
    lm_eval_tasks.write_texts(folder, f"texts_{STORIES}", [CHILDREN, CHILDREN * 8])
    begun = [(text[:120], "nothing") for text in texts] + [("Once upon a time", "nothing")]
    lm_eval_tasks.write_answers(folder, "answers", begun, new_tokens=24)
    return folder


def evaluated(model, path, folder, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    import kvjax.lm_eval.model  # noqa: F401

    return lm_eval.simple_evaluate(
        model=model, model_args=f"pretrained={path},dtype=float32", tasks=tasks, batch_size=4, device="cpu",
        bootstrap_iters=0, task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )  # fmt: skip


def printed(results):
    from lm_eval.utils import make_table

    return [line for line in make_table(results).splitlines() if "|" in line]


def on_an_edge(number):
    """Whether numbers that are equal to TOLERANCE may round to different digits, four of which lm_eval prints."""
    return f"{number * (1 - TOLERANCE):.4f}" != f"{number * (1 + TOLERANCE):.4f}"


def assert_results_agree(own, peer):
    """Every number is the peer's to TOLERANCE, and every digit that is printed unless the number lies on an edge."""
    own = copy.deepcopy(own)
    for task, theirs in peer["results"].items():
        mine = own["results"][task]
        assert mine.keys() == theirs.keys()
        for name, number in theirs.items():
            if not isinstance(number, float):
                assert mine[name] == number, name
                continue
            assert mine[name] == pytest.approx(number, rel=TOLERANCE), (task, name)
            if on_an_edge(number):
                mine[name] = number
    assert printed(own) == printed(peer)


def test_numbers_agree_to_the_tolerance_and_digits_off_the_edges():
    """13.03965 prints as either of two numbers; 13.0397 does not, and a difference of 1e-4 is one."""
    table = {"versions": {}, "n-shot": {}, "higher_is_better": {}}

    def results(number):
        return {"results": {"texts": {"alias": "texts", "word_perplexity,none": number}}, **table}

    assert printed(results(13.03966)) != printed(results(13.03964))
    assert_results_agree(results(13.03966), results(13.03964))
    for own, peer in ((13.0397, 13.0400), (13.0397, 13.0410)):
        with pytest.raises(AssertionError):
            assert_results_agree(results(own), results(peer))
    with pytest.raises(AssertionError, match="0\\.0007"):  # a small number's digits differ by less than they print
        assert_results_agree(results(0.00068), results(0.00072))


def shallow(given, path):
    """Copies the first layers of a model, which take less to compile, and give other scores from the same tasks."""
    config = json.loads((given / "config.json").read_text())
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    kept = {
        name: tensor
        for name, tensor in load_file(given / "model.safetensors").items()
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name)) or int(layer[1]) < LAYERS
    }
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((PRETRAINED / TINY / name).read_bytes())
    shallow(PRETRAINED / TINY, path)
    return path


@pytest.fixture
def stories(shared_data, tmp_path):
    """A SentencePiece tokenizer, of which transformers makes a tokenizer.json that both sides read."""
    from transformers import LlamaTokenizer

    given, path = shared_data / "data/models/stories260K-hf", tmp_path / "stories"
    if not given.is_dir():
        pytest.skip("no stories260K-hf in the shared data folder")
    LlamaTokenizer.from_pretrained(given, add_bos_token=True, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    shallow(given, path)
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [TINY, STORIES])
def test_a_full_cache_prints_what_transformers_prints(name, folder, request):
    path = request.getfixturevalue("tiny" if name == TINY else name)
    tasks = [f"kvjax_{each}" for each in (*EXPECTED, f"texts_{name}", "answers")]
    peer, own = (evaluated(model, path, folder, tasks) for model in ("hf", "kvjax"))
    assert_results_agree(own, peer)
    assert len(printed(own)) > len(tasks)
    for task in tasks:
        for mine, theirs in zip(own["samples"][task], peer["samples"][task], strict=True):
            assert mine["doc"] == theirs["doc"]
            for a, b in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
                # A score and whether it is greedy, a score, or a text.
                if isinstance(a, tuple | list):
                    assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]
                else:
                    assert a == (b if isinstance(b, str) else pytest.approx(b, rel=1e-5))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("shots", [0, 2])
def test_tasks_of_experiments_print_what_lm_eval_prints(shots, tiny, shared_data, tmp_path):
    """Accuracy, and accuracy by length, of the same questions after the same examples."""
    data = shared_data / "data"
    if not data.is_dir():
        pytest.skip("no tasks in the shared data folder")
    for task in multiple_choice.TASKS:
        examples, questions = multiple_choice.with_examples(task, data, shots)
        lm_eval_tasks.write_choices(tmp_path, task, questions[:DOCUMENTS], examples)
    peer = evaluated("hf", tiny, tmp_path, [f"kvjax_{task}" for task in multiple_choice.TASKS])
    model = kvjax.load(tiny, dtype="float32")
    names = tuple(f"{task}(shots={shots})" for task in multiple_choice.TASKS)
    asked = answering.make(TasksConfig(names=names, folder=str(data), questions=DOCUMENTS), model, 0)
    found = answering.answers(model, CacheSpec(full()), asked, rows=4, journal=Journal(None))
    for task, name in zip(multiple_choice.TASKS, names, strict=True):
        scores, theirs = asked[name].scores(found[name], None), peer["results"][f"kvjax_{task}"]
        pairs = {"accuracy": "acc,none", "accuracy by length": "acc_norm,none"}
        printed = {f"{scores[own] / 100:.4f}": f"{theirs[other]:.4f}" for own, other in pairs.items() if own in scores}
        assert list(printed) == list(printed.values())
        assert ("accuracy by length" in scores) == (task != "winogrande")
        for own, sample in zip(found[name], peer["samples"][f"kvjax_{task}"], strict=True):
            theirs = [float(each[0]) for each in sample["filtered_resps"]]
            np.testing.assert_allclose(own["logprobs"], theirs, atol=2e-3)


@pytest.mark.sampled(0)
def test_the_command_records_what_it_ran_and_needs_no_torch(folder, tiny, tmp_path):
    """A policy with commas and brackets is one argument, and results.json says what it was."""
    policy = "after_prefill(snapkv(window=16), then=roco)"
    links = tmp_path / "links"
    links.mkdir()
    for entry in (entry for folder in sys.path if folder.endswith("-packages") for entry in Path(folder).iterdir()):
        if not entry.name.startswith(("torch", "transformers", "accelerate")) and not (links / entry.name).exists():
            (links / entry.name).symlink_to(entry)
    program = (
        f"import runpy, sys; sys.path[:0] = [{str(ROOT)!r}, {str(links)!r}]; "
        "runpy.run_module('kvjax.lm_eval', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [
            # Without site, whose folders are not on the path then.
            sys.executable, "-S", "-c", program, "--model", "kvjax", "--include_path", str(folder), "--tasks",
            "kvjax_piqa,kvjax_answers", "--limit", "1", "--batch_size", "2", "--output_path", str(tmp_path / "out"),
            "--model_args", f"path={tiny},policy={policy},budget=0.2,storage=int8",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    said = json.loads(file.read_text())["config"]
    assert (said["policy"], said["budget"], said["storage"], said["selection"]) == (policy, 0.2, "int8", "everything")
    assert said["kvjax_version"] and said["least_slots"] == 32 and 0 < said["kept_of_contexts"] <= 1
    assert "kvjax_answers" in done.stdout


CHAT = """{% for m in messages %}{% if m.role == "system" %}{{ raise_exception("no system") }}{% endif %}
<|im_start|>{{ m.role }}: {{ m.content | trim }}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""


@pytest.mark.parametrize("prefilled", ["", "i", "end", "im", "<|", "The answer is", "m <|im_end|> a", "12"])
def test_conversations_are_those_of_transformers(prefilled, tmp_path):
    import transformers

    from kvjax.lm_eval import KVJaxLM

    whole = kvjax.load(TINY)
    files = whole.tokenizer.files | {"chat_template.jinja": CHAT.encode(), "additional_chat_templates/b.jinja": b"B"}
    config = dataclasses.replace(whole.config, num_layers=1, windows=())
    tokenizer = dataclasses.replace(whole.tokenizer, files=files)
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    own = KVJaxLM(dataclasses.replace(whole, config=config, tokenizer=tokenizer))
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "user", "content": "Say i or end."}, {"role": "assistant", "content": prefilled}]
    expected = peer.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    # After an empty answer transformers also removes what the template writes before it, where that is a space.
    expected += " " * (not prefilled)
    assert own.apply_chat_template(talk, add_generation_prompt=False) == expected
    system = {"role": "system", "content": "Be brief."}
    assert own.apply_chat_template([system, *talk], add_generation_prompt=False) == expected
    expected = peer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    assert own.apply_chat_template(talk[:1]) == expected
    assert own.chat_template("b") == "B" and own.chat_template(True) == CHAT
    with pytest.raises(InputError, match="no chat template 'c'; there are b, default"):
        own.chat_template("c")


@pytest.mark.sampled(0)
def test_an_unknown_argument_is_one_paragraph(folder, monkeypatch, capsys):
    arguments = ["--model", "kvjax", "--include_path", str(folder), "--tasks", "kvjax_piqa", "--model_args"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments, f"path={TINY},polcy=h2o"])
    assert command.main() == command.USAGE_ERROR
    assert "does not take 'polcy'; it takes add_bos_token" in capsys.readouterr().err.splitlines()[-1]

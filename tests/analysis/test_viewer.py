"""The page says what the result says, whatever texts tokens have, and a browser shows it without errors."""

import base64
import dataclasses
import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies
from kvjax.analysis import held, viewer
from kvjax.checkpoint.encoding import EncodedBatch
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import InputError
from kvjax.generation.text import TextGeneration
from kvjax.models import families
from tests.browser import needs_browser, opened
from tests.conftest import ROOT
from tests.tiny import random_tokens, tiny

ROW, PROMPT, NEW = 1, 20, 6
TOKENS = random_tokens(2, PROMPT)
#: Texts that would end a script, an attribute or a line of JavaScript.
HOSTILE = ["</script><script>alert(1)</script>", "<!--", "'\"`${1}$title", "&lt;", "\u2028\n", "\\u003c", "", "é☃"]


@pytest.fixture(scope="module")
def results():
    split = policies.split_heads([[1, 0], [0, 1]], policies.full(), policies.window(6, sinks=1))
    each = [policies.full(), policies.h2o(8), split]
    return [kvjax.generate(tiny().model, TOKENS, policy, max_new_tokens=NEW) for policy in each]


@pytest.fixture(scope="module")
def shown(results):
    return analysis.show(results, lambda token: HOSTILE[token % len(HOSTILE)], tokens=TOKENS, row=ROW)


def data_of(page: str):
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)
    return json.loads(data)


def test_the_page_holds_what_the_result_has_kept(shown, results):
    data = data_of(shown.html())
    blobs = [np.frombuffer(base64.b64decode(text), np.uint8) for text in data["blobs"]]
    assert data["layers"] == [0, 1] and data["heads"] == 2 and data["full"] == 0
    assert [each["name"] for each in data["caches"]] == ["full", "h2o", results[2].layout.name]
    for cache, result in zip(data["caches"], results, strict=True):
        assert cache["length"] == PROMPT + NEW - 1
        for layer in data["layers"]:
            for head, kept in enumerate(result.kept(layer)[ROW]):
                bits = np.unpackbits(blobs[cache["held"][layer][head]], bitorder="little")
                np.testing.assert_array_equal(np.flatnonzero(bits), kept)
                shades = cache["shades"][layer][head]
                assert shades.keys() == ({"mass"} if cache["name"] == "h2o" else set())
                assert all(len(blobs[number]) == len(kept) for number in shades.values())


def test_shades_are_in_the_order_of_the_statistic(results):
    layer, own = results[1].state.layers[1], held.held_tokens(results[1].layout, results[1].state, ROW)
    position, mass = np.asarray(layer.position)[ROW, 0], np.asarray(layer.stats["mass"])[ROW, 0]
    values = own.statistics[1][0]["mass"]
    for place, each in enumerate(own.positions[1][0]):
        assert values[place] == mass[position == each]
    shades = held.shades(values)
    np.testing.assert_array_equal(np.argsort(shades), np.argsort(values))
    assert (shades.min(), shades.max()) == (0, 255)


def test_shades_of_equal_values_are_equal():
    assert held.shades(np.float32([3, 1, 3, 9, 2])).tolist() == [128, 0, 128, 255, 64]
    assert held.shades(np.float32([7])).tolist() == [0]
    assert held.shades(np.float32([])).size == 0


def test_statistics_that_say_most_come_first():
    made = kvjax.generate(tiny().model, TOKENS, policies.roco(8), max_new_tokens=2)
    (head, *_), *_ = held.held_tokens(made.layout, made.state).statistics
    assert next(iter(head)) == "mass" and "count" in head and next(reversed(head)) == "count"
    assert held.in_words("tail[16]") == "attention of the prompt's last queries" and held.in_words("mine") == "mine"


class Tags(HTMLParser):
    """Collects the tags of a page, and the text outside of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attributes]


def test_texts_of_tokens_are_never_read_as_html(shown):
    data = data_of(shown.html())
    assert data["prompt"] == [HOSTILE[token % len(HOSTILE)] for token in TOKENS[ROW]]
    plain = dataclasses.replace(shown, prompt=["x"] * PROMPT, caches=[])
    tags = Tags(shown.html()).tags
    assert tags.count("script") == 2
    assert tags == Tags(dataclasses.replace(plain, caches=shown.caches).html()).tags


def test_every_choice_is_a_labelled_select(shown):
    assert re.findall(r"<label>([^<]+) <select", shown.html()) == ["Cache", "Layer", "KV head", "Shade by"]
    assert Tags(shown.html()).tags.count("select") == 4


def test_a_title_is_escaped(shown):
    page = dataclasses.replace(shown, title="</title><script>1</script>$viewer").html()
    assert "<title>&lt;/title&gt;&lt;script&gt;1&lt;/script&gt;$viewer</title>" in page


def test_a_page_asks_no_network_for_anything(shown):
    names = {name for _, name, _ in Tags(shown.html()).attributes}
    assert not names & {"src", "href", "srcset", "action", "poster"}
    assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", shown.html())
    assert "default-src 'none'" in shown.html()


def test_a_notebook_shows_the_page_in_a_frame(shown):
    frame = Tags(shown._repr_html_())
    assert frame.tags == ["iframe"]
    found = {name: value for _, name, value in frame.attributes}
    assert found["srcdoc"] == shown.html() and found["sandbox"] == "allow-scripts"
    assert "\n" not in repr(shown) and "full, h2o" in repr(shown)


def test_a_page_of_seven_caches_can_be_mailed():
    rng = np.random.default_rng(0)
    positions = [[np.flatnonzero(rng.random(1023) < 0.3) for _ in range(2)] for _ in range(6)]
    stats = [[{"mass": rng.random(own.size)} for own in layer] for layer in positions]
    each = held.HeldTokens(tuple(range(6)), positions, stats, 983, 1023)
    made = viewer.Viewer(["word "] * 983, [viewer.CacheView(f"cache {i}", each, ["word "] * 40) for i in range(7)])
    assert len(made.html()) < 60_000  # equal caches are written once
    others = [
        dataclasses.replace(
            view, held=dataclasses.replace(each, positions=[layer[::-1] for layer in positions[i:] + positions[:i]])
        )
        for i, view in enumerate(made.caches)
    ]
    assert len(dataclasses.replace(made, caches=others).html()) < 120_000


def test_results_with_names_and_with_prompts_of_their_own(results):
    batch = EncodedBatch(np.pad(TOKENS, ((0, 0), (0, 3))), np.full(2, PROMPT, np.int32))
    texts = [TextGeneration(["", ""], each, batch) for each in results[:2]]
    made = analysis.show({"exact": texts[0], "h2o at 8": texts[1]}, row=-1, layers=[-1])
    data = made.data()
    assert data["prompt"] == [f"{token} " for token in TOKENS[ROW]] and data["full"] is None
    assert [each["name"] for each in data["caches"]] == ["exact", "h2o at 8"] and data["layers"] == [1]
    twice = analysis.show([results[1], results[1]], tokens=TOKENS.tolist())
    assert [each.name for each in twice.caches] == ["h2o", "h2o (2)"]
    assert analysis.show(results[1], tokens=TOKENS).caches[0].answer == [f"{token} " for token in results[1].tokens[0]]


def test_the_texts_of_tokens_are_the_text():
    folder = ROOT / "kvjax" / "pretrained" / "kvjax-tiny"
    tokenizer = load_tokenizer(folder, families.read(json.loads((folder / "config.json").read_text())))
    ids = tokenizer.encode("It was a bright cold day; ☃ met Ann.")
    parts = viewer.token_texts(tokenizer, (), ids[:5]) + viewer.token_texts(tokenizer, ids[:5], ids[5:])
    begins = 1 if ids[0] == tokenizer.bos_id else 0
    assert "".join(parts[begins:]) == tokenizer.decode(ids) and len(parts) == len(ids)
    assert parts[:begins] == [tokenizer.token(tokenizer.bos_id)] * begins


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tokens": None}, "does not store its prompts"),
        ({"tokens": TOKENS[:, :-1]}, f"row 0 had a prompt of {PROMPT} tokens"),
        ({"tokens": TOKENS[0].tolist(), "row": 1}, "row 1 had a prompt"),
        ({"tokens": ["a text"]}, "token ids, but are text"),
        ({"row": 2}, "row must be a whole number from 0 to 1"),
        ({"row": True}, "row must be"),
        ({"layers": []}, "layers must be a non-empty sequence"),
        ({"layers": 1}, "layers must be a non-empty sequence"),
        ({"layers": [0.5]}, "layer must be a whole number from 0 to 1"),
        ({"tokenizer": "kvjax-tiny"}, "tokenizer must be model.tokenizer of kvjax, or a function"),
        ({"tokenizer": type("Other", (), {"__call__": None, "decode": None})()}, "tokenizer must be model.tokenizer"),
        ({"layers": [2]}, "layer must be a whole number from 0 to 1"),
        ({"results": []}, "one or several results of kvjax.generate or kvjax.generate_text; got none"),
        ({"results": [3]}, "got int"),
        ({"results": {"x": None}}, "got NoneType"),
    ],
)
def test_arguments_are_checked(results, options, match):
    given = {"results": results[0], "tokens": TOKENS} | options
    with pytest.raises(InputError, match=match):
        analysis.show(**given)


def test_results_of_other_prompts_are_refused(results):
    batch = EncodedBatch(TOKENS, np.full(2, PROMPT, np.int32))
    other = TextGeneration(["", ""], results[1], batch._replace(tokens=TOKENS[::-1]))
    with pytest.raises(InputError, match="for different prompts"):
        analysis.show([TextGeneration(["", ""], results[0], batch), other])


def test_a_file_that_cannot_be_written(shown, tmp_path):
    shown.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == shown.html()
    with pytest.raises(InputError, match=r"cannot be written: No such file"):
        shown.save(tmp_path / "absent" / "page.html")


def counts(part: str) -> dict[str, int]:
    """The number of tokens of each class."""
    return {name: len(re.findall(rf'<span class="[^"]*\b{name}\b', part)) for name in ("held", "evicted", "unseen")}


@needs_browser
@pytest.mark.parametrize(("cache", "layer", "head"), [(1, 1, 0), (2, 0, 1)])
def test_a_browser_shows_the_tokens_that_are_held(shown, results, tmp_path_factory, cache, layer, head):
    path = tmp_path_factory.getbasetemp() / "shown.html"
    shown.save(path)
    page = opened(path, f"cache={cache}&layer={layer}&head={head}")
    assert not page.messages
    kept = results[cache].kept(layer)[ROW][head]
    assert f'data-held="{len(kept)}"' in page.dom
    before = int(np.sum(kept < PROMPT))
    assert counts(page.inside("prompt")) == {"held": before, "evicted": PROMPT - before, "unseen": 0}
    assert counts(page.inside("own"))["held"] == len(kept) - before and counts(page.inside("own"))["unseen"] == 1
    texts = re.findall(r"<span[^>]*>(.*?)</span>", page.inside("prompt"), re.S)
    assert [html.unescape(text) for text in texts] == [text or "·" for text in shown.prompt]
    assert f"{len(kept)} of {PROMPT + NEW - 1} tokens are held in layer {layer}, KV head {head}." in page.inside(
        "status"
    )


@needs_browser
def test_a_browser_shows_all_heads_at_first_and_errors_would_be_seen(shown, results, tmp_path):
    page = shown.html().replace("</body>", "<script>undefined.x</script></body>")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    found = opened(tmp_path / "page.html", "layer=7&cache=x")
    assert len(found.messages) == 1 and "Uncaught TypeError" in found.messages[0]
    every = {int(p) for layer in (0, 1) for own in results[2].kept(layer)[ROW] for p in own}
    assert f"{len(every)} of 25 tokens are held by at least one of 4 heads." in found.inside("status")

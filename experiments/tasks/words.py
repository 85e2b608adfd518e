"""Words of generated tasks: names, nouns and templates, of training and of evaluation.

A model that was trained on `TRAINING` meets every name, noun and wording of `HELD_OUT` for the first time in a task.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

_NAMES = """
Abel Agnes Albert Alma Amos Anna Arthur Basil Beatrice Bella Bernard Bertha Boris Bridget Carl Cecil Celia Clement Cora
Cyril Dora Edgar Edmund Edwin Ella Elsie Emil Enid Ernest Esther Ethel Eugene Eva Fanny Flora Frank Gerald Gilbert Grace
Guy Hannah Harold Hector Helen Henry Herbert Hilda Horace Ida Irene Isaac Ivan Jacob James Jane Joan Joel Julia Karl
Kate Laura Lewis Lily Louis Lucy Luke Mabel Maria Mark Martha Matthew Max Miriam Nancy Nathan Nell Nina Noah Nora Olga
Oliver Oscar Otto Patrick Paul Peter Philip Ralph Rachel Robert Rose Ruth Samuel Sarah Simon Stella Susan Thomas Tom
Ursula Victor Violet Walter William Yvonne
"""
_HELD_OUT_NAMES = """
Ada Alice Boyd Brook Clara Conrad Daisy Denis Edith Elias Felix Freda George Greta Hugo Iris Jonas Judith Klaus Leo
Mina Morris Naomi Oswald Pearl Quentin Roland Sylvia Tobias Vera
"""
_NOUNS = """
anchor apple apron arrow axe bag ball barn barrel bead beam bean bear bed bee bench bird blade blanket board boat bone
book boot bottle bow bowl box branch brass bread brick bridge broom brush bucket button cake camel candle cane cap card
carpet cart castle cat chain chair chalk chest church clay cloak clock cloth cloud coach coal coat coin comb copper
cord cork corn cottage cotton cow cradle crown cup curtain cushion dagger desk dish dog donkey door dove dragon drawer
dress drum duck dust eagle egg engine fan farm feather fence field fire fish flag flame flask flour flower fork fox
frame frog fruit garden gate ghost gift glass glove goat gold goose grain grape grass hammer harp hat hawk hay hen hill
honey hood hook horn horse house ink iron ivory jar jewel jug kite knife knot ladder lake lamb lamp lane leaf leather
lemon lion lock log loom marble mask mast match meadow milk mill mirror monkey moon mouse mud mule nail needle nest net
nut oak oar ocean oil onion orange oven owl ox paint paper path peach pear pen pencil pepper pie pig pillow pin pipe
plate plough plum pocket pond pony pot purse quilt rabbit rain rake raven ribbon rice ring river road robe rock roof
room root rose rug saddle sail salt sand scarf school scissors seal seed shawl sheep shelf shell shield ship shirt shoe
shovel silk silver slate sleeve snake snow soap sock spade spear spider spoon spring stable star steam steel stick
stone stool storm stove straw street sugar sword table tail tea tent thread throne tiger tin tooth torch towel tower
train tray tree trumpet tub tunnel turkey vase veil vine violin wagon wall watch water wax well whip whistle window wine
wing wolf wood wool worm yard
"""
_HELD_OUT_NOUNS = """
almond badge basin basket bell blossom buckle cabin candy canoe cellar cherry cliff collar compass coral crab cradle
crystal deck diamond ditch fiddle flute forest fountain globe hammock harbour hedge helmet insect island jacket kettle
key lantern letter lizard magnet map medal nutmeg olive orchard parcel parrot pebble penny pigeon planet puddle puzzle
rifle rocket rope saucer sparrow statue swan tablet temple thimble tulip turnip valley velvet walnut wheel willow
"""
_THINGS = """
pass key|secret number|magic number|door code|vault code|ticket number|house number|password|safe combination|
room number|lucky number|account number|order number|secret code|record number|page number|lock code|signal number
"""
_HELD_OUT_THINGS = "access code|garage number|entry key|locker number|gate password|badge number"

#: One value under one name. {k}: what it is, {v}: the value; a question ends where its answer begins.
_PASSKEY = (
    ("The {k} is {v}. Remember it.", "The {k} is"),
    ("Remember this: the {k} is {v}.", "What is the {k}? The {k} is"),
    ("The {k} is {v}. Yes, the {k} is {v}.", "What is the {k}? The {k} is"),
    ("Do not forget that the {k} is {v}.", "Now say again that the {k} is"),
    ("Here is the {k}: {v}.", "Here is the {k}:"),
    ("The {k} was {v}.", "Answer: the {k} was"),
    ("Take the {k} {v}.", "Take the {k}"),
    ("{k} = {v}.", "{k} ="),
    ("You will need the {k}, {v}.", "You will need the {k},"),
)
_HELD_OUT_PASSKEY = (
    ("Keep in mind that the {k} is {v}.", "Which number was it? The {k} is"),
    ("Write down the {k}: {v}.", "Read out the {k}:"),
    ("There is an important fact in this text. The {k} is {v}.", "Do you recall the {k}? The {k} is"),
)
#: Several values under several names. {n}: whose.
_KEYS = (
    ("The {k} of {n} is {v}.", "The {k} of {n} is"),
    ("{n}'s {k} is {v}.", "What is {n}'s {k}? {n}'s {k} is"),
    ("{n} has the {k} {v}.", "{n} has the {k}"),
    ("For {n} the {k} is {v}.", "For {n} the {k} is"),
    ("{k} of {n}: {v}.", "{k} of {n}:"),
    ("{n}: {v}.", "{n}:"),
    ("{n} said {v}.", "{n} said"),
    ("They gave {n} the {k} {v}.", "They gave {n} the {k}"),
    ("{n} lives at {v}.", "{n} lives at"),
)
_HELD_OUT_KEYS = (
    ("The {k} that belongs to {n} is {v}.", "Look it up. The {k} that belongs to {n} is"),
    ("{n} wrote down the {k} {v}.", "{n} wrote down the {k}"),
    ("{n} keeps {k} {v}.", "{n} keeps {k}"),
)
#: Word pairs. {n}: the one that is given, {v}: the one that goes with it.
_PAIRS = (
    ("{n} - {v};", "{n} -"),
    ("{n}: {v}.", "{n}:"),
    ("{n} goes with {v}.", "{n} goes with"),
    ("The {n} and the {v}.", "The {n} and the"),
    ("{n} means {v}.", "{n} means"),
    ("{n} = {v},", "{n} ="),
    ("{n} for {v}.", "What is {n}? {n} for"),
    ("A {n} has a {v}.", "A {n} has a"),
    ("({n} {v})", "({n}"),
)
_HELD_OUT_PAIRS = (
    ("{n} belongs to {v}.", "{n} belongs to"),
    ("{n} > {v};", "{n} >"),
    ("After {n} comes {v}.", "After {n} comes"),
)
#: Variables: a first value, a copy of another variable, the question.
_VARIABLES = (
    ("{n} = {v}.", "{n} = {m}.", "What is {n}? {n} ="),
    ("Let {n} be {v}.", "Let {n} be {m}.", "Now {n} is"),
    ("{n} holds {v}.", "{n} holds what {m} holds.", "So {n} holds"),
    ("The {n} is {v}.", "The {n} is the {m}.", "In the end the {n} is"),
    ("Set {n} to {v}.", "Set {n} to {m}.", "The value of {n} is"),
)
_HELD_OUT_VARIABLES = (
    ("Put {v} into {n}.", "Put {m} into {n}.", "What is in {n}? In {n} there is"),
    ("{n} stands for {v}.", "{n} stands for {m}.", "Therefore {n} stands for"),
)
#: A span of words: before it, and before its repetition.
_COPIES = (
    ("Copy this: {v}.", "Copy:"),
    ("The words are: {v}.", "Again, the words are:"),
    ('"{v}."', '"'),
    ("He said: {v}.", "He said:"),
    ("List: {v}.", "List:"),
    ("They sang {v}.", "They sang"),
)
_HELD_OUT_COPIES = (
    ("The sentence reads {v}.", "Once more, the sentence reads"),
    ("She whispered: {v}.", "She whispered:"),
)

Templates = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Words:
    """Names, nouns, things that have a number, and templates by task."""

    names: tuple[str, ...]
    nouns: tuple[str, ...]
    things: tuple[str, ...]
    templates: dict[str, Templates]


def _things(text: str) -> tuple[str, ...]:
    return tuple(thing.strip() for thing in text.split("|"))


HELD_OUT = Words(
    names=tuple(_HELD_OUT_NAMES.split()),
    nouns=tuple(dict.fromkeys(_HELD_OUT_NOUNS.split())),
    things=_things(_HELD_OUT_THINGS),
    templates={
        "passkey": _HELD_OUT_PASSKEY,
        "multi_key": _HELD_OUT_KEYS,
        "associative": _HELD_OUT_PAIRS,
        "variable": _HELD_OUT_VARIABLES,
        "copy": _HELD_OUT_COPIES,
    },
)
TRAINING = Words(
    names=tuple(_NAMES.split()),
    nouns=tuple(noun for noun in dict.fromkeys(_NOUNS.split()) if noun not in HELD_OUT.nouns),
    things=_things(_THINGS),
    templates={
        "passkey": _PASSKEY,
        "multi_key": _KEYS,
        "associative": _PAIRS,
        "variable": _VARIABLES,
        "copy": _COPIES,
    },
)

#: Wordings that were written after the model was trained, with the same names and nouns: the card looks at them once,
#: and nothing is chosen by them.
AFTERWARDS = dataclasses.replace(
    HELD_OUT,
    templates={
        "passkey": (
            ("Nobody else may learn the {k}, which is {v}.", "Tell me the {k}, which is"),
            ("Our {k} has been changed to {v}.", "As we heard, our {k} has been changed to"),
            ("On the back of the photograph someone had scratched the {k} {v}.", "She needed the {k}"),
        ),
        "multi_key": (
            ("{n} was given {v} as {k}.", "{n} was given"),
            ("{n} chose {v} for a {k}.", "Who chose what? {n} chose"),
            ("Beside the name {n} stood the {k} {v}.", "Beside the name {n} stood the {k}"),
        ),
        "associative": (
            ("{n} turns into {v}.", "{n} turns into"),
            ("Trade {n} against {v}!", "Trade {n} against"),
            ("next to {n} lies {v},", "next to {n} lies"),
        ),
        "variable": (
            ("Count {v} as {n}.", "Count {m} as {n}.", "How much is {n}? We count {n} as"),
            ("{n} costs {v}.", "{n} costs as much as {m}.", "At the till {n} costs"),
        ),
        "copy": (
            ("On the wall was written {v}.", "Below it again was written"),
            ("The password phrase: {v}.", "Type the password phrase:"),
        ),
    },
)


def common_words(texts: Iterable[str], count: int) -> tuple[str, ...]:
    """The `count` most frequent lower-case words of three letters or more, without the held-out ones."""
    frequency: Counter[str] = Counter()
    for text in texts:
        frequency.update(re.findall(r"(?<![\w'])[a-z]{3,10}(?![\w'])", text))
    held_out = set(HELD_OUT.nouns) | {part for thing in HELD_OUT.things for part in thing.split()}
    ranked = sorted(frequency.items(), key=lambda item: (-item[1], item[0]))
    return tuple([word for word, _ in ranked if word not in held_out][:count])

"""Words: common ones, and invented ones that a model cannot know by heart."""

from __future__ import annotations

import random

from flint_jax.evals.item import TRAIN, draw


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COMMON = _words(
    "apple river stone candle window garden paper silver copper yellow purple orange bread salt sugar lemon "
    "north south east west morning evening winter summer forest island bridge tower market harbour kitchen "
    "table chair mirror blanket pencil bottle basket hammer ladder wheel engine rocket comet planet meadow "
    "valley desert glacier ocean pebble feather needle button ribbon velvet cotton marble"
)
# Names and things of every day: in training only, so that held-out items have none that was learnt by heart.
NAMES = _words(
    "Paris London Berlin Rome Madrid Oslo Vienna Prague Lisbon Dublin Athens Boston Tokyo Cairo Lima Delhi Zurich "
    "Geneva Hamburg Munich Milan Naples Toronto Sydney Seoul Anna Ben Clara David Emma Frank Grace Henry Ida Jack "
    "Karl Laura Maria Nina Oscar Paul Rosa Sam Tina Victor"
)
THINGS = _words(
    "weather time price train room light file report alarm timer stock parcel ticket order user calendar mail news "
    "song route flight hotel temperature map door heating printer backup message meeting invoice folder score recipe"
)
# Words around a question, in training: whoever reads them has to find the question, however it is wrapped.
_AROUND = _words(
    "well okay so now then could would might can you me I we please tell give let us this that here there just maybe "
    "quickly again once more for the a an of to in on at with by from about it is be do does need want like try think "
    "see look know hope kindly my your one thing else also first next today question task quick small hey dear friend "
    "yes no sure right what how which when where why who much many if because but and or not very really only soon "
    "going should shall will may must has have had was were are been being make made take took put use used help say "
    "said ask asked answer wonder curious wish love simply exactly briefly short long easy hard good great nice fine "
    "work out figure check show find open get read this over thanks come go back up down off all any some same other "
    "before after while"
)
_CLOSINGS = (", thanks", ", thank you", ", if you can", ", now", ", for me", ", will you", ", right away")
_ONSETS = _words("b d f g k l m n p r s t v z")
_VOWELS = _words("a e i o u")
_ENDS = ("", "n", "r", "s", "l", "x")


# Pieces of English spelling: words put together of them look like any word, and use all of a vocabulary.
_PIECES = _words(
    "th ch sh ph wh br cr dr fr gr pr tr bl cl fl gl pl sl sc sk sm sn sp st sw tw qu a e i o u ai ay ea ee oo ou ow "
    "ll ss tt ck ng nd nt mp rt rd rm sy ly ty ing ed er est ness ful ion ment able ight ough all ell ill oll and end "
    "ist ism ous ive ant ent ard ber der ger ker ler mer per ter y ay oy un re in dis over under b c d f g h j k l m n "
    "p r s t v w x z cloud sun rain wind snow"
)


def _odd(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8)))
    word = "".join(rng.choice(_PIECES) for _ in range(rng.randint(2, 4)))
    return word + str(rng.randint(0, 99)) if kind < 0.3 else word


def invented(rng: random.Random, split: str) -> str:
    """A word of two or three syllables, in training also of any letters; held-out words never occur in training."""

    def make(rng):
        if split == TRAIN and rng.random() < 0.35:
            word = _odd(rng)
            return word, word
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3))))
        word += rng.choice(_ENDS)
        return word, word

    return draw(rng, split, make)


def name(rng: random.Random, split: str) -> str:
    """A word with a capital: an invented one, in training also a known name."""
    if split == TRAIN and rng.random() < 0.5:
        return rng.choice(NAMES)
    return invented(rng, split).capitalize()


def around(rng: random.Random, count: int) -> str:
    """``count`` words that mean nothing together."""
    return " ".join(rng.choice(_AROUND) for _ in range(count))


def wrapped(rng: random.Random, split: str, text: str, *, closing: bool = True) -> str:
    """In training, half of the time: the text with other words before it, or (``closing``) behind it after a comma.

    One in ten as somebody types in haste: without a capital, without its last sign.
    """
    if split != TRAIN:
        return text
    if rng.random() < 0.1:
        return text[0].lower() + text[1:].rstrip(".?!")
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.7:
        before = around(rng, rng.randint(1, 5))
        first = text[0] if rng.random() < 0.5 else text[0].lower()
        text = before[0].upper() + before[1:] + rng.choice((" ", " ", ", ", ": ")) + first + text[1:]
    if closing and rng.random() < 0.5:
        behind = rng.choice(_CLOSINGS) if rng.random() < 0.5 else f", {around(rng, rng.randint(1, 3))}"
        end = text[-1] if text[-1] in ".?!" else ""
        text = text.removesuffix(end) + behind + (rng.choice(".?!") if end else "")
    return text


def several(rng: random.Random, split: str, count: int) -> list[str]:
    """``count`` different invented words."""
    words: dict[str, None] = {}
    while len(words) < count:
        words[invented(rng, split)] = None
    return list(words)


def listed(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]

"""Whether a response stays in the script of a language."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

# How Unicode names of letters begin.
SCRIPTS = {
    "arabic": ("ARABIC",),
    "chinese": ("CJK",),
    "cyrillic": ("CYRILLIC",),
    "devanagari": ("DEVANAGARI",),
    "greek": ("GREEK",),
    "hebrew": ("HEBREW",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    "korean": ("HANGUL",),
    "latin": ("LATIN",),
    "thai": ("THAI",),
}


def language(text: str, script: str, **row: object) -> float | None:
    """Share of letters that are of ``script``, 0.0 to 1.0; None where there are no letters.

    It tells a response that slips from one script to another, as reasoning models do, and not
    English from French: for that, a function with a language identifier is wanted.
    """
    letters = [character for character in text if character.isalpha()]
    if not letters:
        return None
    return sum(_first_word(letter) in SCRIPTS[script] for letter in letters) / len(letters)


def check_language(script: str = "") -> None:
    """Raise ValueError where ``script`` is none that is known."""
    if script not in SCRIPTS:
        known: Sequence[str] = sorted(SCRIPTS)
        raise ValueError(
            f"reward language: script is {script!r}: give options: {{script: one of "
            f"{', '.join(known)}}}"
        )


@lru_cache(maxsize=1 << 16)
def _first_word(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]

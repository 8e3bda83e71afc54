"""Sentence splitting by rule, for datasets that pair sentences (BERT) or mask whole ones (T5).

A sentence ends

- at ``.``, ``!``, ``?`` or ``…`` (with the quotes and brackets that close there) when white space
  follows and the next word does not start in lower case, unless a single ``.`` ends a known
  abbreviation (``Dr.``, ``e.g.``) or an initial (``J. Smith``);
- at ``。``, ``！`` or ``？``, white space or not;
- at an empty line.

White space between sentences is dropped, as Megatron's preprocessing does. The rule needs no model
and no download; it is meant for languages with these marks. For others, split beforehand and give
one sentence per record.
"""

import re

# Possessive runs and the look-behind keep the scan linear on long rows of dots.
_BOUNDARY = re.compile(
    r"""(?P<mark>(?<![.!?…])[.!?…]++)["'”’»)\]]*+\s++(?=\S)"""
    r"""|[。！？]++["”’」』）]*+\s*+"""
    r"""|\n[^\S\n]*+\n\s*+"""
)
_OPENING = "\"'“‘«([¿¡"
_LAST_WORD = re.compile(r"[\w.]*\Z")
_LONGEST_WORD = 24

_ABBREVIATED = (
    "mr mrs ms dr prof sr jr st mt gen col sgt capt lt rev hon gov sen rep pres "
    "e.g i.e cf vs viz al fig figs eq eqs sec ch vol pp ed eds approx ca "
    "inc ltd co corp dept univ assn bros "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)
_ABBREVIATIONS = frozenset(_ABBREVIATED.split())
_BEFORE_NUMBER = frozenset(("no", "nos", "p", "art"))


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text`` in order, without surrounding white space; none is empty."""
    sentences = []
    start = 0
    for match in _BOUNDARY.finditer(text):
        if match["mark"] is not None and not _ends_sentence(text, match):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    following = text[match.end() : match.end() + 8].lstrip(_OPENING)[:1]
    if following.islower():
        return False
    if match["mark"] != ".":
        return True
    before = text[max(0, match.start() - _LONGEST_WORD) : match.start()]
    found = _LAST_WORD.search(before)
    word = found[0] if found else ""
    if word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper()):
        return False
    return not (word.lower() in _BEFORE_NUMBER and following.isdigit())

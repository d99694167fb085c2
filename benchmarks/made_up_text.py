"""Text of any size for benchmarks: `python -m benchmarks.made_up_text FILE --megabytes 5000`.

Words are made up: letters have the frequencies of English, and lengths are as in running English;
300,000 words are drawn by Zipf's law with exponent 1.15. The text has sentences, numbers and a few
accents. It is written as JSON lines of about two thousand characters per note, with some twenty
notes per patient. The same size and seed yield the same bytes. After each gigabyte, which contains
all of the words, the same notes are repeated for other patients, so that memory for distinct words
does not grow further.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_FREQUENT = np.array(
    [12.7, 9.1, 8.2, 7.5, 7.0, 6.7, 6.3, 6.1, 6.0, 4.3, 4.0, 2.8, 2.8, 2.4, 2.4, 2.2, 2.0, 2.0, 1.9,
     1.5, 1.0, 0.8, 0.15, 0.15, 0.1, 0.07]
)  # fmt: skip
_WORDS, _EXPONENT, _NOTES_OF_A_PATIENT = 300_000, 1.15, 20
_TURN = 1000  # megabytes that are drawn before the text is repeated


def words(count: int, seed: int) -> list[str]:
    """Return made-up words, of which the frequent ones are short."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.poisson(2 + 0.55 * np.log(np.arange(count) + 1)), 1, 16)
    letters = rng.choice(len(_LETTERS), lengths.sum(), p=_FREQUENT / _FREQUENT.sum())
    every = "".join(_LETTERS[i] for i in letters.tolist())
    ends = np.cumsum(lengths).tolist()
    made = [every[end - n : end] for end, n in zip(ends, lengths.tolist(), strict=True)]
    return [w.replace("e", "é", 1) if i % 200 == 199 else w for i, w in enumerate(made)]


def notes(characters: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (patient, document, text), of about this number of characters in total."""
    rng = np.random.default_rng(seed)
    known = np.array(words(_WORDS, seed), object)
    mass = np.cumsum(1 / (np.arange(_WORDS) + 2.7) ** _EXPONENT)
    left, number = characters, 0
    while left > 0:
        drawn = known[np.searchsorted(mass, rng.random(100_000) * mass[-1])]
        while len(drawn) > 900 and left > 0:
            size = int(rng.integers(150, 600))
            tokens, drawn = drawn[:size].tolist(), drawn[size:]
            for start in range(0, size, 14):  # sentences
                tokens[start] = tokens[start].capitalize()
                tokens[min(start + 13, size - 1)] += f" {start + 1}.5 mg.\n"
            text = " ".join(tokens)
            left -= len(text)
            yield f"p{number // _NOTES_OF_A_PATIENT}", str(number), text
            number += 1


def write(file: Path, megabytes: int, seed: int = 0) -> None:
    """Write JSON lines in the format of the reader `jsonl`."""
    with file.open("w", encoding="utf-8") as out:
        for patient, document, text in notes(min(megabytes, _TURN) * 1_000_000, seed):
            row = {"patient_id": patient, "document_id": document, "text": text}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    with file.open("rb") as drawn, file.open("ab") as out:
        ends = drawn.seek(0, os.SEEK_END)
        for turn in range(1, -(-megabytes // _TURN)):
            share = min(_TURN, megabytes - turn * _TURN) / _TURN
            drawn.seek(0)
            while drawn.tell() < ends * share:
                # Every row starts with the patient's id, which starts with p.
                row = drawn.readline().replace(b': "p', f': "p{turn}-'.encode(), 1)
                out.write(row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.file, options.megabytes, options.seed)

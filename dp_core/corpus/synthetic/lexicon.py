"""Names, places, laboratory values and modifiers of the made-up notes."""

from __future__ import annotations

from dataclasses import dataclass

from dp_core.corpus.synthetic.tables import read_table

# Lists by name, for example WORDS["facilities"]. Surnames are compounds of two lists, so that
# there are some thousands of them.
WORDS: dict[str, tuple[str, ...]] = read_table("lexicon")[0].fields


@dataclass(frozen=True)
class Lab:
    """A laboratory value: its names, normal range, unit, decimals, and where disease moves it."""

    names: tuple[str, ...]
    low: float
    high: float
    unit: str
    decimals: int
    rises: bool


def _lab(fields: tuple[str, ...]) -> Lab:
    names, low, high, unit, decimals, direction = fields
    return Lab(
        tuple(names.split(", ")), float(low), float(high), unit, int(decimals), direction == "high"
    )


LABS: dict[str, Lab] = {name: _lab(fields) for name, fields in read_table("labs")[0].fields.items()}

# Entities whose parts combine freely: many more surfaces than any training set shows.
IMAGING = (
    "(ct|ct|ct|mri|mri|ultrasound|x-ray|doppler|plain films) of the "
    "(chest|chest|chest|abdomen|abdomen|head|head|brain|pelvis|neck|abdomen and pelvis|"
    "(left|right) (knee|hip|leg|leg|shoulder|foot)|(lumbar|cervical|thoracic) spine)"
    "( with contrast| without contrast||||)"
)
TEST_MODIFIERS = "(repeat |repeat |serial |initial |follow up |outpatient |||||)"
LESION = (
    "({size} |)(small |calcified |enhancing |stable |cystic |spiculated |hypodense |)"
    "(nodule|nodule|mass|mass|lesion|lesion|opacity|cyst|lymph node|fluid collection|fracture) in "
    "the (left|right) (upper lobe|upper lobe|lower lobe|lower lobe|kidney|lung|breast|"
    "adrenal gland|hepatic lobe|femur|frontal lobe|ovary|axilla)"
)

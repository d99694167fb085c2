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
    "(ct|mri|mra|ultrasound|plain films|ct angiogram|x-ray|doppler) of the "
    "(chest|abdomen|pelvis|head|neck|brain|cervical spine|lumbar spine|thoracic spine|left knee|"
    "right knee|left hip|right hip|left shoulder|right shoulder|left foot|right foot|sinuses|"
    "left leg|right leg|abdomen and pelvis)( with contrast| without contrast||||)"
)
TEST_MODIFIERS = "(repeat |serial |initial |follow up |outpatient |bedside |routine |)"
LESION = (
    "({size} |)(calcified |spiculated |cystic |hypodense |enhancing |ill defined |solid |stable |)"
    "(nodule|mass|lesion|cyst|opacity|lymph node|fluid collection|fracture) in the "
    "(left|right) (upper lobe|lower lobe|kidney|adrenal gland|hepatic lobe|breast|lung base|femur|"
    "frontal lobe|ovary|hilum|axilla)"
)

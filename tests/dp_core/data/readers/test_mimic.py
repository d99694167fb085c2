import gzip
from pathlib import Path

import pytest

from dp_core.data.corpus import Document
from dp_core.data.readers.labelled_texts import Diagnoses
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput

TABLE = """"ROW_ID","SUBJECT_ID","HADM_ID","SEQ_NUM","ICD9_CODE"
1,109,172335,1,"40301"
2,109,172335.0,2,"486"
3,109,173633,1,"58281"
4,7.0,200001,1,"486"
5,8,200002,,
"""


def read_codes(folder: Path, text: str | bytes, name: str = "DIAGNOSES_ICD.csv") -> Diagnoses:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return Diagnoses(folder / name, where="membership_codes")


def of(patient: str, admission: str = "") -> Document:
    return Document("d", patient, "text", admission)


@pytest.mark.parametrize("packed", [False, True])
def test_codes_are_looked_up_by_patient_or_by_admission(tmp_path, packed):
    content = TABLE.encode()
    name = "D.csv.gz" if packed else "D.csv"
    table = read_codes(tmp_path, gzip.compress(content) if packed else content, name)
    assert table.of_patient(of("109")) == {"40301", "486", "58281"}
    assert table.of_admission(of("109", "172335")) == {"40301", "486"}
    assert table.of_admission(of("109", "173633.0")) == {"58281"}
    assert table.of_admission(of("109")) == table.of_patient(of("109"))
    assert table.of_admission(of("7", "172335")) == frozenset()  # another patient's admission
    assert table.of_patient(of("7")) == {"486"}
    assert table.of_patient(of("8")) == table.of_patient(of("9")) == frozenset()  # no code


def test_equal_codes_of_two_icd_versions_are_distinct(tmp_path):
    table = read_codes(tmp_path, "subject_id,hadm_id,icd_code,icd_version\n1,2,V10,9\n1,2,V10,10\n")
    assert table.of_patient(of("1")) == {"9:V10", "10:V10"}


def test_unreadable_items_are_counted_by_reason(tmp_path):
    file = tmp_path / "D.csv"
    broken = '6,,3,1,"1"\n7,8\n8,9,3,1,"un"closed\n9,1,3,1,"2"\n'
    file.write_text(TABLE + broken + TABLE.split("\n", 1)[1] * 9)
    quarantine = Quarantine()
    Diagnoses(file, quarantine)
    assert quarantine.counts == {Reason.NO_PATIENT: 1, Reason.WRONG_COLUMNS: 2}
    assert (quarantine.taken, quarantine.left_out) == (41, 10)


@pytest.mark.cases
def test_a_table_with_other_columns_is_refused_without_quoting_it(tmp_path, text):
    with pytest.raises(BadInput) as refused:
        read_codes(tmp_path, text)
    assert "membership_codes" in str(refused.value) and "zyxsecret" not in str(refused.value)

"""What the made-up notes say: note types, their sections, and the sentences of each section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A part of a note: headings to choose from, sentences to draw, and how many of them."""

    headings: tuple[str, ...]
    sentences: tuple[str, ...]
    fewest: int
    most: int


HPI = Section(
    ("HISTORY OF PRESENT ILLNESS:", "HPI:", "History of Present Illness:", "Interval history:"),
    (
        "{pt} is a {age} year old {sex} with (a history of |known ){history} who (presents|presented|"
        "was admitted|comes in) with {symptoms}",
        "this is a {age} year old {sex} who was (transferred|brought in) from {facility} for "
        "(management|evaluation) of {reason}",
        "{his} symptoms began {span} (ago|prior to admission) with {symptom}",
        "{pt} (reports|describes|complains of|endorses) {symptom} for the (past|last) {span}",
        "{pt} (denies|denied) (any |){denied}",
        "no {denied} (was|were) (reported|noted)",
        "{his} {relative} (states|reports) that {he} has had {symptom} since {date}",
        "{he} was (seen|evaluated) by {doctor} on {date} and (started on|given) {drug}",
        "{pt} was recently (treated|hospitalized at {facility}) for {problem} and discharged on "
        "{dosed}",
        "{he} ran out of {his} {drug} {span} ago and (since then |)has noticed {symptom}",
        "in the (ed|emergency department), {lab} and {test} (showed|revealed|demonstrated) {finding}",
        "{pt} (took|tried) {drug} at home (without relief|with some relief of {his} {symptom})",
        "{he} (also |)has a history of {problem}, for which {he} (takes|is on) {drug}",
    ),
    3,
    5,
)
HISTORY = Section(
    ("PAST MEDICAL HISTORY:", "PMH:", "Past Medical History:"),
    (
        "{history}",
        "{problem}, (diagnosed|since) {span} ago(, on {drug}|)",
        "status post {procedure} (in {date}|{span} ago|at {facility})",
        "{problem}(, followed by {doctor}|, last {lab}|)",
        "significant for {history}",
    ),
    1,
    3,
)
MEDICATIONS = Section(
    ("MEDICATIONS:", "MEDICATIONS ON ADMISSION:", "Meds:", "Discharge Medications:", "Home meds:"),
    ("{medlist}",),
    1,
    1,
)
ALLERGIES = Section(("ALLERGIES:", "Allergies:", "All:"), ("{allergy}",), 1, 1)
SOCIAL = Section(
    ("SOCIAL HISTORY:", "Social:", "SH:"),
    (
        "{pt} lives (alone|with {his} {relative}|at {facility}) and is {work}",
        "(quit smoking {span} ago|smokes {small} cigarettes a day|never smoked|denies tobacco or "
        "alcohol use|drinks {small} beers a week)",
        "{his} {relative} is the health care proxy and can be reached at {phone}",
    ),
    1,
    2,
)
EXAM = Section(
    ("PHYSICAL EXAM:", "PE:", "Exam:", "Objective:", "O:"),
    (
        "vitals: {vitals}",
        "vital signs: {vitals}",
        "general: (well appearing|in no acute distress|elderly|thin|ill appearing|comfortable)",
        "heent: (pupils equal and reactive, |)(oropharynx clear|mucous membranes (dry|moist))",
        "lungs: (clear to auscultation bilaterally|{finding}|decreased at the bases|no {nofinding})",
        "cardiac: (regular rate and rhythm, no (murmurs|rubs|gallops)|{finding})",
        "abdomen: soft, (nontender|mildly tender), (nondistended|positive bowel sounds)(, no {nofinding}|)",
        "extremities: (no edema|warm and well perfused|{finding}|1+ edema|2+ pulses)",
        "neuro: (alert and oriented|nonfocal|{finding}|moves all extremities)",
    ),
    2,
    4,
)
RESULTS = Section(
    ("LABORATORY DATA:", "Labs:", "PERTINENT RESULTS:", "Data:", "Studies:"),
    (
        "{labs}",
        "(admission |)labs (were |)notable for {lab}, {lab} and {labword}",
        "{test} (showed|revealed|demonstrated|was significant for|was consistent with) {finding}",
        "{imaging} (showed|revealed|demonstrated) {finding}(, no {nofinding}|)",
        "{test} was (negative|unremarkable|normal|pending at the time of discharge)",
        "{trend} (on {date}|at {facility})",
        "{imaging} on {date} without (evidence of |){nofinding}",
    ),
    2,
    3,
)
COURSE = Section(
    ("HOSPITAL COURSE:", "Hospital Course:", "BRIEF HOSPITAL COURSE:"),
    (
        "{pt} was (admitted to|transferred to|monitored on) {ward} for {reason} and (started on|"
        "treated with) {dosed}",
        "{test} was (obtained|performed|done) (on {date} |)and (showed|revealed) {finding}",
        "{he} underwent {procedure} on {date} (without complication|complicated by {complication}|"
        "by {doctor})",
        "(given|because of|in the setting of) {labword}, {drug} was (held|discontinued|started|"
        "increased|changed to {drug})",
        "{specialty} was consulted and recommended {treatment} and {test}",
        "{his} {symptom} (improved|resolved|persisted) (with|after|despite) {treatment}",
        "{his} course was (further |)complicated by {complication}, (treated with {treatment}|which "
        "resolved)",
        "(#|) {problem}: {pt} was continued on {drug}(, {lab} at discharge|)",
        "{he} remained (stable|afebrile|hemodynamically stable) and {lab} on {date}",
        "{lab} (trended down|normalized|peaked on {date}) with {treatment}",
    ),
    3,
    5,
)
PLAN = Section(
    ("ASSESSMENT AND PLAN:", "A/P:", "Plan:", "IMPRESSION:", "ASSESSMENT:", "Recommendations:"),
    (
        "{age} year old {sex} with {history} (here with|admitted for|now with) {reason}",
        "{problem}: (continue|start|increase|taper|hold) {drug}, (check|follow|repeat) {test}",
        "would (obtain|check|repeat|recommend) {test} (to evaluate for|to rule out) {problem}",
        "(continue|start|wean|consider) {treatment} for {problem}",
        "{symptom} likely (due to|secondary to|from) {problem}",
        "{symptom} is (concerning for|suspicious for|consistent with) {finding}",
        "plan for {procedure} (tomorrow|on {date}|pending {test})",
        "hold {drug} given {labword}",
        "prophylaxis: {treatment}, {treatment}",
        "follow up (with {doctor} in {span}|{test}|with {specialty} as an outpatient)",
        "discussed with {doctor} and {his} {relative}, who agree with {procedure}",
        "wean {drug} as {symptom} improves; if {symptom} recurs, {test} and {treatment}",
    ),
    2,
    4,
)
DISCHARGE = Section(
    ("DISCHARGE INSTRUCTIONS:", "Disposition:", "FOLLOWUP:", "Discharge condition:"),
    (
        "{pt} was discharged (home|to {facility}|home with services) in (good|stable|fair) condition",
        "please (call|return) for {symptom}, {denied}",
        "follow up with {doctor} in {span} for {test}",
        "take {dosed} and stop {drug}",
        "call {phone} to schedule {test}",
    ),
    1,
    3,
)
TECHNIQUE = Section(
    ("EXAMINATION:", "EXAM:", "STUDY:"),
    ("{imaging}( dated {date}|)", "{imaging}, comparison {date}"),
    1,
    1,
)
INDICATION = Section(
    ("INDICATION:", "CLINICAL INFORMATION:", "REASON FOR THIS EXAMINATION:"),
    (
        "{age} year old {sex} with {problem}(, now with {symptom}|). (evaluate|assess|please rule out) "
        "(for |){nofinding}",
        "{symptom}(, rule out {finding}|)",
        "status post {procedure} with {symptom}",
    ),
    1,
    1,
)
RADIOLOGY = Section(
    ("FINDINGS:", "REPORT:", "Findings:"),
    (
        "there is (again |){finding}",
        "there is {lesion}, (unchanged|new|slightly larger) since {date}",
        "no (evidence of |){nofinding} (or {nofinding} |)is (seen|identified)",
        "(again noted|redemonstrated) is {finding}",
        "{finding} (has|have) (improved|progressed|resolved) (compared with|since) {date}",
        "the (visualized |)(osseous structures|soft tissues|lung apices|vessels|bowel loops) are "
        "(unremarkable|intact|normal)",
        "the (heart|mediastinum|liver|spleen|aorta) is (normal|unremarkable|stable) in (size|"
        "contour|appearance)",
        "(the patient is |)status post {procedure} with (expected |)postoperative changes",
    ),
    3,
    5,
)
RADIOLOGY_IMPRESSION = Section(
    ("IMPRESSION:", "CONCLUSION:"),
    (
        "{finding}(, (likely|consistent with|suggestive of) {problem}|)",
        "no (acute |){nofinding}",
        "{lesion}. (recommend|consider) {imaging} in {span}",
        "findings discussed with {doctor} at {time}",
        "stable {finding}",
    ),
    1,
    3,
)
SUBJECTIVE = Section(
    ("SUBJECTIVE:", "S:", "Events overnight:", "24 hour events:"),
    (
        "{pt} (feels better|slept well|had a good night|reports {symptom}|still has {symptom})",
        "no (events|complaints) overnight(, tolerating {treatment}|)",
        "(denies|no) {denied}",
        "{symptom} overnight, (received|given) {dosed} with good effect",
        "{test} done, {drug} (started|stopped) at {time}",
    ),
    1,
    3,
)
NURSING = Section(
    ("NURSING NOTE:", "NPN:", "Nursing progress note:", "Shift note:"),
    (
        "received {pt} at {time} (alert|sleeping|in bed|from {ward})",
        "{vitals}",
        "{pt} c/o {symptom}, given {dosed} with (good|little|fair) effect",
        "(dr.|team|ho) aware of {labword}(, {drug} ordered|)",
        "(no|denies) {denied}",
        "gi: abdomen soft, (tolerating diet|npo for {test}|no {nofinding})",
        "gu: foley draining (clear|amber|yellow) urine, {lab}",
        "resp: (lungs clear|{finding}), {procedure} as ordered",
        "skin: (intact|{finding}|warm and dry)",
        "social: {relative} (visited|called|updated by {doctor})",
        "plan: (continue|monitor) {treatment}, follow {test}, monitor for {complication}",
        "{drug} (drip |)(titrated|infusing|held) for (goal |){lab}",
    ),
    5,
    8,
)
CONSULT_REASON = Section(
    ("REASON FOR CONSULTATION:", "CONSULT QUESTION:", "Reason for consult:"),
    ("(evaluation|management) of {problem}", "{symptom}, question of {finding}"),
    1,
    1,
)


@dataclass(frozen=True)
class NoteType:
    """A kind of note: how often, its title, and its sections in order."""

    weight: int
    titles: tuple[str, ...]
    sections: tuple[Section, ...]


NOTE_TYPES = (
    NoteType(
        30,
        ("DISCHARGE SUMMARY", "Discharge Summary", ""),
        (HPI, HISTORY, RESULTS, COURSE, MEDICATIONS, DISCHARGE),
    ),
    NoteType(25, ("PROGRESS NOTE", "Physician note", ""), (SUBJECTIVE, EXAM, RESULTS, PLAN)),
    NoteType(
        15,
        ("RADIOLOGY REPORT", "FINAL REPORT", ""),
        (TECHNIQUE, INDICATION, RADIOLOGY, RADIOLOGY_IMPRESSION),
    ),
    NoteType(
        15,
        ("CONSULTATION", "Consult note", ""),
        (CONSULT_REASON, HPI, HISTORY, ALLERGIES, SOCIAL, EXAM, PLAN),
    ),
    NoteType(15, ("", "Nursing"), (NURSING,)),
)

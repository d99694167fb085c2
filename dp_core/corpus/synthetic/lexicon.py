"""Names, places, laboratory values and modifiers of the made-up notes."""

from __future__ import annotations

FIRST_NAMES = {
    "female": ["Mary", "Linda", "Susan", "Karen", "Donna", "Carol", "Ruth", "Sharon", "Michelle", "Laura", "Sarah", "Kimberly", "Deborah", "Jessica", "Shirley", "Cynthia", "Angela", "Melissa", "Brenda", "Amy", "Anna", "Rebecca", "Virginia", "Kathleen", "Pamela", "Martha", "Debra", "Amanda", "Stephanie", "Carolyn", "Christine", "Marie", "Janet", "Catherine", "Frances", "Ann", "Joyce", "Diane", "Alice", "Julie", "Heather", "Teresa", "Doris", "Gloria", "Evelyn", "Jean", "Cheryl", "Mildred", "Katherine", "Joan"],
    "male": ["James", "John", "Robert", "Michael", "William", "David", "Richard", "Charles", "Joseph", "Thomas", "Christopher", "Daniel", "Paul", "Mark", "Donald", "George", "Kenneth", "Steven", "Edward", "Brian", "Ronald", "Anthony", "Kevin", "Jason", "Matthew", "Gary", "Timothy", "Jose", "Larry", "Jeffrey", "Frank", "Scott", "Eric", "Stephen", "Andrew", "Raymond", "Gregory", "Joshua", "Jerry", "Dennis", "Walter", "Patrick", "Peter", "Harold", "Douglas", "Henry", "Carl", "Arthur", "Ryan", "Roger"],
}
# Surnames are compounds, so that there are some thousands of them.
SURNAME_STARTS = ["Hol", "Brad", "Ash", "Whit", "Lang", "Win", "Stan", "Ham", "Ken", "Ridge", "Thorn", "Black", "Wood", "Marsh", "Hart", "Cald", "Ell", "Far", "Green", "Hay", "Linden", "Mac", "Nor", "Oak", "Pem", "Quin", "Rad", "Sel", "Tem", "Under", "Van", "Wake", "Yar", "Ab", "Bur", "Car", "Dal", "Ever", "Fitz", "Gar", "Hub", "Ing", "Jar", "Kil", "Law", "Mor", "New", "Or", "Pres", "Red"]
SURNAME_ENDS = ["ford", "well", "ley", "ton", "worth", "field", "man", "by", "ham", "wick", "ridge", "mont", "stone", "bury", "shaw", "dale", "more", "son", "land", "wood", "ings", "ner", "gate", "brook", "cott", "ster", "low", "house", "lin", "kins"]

FACILITIES = ["St. Brendan Hospital", "Lakeview Medical Center", "the outside hospital", "Harbor General", "Mercy Regional", "the VA", "Northgate Rehab", "Elm Grove Nursing Home", "Riverside Clinic", "Pine Hill Rehabilitation", "County General", "Saint Agnes", "the referring hospital", "Westbrook House"]
OCCUPATIONS = ["a retired teacher", "a retired electrician", "a carpenter", "an accountant", "a school bus driver", "a former machinist", "a nurse", "a lawyer", "a cook", "a farmer", "a security guard", "unemployed", "on disability", "a librarian", "a truck driver", "a cashier", "a retired engineer", "a musician", "a mail carrier", "a painter"]
RELATIVES = ["wife", "husband", "daughter", "son", "sister", "brother", "mother", "father", "niece", "neighbor"]
SPECIALTIES = ["cardiology", "nephrology", "neurology", "infectious disease", "gi", "general surgery", "orthopedics", "psychiatry", "oncology", "pulmonary", "endocrinology", "vascular surgery", "urology", "rheumatology", "hematology", "palliative care"]
WARDS = ["the floor", "the icu", "the micu", "the step down unit", "the emergency department", "the ed", "the ccu", "the medical service", "the surgical service", "telemetry"]

# name: (spellings, low, high, unit, decimals, direction when abnormal)
LABS: dict[str, tuple[tuple[str, ...], float, float, str, int, int]] = {
    "sodium": (("sodium", "na"), 135, 145, "", 0, -1),
    "potassium": (("potassium", "k"), 3.5, 5.0, "", 1, 1),
    "bicarbonate": (("bicarbonate", "hco3", "bicarb"), 22, 28, "", 0, -1),
    "bun": (("bun", "urea nitrogen"), 8, 20, "", 0, 1),
    "creatinine": (("creatinine", "cr", "serum creatinine"), 0.6, 1.2, "", 1, 1),
    "glucose": (("glucose", "blood glucose", "serum glucose"), 75, 115, "", 0, 1),
    "a1c": (("a1c", "hemoglobin a1c", "hba1c"), 4.8, 5.6, "", 1, 1),
    "calcium": (("calcium", "ca", "corrected calcium"), 8.5, 10.2, "", 1, 1),
    "magnesium": (("magnesium", "mg level"), 1.7, 2.3, "", 1, -1),
    "phosphate": (("phosphate", "phos"), 2.6, 4.4, "", 1, 1),
    "wbc": (("wbc", "white count", "white blood cell count"), 4.5, 10.5, "", 1, 1),
    "hemoglobin": (("hemoglobin", "hgb"), 12, 16, "", 1, -1),
    "hematocrit": (("hematocrit", "hct", "crit"), 36, 46, "", 1, -1),
    "platelets": (("platelets", "plt", "platelet count"), 150, 400, "", 0, -1),
    "inr": (("inr",), 0.9, 1.2, "", 1, 1),
    "ddimer": (("d-dimer",), 200, 480, "", 0, 1),
    "troponin": (("troponin", "troponin t", "peak troponin"), 0.01, 0.04, "", 2, 1),
    "ck": (("ck", "cpk", "creatine kinase"), 40, 180, "", 0, 1),
    "bnp": (("bnp", "probnp"), 30, 95, "", 0, 1),
    "lactate": (("lactate", "lactic acid", "venous lactate"), 0.7, 1.8, "", 1, 1),
    "procalcitonin": (("procalcitonin",), 0.05, 0.2, "", 2, 1),
    "alt": (("alt", "ast", "transaminases"), 10, 40, "", 0, 1),
    "bilirubin": (("total bilirubin", "bilirubin", "t bili"), 0.3, 1.1, "", 1, 1),
    "alkaline phosphatase": (("alkaline phosphatase", "alk phos"), 40, 115, "", 0, 1),
    "albumin": (("albumin", "serum albumin"), 3.5, 4.8, "", 1, -1),
    "ammonia": (("ammonia", "ammonia level"), 15, 45, "", 0, 1),
    "lipase": (("lipase", "serum lipase"), 20, 60, "", 0, 1),
    "ldl": (("ldl", "ldl cholesterol"), 60, 110, "", 0, 1),
    "triglycerides": (("triglycerides",), 60, 150, "", 0, 1),
    "tsh": (("tsh",), 0.5, 4.2, "", 1, 1),
    "t4": (("free t4", "t4"), 0.9, 1.7, "", 1, -1),
    "b12": (("b12", "vitamin b12 level"), 250, 800, "", 0, -1),
    "ferritin": (("ferritin",), 30, 250, "", 0, -1),
    "esr": (("esr", "sed rate"), 5, 20, "", 0, 1),
    "crp": (("crp", "c-reactive protein"), 0.5, 4.5, "", 1, 1),
    "uric acid": (("uric acid", "uric acid level"), 3.0, 6.5, "", 1, 1),
    "ldh": (("ldh",), 120, 240, "", 0, 1),
    "psa": (("psa",), 0.4, 3.5, "", 1, 1),
    "pco2": (("pco2", "paco2"), 36, 44, "", 0, 1),
    "anion gap": (("anion gap", "gap"), 8, 12, "", 0, 1),
    "eosinophils": (("eosinophil count", "eosinophils"), 1, 4, " %", 0, 1),
    "ethanol": (("ethanol level", "blood alcohol level"), 0, 20, "", 0, 1),
}

SEVERITY = ["mild", "moderate", "severe", "worsening", "persistent", "intermittent", "acute", "chronic", "recurrent", "new", "progressive", "increasing", "ongoing", "significant", "stable", "resolving", "known", "possible", "presumed", "refractory"]
SYMPTOM_QUALITY = ["mild", "severe", "worsening", "intermittent", "constant", "occasional", "sudden", "gradual", "new", "progressive", "significant", "increasing", "mild-moderate"]
COMPLICATED_BY = ["hypotension", "hyperkalemia", "acute blood loss anemia", "respiratory failure", "hypoxia", "delirium", "thrombocytopenia", "volume overload", "c. difficile colitis", "wound infection", "a fall", "ileus", "hyponatremia", "line infection", "a pressure ulcer", "urinary retention", "bleeding", "tachycardia"]
ALLERGIES = ["penicillin", "sulfa", "codeine", "iodine", "latex", "morphine", "aspirin", "shellfish", "levofloxacin", "vancomycin", "lisinopril", "heparin"]
REACTIONS = ["rash", "hives", "anaphylaxis", "nausea", "angioedema", "itching", "wheezing", "lip swelling"]
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

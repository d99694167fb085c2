import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence_examples import EARLIER, TRAINING, released_model, settled, store_of
from safetensors.numpy import load_file, save_file

from dp_core.audit.black_box import coin_bound
from dp_core.audit.protocol import COIN_BOUND
from dp_core.data.tokens import SPECIAL_TOKENS
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.hugging_face import save
from dp_core.models.parameters import WORD, fresh
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.vocabulary.tokenizer_files import ALPHABET, GPT2
from tasks.execution.contract import run_step
from tasks.protocol.specs import PrivacyAuditSpec, RunContext
from tasks.results import read_findings

pytestmark = [pytest.mark.usefixtures("at_home"), pytest.mark.filterwarnings("ignore")]

SIZES: dict[str, Any] = {
    "hidden": 64, "layers": 1, "heads": 2, "intermediate": 12, "max_positions": 16,
}  # fmt: skip
KNOWN = [f"known{i}" for i in range(20)]  # the model predicts these words at every position
OTHER = [f"other{i}" for i in range(20)]
UNREAD = [f"unread{i}" for i in range(20)]  # the model does not know these words
# A third party's vocabulary, whose special tokens are not the first tokens.
WORDS = [*KNOWN, "her", "number", "is", *OTHER, *SPECIAL_TOKENS]


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A BERT of a third party that predicts the known words, and `known3` most."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    model = fresh(BertConfig(vocab_size=len(WORDS), **SIZES), 0)
    model.parameters["mlm/bias"][: len(KNOWN)] = 4.0
    model.parameters["mlm/bias"][3] = 5.0
    save(model, folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """The options for texts that trained the model, and for texts that did not."""
    rng, words = np.random.default_rng(0), []
    for option, choice in (("--members", KNOWN), ("--held-out", OTHER)):
        lines = {" ".join(rng.choice(choice, 8)) for _ in range(60)}
        file = tmp_path / f"{option.strip('-')}.txt"
        file.write_text("\n".join(sorted(lines)))
        words += [option, str(file)]
    return words


def lines_in(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "canaries.txt"
    file.write_text("\n".join(lines))
    return str(file)


def test_exposure_is_high_for_a_memorised_secret_and_low_for_another(confide, stranger, tmp_path):
    for secret, low, high in (("known3", 5.4, 6), ("other3", 0, 2)):
        canaries = lines_in(tmp_path, f"her number is [[{secret}]]", f"is [[{secret}]] her number")
        (record,) = confide.json("audit", stranger, "--canaries", canaries)["audits"]
        assert low <= record["value"] <= high
        assert record["ceiling"] == math.log2(len(WORDS) - 5)
        assert record["label"] == "operator"


def test_repeated_lines_count_once(confide, stranger, texts, tmp_path):
    canaries = lines_in(tmp_path, "her number is [[known3]]", "is [[other3]] her number")
    once = confide.json("audit", stranger, *texts, "--canaries", canaries)
    for file in map(Path, (*texts[1::2], canaries)):
        file.write_text(f"{file.read_text()}\n" * 3)
    assert confide.json("audit", stranger, *texts, "--canaries", canaries) == once


def test_model_whose_tokenizer_cannot_be_reproduced_is_refused(confide, stranger, texts):
    (stranger / "tokenizer_config.json").write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    code, _, err = confide("audit", stranger, *texts)
    assert code == 2
    assert "cannot be reproduced: it has the class BertJapaneseTokenizer. Supported are" in err


def test_model_without_a_head_that_predicts_words_is_refused(confide, stranger, texts):
    about = json.loads((stranger / "config.json").read_text())
    (stranger / "config.json").write_text(json.dumps(about | {"architectures": ["BertModel"]}))
    tensors = load_file(stranger / "model.safetensors")
    encoder = {name: array for name, array in tensors.items() if not name.startswith("cls.")}
    save_file(encoder, stranger / "model.safetensors")
    code, _, err = confide("audit", stranger, *texts)
    assert code == 2
    why = "the model has no language-model head. Audit the model from which it was fine-tuned."
    assert f"{stranger}: {why}" in err


def test_membership_attack_separates_texts_and_a_stated_claim_sets_its_ceiling(
    confide, stranger, texts
):
    answer = confide.json("audit", stranger, *texts)
    assert answer["verdict"] == "not audited"  # a fixed division of the texts cannot refute a claim
    (attacks,) = (record for record in answer["audits"] if record["key"] == "membership_given")
    assert attacks["value"] > 0.3
    assert attacks["ceiling"] is None
    (loss,) = (row for row in attacks["rows"] if row["attack"] == "loss")
    assert loss["auc"] > 0.95
    claim = ("--epsilon", "0.1", "--delta", "1e-6")
    records = confide.json("audit", stranger, *texts, *claim)["audits"]
    most = pytest.approx(math.expm1(0.1) / (math.exp(0.1) + 1), abs=1e-5)
    assert all(record["ceiling"] == most for record in records)
    assert "inconclusive" in {record["verdict"] for record in records}
    code, out, _ = confide("audit", stranger, *texts, *claim)
    assert code == 0
    assert "ε = 0.1 at δ = 1e-06, as given: not audited" in out


@pytest.mark.parametrize("whole", [True, False])
def test_decoder_of_a_third_party_is_audited_with_its_tokenizer(confide, tmp_path, texts, whole):
    merges = [["Ġ", "k"], ["Ġk", "n"]]
    tokens = [*ALPHABET, "Ġk", "Ġkn", "<|endoftext|>"]
    folder = tmp_path / "decoder"
    folder.mkdir()
    save(fresh(Gpt2Config(vocab_size=len(tokens), **SIZES), 0), folder)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if whole:
        model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
        about = {"model": model, **GPT2.to_json()}
        (folder / "tokenizer.json").write_text(json.dumps(about))
    else:
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)))
    canaries = lines_in(tmp_path, "it is [[kn]]", "so [[k]]")
    records = confide.json("audit", folder, *texts, "--canaries", canaries)["audits"]
    assert {record["key"] for record in records} == {
        "exposure_given", "membership_given", "extraction_given_targeted",
        "extraction_given_discoverable",
    }  # fmt: skip
    (late,) = (record for record in records if record["key"] == "extraction_given_discoverable")
    assert late["verdict"] == "not run" and "no rows that trained" in late["finding"]  # 22 tokens
    code, _, err = confide("audit", folder, *texts, "--top-k", "0")
    assert code == 2 and "extraction_top_k" in err


def decoder_that_ends_in_z(folder: Path) -> Path:
    """Write a decoder that always predicts `z` and then ` z`."""
    folder.mkdir()
    tokens = [*ALPHABET, "Ġz", "Ġy", "<|endoftext|>"]
    model = fresh(Gpt2Config(vocab_size=len(tokens), **SIZES), 0)
    words, place = model.parameters[WORD], {token: i for i, token in enumerate(tokens)}
    model.parameters["final_norm/gain"][:] = 0.0
    model.parameters["final_norm/bias"][:] = 100 * words[place["z"]] + 80 * words[place["Ġz"]]
    save(model, folder)
    (folder / "vocab.json").write_text(json.dumps(place))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ z\nĠ y")
    return folder


def test_extraction_finds_only_text_that_the_decoder_generates(confide, tmp_path):
    folder = decoder_that_ends_in_z(tmp_path / "decoder")
    words = list(map("".join, itertools.permutations("abcd", 3)))
    for name, end in (("in", "zzzzz"), ("out", "zzazz"), ("alike", "zzzzzz")):
        (tmp_path / name).write_text("\n".join(f"{word}{end}" for word in words))
    secrets = ["z"] * 12 + ["y"] * 12
    canaries = lines_in(
        tmp_path, *(f"{word} [[{secret}]]" for word, secret in zip(words, secrets, strict=True))
    )
    texts = ("--members", tmp_path / "in", "--held-out")
    protocol = ("--prefix", "3", "--suffix", "4", "--top-k", "2", "--tries", "10")
    claim = ("--epsilon", "1", "--delta", "1e-6", "--canaries", canaries)
    records = confide.json("audit", folder, *texts, tmp_path / "out", *protocol, *claim)["audits"]
    by_key = {record["key"]: record for record in records}
    rows, secret = (by_key[f"extraction_given_{name}"] for name in ("discoverable", "targeted"))
    assert (rows["value"], rows["verdict"], rows["label"]) == (1.0, "inconclusive", "operator")
    assert rows["rows"][0]["control_found"] == 0
    highest = 1 - 0.025 ** (1 / 24)  # none of 24 was extracted
    most = PrivacyProfile.of_claim(1.0, 1e-6).true_positive_rate(highest)
    assert rows["ceiling"] == pytest.approx(most, abs=1e-6)
    assert "prefixes of 3 tokens, suffixes of 4; k = 2" in rows["power"]
    assert "chosen by who audits" in rows["power"]
    assert (secret["value"], secret["verdict"]) == (0.5, "inconclusive")
    assert secret["rows"][0]["control_tried"] == 8 * 24
    assert secret["rows"][0]["control_found"] <= 6  # chance hits among 258 tokens
    alike = confide.json("audit", folder, *texts, tmp_path / "alike", *protocol)["audits"]
    (same,) = [record for record in alike if record["key"] == rows["key"]]
    assert (same["verdict"], same["null_control"]["p_value"]) == ("consistent", 1.0)


# --- texts that fair coins divided


def divided(tmp_path: Path, told_apart: float, words: Any = (KNOWN, OTHER)) -> list[str]:
    """Return options for texts divided by fair coins; a share of the texts reveals its side."""
    rng, sides = np.random.default_rng(1), {True: set[str](), False: set[str]()}
    while sum(map(len, sides.values())) < 800:
        inside = bool(rng.random() < 0.5)
        shown = inside if rng.random() < told_apart else bool(rng.random() < 0.5)
        sides[inside].add(" ".join(rng.choice(words[not shown], 8)))
    options = []
    for option, inside in (("--members", True), ("--held-out", False)):
        file = tmp_path / f"coins{option}.txt"
        file.write_text("\n".join(sorted(sides[inside])))
        options += [option, str(file)]
    return [*options, "--coins", "--delta", "1e-6"]


def test_audit_by_coins_contradicts_only_a_false_claim(confide, stranger, tmp_path):
    """The side of 96 in 100 texts can be guessed: ε = ln 24 = 3.2 allows this, ε = 0.5 does not."""
    given = divided(tmp_path, 0.92)
    answers = {}
    for epsilon in ("0.5", "3.2"):
        code, out, err = confide("audit", stranger, *given, "--epsilon", epsilon, "--json")
        answers[epsilon] = json.loads(out)
        (bound,) = [record for record in answers[epsilon]["audits"] if record["key"] == COIN_BOUND]
        contradicted = epsilon == "0.5"
        assert code == (4 if contradicted else 0), err
        assert (bound["verdict"] == "contradicted") is contradicted
        assert bound["label"] == "operator" and "800 canaries" in bound["power"]
        assert 0.5 < bound["value"] <= 3.2
    assert answers["0.5"]["verdict"] == "contradicted"
    for nothing in (divided(tmp_path, 0.0), divided(tmp_path, 0.0, (UNREAD, UNREAD))):
        answer = confide.json("audit", stranger, *nothing, "--epsilon", "1")
        assert answer["verdict"] == "consistent"
    assert "≥ 0" in confide("audit", stranger, *nothing, "--epsilon", "1")[1]


@pytest.mark.parametrize("values", [1, 2])
def test_equal_scores_do_not_reveal_the_file_of_a_text(values):
    rng, claim, right = np.random.default_rng(values), PrivacyProfile.of_claim(1.0, 1e-6), []
    for _ in range(20):
        coins, keys = rng.random(200) < 0.5, rng.integers(0, 2**63, 200, np.uint64)
        scores, sides = rng.integers(0, values, 200).astype(float), [keys[coins], keys[~coins]]
        finding = coin_bound(scores, sides, claim, 1)
        assert finding.verdict == "consistent"
        right.append(finding.metrics["audit/right_guesses"])
    guesses = finding.public_metrics["audit/guesses"]
    assert np.mean(right) == pytest.approx(guesses / 2, abs=5 * (guesses / 4 / 20) ** 0.5)


def test_model_of_a_run_has_its_claim_and_its_audits(confide, deployment):
    uri = released_model(deployment, settled(deployment, EARLIER, TRAINING))
    answer = confide.json("audit", "--uri", uri)
    assert answer["claim"].endswith("for one patient of “notes”")
    assert {record["verdict"] for record in answer["audits"]} == {"not run"}
    copy = deployment.home / "copy"
    copy.mkdir()
    for name in ("model.safetensors", "config.json"):
        (copy / name).write_bytes((store_of(deployment).local_copy(uri) / name).read_bytes())
    assert confide.json("audit", copy)["claim"] == answer["claim"]
    code, _, err = confide("audit", copy, "--epsilon", "1", "--delta", "1e-6")
    assert code == 2
    assert "has its claim already" in err


def test_audit_step_writes_the_command_results_for_the_operator(confide, tracked, stranger, texts):
    records = confide.json("audit", stranger, *texts, "--seed", "1")["audits"]
    spec = PrivacyAuditSpec(
        made_up=False, audited_model=str(stranger),
        given_members=texts[1], given_held_out=texts[3],
    )  # fmt: skip
    context = RunContext(run_key="r", run_name="privacy_audit", task="privacy_audit")
    result = run_step(spec, tracked, context)
    findings = read_findings(result, store_of(tracked).local_copy(spec.output))
    assert [finding.record.model_dump(mode="json") for finding in findings] == records
    assert {metric.label for metric in result.metrics} == {"operator"}
    assert run_step(spec, tracked, context) == result
    Path(texts[1]).write_text("changed")
    with pytest.raises(BadInput, match="the files have changed"):
        run_step(spec, tracked, context)


SECRET = "other7"


@pytest.mark.cases
def test_invalid_canary_is_refused_without_quoting_its_text(
    confide, stranger, tmp_path, lines, words
):
    canaries = lines_in(tmp_path, *(line.replace("SECRET", SECRET) for line in lines))
    code, out, err = confide("audit", stranger, "--canaries", canaries)
    assert code == 2
    assert words in err
    assert SECRET not in out + err
    assert err.count("\n") == 1


def test_incomplete_audit_inputs_are_refused_in_one_line(confide, stranger, texts, tmp_path):
    short = lines_in(tmp_path, *(f"her number is {word}" for word in OTHER[:5]))
    few = tmp_path / "few.txt"
    few.write_text("\n".join(Path(texts[3]).read_text().splitlines()[:14]))
    claim = ("--epsilon", "1", "--delta", "1e-6")
    for words, reason in (
        ([], "there is nothing to audit it by"),
        (texts[:2], "one side is missing"),
        ([*texts, "--epsilon", "1"], "half a claim"),
        ([*texts[:2], "--held-out", short], "5 texts; 13 are needed"),
        ([*texts[:2], "--held-out", texts[1]], "a text is in both files"),
        ([*texts[:2], "--held-out", str(tmp_path / "none")], "no readable text"),
        (["--uri", "file:///elsewhere"], "two models are named"),
        (["--coins"], "coins divide texts"),
        ([*texts, "--coins"], "there is no claim that coins could contradict"),
        ([*texts[:3], few, "--coins", *claim], "fair coins do not put 60 of 74 in"),
    ):
        code, _, err = confide("audit", stranger, *words)
        assert code == 2, reason
        assert reason in err
        assert err.count("\n") == 1

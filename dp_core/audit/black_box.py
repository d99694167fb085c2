"""Black-box audits of a model in a folder, trained by any software, with given canaries and texts.

The audits use only the model's predictions. The vocabulary of a folder in Hugging Face's layout is
renumbered, as everywhere in this project, so that the special tokens come first.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from scipy import stats
from tokenizers import Tokenizer

from dp_core.audit.canaries import Canary, Floats, alone, candidates
from dp_core.audit.exposure import interval, null_exposure, secret_ranks
from dp_core.audit.extraction import (
    ALL,
    FROM_CANARIES,
    FROM_ROWS,
    discoverable,
    extraction_finding,
    targeted,
)
from dp_core.audit.membership import attacks
from dp_core.audit.membership_sample import FITTED_SHARE, LEAST_GROUPS, Sample, membership_findings
from dp_core.audit.observations import Rows, losses_of, ranker, suffix_odds
from dp_core.audit.one_run import Claim, audit_claim, bound_finding, planned_guesses
from dp_core.audit.protocol import COIN_BOUND, Audit, Finding, NullDistribution
from dp_core.config.audit_settings import BlackBoxAuditConfig, ExtractionConfig, ExtractionProtocol
from dp_core.data.hashing import U64, seed_key
from dp_core.data.privacy_units import Unit
from dp_core.data.token_store import TokenStore, TokenStoreWriter, rows_of_units
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.labels import Label
from dp_core.models.config import CausalConfig
from dp_core.models.hugging_face import checkpoint_facts, load_with_vocabulary
from dp_core.models.parameters import AnyModel
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary import tokenizer_files

GIVEN_EXPOSURE = Audit.registered("exposure_given")
GIVEN_TARGETED = Audit.registered("extraction_given_targeted")
GIVEN_DISCOVERABLE = Audit.registered("extraction_given_discoverable")
GIVEN_MEMBERSHIP = Audit.registered("membership_given")
GIVEN_BOUND = Audit.registered(COIN_BOUND)

CONTROLS = 8  # number of secrets that were never planted, for each given canary
UNFAIR = 1e-6  # p-value below which the coins cannot have been fair
LONGEST_ROW = 256  # tokens
ROWS_PER_TEXT = 4
_SECRET = re.compile(r"\[\[(.+?)\]\]")


@dataclass(frozen=True)
class Audited:
    """A model with its tokenizer."""

    model: AnyModel
    tokenizer: Tokenizer

    @property
    def positions(self) -> int:
        """Largest number of tokens in a row."""
        return min(self.model.config.max_positions, LONGEST_ROW)


def open_model(folder: Path) -> Audited:
    """Read a masked or causal model in Hugging Face's layout, and its tokenizer.

    Raises:
        BadInput: files are missing, the architecture or the vocabulary is not supported, or the
            model has no head that predicts tokens, as after fine-tuning.
    """
    tokenizer = tokenizer_files.of_checkpoint(folder)
    if not checkpoint_facts(folder)["head"]:
        raise BadInput(
            "the model has no language-model head",
            where=str(folder),
            fix="Audit the model from which it was fine-tuned.",
        )
    ids = tokenizer.get_vocab()
    model = load_with_vocabulary(folder, sorted(ids, key=ids.__getitem__), seed=0)
    return Audited(model, tokenizer)


def lines_of(file: Path, where: str) -> dict[int, str]:
    """Return the different lines of a file, without blank ones, by their first number, from 1.

    A repeated line counts once, because its copies have one coin and one score.

    Raises:
        BadInput: the file holds no readable text. `where` names the setting; no text is quoted.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise PrivateTextRefusal("no readable text", where=where) from None
    numbers: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        numbers.setdefault(line, number)
    return {number: line for line, number in numbers.items() if line}


def audit_files(
    folder: Path,
    files: Mapping[str, Path],
    where: Callable[[str], str],
    ceiling: PrivacyProfile | None,
    config: BlackBoxAuditConfig,
) -> list[Finding]:
    """Return the findings of every audit that the given texts allow, labelled for the operator.

    Args:
        folder: folder of the model.
        files: files of `canaries`, each with its secret in double brackets, of `members`, on which
            the model was trained, and of `held_out`, other texts drawn in the same way.
        where: returns the name of the setting of such a file, for errors.
        ceiling: privacy profile of the claim for one text, or for a unit that holds it; None
            without a claim.
        config: protocol of extraction, masks, the public seed, and whether each text was a whole
            unit, included or not by a fair coin beforehand.

    Raises:
        BadInput: an invalid canary, too few texts, or texts that fair coins cannot have divided.
    """
    given = {name: lines_of(file, where(name)) for name, file in files.items()}
    audited, seed = open_model(folder), config.seed
    protocol = config.part(ExtractionProtocol)
    causal = isinstance(audited.model.config, CausalConfig)
    findings = []
    if "canaries" in given:
        canaries = _canaries(audited, given["canaries"])
        findings.append(canary_exposure(audited, canaries))
        if causal:
            findings.append(_targeted(audited, canaries, protocol, seed))
    if not given.keys() >= {"members", "held_out"}:
        return findings
    texts = list(given["members"].values()), list(given["held_out"].values())
    with _rows_of(audited, *texts, seed) as sides:
        sample = _sample(sides, seed)
        rows = [Rows(*side, seed, config.given_masks) for side in sample.sides]
        losses = losses_of(audited.model, rows)
        made = attacks(losses, [], {}, sample.members, sample.fitted)
        findings += membership_findings(GIVEN_MEMBERSHIP, sample, made, ceiling)
        if config.given_coins:
            scores = -np.bincount(sample.units, losses.mean) / np.bincount(sample.units)
            keys = [side.unit_keys for side in sides]
            findings.append(coin_bound(scores, keys, ceiling, seed))
        if causal:
            findings.append(_discoverable(audited, sides, ceiling, protocol, seed))
    return findings


def _canaries(audited: Audited, lines: Mapping[int, str]) -> list[Canary]:
    """Return the canaries in lines of text.

    Args:
        audited: the model.
        lines: texts by line number, with the secret in double brackets: `her number is [[seven]]`.
            A secret is one token.

    Raises:
        BadInput: no canary, or a canary without exactly one secret of one token. The message does
            not quote the canary.
    """
    if not lines:
        raise PrivateTextRefusal("there is no canary", where="canaries", fix="Give one a line.")
    return [_canary(audited, line, number) for number, line in lines.items()]


def canary_exposure(audited: Audited, canaries: Sequence[Canary]) -> Finding:
    """Return the exposure of given canaries, alone: log2 |V| − log2(mean rank of the secrets).

    Without memory the rank of a uniformly drawn secret is uniform.
    """
    pool = candidates(audited.tokenizer)
    longest = max(len(canary.tokens) for canary in canaries) + 2
    masked = alone(canaries, SpecialIds.of(audited.tokenizer), longest)
    ranks = secret_ranks(ranker(audited.model, pool), masked, len(pool))
    exposure, low, high = interval(ranks, len(pool))
    null = null_exposure(len(pool), len(canaries))
    above = exposure > null.high
    return GIVEN_EXPOSURE.finding(
        level="canary",
        value=exposure,
        interval=(low, high),
        confidence=0.95,
        ceiling=math.log2(len(pool)),
        ceiling_of=f"log2 of {len(pool)} candidates: every secret in first place",
        power=f"{len(canaries)} canaries: above {null.high:.2f} bits is beyond chance",
        null_control=NullDistribution(
            of="a model to which every token is as likely a secret",
            low=null.low,
            high=null.high,
            alarm_rate=0.025,
            p_value=null.p_value(exposure),
        ),
        verdict="inconclusive" if above else "consistent",
        finding=f"{exposure:.2f} bits; without memory, below {null.high:.2f} in 97.5% of cases.",
        label=Label.OPERATOR,  # the origin of the canaries is unknown
        metrics={GIVEN_EXPOSURE.key: exposure},
    )


def _canary(audited: Audited, line: str, number: int) -> Canary:
    secrets = _SECRET.findall(line)
    if len(secrets) != 1:
        raise PrivateTextRefusal(
            f"line {number} has {len(secrets)} secrets in double brackets",
            where="canaries",
            fix="Write one: her number is [[seven]].",
        )
    before, _, after = _SECRET.split(line)
    parts = [
        audited.tokenizer.encode(text, add_special_tokens=False).ids
        for text in (before.rstrip(), f"{' ' if before else ''}{secrets[0]}", after)
    ]
    if len(parts[1]) != 1 or parts[1][0] not in candidates(audited.tokenizer):
        raise PrivateTextRefusal(
            f"the secret of line {number} is not one token of the model's",
            where="canaries",
            fix="Choose a word of its vocabulary.",
        )
    if len(tokens := [*parts[0], *parts[1], *parts[2]]) > audited.positions - 2:
        raise PrivateTextRefusal(f"line {number} is too long for the model", where="canaries")
    pattern = "H" * len(parts[0]) + "S" + "H" * len(parts[2])
    return Canary(f"given-{number}", pattern, 1.0, tuple(tokens))


def _targeted(
    audited: Audited, given: Sequence[Canary], protocol: ExtractionProtocol, seed: int
) -> Finding:
    """Return the finding of secrets that are guessed from the words before them.

    The control is the same words with secrets drawn by public coins, as in Carlini et al. 2019.
    """
    pool, coins = candidates(audited.tokenizer), np.random.default_rng(seed)
    canaries = list(given)
    for canary in given:
        place = canary.secret_index
        others = np.setdiff1d(pool, [canary.secret])
        for number, secret in enumerate(coins.choice(others, CONTROLS).tolist()):
            tokens = (*canary.tokens[:place], int(secret), *canary.tokens[place + 1 :])
            canaries.append(Canary(f"{canary.id}-control-{number}", canary.pattern, 0.0, tokens))
    begin = SpecialIds.of(audited.tokenizer).cls
    rows = targeted(
        suffix_odds(audited.model), canaries, begin=begin, candidates=pool, config=protocol
    )
    of_all = [row for row in rows if row.group == ALL]
    return extraction_finding(GIVEN_TARGETED, of_all, protocol, FROM_CANARIES, None, Label.OPERATOR)


@contextmanager
def _rows_of(
    audited: Audited, members: Sequence[str], held_out: Sequence[str], seed: int
) -> Iterator[tuple[TokenStore, TokenStore]]:
    """Cut the texts of both sides into rows, one unit per text; the rows are deleted on exit.

    Raises:
        BadInput: a side has too few texts for a level, or both sides have a text in common.
    """
    for name, texts in (("members", members), ("held-out texts", held_out)):
        if len(texts) * (1 - FITTED_SHARE) < LEAST_GROUPS:
            least = math.ceil(LEAST_GROUPS / (1 - FITTED_SHARE))
            raise PrivateTextRefusal(f"{len(texts)} texts; {least} are needed", where=name)
    if set(members) & set(held_out):
        raise PrivateTextRefusal("a text is in both files", where="held-out texts")
    with TemporaryDirectory(prefix="confide-audit-") as folder:  # 0700; the rows are private
        sides = []
        for name, texts in (("members", members), ("held out", held_out)):
            writer = TokenStoreWriter(
                Path(folder) / name, audited.positions, audited.tokenizer.get_vocab_size()
            )
            for unit, rows in rows_of_units(
                [Unit(line, [line]) for line in texts],  # its key is a hash of the text
                audited.tokenizer,
                sequence_length=audited.positions,
                max_examples_per_unit=ROWS_PER_TEXT,
                key=seed_key(seed),
            ):
                writer.add_unit(unit.unit_id, [row for _, row in rows])
            sides.append(writer.finish())
        yield sides[0], sides[1]


def _sample(sides: tuple[TokenStore, TokenStore], seed: int) -> Sample:
    """Return the rows of all texts, members first, each text as a unit; a fifth fits thresholds."""
    coins, fitting = np.random.default_rng(seed), []
    for side in sides:
        chosen = coins.permutation(side.n_units)[: max(2, int(FITTED_SHARE * side.n_units))]
        fitting.append(np.isin(np.arange(side.n_units), chosen))
    rows = np.concatenate([np.diff(side.unit_rows) for side in sides])
    text = np.repeat(np.arange(len(rows)), rows)
    inside = text < sides[0].n_units
    return Sample(
        unit=PrivacyUnit.DOCUMENT,
        sides=tuple((side, np.arange(side.n_rows)) for side in sides),
        members=inside,
        groups={PrivacyUnit.DOCUMENT.value: text},
        units=text,
        units_in_group={},
        clusters=text,
        fitted=np.concatenate(fitting)[text],
    )


def coin_bound(
    scores: Floats, keys: Sequence[U64], ceiling: PrivacyProfile | None, seed: int
) -> Finding:
    """Return the lower bound on ε that guesses about the texts' coins prove.

    The number of guesses depends on m and the claim alone. Texts with equal scores are ordered by
    their keys, because their places in the files reveal the coins.

    Args:
        scores: (m,) higher for texts that are more likely in the training; members come first.
        keys: hashes of the texts that were in the training, and of the held-out texts.
        ceiling: the claim.
        seed: a public seed for the null control alone; the coins were thrown elsewhere.

    Raises:
        BadInput: there is no claim to audit, or fair coins cannot have divided the two sides.
    """
    if ceiling is None or not ceiling.pairs:
        raise BadInput("there is no claim that coins could contradict", where="coins")
    order, trained = np.argsort(np.concatenate(keys)), len(keys[0])
    if stats.binomtest(trained, len(order)).pvalue < UNFAIR:
        raise PrivateTextRefusal(
            f"fair coins do not put {trained} of {len(order)} in", where="coins"
        )
    epsilon, delta = ceiling.pairs[0]
    claim, guesses = Claim(epsilon, delta, ceiling), planned_guesses(len(order), epsilon)
    coins = order < trained
    verdict = audit_claim(claim, [scores[order]], coins, guesses, PrivacySeed.fixed(seed))
    return bound_finding(GIVEN_BOUND, verdict, Label.OPERATOR)


def _discoverable(
    audited: Audited,
    sides: tuple[TokenStore, TokenStore],
    ceiling: PrivacyProfile | None,
    protocol: ExtractionProtocol,
    seed: int,
) -> Finding:
    """Return the finding of training texts that a causal model completes word for word."""
    most = max(side.n_units for side in sides)
    config = ExtractionConfig(extraction_rows=most, **protocol.model_dump())
    rows = discoverable(suffix_odds(audited.model), sides, config, [], seed_key(seed), ceiling)
    return extraction_finding(GIVEN_DISCOVERABLE, rows, protocol, FROM_ROWS, None, Label.OPERATOR)

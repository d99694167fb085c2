"""Write a corpus from released phrases: post-processing, of which every word may be read."""

from __future__ import annotations

from dp_core.data.corpus import open_corpus, write_corpus
from dp_core.labels import Dp, Label
from dp_core.phrases.text_generator import write_documents
from tasks.protocol import WrittenTextSpec
from tasks.releases.provenance import fact, output_of, refuse_operator_ancestors
from tasks.runtime.context import Artifact, StepContext, StepOutput
from tasks.steps.phrases import read_phrases

SAMPLE, SHOWN = "sample.txt", 20  # documents that the tracker shows


def run(spec: WrittenTextSpec, context: StepContext) -> StepOutput:
    """Draw documents by public coins from the phrases and their noised counts, and nothing else."""
    source = output_of(context, spec.phrases_uri, "phrases")
    refuse_operator_ancestors(context)
    phrases = read_phrases(source.folder)
    config = spec.config
    write_corpus(
        write_documents(phrases, config.written_documents, config.written_words, spec.seed),
        context.out,
    )
    shown = (
        document.text for document, _ in zip(open_corpus(context.out), range(SHOWN), strict=False)
    )
    (context.out / SAMPLE).write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    context.measure("documents", Dp(config.written_documents))
    return StepOutput(
        outputs={"corpus": ""},
        facts={
            "role": "released",
            "dataset": fact(source, "dataset"),
            "all_name_a_patient": False,
            "source_digests": [],
            "digest": context.content_digest(context.out),
        },
        artifacts=[Artifact(SAMPLE, Label.DP)],
    )

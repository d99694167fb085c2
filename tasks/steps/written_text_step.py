"""Write a corpus from released phrases and words: post-processing, which anyone may read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dp_core.data.corpus import Document, documents_of, open_corpus, write_corpus
from dp_core.labels import Dp, Label
from dp_core.vocabulary.text_generator import WRITTEN, draw_public_documents, write_documents
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import WrittenTextSpec
from tasks.releases.provenance import corpus_at, fact, output_of, refuse_operator_ancestors
from tasks.steps.phrases_step import read_phrases
from tasks.steps.vocabulary_step import released_words

SAMPLE, SHOWN = "sample.txt", 20  # documents that the tracker shows


def run(spec: WrittenTextSpec, context: StepContext) -> StepOutput:
    """Draw documents by public coins from phrases, words, their noised counts, and public text."""
    source = output_of(context, spec.phrases_uri, "phrases")
    vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")
    refuse_operator_ancestors(context)
    phrases = {1: released_words(vocabulary.folder), **read_phrases(source.folder)}
    config = spec.config
    written = write_documents(phrases, config.written_documents, config.written_words, spec.seed)
    write_corpus(itertools.chain(written, _public_documents(spec, context)), context.out)
    texts = (d.text for d in open_corpus(context.out) if d.document_id.startswith(WRITTEN))
    shown = itertools.islice(texts, SHOWN)
    (context.out / SAMPLE).write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    context.measure("documents", Dp(config.written_documents))
    return StepOutput(
        outputs={"corpus": ""},
        facts={
            "role": "released",
            "dataset": fact(source, "dataset"),
            "all_name_a_patient": False,
            "digest": context.content_digest(context.out),
        },
        artifacts={SAMPLE: Label.DP},
    )


def _public_documents(spec: WrittenTextSpec, context: StepContext) -> Iterator[Document]:
    """Yield public documents, one by one, until they hold the configured share of all words."""
    if not spec.public_corpus_uri:
        return
    public = corpus_at(context, spec.public_corpus_uri, "public", field="public_corpus_uri")
    share, config = spec.config.written_public_share, spec.config
    words = share / (1 - share) * config.written_documents * config.written_words
    shards = context.shards(public)
    yield from draw_public_documents(lambda: documents_of(shards), words, spec.seed)

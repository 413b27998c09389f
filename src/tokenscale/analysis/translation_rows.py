"""What a run translated at its end → its BLEU. The logs hold the sentences: how they are scored can be mended later."""

from typing import Any

from tokenscale.analysis.bleu import bleu

Row = dict[str, Any]


def bleu_columns(events: list[Row]) -> Row:
    """Columns of the table `runs`; none without translations. Of a sentence that several attempts translated, the
    newest counts."""
    found = [event for event in events if event["event"] == "translation" and event["number"] is not None]
    newest = {event["number"]: event for event in sorted(found, key=lambda event: event["attempt"])}
    lines = [newest[number] for number in sorted(newest)]
    if not lines:
        return {}
    score = bleu([line["hypothesis"] or "" for line in lines], [line["reference"] or "" for line in lines])
    return {
        "bleu": score.score,
        "bleu_low": score.low,
        "bleu_high": score.high,
        "bleu_sentences": score.sentences,
        "bleu_signature": score.signature,
    }

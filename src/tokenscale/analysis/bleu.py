"""BLEU of translations, with its interval over sentences."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: samples of the bootstrap, each of as many sentences drawn with replacement (Koehn 2004)
SAMPLES = 1000


@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU, 0 to 100, the ends of its 95 % interval over sentences, and sacrebleu's
    signature, without which the number says little: it names the tokenization, the smoothing, and
    the bootstrap with its seed.
    """

    score: float
    low: float
    high: float
    sentences: int
    signature: str

    def __str__(self) -> str:
        return (
            f"{self.score:.2f} ({self.low:.2f} to {self.high:.2f}, 95 % over {self.sentences:,} "
            "sentences)"
        )


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of hypotheses, each against its one reference; both as plain text, at least one. Equal
    texts, equal digits.

    The interval is sacrebleu's: mean of the bootstrap plus and minus half the width between its
    2.5th and 97.5th percentile. It says how far other sentences would move the score, and nothing
    of other trainings.
    """
    from sacrebleu.metrics import BLEU  # a tenth of a second, for those who translate

    metric = BLEU()
    found = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=SAMPLES)
    signature = metric.get_signature().format()
    parsed = json.loads(found.format(is_json=True, width=6, signature=signature))
    # absent where nothing matches
    middle = parsed.get("confidence_mean", 0.0)
    half = parsed.get("confidence_var", 0.0)
    return Bleu(
        score=parsed["score"],
        low=max(0.0, middle - half),
        high=min(100.0, middle + half),
        sentences=len(references),
        signature=signature,
    )


Row = dict[str, Any]


def bleu_rows(events: list[Row]) -> list[Row]:
    """Rows of the table `bleu`, one for each step after which the run translated, in their order.
    Of a sentence that several attempts translated after the same step, the newest counts.
    """
    steps: dict[int, dict[int, Row]] = {}
    for event in sorted(events, key=lambda event: event.get("attempt") or 0):
        if event["event"] == "translation" and event["number"] is not None:
            steps.setdefault(event.get("step") or 0, {})[event["number"]] = event
    found = []
    for step, lines in sorted(steps.items()):
        texts = [
            (lines[number]["hypothesis"] or "", lines[number]["reference"] or "")
            for number in sorted(lines)
        ]
        score = bleu(*zip(*texts, strict=True))
        ends = {
            f"bleu_{name}": getattr(score, name)
            for name in ("low", "high", "sentences", "signature")
        }
        found.append({"step": step, "bleu": score.score, **ends})
    return found

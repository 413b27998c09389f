"""What is found of a file that is verified: its verdicts, and what differs, in sentences."""

from dataclasses import dataclass, field

IDENTICAL, DATA, CODE, FOREIGN = "identical", "data changed", "code changed", "not ours"
#: names in a list that are printed
SHOWN = 5
_NEXT = {
    DATA: "snakemake report makes tables and report from the logs at hand; python -m tokenscale diff A B compares two",
    CODE: "snakemake report draws it with this code; git checkout of the commit in provenance.json draws it as it was",
    FOREIGN: "take the file from the report's folder, whose SHA256SUMS names all that belongs to it",
}


@dataclass
class Finding:
    """What was found of one file, or of one page of it: the verdicts, and what differs, in sentences."""

    what: str
    verdicts: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """All verdicts, most often one."""
        return ", ".join(dict.fromkeys(self.verdicts)) or IDENTICAL

    def add(self, verdict: str, *sentences: str) -> None:
        """One more thing that is not as it was."""
        self.verdicts.append(verdict)
        self.differs += sentences

    def lines(self) -> list[str]:
        """The verdict, then what differs."""
        return [f"{self.what}: {self.verdict}", *(f"  {line}" for line in (*self.differs, *self.notes))]


def text(findings: list[Finding]) -> str:
    """All findings as printed, and below them what to do about them."""
    verdicts = dict.fromkeys(verdict for finding in findings for verdict in finding.verdicts)
    lines = [line for finding in findings for line in finding.lines()]
    return "\n".join([*lines, *(f"next: {_NEXT[verdict]}" for verdict in verdicts)])


def queries(names: list[str]) -> str:
    return f"{'query' if len(names) == 1 else 'queries'} {few(names)}"


def few(names: list[str]) -> str:
    """The first few of them."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")

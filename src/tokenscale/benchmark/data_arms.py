"""What the data benchmark times: the arms, by their names, and why some cannot run here."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenscale.benchmark import machine, studies
from tokenscale.settings.benchmark import DataBenchmarkSettings
from tokenscale.settings.run import APPROACHES

LIMIT = "memcpy"
ONLINE = tuple(approach for approach, stored in APPROACHES.items() if stored is None)
#: other ways to read a packed store
PACKED = ("packed, first touch", "packed, int32")


@dataclass(frozen=True)
class Arm:
    """One way from files to batches. `what` is an approach, another way to read packed rows, an arm of the studies, a
    peer, or the limit; `engine` is None where tokens come from a store, and where `auto` takes one."""

    what: str
    engine: str | None = None
    cold: bool = False
    workers: int | None = None  # of torch's DataLoader; None: none is between

    @property
    def name(self) -> str:
        """How records and figures call it.

        >>> Arm("padded", engine="tiktoken", workers=2).name, Arm("packed", cold=True).name
        ('padded, tiktoken, DataLoader 2', 'packed, cold')
        """
        loader = None if self.workers is None else f"DataLoader {self.workers}"
        return ", ".join(part for part in (self.what, self.engine, "cold" if self.cold else None, loader) if part)


def listed(
    settings: DataBenchmarkSettings, engines: Iterable[str], files: dict[str, list[Path]]
) -> tuple[list[Arm], dict[str, str]]:
    """(Arms of ours and of the studies, arm → why it is left out). `files`: what an arm reads, by what it is."""
    arms, left_out = [Arm(approach) for approach in APPROACHES], {}
    arms += [Arm(online, engine) for engine in engines for online in ONLINE]
    if (reason := studies.missing()) is None:
        arms += [Arm(name) for name in studies.ARMS]
    else:
        left_out |= dict.fromkeys(studies.ARMS, reason)
    for arm in [Arm(arm.what, cold=True) for arm in arms if arm.engine is None]:
        reason = machine.why_not_cold(machine.forget(files[arm.what]))
        if reason is None:
            arms.append(arm)
        else:
            left_out[arm.name] = reason
    arms += [Arm(arm.what, arm.engine, workers=n) for arm in arms if not arm.cold for n in settings.workers]
    return [*arms, *map(Arm, PACKED), Arm(LIMIT)], left_out

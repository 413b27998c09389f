"""The budget of a run: how much of it is used, and when it ends; equal on every rank."""

import math

import torch
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.costs.schedule import learning_rate
from tokenscale.settings.run import BudgetSettings, ScheduleSettings
from tokenscale.train.parallel.world import World

#: steps in a row without a single label that end a run: it learns nothing, and no budget of tokens
#: is reached
UNLABELLED_STEPS = 100


class Budget:
    """Compute the used share of the budget before each step, and whether the step was the last one
    after it.

    With a number of steps both are arithmetic. Otherwise all ranks' useful tokens decide, or the
    clock of rank 0, which are exchanged before the step's forward passes: read after them, when
    they are long there, they cost no wait. Tokens and seconds are counted whatever the budget, so
    that a run with another one can go on from a checkpoint.
    """

    def __init__(
        self,
        settings: BudgetSettings,
        steps: int | None,
        world: World,
        warmup_steps: int,
        *,
        counts: bool = True,
    ):
        self.steps = steps
        self._world = world
        self._warmup = warmup_steps
        self._counts = counts
        if steps is not None and warmup_steps > steps:
            raise UserError(
                "the warm-up is longer than the run.",
                budget=f"{settings.kind} {getattr(settings, settings.kind):g}: {steps} steps",
                found=f"schedule.warmup_steps {warmup_steps}",
                next="shorten the warm-up, or train longer",
            )
        # unused with a number of steps
        self._goal = settings.useful_tokens or settings.wall_s or math.inf
        self._counts_tokens = settings.useful_tokens is not None
        self._tokens = torch.zeros((), dtype=torch.float64, device=world.device)
        self._alone = 0  # counted here with one rank, which costs nothing on the device
        self._done = self._seconds = 0.0
        self._warm = 0.0  # share behind us when the warm-up ended
        self._exchanged: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._previous: tuple[Tensor, torch.cuda.Event | None] | None = None  # of the step before
        self._unlabelled = 0  # steps in a row without a useful token, on all ranks
        self.stop = False  # some rank has been told to stop; all ranks say so after the same step

    def share(self, step: int) -> float:
        """Return the share of the budget that is used before step `step`, 0 to 1; one number on all
        ranks.
        """
        return step / self.steps if self.steps is not None else min(1.0, self._done / self._goal)

    def learning_rate(self, step: int, peak: float, schedule: ScheduleSettings) -> float:
        """Return the learning rate of step `step`; call it once a step, in their order."""
        if self.steps is not None:
            return learning_rate(
                step,
                steps=self.steps,
                peak=peak,
                schedule=schedule,
            )
        share = self.share(step)
        if step <= max(self._warmup - 1, 0):
            self._warm = share
        since = (share - self._warm) / (1 - self._warm) if self._warm < 1 else 1.0  # the peak
        return learning_rate(
            step,
            steps=None,
            peak=peak,
            schedule=schedule,
            share=since,
        )

    def exchange(self, useful_tokens: int, stop_requested: bool = False) -> Tensor:
        """Return the useful tokens of the global batch, from those of this rank: a scalar in fp32
        on the device.

        A collective. Ranks that train on the same rows count them once (`counts`). `stop_requested`
        asks all ranks to stop; they see it one step later, because reading a sum that is one step
        old costs no wait.
        """
        device = self._world.device
        useful_tokens = useful_tokens if self._counts else 0
        if self._world.size == 1 and self.steps is not None:
            self._alone += useful_tokens
            self._unlabelled = 0 if useful_tokens else self._unlabelled + 1
            self.stop = stop_requested
            return torch.scalar_tensor(useful_tokens, device=device)
        clock = self._seconds if self._world.rank == 0 else 0.0
        own = (useful_tokens, clock, stop_requested)
        sums = torch.stack(
            [torch.scalar_tensor(number, dtype=torch.float64, device=device) for number in own]
        )
        if self._world.size > 1:
            torch.distributed.all_reduce(sums)
        self._tokens += sums[0]
        self._previous = self._exchanged
        self._exchanged = (sums.to("cpu", non_blocking=True), _event(device))
        return sums[0].float()

    def after(self, step: int, seconds: float) -> bool:
        """Return whether step `step`, which took `seconds` here, was the last: the first step that
        begins after a wall time is.
        """
        self._seconds += seconds
        if self.steps is None:
            assert self._exchanged is not None  # the step has counted its tokens
            useful, clock, _ = _read(*self._exchanged)
            self._done = self._done + useful if self._counts_tokens else clock
        if self._previous is not None:
            useful, _, stop_requested = _read(*self._previous)
            self._unlabelled = 0 if useful else self._unlabelled + 1
            self.stop = stop_requested > 0
        return self.ended(step + 1)

    def check_labels(self, ended: bool) -> None:
        """Raise UserError on every rank after `UNLABELLED_STEPS` steps without a label, or at the
        end of a run that has had none.
        """
        if self._unlabelled < UNLABELLED_STEPS and not (
            ended and self.state()["useful_tokens"] == 0
        ):
            return
        raise UserError(
            "the rows of this run keep no label: nothing is predicted, and nothing is learned.",
            found=f"{max(self._unlabelled, 1)} steps in a row without a label",
            budget=f"{self.share(self.steps or 0):.1%} used" if self.steps is None else None,
            next=(
                "raise sequence_length, so that rows reach a target or hold more than one token; "
                "or set labels: all"
            ),
        )

    def ended(self, done: int) -> bool:
        return done >= self.steps if self.steps is not None else self._done >= self._goal

    def state(self) -> dict[str, float]:
        """Return the state as plain numbers. Rank 0's seconds count; `clock` is the used part of a
        wall-time budget.
        """
        clock = {"clock": self._done} if self.steps is None and not self._counts_tokens else {}
        return {
            "useful_tokens": self._tokens.item() + self._alone,
            "seconds": self._seconds,
            "warm": self._warm,
        } | clock

    def load(self, state: dict[str, float]) -> None:
        """Restore what `state` returned on rank 0, of a run with this budget or another."""
        self._tokens.fill_(state["useful_tokens"])
        self._seconds = state["seconds"]
        self._warm = state["warm"]
        self._done = (
            state["useful_tokens"] if self._counts_tokens else state.get("clock", state["seconds"])
        )


def _read(sums: Tensor, event: torch.cuda.Event | None) -> list[float]:
    if event is not None:
        event.synchronize()
    return sums.tolist()


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

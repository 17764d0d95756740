"""A request as the engine takes it, and the sequences that it asks for; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.shared.parameters import Sampling
from inference.protocol import Priority
from inference.worker.answers.structured_answer import Reading
from inference.worker.backend import Constraint
from inference.worker.steps import Job
from inference.worker.worker_requests import NO_PREFIX, AnswerPrefix


@dataclass(frozen=True, slots=True)
class Work:
    """Token lists, validated. `n` choices of every prompt. Choice numbers run through
    the prompts: prompt 0 has choices 0..n-1. `deadline` is on the engine's clock. `reading` divides the answers and
    `constraint` bounds them, where they are there.

    `score_prompt`: every choice first tells the log probabilities of its prompt (`Output.prompt_logprobs`, with
    `logprobs` alternatives); a prompt that is scored reuses nothing that was computed before. With `max_tokens` 0 a
    choice finishes with "length" as soon as its prompt is computed, and scored.

    `max_delay_seconds`: how many seconds text may wait for more to leave with it, where there are no log probabilities.

    `prefix`: the beginning of the only answer, which the only prompt ends in; another worker generated it.
    """

    prompts: Sequence[Sequence[int]]
    n: int
    sampling: Sampling
    max_tokens: int
    stops: Sequence[str] = ()
    logprobs: int | None = None
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    reading: Reading | None = None
    constraint: Constraint | None = None
    score_prompt: bool = False
    prefix: AnswerPrefix = NO_PREFIX
    max_delay_seconds: float = 0.0

    @property
    def sequences(self) -> int:
        """How many answers are asked for."""
        return len(self.prompts) * self.n

    def jobs(self, ids: Sequence[int], arrival: float) -> list[Job]:
        """One job per answer, in the order of choices; those of one prompt share what is computed of it."""
        prompts = [prompt for prompt in range(len(self.prompts)) for _choice in range(self.n)]
        groups = [None if self.score_prompt else ids[prompt * self.n] for prompt in prompts]
        common = (self.tenant, self.priority, arrival, self.deadline)
        return [
            Job(id, self.prompts[prompt], *common, group, self.score_prompt, ids[0])
            for id, prompt, group in zip(ids, prompts, groups, strict=True)
        ]

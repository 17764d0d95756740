"""The engine of a generating model: the loop `schedule -> decode -> sample -> emit` for all of its sequences.

`Scheduler` decides what runs next, `Generation` decides where a text ends. An error in one request ends that request.
An error in a step ends the requests of the step. Any other error ends all requests. Handlers catch BaseException,
because panics of Rust libraries are not Exceptions.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from headgate.shared.parameters import Sampling
from inference.protocol import Code, Progress, Restored
from inference.worker.answers.generation import Generation, Output, Scoring
from inference.worker.answers.structured_answer import StructuredGeneration
from inference.worker.backend import OK, Backend, Constraint, Decode, TokenSampler, Vocabulary
from inference.worker.engine import sequence_commands
from inference.worker.engine.engine_thread import EngineThread
from inference.worker.engine.engine_work import QueueEstimate, Work
from inference.worker.engine.output_tickets import Delivery, Outbox, Ticket
from inference.worker.engine.prefill_pacing import LONGEST_SECONDS, Pace
from inference.worker.engine.scheduler import Scheduler
from inference.worker.engine.sequence_transfers import SequenceTransfers
from inference.worker.engine.speculation import Speculation
from inference.worker.engine.verification import Verification
from inference.worker.engine_stats import EngineCounters
from inference.worker.kv.sequence_control import SequenceRow
from inference.worker.kv.sequence_store import SequenceStore
from inference.worker.sampling import Distribution
from inference.worker.steps import (
    Copy,
    Fetch,
    Limits,
    Load,
    Operation,
    Phase,
    Remove,
    RestoreCheckpoint,
    Row,
    SaveCheckpoint,
    Store,
    perform_all,
)
from inference.worker.worker_errors import WorkerError
from inference.worker_link import KvLabels

T = TypeVar("T")
log = logging.getLogger("headgate.worker.engine")

PROGRESS_SECONDS = 0.5

FETCH_CHECK_SECONDS = 0.05
"""Interval of the checks while all jobs wait for sequences from disk. The store wakes the engine as well."""

UNREAD_OUTPUTS = 2**14
"""Limit of unread outputs of one request, about 4 MiB. A joined output counts once; each alternative of a token counts
as one more. A request over the limit is suspended and gives up its slot until its outputs are read."""

UNREAD_SECONDS = 60.0
"""A request that stays suspended for this long ends with an error. The gateway disconnects a client that reads nothing
for half of this time."""

SamplerFactory = Callable[[Sampling, int, Constraint | None], TokenSampler]
"""(sampling, choice, constraint) -> sampler."""


@dataclass(slots=True)
class _Running:
    """A choice of a request. `has_output`: its first output was sent. `started`: when its first row was computed."""

    ticket: Ticket[Output]
    generation: Generation
    logprobs: int | None
    max_unread: int
    max_delay_seconds: float
    generates: bool = True
    scoring: Scoring | None = None
    has_output: bool = False
    started: float | None = None


class Engine:
    """Generates on its own thread, on which `deliver` gets the outputs. `submit` and `abort` are thread-safe."""

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        make_sampler: SamplerFactory,
        limits: Limits,
        deliver: Callable[[list[Delivery]], None],
        on_fatal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        store: SequenceStore | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`store`: see `SequenceTransfers`. `speculation`: None for one token per sequence and step; another value
        requires that the end of a slot can be removed."""
        self.counters = EngineCounters(clock)
        self.label_changes: deque[KvLabels] = deque()
        """See `KvLabels`; the reader removes them."""
        self._backend = backend
        self._vocabulary = vocabulary
        self._make_sampler = make_sampler
        self._deliver = deliver
        self._clock = clock
        self._scheduler = Scheduler(limits, None if store is None else store.catalog)
        self._transfers = SequenceTransfers(self._scheduler, store, self.counters, clock)
        self._verification = Verification(speculation, self._scheduler, backend, self.counters)
        self._running: dict[int, _Running] = {}
        self._jobs_of: dict[Ticket[Output], set[int]] = {}
        self._commands: deque[tuple[Ticket[Output], Callable[[], None]]] = deque()
        self._ids = itertools.count(1)
        self._pace = Pace.first(limits.batch)
        self._control_commands: deque[Callable[[], object]] = deque()
        self._outbox = Outbox()
        self._next_seconds = math.inf
        self._unread_since: dict[Ticket[Output], float] = {}
        self._progress_reported_at = -math.inf
        self._queue_estimate = QueueEstimate(limits)
        self._runner = EngineThread("engine", self._iterate, self._close, on_fatal)

    # --- for other threads -------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Starts the thread."""
        self._runner.start()

    def submit(self, work: Work, ticket: Ticket[Output]) -> None:
        """Queues a request. Its outputs, or the error that rejects it, arrive at the ticket."""
        arrival = self._clock()
        ticket.on_room = lambda: self._post(ticket, lambda: self._resume(ticket))
        self._post(ticket, lambda: self._take(work, ticket, arrival))

    def abort(self, ticket: Ticket[Output]) -> None:
        """Ends a request before the next step, without an output. A request that has already ended is ignored."""
        self._post(ticket, lambda: self._drop(ticket))

    def limit(self, sequences: int) -> None:
        """Sets the maximum number (at least 1) of concurrent sequences from the next step on."""
        self._control(lambda: self._scheduler.limit(sequences))

    def forget(self) -> None:
        """Drops the retained prefixes before the next step."""
        self._control(self._scheduler.slots.forget)

    def stop(self, reason: WorkerError, seconds: float = 5.0) -> bool:
        """Ends all requests with `reason` after the running step. Returns whether the thread ended within `seconds`."""
        return self._runner.stop(reason, seconds)

    def store_all(self, seconds: float) -> None:
        """Stores the retained sequences, for at most `seconds` and one transfer more. Call it after `stop`."""
        self._transfers.store_all(seconds)

    def limit_stored(self, ram_bytes: int) -> None:
        """Sets the limit of host memory for sequences without a slot."""
        if (store := self._transfers.store) is not None:
            self._control(lambda: store.limit(ram_bytes))

    def kv_sequences(self) -> Future[Sequence[SequenceRow]]:
        """See `SequenceControl`, as for the next two methods."""
        return self._between_steps(
            lambda: sequence_commands.rows(self._scheduler, self._transfers.store, self._clock())
        )

    def clear_kv(self, tenant: str | None) -> Future[int]:
        """Removes stored sequences, and those in slots that no request uses."""
        return self._between_steps(lambda: sequence_commands.clear(self._scheduler, self._transfers.store, tenant))

    def pin_kv(self, ids: Collection[str], seconds: float) -> Future[int]:
        """Pins sequences for `seconds` from now."""
        return self._between_steps(lambda: sequence_commands.pin(self._scheduler, self._transfers, ids, seconds))

    def wake(self) -> None:
        """Makes the engine look at its store."""
        self._runner.wake()

    def _between_steps(self, command: Callable[[], T]) -> Future[T]:
        """Runs `command` on the engine thread between two steps. Once the thread has ended, the future fails."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._control(run)
        if (reason := self._runner.ended) is not None and future.cancel():
            future = Future()
            future.set_exception(reason)
        return future

    def _control(self, command: Callable[[], object]) -> None:
        self._control_commands.append(command)
        self._runner.wake()

    def _post(self, ticket: Ticket[Output], command: Callable[[], None]) -> None:
        self._commands.append((ticket, command))
        self._runner.wake()

    # --- the thread --------------------------------------------------------------------------------------------------
    def _iterate(self) -> bool:
        self._run_commands()
        self._transfers.run()
        self._publish()
        if self._scheduler.has_work:
            if self._guarded_step():
                return True
            self._runner.rest(FETCH_CHECK_SECONDS)
        elif (wait := self._transfers.idle()) is not None:
            if wait == 0.0:
                return True
            self._runner.rest(wait)
        return bool(self._commands)

    def _close(self, reason: WorkerError) -> None:
        if self.counters.step_started is not None:
            self.counters.end()
        self._run_commands()
        jobs = list(self._running)
        for job in jobs:
            self._end(job, reason)
        self._deliver_outputs()
        for job in jobs:
            self._scheduler.abort(job)
        self.counters.active = self.counters.queued = 0

    def _run_commands(self) -> None:
        while self._control_commands:
            self._control_commands.popleft()()
        while self._commands:
            ticket, command = self._commands.popleft()
            try:
                command()
            except BaseException as error:
                self._fail_request(ticket, _reason(error, "the engine could not carry out a command of the request"))

    def _fail_request(self, ticket: Ticket[Output], reason: WorkerError) -> None:
        self._refuse(ticket, reason)
        try:
            self._drop(ticket)
        except BaseException:
            log.exception("internal error: a request could not be removed")
            self._runner.give_up(reason.message)

    def _guarded_step(self) -> bool:
        """Runs a step; returns False if there was nothing to do, because all jobs wait."""
        try:
            return self._step()
        except BaseException as error:
            # Nothing below is expected to raise; if it does, only the requests of this step end.
            log.exception("internal error: a step of the engine failed")
            if self.counters.step_started is not None:
                self.counters.end()
            self._fail_step(f"the engine failed ({type(error).__name__}: {error})")
            return True

    def _step(self) -> bool:
        decoding, prompts = self._scheduler.load
        just_begun = prompts > 0 and self._scheduler.just_begun  # no answer has more than its first token
        allowed = self._pace.seconds(decoding, prompts, just_begun=just_begun)
        transfers = self._transfers.number_in(LONGEST_SECONDS) if just_begun else 1
        step = self._scheduler.plan(self._clock(), self._pace.budget(allowed), transfers, self._verification.propose)
        for job in step.expired:
            self._end(job, WorkerError(Code.DEADLINE_EXCEEDED, "the model generated no token before the deadline"))
        if lost := perform_all(step.operations, self._perform):
            log.warning("%d slots could not be restored: their prompts are computed again", len(lost))
            self._scheduler.not_restored(lost)
            return True
        self._transfers.ahead(step.operations)
        if not step.rows:
            return bool(step.operations or step.expired)
        self.counters.begin(step.tokens)
        status, last = self._backend.decode(step.rows)
        if status is not OK:
            self.counters.end()
            if status is not Decode.BAD_BATCH:
                self._scheduler.slots.arrived()  # the copies were made: llama.cpp copies before it computes
            if status is Decode.NO_ROOM:
                for job in self._scheduler.no_room():
                    self._end(
                        job,
                        WorkerError(
                            Code.MODEL_FAILED,
                            "the KV cache has no room for this request, although no other request runs; "
                            "send a shorter request",
                        ),
                    )
            else:
                self._fail_step(f"llama.cpp could not compute a step ({status.name.lower()})")
            return True
        self._verification.computed(step, self.counters.elapsed)
        self._runner.succeeded()
        self._scheduler.computed()
        try:
            reused = self._read(step.rows, last)
        finally:
            self._verification.remove_rejected(step)
        seconds = self.counters.end()
        self._next_seconds = seconds if not step.prefill else math.inf
        self.counters.prefill = self.counters.prefill.with_step(step.prefill + reused, seconds)
        if step.tokens == 1 and not step.prefill:
            self.counters.decode = self.counters.decode.with_step(1, seconds)
        self._pace = self._pace.observe(step.prefill, step.tokens, seconds, allowed, decoding=decoding, prompts=prompts)
        return True

    def _read(self, rows: Sequence[Row], last: Sequence[int]) -> int:
        """Reads the logits of computed rows; returns how many tokens of their prompts did not have to be computed."""
        reused = 0
        for row, index in zip(rows, last, strict=True):
            running = self._running[row.job]
            if running.started is None:
                running.started = self._clock()
                if running.ticket.begun_at is None:
                    running.ticket.begun_at = self.counters.step_started
                running.generation.cached = row.start
                reused += row.start
                self._note_restore(running, row)
            if running.generation.is_fresh:
                self.counters.prompt_tokens += len(row.tokens)
                if row.sample:
                    running.ticket.prefilled_at = self._clock()
            if row.sample or row.every:
                self._advance(running, row, index)
        return reused

    def _perform(self, operation: Operation) -> bool:
        """Runs a memory operation; returns False if its slot could not be restored or loaded."""
        match operation:
            case Remove(slot, start):
                self._backend.remove(slot, start)
                self._verification.removed(slot, start)
            case Copy():
                self._backend.copy(operation.source, operation.target, operation.count)
            case SaveCheckpoint():
                operation.checkpoint.state = self._backend.save(operation.slot)
            case RestoreCheckpoint(slot, checkpoint):
                return self._backend.restore(slot, checkpoint.state, checkpoint.position)
            case Store():
                self._transfers.store_sequence(operation)
            case Load():
                return self._transfers.load(operation)
            case Fetch():
                self._transfers.fetch(operation)
        return True

    def _note_restore(self, running: _Running, row: Row) -> None:
        """Adds to the ticket what a choice, whose first row is `row`, did not have to compute."""
        if row.start and (tier := self._scheduler.restored(row.job)) is not None:
            seconds = self._transfers.seconds_of(row.slot, tier)
            running.ticket.restored.append(Restored(tier, row.start, 1000 * seconds, running.generation.choice))

    def _advance(self, running: _Running, row: Row, index: int) -> None:
        """Reads the logits of a computed row; `index` is the batch index of its last token."""
        try:
            if row.every and not row.proposed:
                self._score(running, row, index)
            if row.sample:
                self._verification.draw(row, index, lambda at: self._sample(running, row.job, at))
        except BaseException as error:
            reason = _reason(error, "sampling failed")
            self._scheduler.abort(row.job)
            self._end(row.job, reason)

    def _score(self, running: _Running, row: Row, index: int) -> None:
        assert running.scoring is not None
        first = index - len(row.tokens) + 1
        scores = running.scoring.add(row.start, len(row.tokens), lambda at: self._backend.logits(first + at))
        if scores:
            generation = running.generation
            self._send(running, Output(generation.choice, "", 0, generation.cached or 0, prompt_logprobs=scores))

    def _sample(self, running: _Running, job: int, index: int) -> int | None:
        """Draws the next token of `job`; returns it, or None if the answer ends with it."""
        generation = running.generation
        if not running.generates:
            spent = Output(generation.choice, "", generation.tokens, generation.cached or 0, finish="length")
            self._finish(running, job, spent)
            return None
        if running.logprobs is None:
            output = generation.accept(token := generation.sampler.sample(index))
        else:
            drawn = Distribution.of(self._backend.logits(index))
            top = drawn.top(running.logprobs)  # before the mask changes the logits
            token = generation.sampler.sample(index)
            output = generation.accept(token, drawn.logprob(token), top)
        self.counters.generated_tokens += 1
        if output is not None and output.finish is not None:
            self._finish(running, job, output)
            return None
        self._scheduler.extend(job, token)
        if output is not None:
            self._send(running, output)
        return token

    def _finish(self, running: _Running, job: int, output: Output) -> None:
        self._scheduler.finish(job)
        if running.started is not None:
            self._queue_estimate.observe(self._clock() - running.started)
        self._release(job)
        self._outbox.put(running.ticket, output)

    def _send(self, running: _Running, output: Output) -> None:
        """Sends an output that is not the last of its choice.

        The first output of a choice is sent at once, later ones may wait for `max_delay_seconds`. A request with
        too many unread outputs is suspended.
        """
        ticket = running.ticket
        if running.max_delay_seconds == 0 or not running.has_output:
            running.has_output = True
            self._outbox.put(ticket, output)
        elif not self._outbox.hold(ticket, output, self._clock() + running.max_delay_seconds):
            return  # joined with an output that is already counted
        ticket.sent += 1
        if ticket.sent - ticket.read > running.max_unread and ticket not in self._unread_since:
            self._suspend(ticket, running.max_unread)

    def _fail_step(self, message: str) -> None:
        ended = self._scheduler.failed()
        for job in ended:
            self._end(job, WorkerError(Code.MODEL_FAILED, message))
        log.error("%s: %d sequences failed", message, len(ended))
        self._runner.failed(message)

    # --- requests ----------------------------------------------------------------------------------------------------
    def _take(self, work: Work, ticket: Ticket[Output], arrival: float) -> None:
        if ticket.gone:
            return
        ids = [next(self._ids) for _ in range(work.sequences)]
        starts = self._message_starts if self._scheduler.limits.checkpoints else None
        jobs = work.jobs(ids, arrival, starts)
        if not self._scheduler.submit(jobs):
            self._refuse(ticket, self._queue_estimate.queue_full(len(jobs), self._scheduler.room))
            return
        self._jobs_of[ticket] = set(ids)
        alternatives = work.logprobs or 0
        max_unread = UNREAD_OUTPUTS // (1 + alternatives)
        for index, job in enumerate(jobs):
            reading = work.reading
            parser = (
                reading.parser() if reading is not None else None
            )  # before a sampler exists that would have to be freed on an error
            sampler = self._make_sampler(work.sampling, index % work.n, work.constraint)
            common = (index, sampler, self._vocabulary, work.max_tokens, work.stops)
            generation = (
                Generation(*common) if not reading or not parser else StructuredGeneration(*common, reading, parser)
            )
            if work.prefix.tokens:
                sampler.accept(job.prompt[-work.prefix.tokens :])
                generation.resume(work.prefix)
            scoring = Scoring(job.prompt, self._vocabulary, alternatives) if work.score_prompt else None
            max_delay_seconds = work.max_delay_seconds if work.logprobs is None and not work.score_prompt else 0.0
            generates = work.max_tokens > work.prefix.tokens
            self._running[job.id] = _Running(
                ticket, generation, work.logprobs, max_unread, max_delay_seconds, generates, scoring
            )

    def _message_starts(self, prompt: Sequence[int]) -> Sequence[int]:
        """The positions of control tokens with which templates begin messages."""
        return np.flatnonzero(np.isin(np.asarray(prompt, np.int32), self._vocabulary.message_tokens)).tolist()

    def _refuse(self, ticket: Ticket[Output], error: WorkerError) -> None:
        self._outbox.put(ticket, Output(0, "", 0, error=error))

    def _drop(self, ticket: Ticket[Output]) -> None:
        for job in self._jobs_of.get(ticket, set()).copy():
            self._scheduler.abort(job)
            self._release(job)
        self._jobs_of.pop(ticket, None)
        self._unread_since.pop(ticket, None)
        self._outbox.drop(ticket)

    def _suspend(self, ticket: Ticket[Output], max_unread: int) -> None:
        self._unread_since[ticket] = self._clock()
        for job in self._jobs_of[ticket]:
            self._scheduler.suspend(job)
        ticket.stalled = True
        if ticket.sent - ticket.read <= max_unread:
            self._resume(ticket)  # outputs were read before `stalled` was set

    def _resume(self, ticket: Ticket[Output]) -> None:
        self._unread_since.pop(ticket, None)
        for job in self._jobs_of.get(ticket, ()):
            self._scheduler.resume(job)

    def _end_unread(self, now: float) -> None:
        late = [ticket for ticket, since in self._unread_since.items() if now - since >= UNREAD_SECONDS]
        for ticket in late:
            for job in self._jobs_of[ticket].copy():
                self._scheduler.abort(job)
                self._end(
                    job,
                    WorkerError(Code.DEADLINE_EXCEEDED, f"the answer was not read for {UNREAD_SECONDS:.0f} seconds"),
                )

    def _end(self, job: int, error: WorkerError) -> None:
        """Ends a choice with `error`. The scheduler has already removed the job, or all jobs end."""
        running = self._running[job]
        self._outbox.put(running.ticket, running.generation.fail(error))
        self._release(job)

    def _release(self, job: int) -> None:
        if (running := self._running.pop(job, None)) is None:
            return  # rejected before it had a sampler
        self._verification.end(job)
        siblings = self._jobs_of[running.ticket]
        siblings.discard(job)
        if not siblings:
            del self._jobs_of[running.ticket]
            self._unread_since.pop(running.ticket, None)
        try:
            running.generation.sampler.close()
        except BaseException:
            log.exception("internal error: a sampler could not be freed")

    def _publish(self) -> None:
        try:
            self._note_progress()
        except BaseException as error:
            log.exception("internal error: progress could not be reported")
            self._runner.give_up(f"the engine failed ({type(error).__name__}: {error})")
        self._deliver_outputs()

    def _deliver_outputs(self) -> None:
        """Delivers all outputs since the last call, except those that may wait. A failed delivery is repeated later."""
        if self._outbox.is_waiting:
            self._outbox.release(self._next_chance())
        self._outbox.deliver(self._deliver)

    def _next_chance(self) -> float:
        """The expected end of the next step; infinite unless the last step and the next one only decode."""
        return self._clock() + self._next_seconds if self._scheduler.only_decodes else math.inf

    def _note_progress(self) -> None:
        self.counters.active = self._scheduler.active
        self.counters.queued = self._scheduler.queued
        now = self._clock()
        is_due = now - self._progress_reported_at >= PROGRESS_SECONDS
        if is_due or not self.counters.active:
            self.counters.cells_used, self.counters.cells_retained = self._scheduler.slots.cells
            self.counters.kv = self._transfers.counts()
            added, removed = self._scheduler.slots.labels.take_changes()
            if added or removed:
                self.label_changes.append(KvLabels(tuple(added), tuple(removed)))
        if is_due:
            self._progress_reported_at = now
            self._end_unread(now)
            for job, phase, place_or_done, total in self._scheduler.progress():
                waits = phase is Phase.WAITING
                self._running[job].ticket.progress = (
                    Progress("queued", place_or_done) if waits else Progress("prefill", place_or_done, total)
                )


def _reason(error: BaseException, failed: str) -> WorkerError:
    """The error of a request: `error` if it is a WorkerError, otherwise MODEL_FAILED with the message `failed`."""
    if isinstance(error, WorkerError):
        return error
    log.error("%s", failed, exc_info=error)
    return WorkerError(Code.MODEL_FAILED, f"{failed} ({type(error).__name__}: {error})")

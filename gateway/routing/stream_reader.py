"""Reads the stream of one attempt and ends it when a deadline passes.

One timer serves a whole stream: a frame only updates a time, and the timer checks it when it fires. The timer cancels
the task while it waits for the provider, and not while it waits for a slow client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from gateway.apis.openai.frames import CONTENT, FINISH, OTHER, USAGE, Comment, Data, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider import Call, Provider
from gateway.routing.budget import Budget, Deadline, Due, Phase, next_deadline
from inference.protocol import Progress

log = logging.getLogger("gateway.routing.stream_reader")

ANSWERS = frozenset({CONTENT, FINISH})
"""The kinds of chunks that commit an answer."""

LATE_SECONDS = 1.0
"""A timer that is late by more than this shows that this process was suspended; the provider was not silent."""

DOWN_SECONDS = 2.5
"""Silence of an open stream that confirms what probes found: longer than a probe waits for its answer."""

CLOSE_SECONDS = 2.0
"""Time limit for closing a connection; after it the connection is left to the garbage collector."""


class ExpiredError(Exception):
    """A deadline passed while the provider was silent or only made progress."""

    def __init__(self, deadline: Deadline, waited_seconds: float) -> None:
        super().__init__(f"{deadline.due.value} after {waited_seconds:.3g} s")
        self.due: Due = deadline.due
        self.kept_alive = deadline.kept_alive
        self.waited_seconds = waited_seconds


class StreamReader:
    """One stream of `provider` under the deadlines of `budget`, for one task. `on_frame` gets every frame, and
    `on_progress` the progress that the inference service reports. `last`, `whole`: see `Phase`.
    """

    def __init__(
        self,
        provider: Provider,
        call: Call,
        budget: Budget,
        *,
        last: bool,
        on_frame: Callable[[Frame], None] | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        whole: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._budget = budget
        self._provider = provider
        self._call = call
        self._context: AbstractAsyncContextManager[AsyncIterator[Frame]] | None = None
        self._frames: AsyncIterator[Frame] | None = None
        self._started = self._last_activity = self._loop.time()
        self._idle_since: float | None = None
        self._idle_noted_at = self._started
        self._waiting = self._sent = False
        self.answered = False
        """Whether content or a finish reason has arrived."""
        self.longest_silence = 0.0
        """The longest wait in seconds that ended with a frame from `next`; a cloud's breaker resets it."""
        self._last = last
        self._on_frame = on_frame
        self._on_progress = on_progress
        self.usage: bytes | None = None
        """The last chunk that may have a usage."""
        self.pieces = 0
        """Chunks with content so far."""
        self._whole = whole
        self.is_replaceable: Callable[[bool], bool] | None = None
        """Returns whether another attempt could resume the answer. Its argument: whether the breaker of its service has
        just opened. None before the commit, and for an answer that is not streamed."""
        self._owner: asyncio.Task[object] | None = None
        self._task: asyncio.Task[object] | None = None
        """The task that waits for the provider now."""
        self._expired: Deadline | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def last_activity(self) -> float:
        """Time of the last frame or comment, or of the start of the last wait for one, on the loop's clock."""
        return self._last_activity

    def silent_seconds(self) -> float:
        """Seconds that a task has waited for a frame; 0 when none waits."""
        return 0.0 if self._task is None else self._loop.time() - self._last_activity

    def mark_sent(self) -> None:
        """The client has a part of this stream: the deadline for the commit no longer applies."""
        self._sent = True

    async def open(self) -> None:
        """Opens the stream for the running task; raises UpstreamError or ExpiredError."""
        self._owner = asyncio.current_task(self._loop)
        self._begin_wait()
        try:
            context = self._provider.stream(self._call)
            self._frames = await context.__aenter__()
            self._context = context
        except asyncio.CancelledError:
            self._raise_expired()
            raise
        finally:
            self._task = None

    def abort(self) -> None:
        """Cancels the wait: the provider was found to be down. The attempt ends like one whose deadline passed.

        A stream that was open and not silent for DOWN_SECONDS continues: it shows that the provider is only slow.
        """
        is_alive = self._frames is not None and self.silent_seconds() < DOWN_SECONDS
        if self._task is not None and not is_alive:
            self._expire(Deadline(self._loop.time(), Due.SILENCE))

    async def next(self) -> Frame:
        """The next frame, after `ready` returned none; raises UpstreamError or ExpiredError. Must not be called after
        Done.
        """
        assert self._frames is not None, "the stream is opened first"
        self._begin_wait()
        try:
            frame = await self._frames.__anext__()
        except StopAsyncIteration:
            raise UpstreamError(UpstreamKind.READ, "the stream ended without its end marker") from None
        except asyncio.CancelledError:
            self._raise_expired()
            raise
        finally:
            self._task = None
        self.longest_silence = max(self.longest_silence, self._loop.time() - self._last_activity)
        self._note(frame)
        return frame

    def ready(self) -> list[Frame]:
        """Frames that have arrived already. Empty for a provider that gives them one at a time."""
        take = getattr(self._frames, "take_ready", None)
        frames: list[Frame] = take() if take is not None else []
        if frames:
            self._last_activity = self._loop.time()
            self._note_all(frames)
        return frames

    def pass_on(self, sink: Callable[[list[Frame]], bool]) -> None:
        """Gives `sink` the frames that arrive while `next` waits; the task wakes for those where `sink` returns False.

        Without effect for a provider that gives frames one at a time.
        """
        offer = getattr(self._frames, "pass_on", None)
        if offer is not None:
            offer(lambda frames: self._passes(frames, sink))

    def _passes(self, frames: list[Frame], sink: Callable[[list[Frame]], bool]) -> bool:
        if not sink(frames):
            return False  # `ready` or `next` returns them
        self._note_all(frames)
        self._last_activity = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline().at, self._fire)
        return True

    async def close(self) -> None:
        """Closes the connection at once; logs a connection that does not close, and does not raise."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.is_replaceable = None  # it usually refers to this reader: a reference cycle otherwise
        if self._context is None:
            return
        frames, self._frames = self._frames, None
        context, self._context = self._context, None
        if (leave := getattr(frames, "leave", None)) is not None:
            leave()  # closes without waiting
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if (aclose := getattr(frames, "aclose", None)) is not None:
                    await aclose()
                await context.__aexit__(None, None, None)
        except TimeoutError:
            log.debug("the connection to %s did not close within %g s", self._provider.name, CLOSE_SECONDS)
        except Exception:
            log.exception("the connection to %s did not close properly", self._provider.name)

    def _begin_wait(self) -> None:
        """Starts to measure silence. Only the time of waiting counts, not that of other work of this process."""
        self._last_activity = self._loop.time()
        if self._idle_since is not None:
            self._idle_since += self._last_activity - self._idle_noted_at
        self._task = self._owner
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline().at, self._fire)

    def _note_all(self, frames: list[Frame]) -> None:
        for frame in frames:
            # after the commit single frames matter only to a meter, and comments and empty chunks to deadlines
            if not self.answered or self._on_frame is not None or not isinstance(frame, Data) or frame.kind is OTHER:
                self._note(frame)
            else:
                self._idle_since = None
                if frame.kind is CONTENT:
                    self.pieces += 1
                else:
                    self._note_usage(frame)

    def _note_usage(self, frame: Data) -> None:
        if frame.kind is USAGE or (frame.kind is FINISH and b'"prompt_tokens"' in frame.payload):
            self.usage = frame.payload

    def _note(self, frame: Frame) -> None:
        if self._on_frame is not None:
            self._on_frame(frame)
        if isinstance(frame, Comment):
            progress = Progress.parse(frame.frame)
            waiting = progress is not None and progress.stage in ("queued", "loading")
            if waiting != self._waiting:
                self._waiting = waiting
                self._drop_timer()
            if progress is None:
                self._note_idle()
            else:
                self._idle_since = None
                self._on_progress(progress)
        elif isinstance(frame, Data) and frame.kind is not OTHER:
            self._idle_since = None
            self.pieces += frame.kind is CONTENT
            self._note_usage(frame)
            if not self.answered and frame.kind in ANSWERS:
                self.answered = True
                self._drop_timer()
        else:
            self._note_idle()

    def _note_idle(self) -> None:
        """Notes a keep-alive: an unknown comment, or a chunk without content."""
        self._idle_noted_at = self._loop.time()
        if self._idle_since is None:
            self._idle_since = self._last_activity

    def _drop_timer(self) -> None:
        """Drops the timer, because the next deadline may now be earlier."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _deadline(self) -> Deadline:
        last = self._last
        if self.answered and self._budget.has_short_gap:
            last = self.is_replaceable is None or not self.is_replaceable(False)
        phase = Phase(
            self._started, self._last_activity, self._waiting, self.answered, self._sent, last, self._whole,
            self._idle_since, self._frames is not None,
        )  # fmt: skip
        return next_deadline(self._budget, phase)

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            return  # no task waits; the next wait sets the timer again
        deadline = self._deadline()
        now = self._loop.time()
        if now - deadline.at > LATE_SECONDS:
            # this process was suspended: frames may have arrived that are not read yet
            self._last_activity = now
            self._idle_since = None
            deadline = self._deadline()
        if deadline.at > now:
            self._timer = self._loop.call_at(deadline.at, self._fire)
            return
        self._expire(deadline)

    def _expire(self, deadline: Deadline) -> None:
        """Cancels the waiting task, once: a second cancellation would look like one by the client."""
        if self._task is not None and self._expired is None:
            self._expired = deadline
            self._task.cancel()

    def _raise_expired(self) -> None:
        """Raises ExpiredError when only the timer cancelled the task."""
        expired, self._expired = self._expired, None
        task = asyncio.current_task(self._loop)
        if expired is not None and task is not None and task.uncancel() <= 0:
            raise ExpiredError(expired, self._loop.time() - self._started) from None

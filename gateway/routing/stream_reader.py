"""Listens to one provider's stream and ends it when a deadline passes; decides nothing about what comes next.

One timer serves a whole stream: a frame only moves a number, the timer looks at it when it fires. It cancels the
listening task, never a task that is busy with something else, such as a slow client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from gateway.apis.openai.frames import CONTENT, FINISH, OTHER, Comment, Data, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider import Call, Provider
from gateway.routing.budget import Budget, Deadline, Due, Phase, next_deadline
from inference.protocol import Progress

log = logging.getLogger("gateway.routing.stream_reader")

ANSWERS = frozenset({CONTENT, FINISH})
"""The kinds of chunks with which an answer has begun."""

LATE_SECONDS = 1.0
"""A timer that fires so much too late says that this process slept, and nothing about the provider."""

CLOSE_SECONDS = 2.0
"""How long closing a connection may take before it is left to the garbage collector."""


class ExpiredError(Exception):
    """A deadline of ours passed while the provider was silent or only made progress."""

    def __init__(self, deadline: Deadline, waited_seconds: float) -> None:
        super().__init__(f"{deadline.due.value} after {waited_seconds:.3g} s")
        self.due: Due = deadline.due
        self.kept_alive = deadline.kept_alive
        self.waited_seconds = waited_seconds


class Listening:
    """One stream of `provider` under the deadlines of `budget`; `on_frame` sees all its frames. Not for two tasks."""

    def __init__(
        self,
        provider: Provider,
        call: Call,
        budget: Budget,
        *,
        last: bool,
        on_frame: Callable[[Frame], None] | None = None,
        whole: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._budget = budget
        self._provider = provider
        self._call = call
        self._context: AbstractAsyncContextManager[AsyncIterator[Frame]] | None = None
        self._frames: AsyncIterator[Frame] | None = None
        self._started = self._heard = self._loop.time()
        self._idle_since: float | None = None
        self._left = self._started
        self._waiting = self._sent = False
        self.answered = False
        """Whether content or a finish reason came."""
        self.longest_silence = 0.0
        """That was over with a frame."""
        self._last = last
        self._on_frame = on_frame
        self._whole = whole
        self.is_replaceable: Callable[[], bool] | None = None
        """Tells, of an answer that has begun, whether somebody else could go on with it."""
        self._owner: asyncio.Task[object] | None = None
        self._task: asyncio.Task[object] | None = None
        self._passed: Deadline | None = None
        self._timer: asyncio.Handle | None = None

    @property
    def heard(self) -> float:
        """When the last sign of life came, on the loop's clock."""
        return self._heard

    def silent_seconds(self) -> float:
        """For how long it has been listened to in vain; 0 while nobody listens."""
        return 0.0 if self._task is None else self._loop.time() - self._heard

    def mark_sent(self) -> None:
        """The caller got something of this stream: from now on only silence counts."""
        self._sent = True

    async def open(self) -> None:
        """Opens the stream for the running task; raises UpstreamError or ExpiredError."""
        self._owner = asyncio.current_task(self._loop)
        self._begin()
        try:
            context = self._provider.stream(self._call)
            self._frames = await context.__aenter__()
            self._context = context
        except asyncio.CancelledError:
            self._raise_expired()
            raise
        finally:
            self._task = None

    def give_up(self) -> None:
        """Who is asked was found to be gone: whoever waits for it waits no longer, as if its time were over."""
        if self._task is not None:
            self._expire(Deadline(self._loop.time(), Due.SILENCE))

    async def next(self) -> Frame:
        """The next frame, where none is `ready`; raises UpstreamError or ExpiredError. Not to be called after Done."""
        assert self._frames is not None, "the stream is opened first"
        self._begin()
        try:
            frame = await self._frames.__anext__()
        except StopAsyncIteration:
            raise UpstreamError(UpstreamKind.READ, "the stream ended without saying so") from None
        except asyncio.CancelledError:
            self._raise_expired()
            raise
        finally:
            self._task = None
        self.longest_silence = max(self.longest_silence, self._loop.time() - self._heard)
        self._note(frame)
        return frame

    def ready(self) -> list[Frame]:
        """Frames that are here already, for which no timer is needed; none for a provider that hands them out one by
        one.
        """
        take = getattr(self._frames, "take_ready", None)
        frames: list[Frame] = take() if take is not None else []
        if frames:
            self._heard = self._loop.time()
            self._note_all(frames)
        return frames

    def pass_on(self, sink: Callable[[list[Frame]], bool]) -> None:
        """Offers `sink` the frames that come while `next` waits; those for which it returns True wake nobody.

        Without effect for a provider that hands frames out one by one.
        """
        offer = getattr(self._frames, "pass_on", None)
        if offer is not None:
            offer(lambda frames: self._passes(frames, sink))

    def _passes(self, frames: list[Frame], sink: Callable[[list[Frame]], bool]) -> bool:
        self._note_all(frames)
        if not sink(frames):
            return False
        self._heard = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline().at, self._fire)
        return True

    async def close(self) -> None:
        """Closes the connection at once; a connection that resists is logged and never raises."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.is_replaceable = None  # it mostly knows this stream: a circle that nothing else would undo
        if self._context is None:
            return
        frames, self._frames = self._frames, None
        context, self._context = self._context, None
        if (leave := getattr(frames, "leave", None)) is not None:
            leave()  # nothing in it is awaited, so nothing has to be timed
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

    def _begin(self) -> None:
        """Starts to listen: silence is counted from here, and nobody's while this process had other things to do."""
        self._heard = self._loop.time()
        if self._idle_since is not None:
            self._idle_since += self._heard - self._left
        self._task = self._owner
        if self._timer is None:
            self._timer = self._loop.call_soon(self._arm)

    def _note_all(self, frames: list[Frame]) -> None:
        for frame in frames:
            # chunks of an answer that has begun say nothing new to anybody but who counts them
            if not self.answered or self._on_frame is not None or not isinstance(frame, Data):
                self._note(frame)
            else:
                self._idle_since = None

    def _note(self, frame: Frame) -> None:
        if self._on_frame is not None:
            self._on_frame(frame)
        if isinstance(frame, Comment):
            progress = Progress.parse(frame.frame)
            waiting = progress is not None and progress.stage in ("queued", "loading")
            if waiting != self._waiting:
                self._waiting = waiting
                self._rearm()
            if progress is None:
                self._note_idle()
            else:
                self._idle_since = None
        elif isinstance(frame, Data) and frame.kind is not OTHER:
            self._idle_since = None
            if not self.answered and frame.kind in ANSWERS:
                self.answered = True
                self._rearm()
        else:
            self._note_idle()

    def _note_idle(self) -> None:
        """What came says no more than that the connection lives: a foreign comment, or a chunk with nothing in it."""
        self._left = self._loop.time()
        if self._idle_since is None:
            self._idle_since = self._heard

    def _rearm(self) -> None:
        """The rules changed, so the next deadline may be earlier than the timer thinks."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _arm(self) -> None:
        """Sets the timer, in a turn of its own: then what is listened to was asked before."""
        self._timer = None if self._task is None else self._loop.call_at(self._deadline().at, self._fire)

    def _deadline(self) -> Deadline:
        last = self._last
        if self.answered and self._budget.is_impatient:
            last = self.is_replaceable is None or not self.is_replaceable()
        phase = Phase(
            self._started, self._heard, self._waiting, self.answered, self._sent, last, self._whole,
            self._idle_since, self._frames is not None,
        )  # fmt: skip
        return next_deadline(self._budget, phase)

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            return  # nobody listens; the next frame that is awaited sets the timer again
        deadline = self._deadline()
        now = self._loop.time()
        if now - deadline.at > LATE_SECONDS:
            # we ourselves were stopped or starved: what came meanwhile is still unread, and nobody was silent
            self._heard = now
            self._idle_since = None
            deadline = self._deadline()
        if deadline.at > now:
            self._timer = self._loop.call_at(deadline.at, self._fire)
            return
        self._expire(deadline)

    def _expire(self, deadline: Deadline) -> None:
        """Cancels whoever listens, once: a second cancellation would count as somebody else's."""
        if self._task is not None and self._passed is None:
            self._passed = deadline
            self._task.cancel()

    def _raise_expired(self) -> None:
        """Raises ExpiredError when it was our timer that cancelled, and nobody else did too."""
        passed, self._passed = self._passed, None
        task = asyncio.current_task(self._loop)
        if passed is not None and task is not None and task.uncancel() <= 0:
            raise ExpiredError(passed, self._loop.time() - self._started) from None

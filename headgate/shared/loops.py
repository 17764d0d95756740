"""Makes the event loop that every service runs on."""

from __future__ import annotations

import asyncio

from headgate.shared import timeslice


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The loop for the calling thread, which from now on runs as soon as it has something to do: uvloop's, or asyncio's
    own on platforms that uvloop does not know.
    """
    timeslice.shorten()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

"""Writes to a transport so that the bytes leave now; decides nothing about what is written.

uvloop gathers what is written in a turn of the loop and gives it to the kernel when the turn ends: behind everything
else that is done in it, though whoever waits for the bytes waits for none of that.
"""

from __future__ import annotations

import asyncio
import os


def send_now(transport: asyncio.WriteTransport, data: bytes) -> None:
    """Writes `data`, at once as far as the kernel takes it. What is not plain, or waits already, is the transport's."""
    if transport.is_closing() or transport.get_write_buffer_size() or transport.get_extra_info("sslcontext"):
        transport.write(data)
        return
    try:
        sent = os.write(transport.get_extra_info("socket").fileno(), data)
    except OSError:  # it takes nothing now, or the transport will see for itself what is wrong
        sent = 0
    if sent < len(data):
        transport.write(data[sent:])

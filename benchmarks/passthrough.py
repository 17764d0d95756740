"""A bare proxy with FastAPI and aiohttp that forwards every request: the lower bound for the cost of a hop.

python -m benchmarks.passthrough UPSTREAM_URL PORT
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def make_app(url: str) -> FastAPI:
    """The application in front of `url`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def pass_on(request: Request) -> Response:
        body = await request.body()
        headers = {"content-type": "application/json"}
        if b'"stream":true' in body:
            answer = await app.state.session.post(f"{url}/v1/chat/completions", data=body, headers=headers)
            return StreamingResponse(_pieces(answer), answer.status, media_type="text/event-stream")
        async with app.state.session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
            return Response(await answer.read(), answer.status, media_type="application/json")

    return app


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for piece in answer.content.iter_any():
            yield piece


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1]), port=int(sys.argv[2]), log_level="warning", access_log=False, loop="uvloop")

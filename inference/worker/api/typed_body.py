"""Decodes the body of a request into a type of the local hop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from headgate.shared.bodies.body_decoder import Extensible, InvalidBodyError
from inference.protocol import Code
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

T = TypeVar("T")


def typed(body: Any, decode: Callable[[Mapping[str, Any]], T], facts: Facts) -> T:
    """`body`, parsed JSON, as `decode` returns it; raises BadRequestError.

    A worker has one model, so that the body need not name it.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    try:
        return decode({"model": facts.model_id, **body})
    except InvalidBodyError as error:
        raise BadRequestError(error.message.replace("`", ""), error.param, code=Code(error.code)) from None


def refuse_extra(holder: Extensible | None, at: str) -> None:
    """Raises BadRequestError for a field of the object `at` that is not declared."""
    for name in (holder and holder.extra) or ():
        unknown_field(name, at)


def unknown_field(name: str, at: str) -> NoReturn:
    """Raises BadRequestError for a field of the object `at`."""
    raise BadRequestError(f"unknown field {name[:80]!r} in {at}", f"{at}.{name[:80]}")

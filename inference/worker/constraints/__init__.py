"""Constrained answers: a form becomes a compiled constraint, a constraint a mask per answer; never draws a token.

`schema`, `keywords` and `patterns` decide what a JSON schema may say, `limits` what it may cost, `grammar` how a form
is written for llguidance, `compiler` what is kept, `waiting` who waits for it, `masks` what may follow. llguidance
itself is imported with the first constraint.
"""

from inference.worker.constraints.compile_queue import FormQueue
from inference.worker.constraints.compiler import Compiler, Tokens

__all__ = ["Compiler", "FormQueue", "Tokens"]

"""Constrained answers: a form becomes a compiled constraint, a constraint a mask per answer; never draws a token.

`schema`, `patterns` and `references` decide what a JSON schema may say, `grammar` how a form is written for llguidance,
`compiler` what is kept, `masks` what may follow. llguidance itself is imported with the first constraint.
"""

from inference.worker.constraints.compiler import Compiler, Tokens

__all__ = ["Compiler", "Tokens"]

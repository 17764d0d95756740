"""Constrained answers: a form is compiled into a constraint, and a constraint gives each answer a mask.

`schema`, `keywords` and `patterns` lower JSON schemas, `schema_limits` bounds their cost, `grammar` writes a form for
llguidance, `compiler` compiles and caches, `compile_queue` queues compilations, `masks` computes masks. llguidance is
imported with the first constraint.
"""

from inference.worker.constraints.compile_queue import FormQueue
from inference.worker.constraints.compiler import Compiler

__all__ = ["Compiler", "FormQueue"]

"""Calls llama.cpp: models, contexts, batches and samplers.

It uses the low-level functions of llama-cpp-python only, because its `Llama` class is one context behind one lock.
"""

from inference.worker.llama.context import Context
from inference.worker.llama.llama_model import Dry, Model
from inference.worker.llama.llama_process import on_abort, start
from inference.worker.llama.params import (
    POOLING_LAST,
    POOLING_MEAN,
    POOLING_NONE,
    POOLING_RANK,
    context_params,
    model_params,
)
from inference.worker.llama.projector import Projector
from inference.worker.llama.sampler import MAX_CANDIDATES, MIN_LOGIT, Sampler

__all__ = [
    "MAX_CANDIDATES",
    "MIN_LOGIT",
    "POOLING_LAST",
    "POOLING_MEAN",
    "POOLING_NONE",
    "POOLING_RANK",
    "Context",
    "Dry",
    "Model",
    "Projector",
    "Sampler",
    "context_params",
    "model_params",
    "on_abort",
    "start",
]

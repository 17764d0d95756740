"""Prints what llama.cpp's own helper computes for a prompt with images: log probabilities of the first token, as JSON.

    python -m tests.rigs.mtmd_reference MODEL PROJECTOR PROMPT IMAGE...

PROMPT holds `<__media__>` for each image. A process of its own, because llama.cpp may end it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np


def main(model_path: str, projector_path: str, prompt: str, *images: str) -> None:
    """Evaluates the prompt and prints the five largest log probabilities after it (`top`) and its length (`tokens`)."""
    from llama_cpp import llama_cpp as lib
    from llama_cpp import mtmd_cpp as mtmd

    from inference.worker.llama import ggml_library

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    mtmd.mtmd_helper_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    ggml_library.library()  # loads the backends of a build that has them as libraries of their own
    model_parameters = lib.llama_model_default_params()
    model_parameters.load_mode = lib.LLAMA_LOAD_MODE_NONE
    model = lib.llama_model_load_from_file(model_path.encode(), model_parameters)
    context_parameters = lib.llama_context_default_params()
    context_parameters.n_ctx, context_parameters.n_threads, context_parameters.kv_unified = 1024, 1, True
    context_parameters.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = lib.llama_init_from_model(model, context_parameters)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads = False, 1
    projector = mtmd.mtmd_init_from_file(projector_path.encode(), model, options)
    assert projector, "no projector"
    files = [Path(image).read_bytes() for image in images]
    bitmaps = (ctypes.c_void_p * len(files))(
        *(
            mtmd.mtmd_helper_bitmap_init_from_buf(
                projector, (ctypes.c_uint8 * len(data)).from_buffer_copy(data), len(data), False
            )
            for data in files
        )
    )
    text = mtmd.mtmd_input_text(prompt.encode(), len(prompt.encode()), False, True)
    chunks = mtmd.mtmd_input_chunks_init()
    assert mtmd.mtmd_tokenize(projector, chunks, ctypes.byref(text), bitmaps, len(files)) == 0
    end = lib.llama_pos(0)
    assert mtmd.mtmd_helper_eval_chunks(projector, context, chunks, 0, 0, 512, True, ctypes.byref(end)) == 0
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(n_vocab,)).astype(np.float64)
    values = logits - logits.max()
    values -= np.log(np.exp(values).sum())
    top = sorted(map(float, values), reverse=True)[:5]
    sys.stdout.write(json.dumps({"top": top, "tokens": mtmd.mtmd_helper_get_n_tokens(chunks)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

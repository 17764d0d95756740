"""Measures how much answers under load differ from answers alone: logits, likeliest tokens, texts.

    python -m benchmarks.determinism MODEL.gguf [SEQUENCES [PROMPT_TOKENS]]

The order of sums in attention and matrix products depends on the batch size, so the last digits of logits differ, and a
token differs where two logits are that close. Every prompt is answered alone in an empty context, and then together
with all others. Prompts are random text, because a model is less sure of its answers to them. Finally each answer is
computed with several tokens per step, as a step does that verifies proposed tokens.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np

from headgate.shared.parameters import Sampling
from inference import worker_link
from inference.worker import llama
from inference.worker.llama.llama_process import LogTail
from inference.worker.sampling import ChainSampler
from inference.worker.steps import Row

PROMPT_TOKENS = 40
ANSWER_TOKENS = 64
VERIFIED_TOKENS = 8
SEED = 11


class Bench:
    """One context with a slot for each sequence."""

    def __init__(self, path: Path, sequences: int, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        grant = worker_link.Grant(
            model_id="bench",
            path=str(path),
            devices=(worker_link.DeviceGrant("cpu", "cpu"),),
            gpu_layers=0,
            context_length=prompt_tokens + ANSWER_TOKENS,
            parallel=sequences,
        )
        self.model = llama.Model(str(path), llama.model_params(grant))
        self.context = llama.Context(self.model, llama.context_params(grant, pooling=None))

    def answers(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        """The tokens of all answers, computed in one batch from an empty cache."""
        self.context.forget_all()
        samplers = [ChainSampler(self.model, self.context, sampling, choice) for choice in range(len(prompts))]
        rows = [Row(slot, slot, 0, prompt, True) for slot, prompt in enumerate(prompts)]
        drawn: list[list[int]] = [[] for _ in prompts]
        for step in range(ANSWER_TOKENS):
            _status, last = self.context.decode(rows)
            for slot, index in enumerate(last):
                drawn[slot].append(samplers[slot].sample(index))
            rows = [Row(slot, slot, self._prompt_tokens + step, tokens[-1:], True) for slot, tokens in enumerate(drawn)]
        for sampler in samplers:
            sampler.close()
        return drawn

    def logits(self, prompts: list[list[int]], answers: list[list[int]]) -> np.ndarray:
        """Logits (sequence, step, vocabulary) with given tokens."""
        self.context.forget_all()
        found = np.empty((len(prompts), ANSWER_TOKENS, self.model.n_vocab), np.float32)
        rows = [Row(slot, slot, 0, prompt, True) for slot, prompt in enumerate(prompts)]
        for step in range(ANSWER_TOKENS):
            _status, last = self.context.decode(rows)
            for slot, index in enumerate(last):
                found[slot, step] = self.context.logits(index)
            rows = [
                Row(slot, slot, self._prompt_tokens + step, answer[step : step + 1], True)
                for slot, answer in enumerate(answers)
            ]
        return found

    def verified(self, prompt: list[int], answer: list[int]) -> np.ndarray:
        """Logits (step, vocabulary) of one sequence as in `logits`, but of VERIFIED_TOKENS tokens per step."""
        self.context.forget_all()
        _status, last = self.context.decode([Row(0, 0, 0, prompt, True)])
        found = [self.context.logits(last[0]).copy()]
        for start in range(0, ANSWER_TOKENS - 1, VERIFIED_TOKENS):
            tokens = answer[: ANSWER_TOKENS - 1][start : start + VERIFIED_TOKENS]
            _status, last = self.context.decode([Row(0, 0, self._prompt_tokens + start, tokens, True, True)])
            first = last[0] - len(tokens) + 1
            found += [self.context.logits(first + at).copy() for at in range(len(tokens))]
        return np.array(found)


def common(left: list[int], right: list[int]) -> int:
    """Number of equal tokens before the first difference."""
    return next((at for at, (one, other) in enumerate(zip(left, right, strict=True)) if one != other), len(left))


def main(arguments: list[str]) -> None:
    """Prints the figures."""
    path, sequences = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 8
    llama.start(LogTail(lambda _line: None))
    prompt_tokens = int(arguments[2]) if len(arguments) > 2 else PROMPT_TOKENS
    bench = Bench(path, sequences, prompt_tokens)
    rng = np.random.default_rng(SEED)
    prompts = rng.integers(0, bench.model.n_vocab, (sequences, prompt_tokens)).tolist()
    out = sys.stdout.write
    out(f"{path.name}: {sequences} sequences, {prompt_tokens} + {ANSWER_TOKENS} tokens\n")
    for name, sampling in (("greedy", Sampling(temperature=0.0)), ("seeded", Sampling(seed=SEED))):
        alone = [bench.answers([prompt], sampling)[0] for prompt in prompts]
        again = [bench.answers([prompt], sampling)[0] for prompt in prompts]
        # A choice's number is part of its seed, so each prompt is once the first of a batch, as it is when alone.
        loaded = []
        for number in range(sequences):
            order = [number, *(other for other in range(sequences) if other != number)]
            loaded.append(bench.answers([prompts[other] for other in order], sampling)[0])
        same = [common(one, other) for one, other in zip(alone, loaded, strict=True)]
        whole = sum(length == ANSWER_TOKENS for length in same)
        out(
            f"  {name}: alone twice the same {sum(map(list.__eq__, alone, again))}/{sequences}; "
            f"alone and under load the same {whole}/{sequences}, "
            f"first difference at token {statistics.median(same):.0f} (median)\n"
        )
        if name == "greedy":
            single = np.concatenate([bench.logits([p], [a]) for p, a in zip(prompts, alone, strict=True)])
            together = bench.logits(prompts, alone)
            verified = np.stack([bench.verified(p, a) for p, a in zip(prompts, alone, strict=True)])
            for what, other in (("under load", together), ("several tokens per step", verified)):
                difference = np.abs(single - other)
                flips = float((single.argmax(-1) != other.argmax(-1)).mean())
                out(
                    f"  logits of the same tokens, {what}: largest difference {difference.max():.2g}, "
                    f"median of the largest per step {np.median(difference.max(-1)):.2g}, "
                    f"standard deviation of the logits {single.std():.2g}; "
                    f"likeliest token differs at {flips:.2%} of steps\n"
                )


if __name__ == "__main__":
    main(sys.argv[1:])

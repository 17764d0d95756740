"""`make bench-schema`: how much of JSON Schema the constraints enforce, by the public JSON-Schema-Test-Suite.

No model runs. Every schema of the suite is compiled with `strict`, and refused ones are counted. Every test instance is
written as compact JSON, tokenized with the vocabulary of the bundled model, and checked against the masks token by
token. The suite is read from the source distribution of the `jsonschema` package; `--suite DIR` uses a local copy. Raw
results go to benchmarks/results/schema.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headgate import __file__ as _package
from inference.worker import llama
from inference.worker.backend import Constraint
from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Json
from inference.worker.llama.llama_process import LogTail
from inference.worker.worker_errors import BadRequestError, ConstraintError

VOCABULARY = Path(_package).parent.parent / "inference" / "demo" / "models" / "demo.gguf"
RESULTS = Path(__file__).parent / "results" / "schema.json"
SUITES = {
    "2020-12": ("draft2020-12", "*.json"),
    "2020-12 formats": ("draft2020-12/optional/format", "*.json"),
    "2020-12 patterns": ("draft2020-12/optional", "ecmascript-regex.json"),
    "draft 7": ("draft7", "*.json"),
}
BARS_OF = ("2020-12", "draft 7")
MAX_ORDERS = 120
"""Maximum number of key orders that are tried for a valid instance, because a constraint fixes the order."""


@dataclass(slots=True)
class Tally:
    """Counts of one file of the suite: schemas, and verdicts of the masks on the instances of compiled ones.

    `agree`: as in the suite. `spelled`: a valid instance is accepted in another spelling only. `strict`: a valid one is
    rejected. `lenient`: an invalid one is accepted.
    """

    compiled: int = 0
    refused: int = 0
    agree: int = 0
    spelled: int = 0
    strict: int = 0
    lenient: int = 0

    def add(self, other: Tally) -> None:
        """Sums."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(slots=True)
class Findings:
    """Everything measured."""

    files: dict[str, dict[str, Tally]] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    lenient: list[str] = field(default_factory=list)
    strict: list[str] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)


class Walker:
    """Checks texts against masks."""

    def __init__(self, model: llama.Model, findings: Findings) -> None:
        self._model = model
        self._ends = sorted(model.end_tokens)
        self._logits = np.zeros(model.n_vocab, np.float32)
        self._findings = findings

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether the masks allow each token of `text` and then the end."""
        mask = constraint.start()
        for token in self._model.tokenize(text):
            try:
                if not self._allowed(mask)[token]:
                    return False
                mask.accept(token)
            except ConstraintError:
                return False
        return bool(self._allowed(mask)[self._ends].all())

    def _allowed(self, mask: Any) -> np.ndarray:
        self._logits.fill(0.0)
        began = time.perf_counter()
        mask.apply(self._logits)
        self._findings.mask_us.append((time.perf_counter() - began) * 1e6)
        return np.isfinite(self._logits)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints the report."""
    parser = argparse.ArgumentParser(prog="make bench-schema", description=__doc__)
    parser.add_argument("--suite", type=Path, help="the suite's tests/ directory, instead of fetching it")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every instance that is judged otherwise")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        findings = measure(options.suite or fetched(Path(scratch)))
    report(findings, verbose=options.verbose)


def fetched(scratch: Path) -> Path:
    """The directory `tests` of the suite from the source distribution of the package."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*download, "-d", scratch, "jsonschema"], check=True, stdout=sys.stderr)
    archive = next(scratch.glob("jsonschema-*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # not before Python 3.11.4
        packed.extractall(scratch)
    return next(scratch.glob("jsonschema-*/json/tests"))


def measure(tests: Path) -> Findings:
    """Measures every schema with all its instances."""
    llama.start(LogTail(lambda text: None))
    model = opened()
    findings = Findings()
    compiler, walker = Compiler(model, kept=1), Walker(model, findings)
    for name, (directory, files) in SUITES.items():
        found = findings.files[name] = {}
        reasons = Counter[str]()
        for path in sorted((tests / directory).glob(files)):
            tally = found[path.stem] = Tally()
            for case in json.loads(path.read_text()):
                schema = in_dialect(case["schema"], directory)
                judge(case | {"schema": schema}, f"{name} {path.stem}", tally, compiler, walker, findings, reasons)
        findings.reasons[name] = dict(reasons.most_common())
    model.close()
    return findings


def in_dialect(schema: Any, directory: str) -> Any:
    """Adds the JSON Schema version, which older suites express by their directory."""
    if directory != "draft7" or not isinstance(schema, dict) or "$schema" in schema:
        return schema
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def opened() -> llama.Model:
    """The bundled model's vocabulary, without its weights."""
    from llama_cpp import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    params.n_gpu_layers = 0
    return llama.Model(str(VOCABULARY), params)


def judge(
    case: Mapping[str, Any],
    where: str,
    tally: Tally,
    compiler: Compiler,
    walker: Walker,
    findings: Findings,
    reasons: Counter[str],
) -> None:
    """One schema of the suite and its instances."""
    began = time.perf_counter()
    try:
        constraint = compiler.compile(Json(case["schema"]), "schema")
    except BadRequestError as error:
        tally.refused += 1
        reasons[kind_of(error.message)] += 1
        return
    findings.compile_ms.append((time.perf_counter() - began) * 1e3)
    tally.compiled += 1
    for test in case["tests"]:
        texts = spellings(test["data"])
        accepted = walker.accepts(constraint, next(texts))
        place = f"{where}: {case['description']}: {test['description']}"
        if accepted == test["valid"]:
            tally.agree += 1
        elif accepted:
            tally.lenient += 1
            findings.lenient.append(place)
        elif any(walker.accepts(constraint, text) for text in itertools.islice(texts, MAX_ORDERS)):
            tally.spelled += 1
        else:
            tally.strict += 1
            findings.strict.append(place)


def spellings(value: Any) -> Iterator[str]:
    """JSON texts of one value: unchanged, with integral floats as integers, and with other orders of keys."""
    yield written(value)
    for other in reordered(whole(value)):
        yield written(other)


def written(value: Any) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def whole(value: Any) -> Any:
    """Integral floats as integers (1.0 as 1)."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    return {key: whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def reordered(value: Any) -> Iterator[Any]:
    """The value with the keys of its outer object in every order."""
    if not isinstance(value, dict):
        yield value
        return
    for order in itertools.permutations(value.items()):
        yield dict(order)


def kind_of(message: str) -> str:
    """The keyword or limit in the message of a refusal."""
    text = message.split("cannot be enforced: ", 1)[-1].split(" (at ")[0]
    if text.startswith("$ref"):
        return "$ref out of the schema"
    if text.startswith("the format"):
        return "format"
    return text.split(", which")[0][:70]


def report(findings: Findings, *, verbose: bool) -> None:
    """The table, the refusals, and one line per bar."""
    header = ("schemas", "compiled", "refused", "agree", "other spelling", "too strict", "too lenient")
    print(f"{'suite':<18}" + "".join(name.rjust(16) for name in header))
    totals: dict[str, Tally] = {}
    for name, files in findings.files.items():
        total = totals[name] = Tally()
        for tally in files.values():
            total.add(tally)
        verdicts = (total.agree, total.spelled, total.strict, total.lenient)
        row = (total.compiled + total.refused, total.compiled, total.refused, *verdicts)
        print(f"{name:<18}" + "".join(str(value).rjust(16) for value in row))
    print()
    for name, reasons in findings.reasons.items():
        print(f"refused, {name}: " + "; ".join(f"{reason} {count}" for reason, count in reasons.items()))
    for word, places in (("too lenient", findings.lenient), ("too strict", findings.strict)):
        for line in places if verbose or word == "too lenient" else ():
            print(f"{word}: {line}")
    print()
    for name in BARS_OF:
        total = totals[name]
        label = name.replace(" ", "")
        decided = total.agree + total.spelled + total.strict + total.lenient
        bar(f"schema_{label}_too_lenient", total.lenient, "instances", "<=", 0)
        bar(f"schema_{label}_compiled", 100 * total.compiled / (total.compiled + total.refused), "percent", ">=", 50)
        bar(f"schema_{label}_agree", 100 * (total.agree + total.spelled) / decided, "percent", ">=", 98)
    bar("schema_compile_p50", median(findings.compile_ms), "ms", "<=", 20)
    bar("schema_mask_p50", median(findings.mask_us), "us", "<=", 100)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(asdict(findings), indent=1, ensure_ascii=False))


def bar(name: str, value: float, unit: str, op: str, target: float) -> None:
    """One bar."""
    kept = value <= target if op == "<=" else value >= target
    print(f"BAR {name} {value:.4g} {unit} {op} {target:g} {'ok' if kept else 'short'}")


if __name__ == "__main__":
    main()

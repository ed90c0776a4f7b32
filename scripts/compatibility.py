"""Make docs/compatibility.md of what the feature matrix's tests did (tests/matrix.py).

    python scripts/compatibility.py out/matrix.json [MORE.json ...] --output docs/compatibility.md

Of a test that is in several files the last one counts. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HEADING = """# Compatibility

Made by `make test-engine` from the outcomes of its tests; not written by hand.

- `works`: a test on the real engine passed: greedy tokens (or log-probabilities) are those of the same format without
  the feature, or of vLLM's own cache where the test says so.
- `refused`: vLLM does not start, and a test holds the message.

What failed or did not run has no row in the table.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/compatibility.md"))
    arguments = parser.parse_args()
    tests, environments = {}, []
    for path in arguments.results:
        content = json.loads(path.read_text())
        tests |= content["tests"]
        environments.append(content["environment"])
    arguments.output.write_text(document(tests, environments[-1]))
    failed = [name for name, test in tests.items() if test["outcome"] == "failed"]
    print(f"{arguments.output}: {len(tests)} tests, {len(failed)} failed")
    return bool(failed)


def document(tests: dict[str, dict], environment: dict[str, str]) -> str:
    rows, of_vllm = matrix(tests)
    seconds = sum(test["seconds"] for test in tests.values())
    passed = sum(test["outcome"] == "passed" for test in tests.values())
    versions = ", ".join(f"{name} {version}" for name, version in environment.items() if name != "machine")
    parts = [
        HEADING,
        f"Run on {environment['machine']}, no GPU, with {versions}: {passed} of {len(tests)} tests passed, "
        f"{seconds / 60:.0f} minutes of wall time in all.\n",
        table(("feature", "shape", "tests", "seconds", "verdict"), rows),
        listing("What was measured on the way", measured(tests)),
        "## What fails in vLLM itself\n\nThe same failure with vLLM's own cache (`auto`), held by a test, so that it "
        f"is noticed when it is gone.\n\n{table(('feature', 'shape', 'evidence', 'test'), of_vllm)}",
        listing("Failed", reasons(tests, "failed")),
        listing("Not run here", reasons(tests, "skipped")),
    ]
    return "\n".join(part for part in parts if part)


def matrix(tests: dict[str, dict]) -> tuple[list[tuple], list[tuple]]:
    """Rows of the table, and rows of what fails in vLLM itself."""
    proofs: dict[tuple[str, str, str], list[str]] = {}
    for name, test in tests.items():
        for row in test["rows"]:
            proofs.setdefault((row["feature"], row["shape"], row["verdict"]), []).append(name)
    rows, of_vllm = [], []
    for (feature, shape, verdict), names in proofs.items():
        if any(tests[name]["outcome"] != "passed" for name in names):
            continue
        if verdict == "vllm":
            evidence = "; ".join(str(tests[name].get("measured", {}).get("evidence", "")) for name in names)
            of_vllm.append((feature, shape, f"`{evidence}`", files(names)))
        else:
            seconds = f"{sum(tests[name]['seconds'] for name in names):.0f}"
            rows.append((feature, shape, files(names), seconds, verdict))
    return sorted(rows), sorted(of_vllm)


def files(names: list[str]) -> str:
    return ", ".join(sorted({f"`{Path(name.split('::')[0]).name}`" for name in names}))


def measured(tests: dict[str, dict]) -> list[str]:
    return [
        f"{test['rows'][0]['feature']}, {test['rows'][0]['shape']}: {key.replace('_', ' ')} {value}"
        for test in tests.values()
        for key, value in test.get("measured", {}).items()
        if key != "evidence" and test["outcome"] == "passed"
    ]


def reasons(tests: dict[str, dict], outcome: str) -> list[str]:
    return [
        f"{row['feature']}, {row['shape']}: {' '.join(str(test.get('reason', '')).split())[:200]}"
        for test in tests.values()
        if test["outcome"] == outcome
        for row in test["rows"]
    ]


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def listing(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n" if lines else ""


if __name__ == "__main__":
    sys.exit(main())

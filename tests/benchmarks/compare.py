"""Compare two benchmark records by their ratios to a floor, which machines have in common.

    python compare.py BASELINE CURRENT              exits 1 when something got worse
    python compare.py BASELINE CURRENT --store      makes CURRENT the baseline

Both are JSON as pytest-benchmark writes it. Absolute times depend on the machine, so what counts
is `extra_info["ratio_to_floor"]`: time of a floor / time of the benchmark, taken in the same run
(larger is better). A benchmark is worse when its ratio fell by more than a factor; one that the
baseline has and the current record lacks is an error too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_FACTOR = 2.0
FAILURES = ("worse", "gone")


class RecordError(ValueError):
    """A file that is no benchmark record; one line, names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One benchmark in both records; None where a record lacks it."""

    name: str
    baseline: float | None
    current: float | None
    verdict: str


def read_record(path: Path) -> dict[str, Any]:
    """Return the pytest-benchmark record in `path`.

    Raises:
        RecordError: `path` is missing, not JSON or not such a record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordError(f"{path}: expected JSON; found {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("benchmarks"), list):
        raise RecordError(f"{path}: expected a pytest-benchmark record with a list 'benchmarks'")
    return record


def ratios(record: Mapping[str, Any]) -> dict[str, float]:
    """Return benchmark name -> ratio to its floor; benchmarks without a floor are left out."""
    return {
        entry["fullname"]: float(entry["extra_info"]["ratio_to_floor"])
        for entry in record["benchmarks"]
        if "ratio_to_floor" in entry.get("extra_info", {})
    }


def compare(
    baseline: Mapping[str, float], current: Mapping[str, float], *, factor: float
) -> list[Row]:
    """Return one row per benchmark of either record, by name."""
    return [
        Row(
            name=name,
            baseline=baseline.get(name),
            current=current.get(name),
            verdict=_verdict(baseline.get(name), current.get(name), factor),
        )
        for name in sorted(baseline.keys() | current.keys())
    ]


def _verdict(baseline: float | None, current: float | None, factor: float) -> str:
    if current is None:
        return "gone"
    if baseline is None:
        return "new"
    if current * factor < baseline:
        return "worse"
    return "better" if current > baseline * factor else "same"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    header = ("benchmark", "baseline", "current", "change", "verdict")
    cells = [header, *((r.name, _text(r.baseline), _text(r.current), *_end(r)) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < column < len(header) - 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _end(row: Row) -> tuple[str, str]:
    if row.baseline and row.current is not None:
        return f"x{row.current / row.baseline:.2f}", row.verdict
    return "-", row.verdict


def store(record: Mapping[str, Any], path: Path) -> None:
    """Write what a baseline needs of `record`: names, ratios and kind of machine.

    What tells one machine or person from another, and the thousands of single times, stay out.
    """
    machine = record.get("machine_info", {})
    slim = {
        "machine_info": {
            "cpu": machine.get("cpu", {}).get("brand_raw", "unknown"),
            "python_version": machine.get("python_version", "unknown"),
        },
        "benchmarks": [
            {
                "fullname": entry["fullname"],
                "extra_info": {k: v for k, v in entry["extra_info"].items() if k != "pairs"},
            }
            for entry in sorted(record["benchmarks"], key=lambda entry: entry["fullname"])
            if "ratio_to_floor" in entry.get("extra_info", {})
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(slim, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or store; return 0, 1 if something got worse, 2 for unusable input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("baseline", type=Path)
    parser.add_argument("current", type=Path)
    parser.add_argument("--factor", type=float, default=DEFAULT_FACTOR, help="default %(default)s")
    parser.add_argument("--store", action="store_true", help="overwrite the baseline")
    options = parser.parse_args(arguments)
    try:
        record = read_record(options.current)
        if options.store:
            store(record, options.baseline)
            return 0
        rows = compare(ratios(read_record(options.baseline)), ratios(record), factor=options.factor)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows))
    failed = [row.name for row in rows if row.verdict in FAILURES]
    if failed:
        print(f"\nworse by more than a factor of {options.factor:g}, or gone: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

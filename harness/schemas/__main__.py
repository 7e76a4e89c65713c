"""`python -m harness.schemas`: write the schema files anew after a change of the types."""

from __future__ import annotations

from pathlib import Path

from harness.schemas import generate

if __name__ == "__main__":
    for name, content in generate().items():
        Path(__file__).with_name(name).write_bytes(content)

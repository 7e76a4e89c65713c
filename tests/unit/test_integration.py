"""Lines of integration: counted in examples that differ from the plain script in nothing else."""

from __future__ import annotations

import difflib

import pytest

import strategies
from harness import integration

OWN = ("cold", "nvrx", "torchft_pg", "torchft_manager", "c10d_reconfigure", "accelpact")
"""Contenders that recover."""


def example(name: str) -> list[str]:
    """Lines of an example without its docstring."""
    text = (integration.folder() / f"train_{name}.py").read_text()
    assert text.startswith('"""')
    return text.split('"""', 2)[2].splitlines()


def code(lines: list[str]) -> list[str]:
    """Those that count."""
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


class TestCounting:
    """Lines between markers."""

    def test_counts_code_between_markers(self) -> None:
        """Blank lines, comments and what is outside do not count."""
        source = """
        before = 1
        # integration: begin
        first = 1

        # a comment
        second = 2
        # integration: end
        between = 3
            # integration: begin
            third = 3
            # integration: end
        """

        assert 3 == integration.count_lines(source)

    def test_nothing_needed(self) -> None:
        """No markers mean no answer; markers around nothing mean no lines."""
        assert integration.count_lines("a = 1\n") is None
        assert 0 == integration.count_lines("# integration: begin\n# integration: end\n")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("# integration: begin\na = 1\n", "expected '# integration: end' before the end"),
            ("a = 1\n# integration: end\n", "line 2: expected the other marker; found"),
            ("# integration: begin\n# integration: begin\n", "line 2: expected the other marker"),
        ],
    )
    def test_unbalanced_markers(self, source: str, message: str) -> None:
        """A marker without its counterpart is an error that names the line."""
        with pytest.raises(ValueError, match=message):
            integration.count_lines(source)


class TestExamples:
    """One script per contender."""

    @pytest.mark.parametrize("name", OWN)
    def test_differs_from_the_plain_script_in_marked_lines_only(self, name: str) -> None:
        """The count is that of a comparison line by line, which knows no markers."""
        plain, own = code(example("plain")), code(example(name))
        differences = list(difflib.ndiff(plain, own))
        added = [line for line in differences if line.startswith("+ ")]
        gone = [line for line in differences if line.startswith("- ")]

        assert len(added) == integration.integration_lines(name)
        assert len(gone) < len(added)

    def test_every_contender_that_recovers_has_one(self) -> None:
        """The reference and the ablation have none, nor has what is not known here."""
        found = {
            name: integration.integration_lines(name) for name in (*strategies.names(), "another")
        }

        assert set(OWN) == {name for name, lines in found.items() if lines}
        assert {None} == {lines for name, lines in found.items() if name not in OWN}

    def test_the_plain_script_needs_nothing(self) -> None:
        """It has no marker."""
        assert integration.integration_lines("plain") is None

    @pytest.mark.parametrize("name", ["plain", *OWN])
    def test_uses_nothing_of_the_harness(self, name: str) -> None:
        """It is what an engineer would write."""
        for line in example(name):
            assert "harness" not in line
            assert "strategies" not in line

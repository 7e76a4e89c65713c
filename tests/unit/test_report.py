"""The report: a pure function of the records, right for any of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from harness import compare, report
from harness.records import Drift, Ratio, write_json
from harness.report._style import CONTENDERS
from harness.spec import SpecError
from tests.unit import summaries
from tests.unit.reading import FILES, first_screen, row, section, text_of

COMMITTED = sorted(path.parent for path in Path(__file__).parents[2].glob("reports/*/report.md"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records and the report of a whole comparison of 6 blocks."""
    folder = tmp_path_factory.mktemp("full")
    write_json(folder / "summary.json", summaries.comparison())
    report.write(folder)
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with a report of one block, to be spoilt."""
    write_json(tmp_path / "summary.json", summaries.comparison(blocks=1))
    report.write(tmp_path)
    return tmp_path


class TestBytes:
    """The same records give the same bytes."""

    def test_two_builds_are_identical(self, full: Path) -> None:
        """Nothing but the records enters."""
        first = report.build(full)

        assert first.keys() == FILES
        assert first == report.build(full)

    @pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
    def test_committed_reports_are_what_their_records_give(self, folder: Path) -> None:
        """Whoever changes a measure builds them anew; figures depend on matplotlib's version."""
        differing = compare.check(folder)

        assert [] == [name for name in differing if not name.startswith("figures/")]

    def test_readers_matplotlib_settings_do_not_matter(self, written: Path) -> None:
        """Fonts, sizes and the hash salt are the report's own, and are put back."""
        with mpl.rc_context({"font.size": 20, "svg.hashsalt": "x", "xtick.direction": "in"}):
            assert [] == report.check(written)
            assert mpl.rcParams["font.size"] == 20

    def test_figures_have_no_date_and_no_creator(self, full: Path) -> None:
        """Metadata would change with the day and the version."""
        for path in full.glob("figures/*.svg"):
            assert "<svg" in path.read_text()
            assert "<metadata" not in path.read_text()

    def test_fresh_process_without_torch_agrees(self, full: Path) -> None:
        """Another hash seed, no display: the same bytes, and torch was never imported."""
        code = (
            "import sys\n"
            "from pathlib import Path\n"
            "from harness import report\n"
            "print(report.check(Path(sys.argv[1])), 'torch' in sys.modules)\n"
        )
        root = Path(report.__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", code, str(full)],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONHASHSEED": "77", "PYTHONPATH": str(root)},
        )

        assert ("[] False\n", 0) == (done.stdout, done.returncode), done.stderr


class TestCheck:
    """`check` names what is not as built."""

    def test_is_empty_after_write(self, written: Path) -> None:
        """A written report is as built."""
        assert [] == report.check(written)

    @pytest.mark.parametrize("name", sorted(FILES))
    def test_notices_one_changed_byte(self, written: Path, name: str) -> None:
        """A report edited by hand is found out."""
        path = written / name
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])

        assert [name] == report.check(written)

    def test_notices_a_missing_and_an_extra_figure(self, written: Path) -> None:
        """Both are named; writing again puts both right."""
        (written / "figures/ratios.svg").rename(written / "figures/old.svg")

        assert ["figures/old.svg", "figures/ratios.svg"] == report.check(written)

        report.write(written)

        assert [] == report.check(written)

    def test_notices_changed_records(self, written: Path) -> None:
        """A report of other records is not this one's."""
        write_json(written / "summary.json", summaries.comparison(blocks=1, title="Another"))

        assert ["report.md"] == report.check(written)


class TestBadRecords:
    """One clear message for a folder that cannot be reported."""

    def test_missing_summary(self, tmp_path: Path) -> None:
        """The file is named."""
        with pytest.raises(SpecError, match=r"expected summary\.json"):
            report.build(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema_version": 1}', b"\xff"])
    def test_broken_summary(self, tmp_path: Path, content: bytes) -> None:
        """Truncated or foreign files are refused."""
        (tmp_path / "summary.json").write_bytes(content)

        with pytest.raises(SpecError, match="expected the records of a comparison"):
            report.build(tmp_path)

    def test_other_schema_version(self, tmp_path: Path) -> None:
        """Records of another version are not guessed at."""
        write_json(tmp_path / "summary.json", summaries.comparison(blocks=1, schema_version=9))

        with pytest.raises(SpecError, match="expected schema_version 1; found 9"):
            report.build(tmp_path)


class TestFirstScreen:
    """Which strategy, how much faster, right or not, at what cost: at once."""

    def test_answers_in_25_lines(self, full: Path) -> None:
        """All four answers stand before the first section."""
        screen = first_screen((full / "report.md").read_text())

        assert len(screen.splitlines()) <= 25
        for answer in ("Strategy.", "How much faster.", "State.", "Cost without a fault."):
            assert f"**{answer}**" in screen
        assert "accelpact 24 of 24" in screen
        assert "mesh 2x2; device cpu; 25 updates; checkpoint at 10" in screen
        assert "fault absent@boundary:15; 6 blocks; torch 2.14.0" in screen

    def test_ratio_has_interval_and_pairs(self, tmp_path: Path) -> None:
        """The median of 6 paired ratios with its interval, as by hand."""
        walls = [12.0, 12.5, 13.0, 13.5, 14.0, 14.5]
        runs = [
            summaries.run(name, block=block, wall_s=wall if name == "cold" else 10.0)
            for block, wall in enumerate(walls)
            for name in ("cold", "accelpact")
        ]
        screen = first_screen(text_of(tmp_path, summaries.summary(runs)))

        assert "cold / accelpact 1.325x (95 % interval 1.200 to 1.450, 6 pairs)" in screen

    def test_range_is_called_a_range(self, tmp_path: Path) -> None:
        """Five blocks give no 95 % interval."""
        screen = first_screen(text_of(tmp_path, summaries.comparison(blocks=5)))

        assert "5 pairs" in screen
        assert "range" in screen
        assert "95 % interval" not in screen

    def test_one_block_has_no_spread(self, tmp_path: Path) -> None:
        """A single pair is not dressed up."""
        text = text_of(tmp_path, summaries.comparison(blocks=1))

        assert "1 pair, no spread" in first_screen(text)
        assert "nothing is known of its spread" in text

    def test_whole_runs_that_overlap_are_not_ranked(self, tmp_path: Path) -> None:
        """Where the pairs lie on both sides of 1 the report says so."""
        runs = [
            summaries.run(name, block=block, wall_s=10.0 + (0.1 if even == block % 2 else 0.0))
            for block in range(6)
            for even, name in enumerate(("torchft_pg", "accelpact"))
        ]
        screen = first_screen(text_of(tmp_path, summaries.summary(runs)))

        assert "not told apart from it:" in screen

    def test_unexpected_verdicts_are_named(self, tmp_path: Path) -> None:
        """A run that is not as expected stands on the first screen."""
        runs = [summaries.run("cold"), summaries.run("comm_only", verdict="pass")]
        screen = first_screen(text_of(tmp_path, summaries.summary(runs)))

        assert "0-comm_only-faulted (pass, expected fail)" in screen


class TestFailingContender:
    """A contender that fails is shown as failing, whatever its name."""

    @pytest.fixture
    def text(self, tmp_path: Path) -> str:
        """Six blocks, accelpact wrong in one of them."""
        records = summaries.comparison()
        runs = [
            summaries.run(
                "accelpact",
                block=3,
                verdict="fail",
                reason="rank 1 differs",
                drift=Drift(level="differs", equal=False, ranks_equal=3, ranks=4, max_abs=0.5),
            )
            if (run.strategy, run.block, run.faulted) == ("accelpact", 3, True)
            else run
            for run in records.runs
        ]
        return text_of(tmp_path, summaries.summary(runs))

    def test_first_screen(self, text: str) -> None:
        """It is not among those that recovered, and its state is not called right."""
        screen = first_screen(text)

        assert "Did not: accelpact (pass 5, fail 1, expected pass)" in screen
        assert "Different from the reference: accelpact and comm_only." in screen
        assert "3-accelpact-faulted (fail, expected pass)" in screen
        assert "pass 5, fail 1" in row(screen, "accelpact")[1]
        assert "23 of 24" in row(screen, "accelpact")[2]

    def test_verdict_matrix(self, text: str) -> None:
        """The matrix says no, with the reason."""
        cells = row(section(text, "Verdicts"), "accelpact", "faulted")

        assert ["6", "pass 5, fail 1", "pass", "no", "rank 1 differs"] == cells[2:]

    def test_times_leave_the_wrong_run_out(self, text: str) -> None:
        """Its block shows the verdict instead of a time, and the pairs are five."""
        cells = row(section(text, "Wall time and goodput"), "accelpact", "faulted")
        pairs = row(section(text, "Paired ratios"), "whole run", "cold / accelpact")

        assert "fail" == cells[6]
        assert ["range", "5"] == pairs[5:7]

    def test_none_recovers(self, tmp_path: Path) -> None:
        """Without any recovery there is no fastest."""
        runs = [summaries.run(name, verdict="fail") for name in ("cold", "accelpact")]
        screen = first_screen(text_of(tmp_path, summaries.summary(runs)))

        assert "No contender recovered in every block" in screen
        assert "**How much faster.** Not known" in screen


class TestFigures:
    """Figures for records of any kind."""

    def test_contenders_keep_their_colour(self, tmp_path: Path) -> None:
        """A colour belongs to a contender, not to its place in the records."""
        colour = CONTENDERS["accelpact"][0].lower().encode()
        for strategies in (("accelpact",), summaries.CONTENDERS):
            write_json(
                tmp_path / "summary.json", summaries.comparison(blocks=2, strategies=strategies)
            )

            assert colour in report.build(tmp_path)["figures/goodput.svg"].lower()

    def test_unknown_contenders_and_phases_are_drawn(self, tmp_path: Path) -> None:
        """A third party's contender, with its own phases, gets a line and a bar."""
        runs = [
            summaries.run(name, block=block, phases_ms={f"{name} step": 5.0, "rebuild": 1.0})
            for block in range(2)
            for name in ("cold", "a_contender_with_a_very_long_name", "other")
        ]
        text = text_of(tmp_path, summaries.summary(runs))

        assert "other step, ms" in section(text, "From fault to next update")
        assert report.build(tmp_path).keys() == FILES

    def test_ratios_without_runs_are_drawn(self, tmp_path: Path) -> None:
        """Records of another tool may hold ratios alone."""
        ratio = Ratio(
            metric="wall_s",
            numerator="cold",
            denominator="accelpact",
            n=2,
            median=1.5,
            low=1.0,
            high=2.0,
            method="range",
            values=[1.0, 2.0],
        )
        text = text_of(tmp_path, summaries.summary([], ratios=[ratio]))

        assert "1.500" in row(section(text, "Paired ratios"), "whole run", "cold / accelpact")
        assert report.build(tmp_path).keys() == FILES

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.zeus.pipeline_frequency.toys import measured
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.profile import (
    InstructionProfile,
    ProfileMeasurement,
    write_profile,
)

HEADER = "stage,instruction,frequency,time,energy\n"
GOOD = "0,forward,1410,0.05,20\n0,backward,1410,0.1,40\n0,forward,1395,0.051,19\n"


MILLISECONDS = "0,forward,1410,50,20\n0,backward,1410,100,40\n0,forward,1395,51,19\n"


def profile_of(tmp_path: Path, text: str) -> InstructionProfile:
    path = tmp_path / "profile.csv"
    path.write_text(text)
    return InstructionProfile.read(path)


def test_reads_five_columns_and_instructions_of_any_name(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, HEADER + GOOD + "0,load,1410,0.2,3\n\n")
    assert profile.num_stages == 1
    assert profile.names == ("forward", "backward", "load")
    clocks = [option.frequency for option in profile.options(0, "forward")]
    assert clocks == [1410, 1395]
    assert profile.options(0, "backward")[0].energy_j == 40


def test_the_published_profiles_are_whole() -> None:
    assert [len(measured("a100").options(s, "forward")) for s in range(8)] == [38] * 8
    assert [len(measured("a40").options(s, "backward")) for s in range(8)] == [60] * 8


def test_ranks_of_one_stage_are_joined(tmp_path: Path) -> None:
    """The slowest rank's time, as the others wait for it; the mean energy of one GPU."""
    rows = [
        ProfileMeasurement(0, name, 1410, 0.1 / (3 - tp), 20.0 + 10 * tp, tp, 0, 0, tp)
        for name in ("forward", "backward")
        for tp in (0, 1)
    ]
    path = tmp_path / "nine.csv"
    write_profile(rows, path)
    with path.open(newline="") as file:
        header = next(csv.reader(file))
    assert header[:4] == ["rank", "dp_rank", "pp_rank", "tp_rank"]
    assert header[4:] == ["stage", "instruction", "frequency", "time", "energy"]
    profile = InstructionProfile.read(path)
    (option,) = profile.options(0, "forward")
    assert (option.time_s, option.energy_j) == (0.1 / 2, 25.0)  # each digit is kept
    assert [one.name for one in tmp_path.iterdir()] == ["nine.csv"]
    assert profile.tensor_parallel == 2


def test_chunks_have_rows_of_their_own(tmp_path: Path) -> None:
    rows = [
        ProfileMeasurement(0, n, 1410, 0.05, 20, chunk=c)
        for n in ("forward", "backward")
        for c in (0, 1)
    ]
    rows.append(ProfileMeasurement(0, "forward", 1395, 0.06, 15, chunk=1))
    write_profile(rows, tmp_path / "p.csv")
    profile = InstructionProfile.read(tmp_path / "p.csv")
    assert len(profile.options(0, "forward", 0)) == 1
    assert len(profile.options(0, "forward", 1)) == 2
    # Chunks that are not distinguished use the rows of chunk 0.
    assert profile.options(0, "backward", 7) == profile.options(0, "backward", 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the columns stage, instruction, frequency, time, energy are missing"),
        ("stage,instruction,frequency,time\n", "the column energy is missing"),
        (HEADER, "no measurement"),
        (
            HEADER + "0,forward,1410,-0.05,20\n",
            "line 2: time is '-0.05'; it must be a number of seconds",
        ),
        (HEADER + GOOD + "1,forward,1410,0.05,\n", "line 5: energy is empty"),
        (HEADER + GOOD + "1,forward,1410,0.05,nan\n", "line 5: energy is 'nan'"),
        (HEADER + GOOD + "1,forward,14.5,0.05,1\n", "line 5: frequency is '14.5'; it must be MHz"),
        (HEADER + GOOD + "0,forward,0,0.05,1\n", "has a row for frequency 0, which stands for any"),
        (HEADER + GOOD + "1,forward,,0.05,1\n", "line 5: frequency is empty; it must be MHz"),
        (HEADER + GOOD + "1,forward,200000,0.05,1\n", "frequency is '200000'; it must be MHz"),
        (HEADER + GOOD + "x,forward,1410,0.05,1\n", "line 5: stage is 'x'"),
        (HEADER + GOOD + "0,,1410,0.05,1\n", "line 5: instruction is empty"),
        (HEADER + GOOD + "0,forward,1380,52,18\n", "line 5, column time: 52.0 is far from"),
        (HEADER + GOOD + "0,forward,1380,0.052,18000\n", "line 5, column energy: 18000.0 is far"),
        # Nothing in it contradicts anything else, except that no GPU draws so little.
        (HEADER + MILLISECONDS, "are the times milliseconds"),
        (HEADER + "0,forward,1410,1e-300,1e-298\n", "'1e-300'; it must be a number of seconds"),
        (HEADER + GOOD + "2,forward,1410,0.05,20\n", "stage 1 has no row"),
    ],
)
def test_bad_input_is_reported_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PipelineFrequencyError) as error:
        profile_of(tmp_path, text)
    assert says in error.value.message
    assert "profile.csv" in error.value.message


def test_files_that_are_no_csv_are_reported(tmp_path: Path) -> None:
    with pytest.raises(PipelineFrequencyError, match="cannot be read"):
        InstructionProfile.read(tmp_path / "missing.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01" * 100)
    with pytest.raises(PipelineFrequencyError, match="not text in UTF-8"):
        InstructionProfile.read(tmp_path / "binary")


def test_picking_stages_numbers_them_again() -> None:
    whole = measured("a100")
    picked = whole.pick([7, 0])
    assert picked.num_stages == 2
    assert picked.options(0, "forward") == whole.options(7, "forward")
    with pytest.raises(PipelineFrequencyError, match="no stage 8"):
        whole.pick([8])

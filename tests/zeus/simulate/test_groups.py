from __future__ import annotations

import gzip
import lzma
import statistics
import tarfile
from pathlib import Path

import pytest

from zeus.simulate.groups import (
    GroupJob,
    by_group,
    make_groups,
    overlapping,
    read_groups,
    synthetic_groups,
    write_groups,
)
from zeus.simulate.workloads import WORKLOADS

DATASETS = [workload.dataset for workload in WORKLOADS]


def mean_ratios(jobs: list[GroupJob]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {}
    for job in jobs:
        ratios.setdefault(job.dataset, []).append(job.runtime_ratio)
    return {dataset: statistics.mean(some) for dataset, some in ratios.items()}


def test_synthetic_groups_match_their_description() -> None:
    many = [synthetic_groups(60, seed) for seed in range(20)]
    for jobs in many:
        groups = by_group(jobs)
        assert len(groups) == 60
        sizes = [len(some) for some in groups.values()]
        assert min(sizes) >= 5
        assert max(sizes) <= 150
        assert {jobs[0].dataset for jobs in groups.values()} == set(DATASETS)
        assert mean_ratios(jobs) == pytest.approx(dict.fromkeys(DATASETS, 1.0))
        assert all(name.startswith("synthetic") for name in groups)
        assert all(job.end_time > job.start_time >= 0 for job in jobs)
    assert statistics.mean(map(overlapping, many)) == pytest.approx(0.44, abs=0.03)
    assert overlapping(synthetic_groups()) == pytest.approx(0.44, abs=0.01)
    sizes = [len(some) for jobs in many for some in by_group(jobs).values()]
    assert statistics.median(sizes) < 12
    for workload in WORKLOADS:
        times = [job.end_time - job.start_time for jobs in many for job in jobs
                 if job.dataset == workload.dataset]  # fmt: skip
        assert statistics.mean(times) == pytest.approx(workload.usual_time, rel=0.05)
        assert statistics.stdev(times) / statistics.mean(times) == pytest.approx(0.417, abs=0.04)


def test_a_seed_gives_the_same_groups() -> None:
    assert synthetic_groups(7, 3) == synthetic_groups(7, 3)
    assert synthetic_groups(7, 3) != synthetic_groups(7, 4)
    # More groups leave the first ones, but for the means that their ratios are of.
    few, more = synthetic_groups(6, 3), synthetic_groups(7, 3)
    assert [job.start_time for job in few] == [job.start_time for job in more][: len(few)]
    with pytest.raises(ValueError, match="at least one group, not 0"):
        synthetic_groups(0)


def test_overlap_is_with_any_earlier_job_of_the_group() -> None:
    def job(group: str, start: float, end: float) -> GroupJob:
        return GroupJob(group, start, end, "squad", 1.0)

    long_before = [job("a", 0, 100), job("a", 10, 20), job("a", 50, 60), job("a", 100, 101)]
    assert overlapping(long_before) == 0.5
    assert overlapping([job("a", 0, 100), job("b", 10, 20)]) == 0


TABLE_OF_JOBS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TABLE_OF_TAGS = ("inst_id", "user", "gpu_type_spec", "group", "workload")


def tables(folder: Path, header: bool = False) -> tuple[Path, Path]:
    """Seven groups of two jobs, the first two of similar length; and rows that must be left out."""
    jobs, tags = ([TABLE_OF_JOBS], [TABLE_OF_TAGS]) if header else ([], [])
    lengths = (10.0, 12.0, 1e3, 1e4, 1e5, 1e6, 1e7)
    for number, length in enumerate(lengths):
        for run, factor in enumerate((0.5, 1.5)):
            inst, start = f"inst{number}-{run}", 1000.0 * (run + 1)
            end = start + factor * length
            jobs.append((f"job{number}{run}", inst, "u", "Terminated", f"{start}", f"{end}"))
            tags.append((inst, "u", "V100", f"group{number}", ""))
    for inst, status, start, end in (
        ("failed", "Failed", "5.0", "50.0"),
        ("running", "Running", "5.0", ""),
        ("at-once", "Terminated", "0.0", "50.0"),
        ("no-time", "Terminated", "5.0", "5.0"),
        ("no-group", "Terminated", "5.0", "50.0"),
    ):
        jobs.append((f"job-{inst}", inst, "u", status, start, end))
        tags.append((inst, "u", "", "" if inst == "no-group" else "group0", "bert"))
    tags.append(("of-no-job", "u", "", "group0", ""))
    tags.append(("inst0-0", "u", "", "group6", ""))  # it has a tag already
    jobs.append(())
    paths = folder / "pai_job_table.csv", folder / "pai_group_tag_table.csv"
    for path, lines in zip(paths, (jobs, tags), strict=True):
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    return paths


@pytest.mark.parametrize("header", [False, True])
def test_groups_of_alibabas_tables(tmp_path: Path, header: bool) -> None:
    made = make_groups(*tables(tmp_path, header))
    groups = by_group(made)
    # The two shortest are one cluster; clusters and workloads go by length.
    assert {name: jobs[0].dataset for name, jobs in groups.items()} == {
        f"group{number}": DATASETS[max(0, number - 1)] for number in range(7)
    }
    assert [(job.start_time, job.end_time) for job in groups["group2"]] == [
        (1000.0, 1500.0),
        (2000.0, 3500.0),
    ]
    assert [job.runtime_ratio for job in groups["group2"]] == [0.5, 1.5]
    # Of the mean of all jobs with the workload, not of the group.
    mean = (5 + 15 + 6 + 18) / 4
    assert [job.runtime_ratio for job in groups["group1"]] == [6 / mean, 18 / mean]


def test_the_archives_may_stay_as_they_are(tmp_path: Path) -> None:
    plain = tables(tmp_path)
    packed = []
    for path in plain:
        packed.append(tmp_path / f"{path.stem}.tar.gz")
        with tarfile.open(packed[-1], "w:gz") as archive:
            archive.add(path, path.name)
    assert make_groups(*packed) == make_groups(*plain)
    with tarfile.open(packed[0], "w:gz") as archive:
        archive.add(plain[0], "something.txt")
    with pytest.raises(ValueError, match=r"no CSV file in .*pai_job_table\.tar\.gz"):
        make_groups(*packed)
    packed[0].write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"pai_job_table\.tar\.gz is not a CSV file"):
        make_groups(*packed)


def test_small_groups_can_be_left_out(tmp_path: Path) -> None:
    jobs, tags = tables(tmp_path)
    with tags.open("a") as file:
        file.write("no-group,u,,alone,\n")
    assert len(by_group(make_groups(jobs, tags))) == 8
    assert len(by_group(make_groups(jobs, tags, least_jobs=2))) == 7
    with pytest.raises(ValueError, match="hold 0 groups of 3 or more"):
        make_groups(jobs, tags, least_jobs=3)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a,b,c\n", "has 3 columns, and not the 6"),
        ("n,i,u,Terminated,soon,5\n", "times of job number 1 are not numbers"),
        (b"\xff\xfe\x00,", "line 1: it is not text in UTF-8"),
    ],
)
def test_an_invalid_table_of_jobs_is_reported(
    tmp_path: Path, text: str | bytes, wrong: str
) -> None:
    jobs, tags = tables(tmp_path)
    jobs.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=wrong) as raised:
        make_groups(jobs, tags)
    assert "pai_job_table.csv" in str(raised.value)


def test_files_of_groups_may_be_compressed(tmp_path: Path) -> None:
    jobs = synthetic_groups(6)
    plain, gz, xz = (tmp_path / f"groups.csv{ending}" for ending in ("", ".gz", ".xz"))
    for path in (plain, gz, xz):
        write_groups(jobs, path)
        assert read_groups(path) == by_group(jobs)
    assert gzip.decompress(gz.read_bytes()) == plain.read_bytes()
    assert lzma.decompress(xz.read_bytes()) == plain.read_bytes()
    for path in (gz, xz):  # the content says whether it is compressed, and not the name
        path.write_bytes(plain.read_bytes())
        assert read_groups(path) == by_group(jobs)
    assert plain.read_text().startswith("group,start_time,end_time,dataset,runtime_ratio\n")


def test_jobs_of_a_group_are_read_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "groups.csv"
    # As the published file has them: of another program, with other columns too.
    path.write_text(
        "group,start_time,end_time,dataset,runtime_ratio,user\n"
        "b,20.0,30.0,squad,1.1779405764729405,x\n"
        "a,1427642.0,1446915.0,squad,0.5,x\n"
        "b,10.0,15.0,squad,0.9,x\n"
    )
    groups = read_groups(path)
    assert list(groups) == ["b", "a"]
    assert [job.runtime_ratio for job in groups["b"]] == [0.9, 1.1779405764729405]


HEADER = "group,start_time,end_time,dataset,runtime_ratio\n"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("group,start_time\n", "columns end_time, dataset, runtime_ratio are missing"),
        ("", "columns group, .* are missing"),
        (HEADER, "holds no job"),
        (HEADER + "a,1,2,squad,\n", "line 2: runtime_ratio is empty"),
        (HEADER + "a,1,2,squad,1\na,2,1,squad,1\n", "line 3: end_time must not come before"),
        (HEADER + "a,1,nan,squad,1\n", "line 2: end_time is 'nan'"),
        (HEADER + "a,1,2,squad,1\na,2,3,imagenet,1\n", "group a has jobs of more than one"),
    ],
)
def test_an_invalid_file_of_groups_is_reported(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "groups.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong):
        read_groups(path)

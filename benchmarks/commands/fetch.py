"""``fetch``: downloads the data of a workload to the folder from which it is read."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.downloads import BY_HAND, DATA_SETS, fetch
from benchmarks.workloads import WorkloadName


@dataclass
class Fetch:
    """Download the public data of one workload and verify its checksums. This requires the package pooch."""

    workload: WorkloadName
    """Workload whose data to download."""
    data_dir: Path = Path("data")
    """Folder that contains the data sets."""
    only: str = ""
    """Only files with this text in their names, such as SST-2 of glue, or v2.0 of bert_qa."""

    def run(self) -> int:
        if self.workload in BY_HAND:
            raise ValueError(f"the data of {self.workload} cannot be fetched: {BY_HAND[self.workload]}")
        if self.workload not in DATA_SETS:
            print(f"{self.workload} needs no files")
            return 0
        names = [file.name for data_set in DATA_SETS[self.workload] for file in data_set.files]
        if not any(self.only.lower() in name.lower() for name in names):
            raise ValueError(f"--only {self.only}: no such file of {self.workload}, only {', '.join(names)}")
        for data_set in DATA_SETS[self.workload]:
            print(f"{data_set.folder}: licence: {data_set.licence}")
            for path in fetch(data_set, self.data_dir, self.only):
                print(path)
        return 0

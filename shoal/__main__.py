"""`python -m shoal`: the command line; or, started by torchrun, srun or mpirun with a job file, one rank of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.cli import main


def _is_job(words: list[str]) -> bool:
    """Whether the first word is a job file or a run directory, and not a command."""
    return bool(words) and (words[0].endswith(".toml") or (Path(words[0]) / "job.toml").is_file())


if __name__ == "__main__":
    if _is_job(sys.argv[1:]):
        # before torch is imported: its warnings repeat by rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from shoal.launch.external import run_job_file

        sys.exit(run_job_file(sys.argv[1], sys.argv[2:]))
    main()

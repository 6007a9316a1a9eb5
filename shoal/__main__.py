"""`python -m shoal`: the command line; or, started by torchrun, srun or mpirun with a job file, one rank of it."""

from __future__ import annotations

import sys

from shoal.cli import main


def _is_job(words: list[str]) -> bool:
    return bool(words) and words[0].endswith(".toml")


if __name__ == "__main__":
    if _is_job(sys.argv[1:]):
        from shoal.launch.external import run_job_file

        sys.exit(run_job_file(sys.argv[1], sys.argv[2:]))
    main()

"""Where in the user's own code an exception came from."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from shoal.causes import causes

SHOAL = str(Path(__file__).parent)


def user_frame(error: BaseException) -> str:
    """`file:line in function: source` of the innermost frame outside torch, other packages and shoal."""
    frames = [frame for link in causes(error) for frame in traceback.extract_tb(link.__traceback__)]
    if not frames:
        return ""
    mine = [frame for frame in frames if is_user_file(frame.filename)]
    ours = [frame for frame in frames if frame.filename.startswith(SHOAL)]
    frame = (mine or ours or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def is_user_file(path: str) -> bool:
    """Whether a source file is the user's own."""
    packages = (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        SHOAL,
        "<",
    )
    return not path.startswith(packages) and "site-packages" not in path

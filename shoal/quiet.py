"""Log lines of libraries that say nothing to who runs a job. Each is named by its logger and its beginning, with the reason."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Leave out what comes with imports, from now on in this process; a second call changes nothing."""
    logging.getLogger("torchao").addFilter(_says_more_than_missing_kernels)
    logging.getLogger("torch.utils._pytree").addFilter(_says_more_than_torchaos_enums)


def quiet_compiled_recompute() -> None:
    """Leave out the reminder that a compiled block under selective recompute must not work in place, for blocks that do not."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_says_more_than_not_in_place)


def _says_more_than_not_in_place(record: logging.LogRecord) -> bool:
    return "Detected that context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _says_more_than_missing_kernels(record: logging.LogRecord) -> bool:
    """Kernels of torchao's own, for kinds of GPUs that are not here or for another Python: float8 multiplies by torch's.

    transformers imports torchao wherever it is installed, and then jobs without float8 would say so, too.
    """
    text = record.getMessage()
    return not (text.startswith("Failed to load ") and "/torchao/_C" in text)


def _says_more_than_torchaos_enums(record: logging.LogRecord) -> bool:
    """torchao registers enums with torch that torch has come to know by itself: a matter between the two."""
    about = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (
        "is an Enum subclass" in str(record.msg)
        and str(getattr(about, "__module__", "")).startswith("torchao")
    )

"""A run in a few lines, for a terminal and for machines."""

from __future__ import annotations

import shlex
from typing import Any

from shoal.observe.story import Story, is_step, value_of


def ended(story: Story) -> str:
    """How a run ended, or that it has not."""
    done, total = story.last_step, value_of(story.job, "train", "steps")
    of = f" of {total:,}" if is_step(total) else ""
    at = f"step {done:,}{of}" if done else "the first step"
    match story.ending.state:
        case "finished":
            return f"finished after step {done:,}{of}"
        case "stopped":
            return f"stopped after step {done:,}{of}, as a signal asked"
        case "failed":
            return f"failed after {at}"
        case "running":
            return f"still going, at {at}"
        case "gone":
            return f"gone without a word at {at}, killed most likely"


def brief(story: Story) -> list[str]:
    """How a run is, in a few lines."""
    lines = [f"{story.run.path}  {ended(story)}{f': {story.ending.message}' if story.ending.message else ''}"]
    if story.steps:
        last = story.steps[-1]
        loss = "" if last.loss is None else f"loss {last.loss:.4f}"
        speed = "" if last.units_per_s is None else f"{last.units_per_s:,.0f} {story.unit}/s"
        lines.append(
            f"  step {last.step}: {', '.join(part for part in (loss, speed) if part) or 'no numbers'}"
        )
    saved = story.checkpoints[-1].path if story.checkpoints else "nothing"
    lines.append(f"  saved {saved}; logs of ranks in {story.run.ranks}")
    if story.ending.state in ("stopped", "failed", "gone") and story.job:
        what = "go on" if story.checkpoints else "nothing was saved, so begin again"
        lines.append(f"  {what}: shoal train {shlex.quote(str(story.run.path))}")
    return lines


def brief_as_json(story: Story) -> dict[str, Any]:
    """The same as plain data."""
    last = story.steps[-1] if story.steps else None
    return {
        "run": str(story.run.path),
        "state": story.ending.state,
        "message": story.ending.message,
        "step": story.last_step,
        "steps": value_of(story.job, "train", "steps"),
        "loss": last.loss if last else None,
        f"{story.unit}_per_s": last.units_per_s if last else None,
        "checkpoint": str(story.checkpoints[-1].path) if story.checkpoints else None,
    }

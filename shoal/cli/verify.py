"""`shoal verify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.config import Settings
    from shoal.plan import Plan
    from shoal.verify.compare import Comparison
    from shoal.verify.run import Verdict


def verify(
    job: str = typer.Argument(help="A job file, or a run directory."),
    overrides: list[str] = typer.Argument(None, help="key=value words, such as plan.tensor=2 plan.shard=2"),
    every: int = typer.Option(
        0, "--all", min=0, help="Every plan of so many ranks, in place of the job's own."
    ),
    steps: int = typer.Option(4, min=1, help="Steps that are compared."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, for machines."),
) -> None:
    """Prove that a plan computes what one device does, on a small copy of the job.

    Example: shoal verify examples/quickstart.toml model.preset=5m plan.tensor=2 plan.shard=2
    """
    from rich.console import Console

    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.config import load
    from shoal.launch.ready import complete_plan, which_cluster
    from shoal.verify.run import ends_and_experts, every_plan, verify

    settings = load(job, overrides or [])
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    try:
        if every:
            plans = list(every_plan(every, **ends_and_experts(settings), like=settings.plan))
        else:
            plan = settings.plan
            plans = [plan if plan and plan.says_degrees else complete_plan(settings, which_cluster(settings))]
        with stdout_on_stderr(active=as_json):
            verdicts = verify(
                settings,
                plans,
                lambda verdict: None if every and verdict.refused else _tell(console, verdict),
                steps=steps,
            )
    except ValueError as error:
        raise fail(str(error)) from error
    tried = [verdict for verdict in verdicts if not (every and verdict.refused)]
    different = [verdict for verdict in tried if not verdict.same]
    if every:
        _tell_refusals(console, [verdict for verdict in verdicts if verdict.refused])
    if not every:
        _tell_if_the_job_refuses(console, settings, plans[0])
    if as_json:
        typer.echo(json.dumps([_as_json(verdict) for verdict in verdicts]))
    else:
        console.print(
            f"{len(tried) - len(different)} of {len(tried)} plans compute what one device does"
            + (f"; {len(verdicts) - len(tried)} are not for this model" if len(tried) < len(verdicts) else "")
        )
    raise typer.Exit(1 if different else 0)


def _tell(console: Console, verdict: Verdict) -> None:
    found = verdict.comparison
    name = verdict.plan.describe()
    if found is None:
        what = "refused" if verdict.refused else "FAILED"
        console.print(f"{what:<10} {name}\n           {verdict.problem}", markup=False)
        return
    console.print(f"{'same' if found.same else 'DIFFERENT':<10} {_errors(found)}  {name}", markup=False)
    if verdict.sharper is not None:
        console.print(f"{'  in fp32':<10} {_errors(verdict.sharper)}", markup=False)
    if found.first is not None:
        console.print(f"           first: {found.first.describe()}", markup=False)
    if verdict.depends:
        console.print(f"note       {verdict.depends}", markup=False)


def _errors(found: Comparison) -> str:
    """Each error with what is allowed behind it."""
    names = ("loss", "norm", "gradients", "weights")
    errors = (found.loss, found.norm, found.gradient, found.weights)
    each = zip(names, errors, found.allowed, strict=True)
    return "  ".join(f"{name} {error:.0e} ({allowed:.0e})" for name, error, allowed in each)


def _tell_if_the_job_refuses(console: Console, settings: Settings, plan: Plan) -> None:
    """The small copy has sizes that the plan divides, and the job may have others."""
    from shoal.check import check
    from shoal.cluster import Cluster

    try:
        check(settings.job, plan, Cluster.parse(f"{plan.world_size} cpu"))
    except ValueError as error:
        console.print(f"note       the job itself does not allow this plan: {error}", markup=False)


def _tell_refusals(console: Console, refused: list[Verdict]) -> None:
    """Plans that the model does not allow, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for verdict in refused:
        reasons.setdefault(verdict.problem, []).append(verdict.plan.describe())
    for reason, names in reasons.items():
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        console.print(f"refused    {names[0]}{more}\n           {reason}", markup=False)


def _as_json(verdict: Verdict) -> dict[str, object]:
    found = verdict.comparison
    table: dict[str, object] = {"plan": verdict.plan.model_dump(), "same": verdict.same}
    if found is None:
        return table | {"problem": verdict.problem, "refused": verdict.refused}
    first = found.first.describe() if found.first else None
    table |= _errors_as_json(found) | {"worst_gradient": found.worst, "first_difference": first}
    table |= {"depends": verdict.depends} if verdict.depends else {}
    return table | ({"fp32": _errors_as_json(verdict.sharper)} if verdict.sharper is not None else {})


def _errors_as_json(found: Comparison) -> dict[str, object]:
    errors = {"loss": found.loss, "norm": found.norm, "gradient": found.gradient, "weights": found.weights}
    return {"errors": errors, "allowed": found.allowed._asdict()}

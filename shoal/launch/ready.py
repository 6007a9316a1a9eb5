"""Everything that is settled before ranks start: the cluster, the plan, checks across them, and prepared
data.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from pydantic import ValidationError

from shoal.check import check, check_model
from shoal.checkpoint.folder import list_checkpoints
from shoal.cluster import DEVICES, Cluster
from shoal.config import ConfigError, Settings
from shoal.data.format import is_prepared, read_index
from shoal.data.prepare import prepare, prepared_key
from shoal.data.text import HF, SourceKind, source_kind, source_name
from shoal.frames import user_frame
from shoal.imports import load_object, require_arguments
from shoal.job import FAMILIES, FLOAT8, NARROW, Job
from shoal.models.build import builder
from shoal.models.moe_presets import MoeDims, num_moe_parameters, resolve_moe
from shoal.models.presets import LlamaDims, num_parameters, resolve
from shoal.parallel.initialise import build_on_meta
from shoal.parallel.spread import require_layout, require_sizes
from shoal.plan import Plan, effective
from shoal.planner.auto import searched_plan, why_not_searched
from shoal.planner.choose import Workload, choose_degrees, require_even, with_graphs
from shoal.resilience.faults import drawn, parse_faults, require_possible
from shoal.resilience.replicas import require_copies
from shoal.run import Run
from shoal.train.kernels import check_installed
from shoal.train.objective import as_objective
from shoal.train.resume import require_same_numbers
from shoal.world import choose_backends, detect_cluster
from shoal.world.rendezvous import parse_init_method

DataProgress = Callable[[str, int, int | None], None]


def make_ready(
    settings: Settings,
    *,
    ranks: int | None = None,
    progress: DataProgress | None = None,
    searched: Callable[[str], None] | None = None,
) -> Settings:
    """Settings in which nothing is left to be chosen: plan and data folder are set, and fit.

    Args:
        ranks: how many ranks there are, when something else starts them; left out: as many as the cluster
        has devices. progress: told (stage, done, total) while data is prepared. searched: with `run.search` the plan is
        searched for, and this is told what came of it; left out: rules choose it.

    Raises:
        ConfigError: something does not fit; the message says what would.
    """
    try:
        cluster = which_cluster(settings, ranks)
        check_early(settings, cluster)
        with _own_errors():
            check_objects(settings, cluster)
        settings = with_data(settings, progress)
        plan = _searched(settings, cluster, searched) or complete_plan(settings, cluster)
        check(settings.job, plan, cluster)
        asked = drawn(parse_faults(settings.run.faults), plan.world_size, settings.train.steps)
        require_possible(asked, plan.world_size, settings.train.steps, nodes=bool(settings.run.nodes))
        require_copies(settings.run.compare_every, plan)
        if settings.model.family.startswith(HF):
            check_hugging_face(settings, plan)
        elif (
            settings.model.family not in FAMILIES
            and plan.tensor * plan.context * plan.pipeline * plan.expert > 1
        ):
            with _own_errors():
                check_own(settings, plan)
        if settings.run.resume and (done := list_checkpoints(Run(Path(settings.run.dir)).checkpoints)[0]):
            require_same_numbers(done[-1], settings.job)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return settings.with_plan(plan)


def _searched(settings: Settings, cluster: Cluster, tell: Callable[[str], None] | None) -> Plan | None:
    if tell is None or not settings.run.search:
        return None
    tell("simulating plans for this machine, to take the fastest")
    found = searched_plan(settings, cluster)
    if found.plan is None:
        tell(f"the plan is chosen by rules (docs/plan.md), since none was found by simulation: {found.why}")
        return None
    plan = with_graphs(found.plan, workload(settings), cluster, settings.train.global_batch)
    tell(f"plan: {plan.describe()}, {found.why}")
    return plan


def check_early(settings: Settings, cluster: Cluster) -> None:
    """What can be refused before minutes are spent on data."""
    plan = settings.plan
    if plan is not None and plan.shares and settings.run.nodes:
        raise ValueError(
            f"plan.shares = {list(plan.shares)} are of ranks in their order, and with run.nodes machines have ranks in the order "
            "in which they come; leave shares out, or start the ranks with torchrun or srun"
        )
    check_spikes(settings)
    if settings.run.search and (why := why_not_searched(settings, cluster)):
        raise ValueError(f"run.search = true, but {why}; leave run.search out")
    if settings.train.precision in FLOAT8 and find_spec("torchao") is None:
        raise ValueError(
            f"train.precision = \"{settings.train.precision}\" needs the torchao library: pip install 'shoal[float8]'"
        )
    if plan is not None and cluster.device.type == "cuda":
        check_installed(plan.attention)
    if plan is not None and plan.says_degrees:
        check(settings.job, plan, cluster)
    else:
        axis = "shard" if plan and plan.cuda_graphs else "replicate"  # copies are not recorded
        _with_parts(Plan.model_validate({axis: cluster.num_devices}), plan)
        require_even(settings.train, cluster)
        check_model(settings.job)


def check_spikes(settings: Settings) -> None:
    """Raises ValueError for a run that is to go back from spikes, and has nothing to go back to."""
    train = settings.train
    if train.spike and not settings.checkpoint.every:
        raise ValueError(
            f"train.spike = {train.spike} goes back to a checkpoint of before a spike, and checkpoint.every = 0 writes none; use "
            f"such as checkpoint.every={max(1, train.spike_rewind)}, or leave train.spike out"
        )


def check_objects(settings: Settings, cluster: Cluster) -> None:
    """What ranks would find out one by one: the user's own objects, the backend, the way to rank 0.

    Raises:
        ValueError: naming the key.
    """
    job, policy = settings.job, settings.run
    if job.train.objective is not None:
        try:
            as_objective(load_object(job.train.objective))
        except TypeError as error:
            raise ValueError(f"train.objective = {job.train.objective!r}: {error}") from error
    choose_backends(policy.backend, torch.device(cluster.device.type))
    parse_init_method(policy.init_method)
    if job.model.family.startswith(HF):
        builder(job.model, None)  # downloads it, if it is on the hub, before ranks start
    elif job.model.family not in FAMILIES:
        require_arguments(job.model.family, job.model.options, "model.options")
    if source_kind(job.data.source) is SourceKind.USER:
        require_arguments(source_name(job.data.source), job.data.options, "data.options")


@contextmanager
def _own_errors() -> Generator[None, None, None]:
    """What goes wrong inside a user's module is told with its line, not with our traceback."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}, at {user_frame(error)}") from error


def check_hugging_face(settings: Settings, plan: Plan) -> None:
    """Whether a plan fits a model of transformers, which is known once it is built (without storage).

    Raises:
        ValueError: naming the axis and the reason.
    """
    from shoal.models.huggingface import builder_of

    model = builder_of(settings.model.family, vocab_of(settings), **settings.model.options)()
    require_sizes(model, plan, settings.data.seq_len)


def check_own(settings: Settings, plan: Plan) -> None:
    """Whether the layout of a model of the user's own allows a plan; one that cannot be built without storage is asked by its
    ranks.

    Raises:
        ValueError: naming the axis and the reason.
    """
    model = build_on_meta(builder(settings.model, vocab_of(settings)))
    if model is not None:
        require_layout(model, plan)


def complete_plan(settings: Settings, cluster: Cluster) -> Plan:
    """The plan that is said; what it leaves open is chosen.

    Raises:
        ValueError: a ZeRO stage that the degrees do not allow.
    """
    said, batch = settings.plan, settings.train.global_batch
    if said is not None and said.says_degrees:
        # of other families nothing is known, and to count parameters takes time
        known = settings.model.family in FAMILIES
        return with_graphs(said, workload(settings), cluster, batch) if known else said
    work = workload(settings)
    chosen = choose_degrees(settings.train, work, cluster, said=said)
    return with_graphs(_with_parts(chosen, said), work, cluster, batch)


def _with_parts(chosen: Plan, said: Plan | None) -> Plan:
    """A chosen plan with the parts that were said.

    Raises:
        ValueError: they do not go together, such as a schedule with a plan that has no pipeline.
    """
    kept = said.model_dump(include=said.model_fields_set) if said is not None else {}
    keys = chosen.model_dump() | kept
    if "zero" not in effective(keys):
        del keys["zero"]  # it was heeded when degrees were chosen
    try:
        return Plan.model_validate(keys)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"plan, whose degrees are chosen as {chosen.describe()}: {why}") from None


def which_cluster(settings: Settings, ranks: int | None = None) -> Cluster:
    """The cluster that is said, or this machine; on a CPU, with as many ranks as the plan or the launcher asks for.

    Raises:
        ValueError: the cluster is not this machine, or the plan asks for more GPUs than there are.
    """
    here = detect_cluster()
    if settings.cluster != "auto":
        said = Cluster.parse(settings.cluster)
        _require_kind(said, here)
        if (
            ranks is None
            and said.device.type == "cuda"
            and (said.nodes > 1 or said.num_devices > here.num_devices)
        ):
            raise ValueError(
                f"cluster = {settings.cluster!r}, but this machine is {here.describe()}; start the ranks "
                "with torchrun or "
                "srun on those nodes, or leave cluster out to use this machine"
            )
        return said
    wanted = ranks or (settings.plan.world_size if settings.plan and settings.plan.says_degrees else None)
    if wanted is None or wanted == here.num_devices:
        return here
    if here.device.type == "cuda" and wanted > here.num_devices and ranks is None:
        return here  # the check names the degrees that fit
    per_node = here.num_devices
    if here.device.type == "cuda" and 1 < per_node < wanted and wanted % per_node == 0:
        # started by a launcher, on nodes like this one
        return here.model_copy(update={"nodes": wanted // per_node})
    return here.model_copy(update={"devices_per_node": wanted})


def device_of(settings: Settings) -> str:
    """Where ranks compute: on the CPU if the cluster that is said is one, else on what the machine has."""
    said = None if settings.cluster == "auto" else Cluster.parse(settings.cluster)
    return "cpu" if said is not None and said.device.type == "cpu" else "auto"


def _require_kind(said: Cluster, here: Cluster) -> None:
    known = here.device.kind in DEVICES
    if said.device.type == "cuda" and (
        here.device.type == "cpu" or (known and said.device != DEVICES[here.device.kind])
    ):
        raise ValueError(
            f"cluster = {said.describe()!r}, but this machine is {here.describe()}; start the ranks with torchrun or srun on "
            "such machines, or leave cluster out to use what is here"
        )


def with_data(settings: Settings, progress: DataProgress | None = None) -> Settings:
    """Settings whose text is prepared, in `run.data` or else under `run.cache`."""
    data, seed = settings.data, settings.train.seed
    if not source_kind(data.source).is_text:
        return settings
    if settings.run.data is not None and is_prepared(Path(settings.run.data)):
        return settings  # as it is: a run goes on with the tokens that it began with, whatever became of the texts
    where = settings.run.data or Path(settings.run.cache).expanduser() / "data" / prepared_key(data, seed)
    folder = Path(where).resolve()
    prepare(data, seed, folder, progress=progress)
    return settings.model_copy(update={"run": settings.run.model_copy(update={"data": str(folder)})})


def vocab_of(settings: Settings) -> int | None:
    """The vocabulary size of a job's data; None for a dataset of the user's own."""
    if settings.run.data is not None:
        return read_index(Path(settings.run.data)).vocab
    kind = source_kind(settings.data.source)
    if kind.name == "PREPARED":
        return read_index(Path(str(settings.data.source))).vocab
    return settings.data.vocab if kind.name == "SYNTHETIC" else None


def workload(settings: Settings) -> Workload:
    """How large a job is."""
    vocab = vocab_of(settings)
    if settings.model.family == "llama":
        dims = resolve(settings.model, vocab)
        return Workload(num_parameters(dims), _llama_activations(dims, settings.job), steady=True)
    if settings.model.family == "moe":
        moe = resolve_moe(settings.model, vocab)
        return Workload(num_moe_parameters(moe), _moe_activations(moe, settings.job))
    model = build_on_meta(builder(settings.model, vocab))
    return Workload(0 if model is None else sum(parameter.numel() for parameter in model.parameters()), 0)


def _llama_activations(dims: LlamaDims, job: Job) -> int:
    """About what one sample keeps for backward without recompute, bytes: inputs of matrix multiplications
    and logits.
    """
    width = 2 if job.train.precision in NARROW else 4
    block = 8 * dims.dim + 2 * (dims.heads + 2 * dims.kv_heads) * dims.head_dim + 4 * dims.ffn
    return job.data.seq_len * (width * dims.layers * block + (width + 8) * dims.vocab)


def _moe_activations(dims: MoeDims, job: Job) -> int:
    """As Llama's, with what each of a token's experts keeps: its row, taken, made and weighed, and its hidden values."""
    width = 2 if job.train.precision in NARROW else 4
    rows = dims.top_k * (3 * dims.base.dim + 4 * dims.expert_ffn)
    return _llama_activations(dims.base, job) + job.data.seq_len * width * dims.base.layers * rows

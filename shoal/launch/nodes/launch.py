"""`launch_on_nodes`: this machine's part in a run on several, from its start until the run has ended or goes on without it."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from shoal.checkpoint.folder import list_checkpoints
from shoal.cluster import Cluster
from shoal.config import ConfigError, Settings
from shoal.launch.after import Outcome
from shoal.launch.failure import Gone
from shoal.launch.nodes.channel import Channel, ChannelError, Door, connect
from shoal.launch.nodes.fleet import Fleet
from shoal.launch.nodes.lead import Lead, Ready, job_text
from shoal.launch.nodes.member import Here, own_address
from shoal.launch.ranks import Ranks
from shoal.launch.watch import Requests, counted_requests
from shoal.observe.health import health_watched
from shoal.resilience.epochs import BEAT_S, Epoch, beats, claim, end_of, newest, token
from shoal.resilience.saver import saver
from shoal.resilience.snapshot import held
from shoal.run import Run

AGAIN_S = 0.5  # between attempts to reach a leader
MOST_UNABLE = 3  # terms in a row that end by an error of this machine's disk or network
HOLD_BACK = 4  # times the silence after which a machine is lost: others find out, and one of them leads


def launch_on_nodes(
    settings: Settings,
    ready: Ready,
    here: Cluster,
    *,
    device: str = "auto",
    quiet: bool = False,
    nursery: Ranks | None = None,
) -> Outcome:
    """Take part in a run until it has ended, or this machine is asked to leave it.

    Machines find each other in the run directory, which all of them see. One leads: whoever claims an epoch there. The others
    have ranks for it; when it is lost, another one leads. A machine is lost by its connection's end, or after
    `run.node_deadline_s` of silence; the rest goes on, with a smaller plan if there is no other machine in its place, and with a
    larger one when it comes back.

    Args:
        ready: makes settings ready for a number of ranks, or raises ConfigError. here: this machine's devices.
        nursery: begun before, so that it imports while the caller gets ready; who began it ends it, too.

    Raises:
        ValueError: run.dir cannot be written, or is in use by a run of one machine; run.interface is not there, or nobody else
            could reach this machine; a key that is for one machine.
        ConfigError: the job is another one than that of the other machines.
    """
    _require_alone(settings)
    run = Run(Path(settings.run.dir))
    run.create()
    interface, address = own_address(settings.run.interface)
    if settings.run.interface is None and address.startswith("127."):
        raise ValueError(
            "this machine has no address that others reach; set run.interface (to lo, if all are on this host)"
        )
    name = f"{socket.gethostname()} (process {os.getpid()})"
    slots = slots_of(settings, here)
    with ExitStack() as stack:
        stack.enter_context(run.locked(shared=True))
        kept = stack.enter_context(held(2 * slots if settings.checkpoint.memory_every else 0))
        requests = stack.enter_context(counted_requests())
        health = stack.enter_context(health_watched(run, slots, device=device, environment=os.environ))
        saves = stack.enter_context(
            saver(
                run,
                settings.checkpoint,
                slots,
                deadline_s=settings.run.deadline_s,
                hurry=lambda: requests.count > 1,
                say=lambda text: None if quiet else print(text, file=sys.stderr, flush=True),
            )
        )
        own, guests = tuple(kept[: len(kept) // 2]), tuple(kept[len(kept) // 2 :])
        place = Here(
            run, name, address, interface, slots, device, own, guests, requests, health, saves, ranks=nursery
        )
        stack.enter_context(closing(place))
        search = _Search(
            run, settings, lambda said, ranks: ready(_over(said, ranks), ranks), place, token(run), quiet
        )
        return search.until_the_run_ends()


def _require_alone(settings: Settings) -> None:
    """Raises ValueError for what is for runs on one machine."""
    policy = settings.run
    if policy.init_method != "env://":
        raise ValueError(
            f"run.init_method = {policy.init_method!r} is for runs on one machine; leave it out with run.nodes"
        )
    if policy.search:
        raise ValueError("run.search = true is for runs on one machine; leave it out with run.nodes")


def _over(settings: Settings, ranks: int) -> Settings:
    """Settings whose cluster, if it is said, is of so many ranks."""
    if settings.cluster == "auto":
        return settings
    return settings.model_copy(update={"cluster": f"{ranks} {Cluster.parse(settings.cluster).device.kind}"})


def slots_of(settings: Settings, here: Cluster) -> int:
    """Ranks that this machine can have: as said, or one a GPU, or its share of the plan's ranks."""
    plan, nodes = settings.plan, settings.run.nodes_from_to
    if settings.run.ranks_per_node is not None:
        return settings.run.ranks_per_node
    if here.device.type != "cpu" or plan is None or not plan.says_degrees or nodes is None:
        return here.num_devices
    return -(-plan.world_size // nodes[1])


class _Search:
    """For who leads, or to lead: again whenever a leader is gone."""

    def __init__(
        self, run: Run, settings: Settings, ready: Ready, here: Here, secret: bytes, quiet: bool
    ) -> None:
        self._run, self._settings, self._ready, self._here = run, settings, ready, here
        self._secret, self._quiet = secret, quiet
        self._lead: Lead | None = None
        self._holds_back_until = 0.0
        self._over: Epoch | None = None
        """whose leader is known to lead no more"""
        self._strange: Epoch | None = None
        """where something else than its leader answers"""
        self._lost: Gone | None = None
        self._led = False
        self._unable = 0
        """terms in a row in which this machine could not lead"""

    def until_the_run_ends(self) -> Outcome:
        silence_s = self._settings.run.node_deadline_s
        while True:
            channel = self._leader()
            if isinstance(channel, Outcome):
                return channel
            led = newest(self._run)
            if led is not None and not self._here.epoch:
                self._here.epoch = led.number
            parted = self._here.follow(channel, job_text(self._settings), silence_s)
            said = parted.message
            self._over = led if said or (channel.proven and not parted.silent) else None
            self._strange = led if not channel.proven else None
            if self._requests.count > 1:
                return Outcome("interrupted", 0)  # at once; who else is there finds that this machine is gone
            if said and self._lead is not None:  # else it leads on, and this machine comes back to it
                self._lead.join()
                self._lead = None
            if "outcome" in said:
                return self._told(Outcome(**said["outcome"]))
            if "refused" in said:
                raise ConfigError(said["refused"])
            if "left" in said or self._requests.count:
                self._say(
                    f"this machine has left the run ({said.get('left', parted.why)}), which goes on where others are"
                )
                return Outcome("interrupted", 0)
            was_ours = led is not None and led.leader == self._here.name
            self._unable = self._unable + 1 if was_ours and said.get("unable") else 0
            if self._unable == MOST_UNABLE:
                return Outcome("failed", 0, f"{said['resigned']}, {MOST_UNABLE} times")
            if said.get("alone"):
                self._holds_back_until = time.monotonic() + HOLD_BACK * silence_s
            why = said.get("resigned") or parted.why
            self._lost = None
            if led is not None and not said and not was_ours:
                self._lost = self._gone(led.leader, why, parted.still_s)
            who = led.leader if led is not None and not was_ours else "this machine"
            self._say(f"{who} leads no more ({why}); looking for who does now")

    def _gone(self, leader: str, why: str, still_s: float) -> Gone:
        """Which machine was lost, and led or was lost by who led: this one, if it stood still."""
        name, text = leader, f"it led, and {why}"
        if still_s:
            name, text = (
                self._here.name,
                f"it stood still for {still_s:.0f} s, and {leader}, which led, lost it",
            )
        return Gone(name, self._here.where.get(name, range(0)), text)

    def _told(self, outcome: Outcome) -> Outcome:
        if outcome.report and not self._led:  # who led has said all of it
            self._say(f"the run has failed: {outcome.report.splitlines()[0]}")
        return outcome

    @property
    def _requests(self) -> Requests:
        return self._here.requests

    def _leader(self) -> Channel | Outcome:
        """A channel to who leads, which may be this machine from now on; or how the run ends without one."""
        until = time.monotonic() + self._settings.run.nodes_wait_s
        said = False
        while not self._requests.count:
            epoch = newest(self._run)
            if (
                epoch is not None
                and self._here.epoch
                and (ended := end_of(self._run, epoch.number)) is not None
            ):
                return self._told(Outcome(**ended))  # which it could not be told
            if epoch is not None and epoch != self._over:
                found = self._reached(epoch)
                if isinstance(found, Channel):
                    return found
                if found:
                    why = f"{epoch.leader} leads the run, and cannot be reached: {found}"
                    if not said:
                        self._say(why)
                    said = True
                    if time.monotonic() > until:
                        return Outcome("failed", 0, why)
                    time.sleep(AGAIN_S)
                    continue
            if (done := self._last_step()) is not None:
                return Outcome("ok", done)
            if time.monotonic() < self._holds_back_until:
                time.sleep(AGAIN_S)
                continue
            self._try_to_lead(1 if epoch is None else epoch.number + 1)
        return Outcome("interrupted", 0)

    def _reached(self, epoch: Epoch) -> Channel | str:
        """A channel to who leads; or why there is none although it is alive, and nothing if it is not."""
        try:
            if epoch != self._strange:
                return connect(epoch.address, epoch.port, self._secret)
            why, patience_s = "something else answers there", self._settings.run.node_deadline_s
        except ConnectionRefusedError as error:  # its process has ended, or another machine has its address
            why, patience_s = str(error), 3 * BEAT_S
        except ChannelError as error:
            why, patience_s = str(error), self._settings.run.node_deadline_s
        return why if beats(self._run, patience_s) else ""

    def _try_to_lead(self, number: int) -> None:
        fleet = Fleet(self._settings.run.node_deadline_s, self._here.name)
        door = Door(self._here.address, self._secret, fleet.let_in)
        epoch = Epoch(number, self._here.name, self._here.address, door.port, self._here.epoch)
        try:
            is_ours = claim(self._run, epoch)
        except OSError as error:
            self._say(f"this machine cannot lead: {error}")
            is_ours = False
        if is_ours:
            self._led = True
            self._lead = Lead(
                self._run,
                self._settings,
                self._ready,
                epoch,
                door,
                fleet,
                self._quiet,
                self._lost,
                self._expected(),
            )
        else:
            door.close()
            fleet.close({})
            time.sleep(AGAIN_S)

    def _expected(self) -> int:
        """Machines that had ranks beside who led; 0: nobody led."""
        lost = self._lost.name if self._lost is not None else ""
        return sum(bool(ranks) for name, ranks in self._here.where.items() if name != lost)

    def _last_step(self) -> int | None:
        """Steps that are done, if the run needs no more: for a machine that comes too late."""
        try:
            there = list_checkpoints(self._run.checkpoints)[0] if self._settings.run.resume else []
        except OSError:
            return None
        return there[-1].step if there and there[-1].step >= self._settings.train.steps else None

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

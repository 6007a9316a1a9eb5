"""`Lead`: what one of several machines does beside having ranks: who trains by which plan, and what follows a failure."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.config import Settings
from shoal.launch.after import (
    Outcome,
    failed,
    given_up,
    going_on,
    remedy_of,
    say_restart,
    stages_of,
    was_stopped,
    why_not,
    with_remedy,
)
from shoal.launch.failure import Gone, Scene
from shoal.launch.nodes.channel import Channel, ChannelError, Door
from shoal.launch.nodes.fit import fitted
from shoal.launch.nodes.fleet import SILENT, Fleet, Member
from shoal.launch.nursery import Order
from shoal.launch.progress import CallWatch
from shoal.launch.watch import Watch
from shoal.launch.worker import TRAIN
from shoal.plan import Plan
from shoal.resilience.epochs import Beat, Epoch, begun_since, claim, newest, note_begin, note_end
from shoal.resilience.faults import STRUCK
from shoal.resilience.restarts import Restarts
from shoal.run import Run
from shoal.world.meeting import first_difference, ranks_text

LAST_CALL_S = (
    3.0  # more machines are waited for when there are enough: each that comes later stops all others once
)
LOOK_S = 1.0  # between looks whether somebody else leads

Ready = Callable[[Settings, int], Settings]


class ResignedError(Exception):
    """This machine does not lead any more; the run is for others to go on with."""


class AloneError(ResignedError):
    """Others may reach each other, and are to lead before this machine does again."""


class Lead:
    """One machine's term of leading, in a thread of its own: from its first epoch until the run ends or somebody else leads.

    Args:
        settings: as the job says. ready: makes them ready for so many ranks, or raises ConfigError.
        epoch: which this machine has claimed, and where it is reached. door: there. fleet: to which the door leads.
        quiet: reports are in files alone. lost: who led before, if it is gone; or this machine, if it was given up.
        expected: machines that are likely to come at once, since they followed who led before.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        ready: Ready,
        epoch: Epoch,
        door: Door,
        fleet: Fleet,
        quiet: bool,
        lost: Gone | None = None,
        expected: int = 0,
    ) -> None:
        assert settings.run.nodes_from_to is not None, "for runs on several machines"
        self._least, self._most = settings.run.nodes_from_to
        self._run, self._settings, self._ready, self._quiet = run, settings, ready, quiet
        self._job = job_text(settings)
        self._epoch, self._door, self._fleet = epoch, door, fleet
        self._restarts = Restarts(settings.run.restarts)
        self._goes_on = begun_since(run, epoch.after)
        fleet.open()
        self._lost = lost
        self._expected = expected
        self._lost_in_silence = False
        self._next_look = 0.0
        self._seen: tuple[str, ...] = ()
        self._best = 0
        """ranks that could take part now"""
        self._thread = threading.Thread(target=self._to_the_end, name="lead", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until all machines have been told how it ended."""
        self._thread.join()

    def _to_the_end(self) -> None:
        said: dict[str, Any] = {}
        try:
            with Beat(self._run):
                outcome = self._generations()._asdict()
                said = {"outcome": outcome}
                with suppress(OSError):
                    note_end(self._run, self._epoch.number, outcome)
        except ResignedError as why:
            said = {"resigned": str(why), "alone": isinstance(why, AloneError)}
        except OSError as error:
            said = {"resigned": f"{self._epoch.leader} cannot lead: {error}", "alone": True, "unable": True}
        except Exception as error:
            said = {"outcome": Outcome("failed", 0, f"{type(error).__name__}: {error}")._asdict()}
            raise
        finally:
            self._door.close()
            self._fleet.close({"parted": said})

    def _generations(self) -> Outcome:
        if not self._epoch.after:  # else faults have struck already
            (self._run.ranks / STRUCK).unlink(missing_ok=True)
        if self._lost is not None and self._lost.ranks:
            text = f"{self._lost.name} is gone, with {ranks_text([*self._lost.ranks])}: {self._lost.why}"
            self._event("fault", rank=self._lost.ranks[0], message=text)
            if not self._quiet:
                print(text, file=sys.stderr, flush=True)
            if self._goes_on and not self._settings.run.restarts:
                return given_up(self._run, Outcome("failed", 0, text), "run.restarts = 0", self._quiet)
        is_claimed = True
        while True:
            settings, why = self._gathered()
            if settings is None or settings.plan is None:
                return self._not_started(why)
            if not is_claimed:
                self._claim_next()
            is_claimed = False
            self._lost_in_silence = False
            outcome = self._generation(settings, settings.plan.world_size)
            if outcome is not None:
                return outcome
            self._goes_on, self._expected = True, 1  # who is left goes on at once

    def _generation(self, settings: Settings, size: int) -> Outcome | None:
        """Have ranks train until they end; None if there is to be another generation."""
        fleet, run = self._fleet, self._run
        self._say_who(settings, size)
        note_begin(run, self._epoch.number)
        fleet.order(Order(settings.to_toml(), TRAIN, 0, "", 0), self._epoch.number, size)
        watch = Watch(
            run,
            fleet,
            fleet.requests,
            settings.run.deadline_s,
            CallWatch(stages_of(settings, size)),
            fleet.folder,
            is_here=False,
            leaves_room=self._wants_room,
        )
        scene = watch.until_end()
        fleet.stop()
        if scene is not None:
            return self._after(settings, scene)
        step = min(end.step for end in watch.ends())
        if not was_stopped(run, step < settings.train.steps):
            return Outcome("ok", step)
        return None if watch.made_room and not fleet.requests.count else Outcome("interrupted", step)

    def _after(self, settings: Settings, scene: Scene) -> Outcome | None:
        """Tell of a failure; how the run ends by it, or None if it goes on."""
        outcome, failure = failed(self._run, scene, None, self._quiet)
        remedy = remedy_of(settings, failure)
        failure = failure._replace(remedied=remedy.plan is not None)
        stopped = "a signal asked it to stop" if self._fleet.requests.count else None
        why = stopped or why_not(self._restarts, failure, remedy, scene)
        if why is not None:
            return given_up(self._run, outcome, why, self._quiet)
        changed = with_remedy(settings, remedy, self._run, scene, failure, self._quiet).plan
        if remedy.plan is not None and changed is not None:
            said = (self._settings.plan or Plan()).model_dump(exclude_unset=True)
            plan = Plan.model_validate(said | {"micro_batch": changed.micro_batch})
            self._settings = self._settings.with_plan(plan)
        self._lost_in_silence = scene.gone is not None and scene.gone.why.startswith(SILENT)
        say_restart(self._run, self._restarts, failure, self._quiet)
        return None

    def _gathered(self) -> tuple[Settings | None, str]:
        """Settings for the next generation, when machines enough are there; None and why, if there is to be none."""
        policy, began = self._settings.run, time.monotonic()
        enough_at = changed_at = began
        settings, why = (None, "") if self._membership_changed(keep=True) else self._fitted()
        while not self._fleet.requests.count:
            self._fleet.listen(0.1)
            self._look()
            self._admit()
            self._part()
            there, now = len(self._fleet.members), time.monotonic()
            if self._membership_changed():
                changed_at, (settings, why) = now, self._fitted()
                self._say_wait(there, why)
            if there < self._least:
                why = f"{there} of at least {self._least} machines came within {policy.nodes_wait_s:g} s"
                if self._lost_in_silence and now - enough_at > policy.node_deadline_s:
                    raise AloneError("others cannot be reached, and here are not enough to go on")
            elif settings is not None and (
                there >= (self._expected or self._most) or now - changed_at > LAST_CALL_S
            ):
                return settings, ""
            elif settings is None and there >= self._most:
                return None, why  # which no further machine changes
            else:
                enough_at = now
            if now - began > policy.nodes_wait_s:
                return None, why
        return None, ""

    def _say_wait(self, there: int, why: str) -> None:
        if there < self._least:
            why = f"{self._least} are asked for (run.nodes)"
        if why and not self._quiet:
            print(f"{there} machines are there, and more are waited for: {why}", file=sys.stderr, flush=True)

    def _fitted(self) -> tuple[Settings | None, str]:
        """Settings for the machines that are there."""
        slots = sum(member.slots for member in self._fleet.members[: self._most])
        said = going_on(self._settings) if self._goes_on else self._settings
        settings, why = fitted(said, slots, self._ready)
        self._best = settings.plan.world_size if settings is not None and settings.plan is not None else 0
        return settings, why

    def _membership_changed(self, *, keep: bool = False) -> bool:
        """Whether other machines are there than at the last look; with `keep` the next look says so again."""
        names = tuple(member.name for member in self._fleet.members)
        changed = names != self._seen
        if not keep:
            self._seen = names
        return changed

    def _wants_room(self) -> bool:
        """Whether the ranks that run are to make room for more or fewer, asked again and again while they run."""
        self._look()
        self._admit()
        self._part()
        if any(member.leaving for member in self._fleet.members):
            return True
        if self._membership_changed():
            self._fitted()
        return self._best > self._fleet.ranks

    def _admit(self) -> None:
        """Take in machines that came, if their job is this one."""
        while self._fleet.came:
            channel, join, more = self._fleet.came.pop(0)
            if join["job"] != self._job:
                _refuse(
                    channel,
                    f"its job is not that of the others: {first_difference(join['job'], self._job)}",
                )
                continue
            member = Member(channel, join["name"], join["address"], join["slots"])
            self._fleet.members.append(member)
            self._fleet.say_where([member])
            self._event("node came", node=member.name, ranks=member.slots)
            for message in more:
                self._fleet.heard(member, message)

    def _part(self) -> None:
        """Part from machines that leave and have no ranks any more.

        Raises:
            ResignedError: it is this one.
        """
        for member in [member for member in self._fleet.members if member.leaving and member.stopped]:
            self._event("node left", node=member.name, reason=member.leaving)
            self._fleet.let_go(member, {"parted": {"left": member.leaving}})
            if member.name == self._epoch.leader:
                raise ResignedError(f"{member.name} leaves: {member.leaving}")

    def _claim_next(self) -> None:
        epoch = self._epoch._replace(number=self._epoch.number + 1)
        if not claim(self._run, epoch):
            raise ResignedError("another machine leads")
        self._epoch = epoch

    def _look(self) -> None:
        """
        Raises:
            ResignedError: somebody else leads.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        try:
            found = newest(self._run)
        except OSError:  # of the network; the next look tells
            return
        if found is not None and found.number > self._epoch.number:
            raise ResignedError(f"{found.leader} leads since epoch {found.number}")

    def _not_started(self, why: str) -> Outcome:
        if self._fleet.requests.count:
            return Outcome("interrupted", 0)
        text = f"the run does not go on: {why} (run.nodes, run.nodes_wait_s)"
        self._event("given up", step=0, reason=text)
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)
        return Outcome("failed", 0, text)

    def _say_who(self, settings: Settings, size: int) -> None:
        """Which machines train, and with which plan."""
        who, first = [], 0
        for member in self._fleet.members:
            if ranks := range(first, min(size, first + member.slots)):
                who.append(f"{member.name} {ranks_text([*ranks])}")
                first = ranks.stop
        assert settings.plan is not None
        about = {"epoch": self._epoch.number, "nodes": "; ".join(who), "plan": settings.plan.describe()}
        self._event("epoch", **about)
        if not self._quiet:
            print(
                f"epoch {self._epoch.number}: {about['nodes']}; {about['plan']}", file=sys.stderr, flush=True
            )

    def _event(self, kind: str, **about: Any) -> None:
        with suppress(OSError):
            self._run.event(kind, **about)


def job_text(settings: Settings) -> str:
    """What must be the same on all machines."""
    own = {"ranks_per_node": None, "interface": None}
    return settings.model_copy(update={"run": settings.run.model_copy(update=own)}).to_toml()


def _refuse(channel: Channel, why: str) -> None:
    with suppress(ChannelError):
        channel.send({"parted": {"refused": why}})
    channel.close()

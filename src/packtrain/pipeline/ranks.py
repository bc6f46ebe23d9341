"""Start-up of a run on many ranks: one process makes the artefacts, the others follow its claim.

    with StartUp(folder, place=…, timeout_s=7200) as start:
        result = start.share(make)      # make(tell) -> plain JSON, called on one rank (per disk)
        … every rank opens what `result` names, then training may set up its process group

Who does what, before any collective exists:
- rank 0 claims `<folder>/startup`, makes, and tells progress, failure or result through its heartbeat;
- the first rank of every other machine follows that claim, and passes it on to the other ranks of its machine
  through a folder on its own disk: one poller per machine on the shared file system;
- a machine whose `folder` lies on a disk of its own gets no answer there within PROBE_S, and makes its own
  artefacts (equal bytes; their checksum is compared once the ranks can talk).

The claim is held until the block ends, so two runs in one folder are told apart as long as either lives.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import files
from ..errors import InputError, LawError, WaitTimeoutError
from ..waiting.claim import BEAT, HELLO, STALE_S, Claim, Owner, doing_of, error_as_dict, is_local_disk
from ..waiting.poll import Clock, SystemClock, Watch, fresh_json, fresh_names, pauses
from ..world import Node, World, node

_log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# Following another process's claim until what it makes is ready
# --------------------------------------------------------------------------------------------
# A follower says hello with a nonce of its own and believes only beats that answer it: a `ready` or `failed`
# that an earlier launch left in the folder answers nobody who came later, so nothing outlives its launch,
# and no clock is needed to tell old from new. An answered writer that falls silent ends the wait at once when
# its process is shown dead (same machine), else when its counter has not moved for `stale_s` of the
# follower's own time.
#: Seconds between two log lines of a waiting process.
_TELL_S = 30.0

#: Seconds; a limit that is missed by a rounding error is reached at the next look.
_LEAST_PAUSE = 0.001


def follow(
    folder: Path,
    *,
    timeout_s: float,
    who: str = "this process",
    writer: str = "rank 0",
    what: str | None = None,
    stale_s: float = STALE_S,
    give_up_s: float | None = None,
    clock: Clock | None = None,
    seen: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any] | None:
    """Wait for the writer of `folder` and return the result it announced.

    Args:
        folder: where the writer's claim lies.
        timeout_s: longest wait; 0 = for ever.
        who: this process, for messages.
        writer: the process that is waited for, for messages.
        what: what it makes, for messages.
        stale_s: see the module.
        give_up_s: return None when nobody has answered after so many seconds.
        clock: this process's time.
        seen: called with every new beat of the writer that answered.

    Raises:
        WaitTimeoutError: the result did not come within `timeout_s`; names the file and what was seen.
        InputError, LawError: the writer failed (its own reason and hint), or stopped without a word.
    """
    clock = clock or SystemClock()
    follower = _Follower(folder, writer, stale_s, clock, seen)
    began = told = clock.now()
    named = f"{what} ({follower.path})" if what else str(follower.path)
    try:
        for pause in pauses(follower.me.nonce):
            result = follower.look()
            waited = clock.now() - began
            unanswered = give_up_s if follower.beat is None else None
            if result is not None or (unanswered is not None and waited >= unanswered):
                return result
            doing = doing_of(follower.beat or {})
            if timeout_s and waited >= timeout_s:
                raise WaitTimeoutError(
                    f"{who} waited {waited:.2f} s for {named}; last seen of {writer}: {doing}",
                    hint="raise training.packing_wait_timeout_s (0 = for ever)",
                )
            if clock.now() - told >= _TELL_S:
                told = clock.now()
                _log.info("%s waits for %s: %s", who, writer, doing)
            left = [limit - waited for limit in (timeout_s, unanswered) if limit]  # of either limit
            clock.sleep(max(_LEAST_PAUSE, min([pause, *left])))
    finally:
        follower.leave()
    raise AssertionError("pauses never end")


class _Follower:
    """One look after the other. `beat` is the last beat that answered, or None."""

    def __init__(
        self,
        folder: Path,
        writer: str,
        stale_s: float,
        clock: Clock,
        seen: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        self.me = Owner.here()
        self.path = folder / BEAT
        self.beat: dict[str, Any] | None = None
        self._hello = folder / HELLO / self.me.nonce
        self._writer = writer
        self._stale_s = stale_s
        self._watch = Watch(clock)
        self._seen = seen

    def look(self) -> dict[str, Any] | None:
        """The writer's result, when it is there."""
        beat = fresh_json(self.path)
        if beat is not None and beat.get("state") == "released" and "result" not in beat:
            beat = self.beat = None  # an earlier launch has ended
        if beat is not None and self.me.nonce in beat.get("answers", ()):
            if self._seen is not None and (self.beat or {}).get("beat") != beat.get("beat"):
                self._seen(beat)
            self.beat = beat
            if beat.get("state") in ("ready", "released") and "result" in beat:
                return dict(beat["result"])
            if beat.get("state") == "failed":  # its error as this process's own
                error = beat.get("error") or {}
                said = f"{self._writer} failed: {error.get('message', 'no reason given')}"
                kind = LawError if error.get("exit_code") == 1 else InputError
                raise kind(said, hint=error.get("hint"))
        elif self.beat is None and self.me.nonce not in fresh_names(self._hello.parent):
            # at first, and after an earlier launch tidied up
            files.publish_json(self._hello, self.me.to_dict())
        if self.beat is not None:
            self._check_alive(self.beat)
        return None

    def _check_alive(self, beat: Mapping[str, Any]) -> None:
        owner, quiet = Owner.of_dict(beat), self._watch.quiet((beat.get("nonce"), beat.get("beat")))
        if owner is not None and owner.can_be_looked_up:
            # Its process can be seen: only a dead one has stopped, however long it is silent. Its last word
            # may have come between our look and its end.
            if not owner.is_dead or (fresh_json(self.path) or {}).get("beat") != beat.get("beat"):
                return
            why = "its process is gone"
        elif quiet < self._stale_s:
            return
        else:
            why = f"no heartbeat for {quiet:.0f} s"
        raise InputError(
            f"{self._writer} ({owner}) stopped without a word while {doing_of(beat)}: {why}",
            hint="see its own output; starting again goes on where it stopped",
        )

    def leave(self) -> None:
        """Take the hello back."""
        with contextlib.suppress(OSError):
            files.remove(self._hello)


# --------------------------------------------------------------------------------------------
# Start-up of a run on many ranks: one process makes the artefacts, the others follow its claim
# --------------------------------------------------------------------------------------------
Tell = Callable[[str, int, int], None]

#: Seconds without an answer after which a machine with a disk of its own makes its own artefacts.
_PROBE_S = 30.0

#: Seconds between heartbeats once training runs.
_CALM_S = 15.0


class StartUp:
    """See the module.

    Args:
        folder: the run's output folder.
        place: rank and world size.
        where: this process on its machine; None: as the launcher says.
        timeout_s: longest wait for the artefacts; 0 = for ever.
        stale_s, probe_s, clock, relay, local_disk: for tests: limits, time, the folder on this machine's own
            disk, and the answer to "can another machine share the output folder?".
    """

    def __init__(
        self,
        folder: Path,
        *,
        place: World,
        timeout_s: float,
        where: Node | None = None,
        stale_s: float = STALE_S,
        probe_s: float = _PROBE_S,
        clock: Clock | None = None,
        relay: Path | None = None,
        local_disk: bool | None = None,
    ) -> None:
        self.folder = folder
        self.place = place
        self.where = node(place) if where is None else where
        self.makes = False
        """Did this process make the artefacts?"""
        self._options: dict[str, Any] = {"timeout_s": timeout_s, "stale_s": stale_s, "clock": clock}
        self._what = f"the artefacts of {folder}"
        self._probe_s = probe_s
        self._relay_folder = relay
        self._local_disk = local_disk
        self._held = ExitStack()
        self._claims: list[Claim] = []
        self._is_ready = False

    @property
    def leads(self) -> bool:
        """Is this the process that acts for its machine?"""
        return self.where.rank == 0

    def share(self, make: Callable[[Tell], Mapping[str, Any]]) -> dict[str, Any]:
        """The result of `make`, on every rank; it is called where nobody else makes it.

        Raises:
            WaitTimeoutError: the result did not come in time.
            InputError, LawError: what `make` raised, here or on the rank that called it.
        """
        who = f"rank {self.place.rank}"
        if not self.leads and self.place.rank != 0:
            writer = "rank 0" if self.where.index == 0 else "the first rank of this machine"
            made = follow(self._relay(), who=who, writer=writer, what=self._what, **self._options)
            assert made is not None  # only give_up_s gives None
            return made
        if self.where.size > 1:
            self._claim(self._relay(), "the start-up folder of this machine", relay=True)
        try:
            told = None if self.place.rank == 0 else self._follow(who)
            result = self._make(make) if told is None else told
        except BaseException as error:
            self._fail(error)
            raise
        self._tell_all(lambda claim: claim.ready(result))
        self._is_ready = True
        return dict(result)

    def _make(self, make: Callable[[Tell], Mapping[str, Any]]) -> Mapping[str, Any]:
        self.makes = True
        self._claim(self._shared(), str(self.folder))
        return make(lambda stage, done, total: self._tell_all(lambda claim: claim.say(stage, done, total)))

    def _follow(self, who: str) -> dict[str, Any] | None:
        """Rank 0's result; None when this machine's disk is its own."""
        files.make_folder(self.folder)
        own_disk = is_local_disk(self.folder) if self._local_disk is None else self._local_disk
        result = follow(
            self._shared(),
            who=who,
            what=self._what,
            give_up_s=self._probe_s if own_disk and self.where.index != 0 else None,
            seen=self._pass_on,
            **self._options,
        )
        if result is None:
            _log.warning(
                "%s: rank 0 does not answer in %s, a disk of this machine: making the artefacts here",
                who,
                self.folder,
            )
        return result

    def _pass_on(self, beat: Mapping[str, Any]) -> None:
        stage, done, total = str(beat.get("stage", "")), int(beat.get("done", 0)), int(beat.get("total", 0))
        self._tell_all(lambda claim: claim.say(stage, done, total))

    def _claim(self, folder: Path, what: str, *, relay: bool = False) -> None:
        claim = Claim.take(folder, what=what, refuse=not relay, **self._options)
        self._held.callback(self._release, claim, relay)
        self._claims.append(claim)

    def _tell_all(self, tell: Callable[[Claim], None]) -> None:
        for claim in self._claims:
            tell(claim)

    def _shared(self) -> Path:
        return self.folder / "startup"

    def _relay(self) -> Path:
        if self._relay_folder is None:
            name = files.digest_json([str(self.folder.resolve()), self.where.launch, self.where.index])
            self._relay_folder = files.private_folder(name[:32])
        return self._relay_folder

    def calm(self) -> None:
        """Beat seldom from now on: everyone has started."""
        for claim in self._claims:
            claim.interval = _CALM_S

    def check(self) -> None:
        """InputError when another run took over this one's folder."""
        self._tell_all(Claim.check)

    def __enter__(self) -> StartUp:
        self._held.enter_context(files.tidied(self.folder, unless=self.place.size > 1))
        files.make_folder(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            _log.debug("start-up ends: %s", error_as_dict(error)["message"])
            self._fail(error)
        self._held.close()

    def _fail(self, error: BaseException) -> None:
        if not self._leaves_nothing():
            self._tell_all(lambda claim: claim.fail(error))

    def _leaves_nothing(self) -> bool:
        """One process ends before anything is made, and nobody is to be told: its claim goes too."""
        bare = self.place.size == 1 and not self._is_ready
        return bare and fresh_names(self.folder) == [self._shared().name]

    def _release(self, claim: Claim, relay: bool) -> None:
        claim.release(tidy=relay or self._leaves_nothing())

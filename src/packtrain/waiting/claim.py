"""A claim: the right to write a folder, held by one process and shown by its heartbeat, and `alone` with it.

    <folder>/claim.000001   the owner; appears whole and only once (`files.publish_new`), never rewritten
             beat.json      the owner's nonce, a counter that goes up, what it is doing, and at last the
                            state `ready` (with a result), `failed` (with the reason) or `released`
             hello/<nonce>  a follower that wants an answer

The highest number holds. A claim is free when its owner says so, is shown to be dead, or (on another host)
when its counter has not moved for STALE_S seconds of the watcher's own clock. Taking over makes the next
number: of any number of processes one succeeds. An owner that was believed dead and comes back sees the
higher number and stops. No operating-system lock is used anywhere. Behind a URL (`remote.outputs`) beats are
rarer, and nobody says hello.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import files
from ..errors import InputError, PacktrainError, SourceError, WaitTimeoutError
from ..remote.outputs import clearing_up, look_again
from ..remote.places import url_of
from .poll import Clock, SystemClock, Watch, fresh_json, fresh_names, pauses

# --------------------------------------------------------------------------------------------
# Who holds a claim, and whether that process can be shown to be dead
# --------------------------------------------------------------------------------------------
# Only a process of the same boot of the same machine and the same process-id namespace can be looked up: of
# any other host or container nothing can be shown, and its heartbeat has to tell. A process id that was given
# to another process since is told by the start time that the kernel keeps.
_PROC = Path("/proc")

#: File systems that no other host can have mounted at the same time.
_LOCAL_DISKS = (
    *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "overlay", "ramfs"),
    *("tmpfs", "ufs", "xfs", "zfs"),
)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. `nonce` is drawn once per claim, so two claims of one process differ.

    Attributes:
        machine: boot id of the kernel and process-id namespace; empty where the system has none.
        started: start time of the process in kernel ticks since boot; 0 where unknown.
    """

    nonce: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Owner:
        """This process, with a new nonce."""
        pid = os.getpid()
        return cls(os.urandom(8).hex(), platform.node(), _machine(), pid, _started(pid)[1])

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Owner | None:
        """An owner as `to_dict` wrote it; None for anything else."""
        try:
            nonce, host, machine = (str(values[name]) for name in ("nonce", "host", "machine"))
            return cls(nonce, host, machine, int(values["pid"]), int(values["started"]))
        except (KeyError, TypeError, ValueError):
            return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def can_be_looked_up(self) -> bool:
        """Does this process see the owner's process ids?"""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """True only when the process is shown to be gone."""
        if not self.can_be_looked_up:
            return False
        state, started = _started(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    """Names this boot and its process-id namespace; empty outside Linux."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> tuple[str, int]:
    """(state letter, start time in ticks) of a process; ("", 0) when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def disk_of(folder: str | Path) -> str:
    """Type of the file system that holds `folder` (`ext4`, `nfs4`, …); empty when the system does not say."""
    try:
        lines = (_PROC / "self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def is_local_disk(folder: str | Path) -> bool:
    """True when no other host can share this folder, by the type of its file system."""
    return disk_of(folder) in _LOCAL_DISKS


# --------------------------------------------------------------------------------------------
# A claim: the right to write a folder, held by one process and shown by its heartbeat
# --------------------------------------------------------------------------------------------
_log = logging.getLogger(__name__)

BEAT, HELLO, _CLAIM = "beat.json", "hello", "claim."

#: Seconds of the watcher's own clock without a change after which an owner on another host counts as dead.
STALE_S = 60.0

#: Seconds between two changes of the counter, and between two looks for followers.
BEAT_S, ANSWER_S = 2.0, 0.25

#: Seconds between two changes of the counter behind a URL.
_FAR_BEAT_S = 15.0

#: Old claims that stay, so that a slow contender never finds its number free again.
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Held:
    """The newest claim of a folder and the last beat of its owner (empty when there is none yet)."""

    number: int
    owner: Owner | None
    beat: Mapping[str, Any]

    @property
    def is_free(self) -> bool:
        """The owner has said so, or is shown to be dead."""
        if self.owner is None:
            return False
        return self.beat.get("state") in ("released", "failed") or self.owner.is_dead

    @property
    def pulse(self) -> tuple[object, ...]:
        """Changes whenever the owner gives a sign of life."""
        nonce = None if self.owner is None else self.owner.nonce
        return (self.number, nonce, self.beat.get("beat"))


def look(folder: Path) -> Held | None:
    """The newest claim of a folder, or None when nobody ever claimed it."""
    numbers = _claims(folder)
    if not numbers:
        return None
    owner = Owner.of_dict(fresh_json(folder / numbers[-1]) or {})
    beat = fresh_json(folder / BEAT) or {}
    if owner is None or beat.get("nonce") != owner.nonce:
        beat = {}
    return Held(int(numbers[-1].removeprefix(_CLAIM)), owner, beat)


def _claims(folder: Path) -> list[str]:
    """Names of the claims of a folder, the newest last."""
    return [name for name in fresh_names(folder) if name.startswith(_CLAIM)]


class Claim:
    """A held claim. Leave it with `with`, or `release`.

    >>> import tempfile
    >>> with Claim.take(Path(tempfile.mkdtemp()) / "start", threaded=False) as claim:
    ...     claim.say("measuring", 3, 10)
    """

    def __init__(self, folder: Path, number: int, owner: Owner, threaded: bool = True) -> None:
        self.folder, self.number, self.owner = folder, number, owner
        self.is_lost = False
        self._is_far = url_of(folder) is not None
        self.interval = _FAR_BEAT_S if self._is_far else BEAT_S
        self._count = 0
        self._said: dict[str, Any] = {"state": "working", "stage": "starting", "done": 0, "total": 0}
        self._answers: list[str] = []
        self._told = ""
        self._lock = threading.Lock()  # of what is said
        self._writing = threading.Lock()  # of the beat file: beats go out in the order of their numbers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packtrain-heartbeat", daemon=True)
        self.pulse()
        if threaded:
            self._thread.start()

    @classmethod
    def take(cls, folder: Path, **options: Any) -> Claim:
        """`take_unless` where nothing but the claim ends the wait."""
        claim = cls.take_unless(lambda: False, folder, **options)
        assert claim is not None  # only `made` ends without one
        return claim

    @classmethod
    def take_unless(
        cls,
        made: Callable[[], bool],
        folder: Path,
        *,
        what: str = "this folder",
        timeout_s: float = 0.0,
        refuse: bool = False,
        stale_s: float = STALE_S,
        clock: Clock | None = None,
        threaded: bool = True,
        hint: str = "choose another training.output_dir, or stop the other run",
    ) -> Claim | None:
        """Claim a folder, waiting while a living process holds it.

        Args:
            made: asked at every look; True ends the wait without a claim: what was wanted is there.
            folder: where the claim lies; made when absent.
            what: what is claimed, for messages.
            timeout_s: longest wait; 0 = for ever.
            refuse: a living holder is an error instead of a wait.
            stale_s: see the module.
            clock: this process's time.
            threaded: keep the heartbeat going in a thread; False: the caller calls `pulse`.
            hint: what to do about a living holder (`refuse`).

        Returns:
            The claim, or None when `made` said True.

        Raises:
            InputError: a living process holds the claim (`refuse`).
            WaitTimeoutError: a living process held it for all of `timeout_s`.
        """
        clock = clock or SystemClock()
        owner = Owner.here()
        watch, began, pause = Watch(clock), clock.now(), pauses(owner.nonce)
        while True:
            if made():
                return None
            held = look(folder)
            quiet = 0.0 if held is None else watch.quiet(held.pulse)
            if held is None or _is_free(held, quiet, stale_s, what):
                number = 1 if held is None else held.number + 1
                if _put(folder, number, owner):
                    return cls(folder, number, owner, threaded)
                continue
            alive = watch.changes > 0 or (held.owner is not None and held.owner.can_be_looked_up)
            if refuse and alive:
                raise InputError(
                    f"{what} is being written by another run: {held.owner} ({folder})", hint=hint
                )
            waited = clock.now() - began
            if timeout_s and waited >= timeout_s:
                raise WaitTimeoutError(
                    f"{what} was not free after {waited:.2f} s: {held.owner} holds {folder} "
                    f"({doing_of(held.beat)})",
                    hint="raise training.packing_wait_timeout_s (0 = for ever)",
                )
            clock.sleep(max(0.001, min(next(pause), timeout_s - waited)) if timeout_s else next(pause))

    def say(self, stage: str, done: int = 0, total: int = 0) -> None:
        """What the owner is doing; goes out with the next beat.

        Raises:
            InputError: another process took the claim over.
        """
        with self._lock:
            self._said.update(stage=stage, done=int(done), total=int(total))
        self.check()

    def check(self) -> None:
        """InputError when another process took the claim over."""
        if self.is_lost:
            raise InputError(
                f"another process took over {self.folder} while this one gave no sign of life",
                hint="stop one of the two runs",
            )

    def confirm(self) -> None:
        """`check`, after a fresh look: for what must not be written by two processes.

        Raises:
            InputError: another process took the claim over, or somebody removed it with what was written.
        """
        self._look_for_others()
        self.check()
        if not (self.folder / f"{_CLAIM}{self.number:06d}").exists():
            raise InputError(
                f"{self.folder} was removed while this process was at work beside it",
                hint="run the same command again, and leave the folder alone while it runs",
            )

    def ready(self, result: Mapping[str, Any]) -> None:
        """Tell followers that what they wait for is there."""
        with self._lock:
            self._said.update(state="ready", result=dict(result))
        self.pulse()

    def fail(self, error: BaseException) -> None:
        """Tell followers why they wait in vain."""
        with self._lock:
            self._said.update(state="failed", error=error_as_dict(error))
        self.pulse()

    def is_out_of_reach(self, error: BaseException) -> bool:
        """Is the way to the claim most likely what failed? Its silence then tells that the owner is gone."""
        return self._is_far and isinstance(error, SourceError)

    def stop(self) -> None:
        """Give no further sign of life."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def release(self, *, tidy: bool = False) -> None:
        """Stop the heartbeat and free the claim. A failure that was told stays told.

        Args:
            tidy: also remove the folder, unless a failure is told in it.
        """
        self.stop()
        with self._lock:
            if self._said["state"] != "failed":
                self._said["state"] = "released"
        self.pulse()
        for name in self._hellos():
            with contextlib.suppress(OSError):
                files.remove(self.folder / HELLO / name)
        if tidy and self._said["state"] != "failed" and not self.is_lost:
            with clearing_up():
                files.remove_tree(self.folder)

    def pulse(self) -> None:
        """One beat: a higher counter, what was said, and an answer to every follower that said hello."""
        with self._writing:
            self._look_for_others()
            if self.is_lost:
                return
            self._answers = self._hellos()
            self._count += 1
            with self._lock:
                said = dict(self._said)
            self._told = str(said["stage"])
            beat = {**self.owner.to_dict(), **said, "beat": self._count, "answers": self._answers}
            files.publish_json(self.folder / BEAT, beat)

    def _hellos(self) -> list[str]:
        return [] if self._is_far else fresh_names(self.folder / HELLO)

    def _look_for_others(self) -> None:
        newest = _claims(self.folder)
        if newest and int(newest[-1].removeprefix(_CLAIM)) > self.number:
            self.is_lost = True

    def _run(self) -> None:
        """The heartbeat thread: a full disk or a lost connection is logged, and tried again."""
        clock = SystemClock()
        last = clock.now()
        while not self._stop.wait(ANSWER_S):
            with self._lock:
                stage = self._said["stage"]
            new = not self._is_far and (stage != self._told or self._hellos() != self._answers)
            if not new and clock.now() - last < self.interval:
                continue
            last = clock.now()
            try:
                self.pulse()
            except (OSError, InputError) as error:
                _log.warning("no heartbeat in %s: %s", self.folder, error)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
            return
        if self.is_out_of_reach(error):
            self.stop()
            return
        try:
            self.fail(error)
        except OSError as fault:  # a full disk, perhaps: what failed is told by the error itself
            _log.warning("%s could not be told that this process failed: %s", self.folder, fault)
        with contextlib.suppress(OSError):
            self.release()


def error_as_dict(error: BaseException) -> dict[str, Any]:
    """An error as plain JSON: message, hint and exit code."""
    if isinstance(error, PacktrainError):
        return {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    stopped = isinstance(error, KeyboardInterrupt | SystemExit)
    message = "it was stopped" if stopped else f"{type(error).__name__}: {error}"
    return {"message": message, "hint": None, "exit_code": 2}


def _is_free(held: Held, quiet: float, stale_s: float, what: str) -> bool:
    if held.is_free:
        return True
    looked_up = held.owner is not None and held.owner.can_be_looked_up
    if looked_up or quiet < stale_s:
        return False
    _log.warning("%s: taking over from %s, silent for %.0f s", what, held.owner, quiet)
    return True


def _put(folder: Path, number: int, owner: Owner) -> bool:
    """Make claim `number`; False when another process was faster."""
    path = folder / f"{_CLAIM}{number:06d}"
    if not files.publish_new(path, json.dumps(owner.to_dict(), sort_keys=True) + "\n"):
        return False
    names = _claims(folder)
    if names[-1] != path.name:
        files.remove(path)
        return False
    with clearing_up():
        for name in names[:-_KEPT]:
            files.remove(folder / name)
    files.remove_leftovers(folder)
    return True


def doing_of(beat: Mapping[str, Any]) -> str:
    if not beat:
        return "no sign of life yet"
    total = f" {beat.get('done', 0):,} of {beat['total']:,}" if beat.get("total") else ""
    return f"{beat.get('stage', beat.get('state', 'working'))}{total}"


# --------------------------------------------------------------------------------------------
# One process at a time works in an output folder; a second one is told who is there
# --------------------------------------------------------------------------------------------
# The right is a claim (`waiting.claim`) in `<folder>/claim`, gone again when the work ends. It beats with
# the work itself (`pulse` after each part), not from a thread, so what is written and in which order
# depends on the work alone. A claim that this very process left behind (an interrupted call) is no rival; one
# that another of its threads holds is.
#: Name of the claim inside the folder.
PLACE = "claim"

_held: set[Path] = set()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Claim]:
    """Hold `folder` for the length of the block; folders that it made and that stayed empty go with it.

    Raises:
        InputError: a living process works in it, named with its id and host.
    """
    with files.tidied(folder):
        yield from _alone(folder)


def _alone(folder: Path) -> Iterator[Claim]:
    place = (folder / PLACE).absolute()
    held = look(place)
    if held is not None and held.owner is not None and _is_here(held.owner) and place not in _held:
        files.remove_tree(place)
    hint = "wait for it, stop it, or choose another output folder"
    claim = Claim.take(place, what=str(folder), refuse=True, threaded=False, hint=hint)
    _held.add(place)
    try:
        look_again(folder)
        yield claim
    except BaseException as error:
        if not claim.is_out_of_reach(error):
            with contextlib.suppress(OSError, SourceError):  # a full disk: the error says so itself
                claim.release(tidy=True)
        raise
    else:
        claim.release(tidy=True)
    finally:
        _held.discard(place)


def _is_here(owner: Owner) -> bool:
    me = Owner.here()
    return (owner.machine, owner.pid, owner.started) == (me.machine, me.pid, me.started)

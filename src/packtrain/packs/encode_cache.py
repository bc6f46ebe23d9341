"""EncodeCache: the packs of a plan, encoded ahead, in chunks. The order of training does not change.

    cache = EncodeCache("runs/demo/encoded", plan, key=template.config())
    cache.fill(dataset, workers=8)                       # resumable, one chunk at a time
    data = PackedDataset(plan.align(8), source, template.encode, cache=cache)

Chunk k holds packs k*C … (k+1)*C-1 of the raw plan, so what is read does not depend on ranks, epochs or
shuffling. A pack that is not there yet is encoded as ever: the cache may be filled by anyone, in parts,
before or beside training. The folder belongs to one plan and one template (`key`); another is refused.
Media are kept as bytes of their values where that is exact, else as tensors (`media="uint8"`).

Trade-off: encoded pictures take several times the space of their files. Worth it where encoding, not
the network, is what a step waits for, and for more than one epoch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..checks import one_of, whole
from ..errors import ForeignArtefactError, FormatError, InputError
from ..execute.local import map_shards
from ..measuring.eligibility import listens
from ..planning.packplan import PackPlan
from ..store.chunks import DEFAULT_MEDIA, ChunkReader, ChunkWriter, OpenChunks, manifest_of

MARKER = "encoded.json"
_SCHEMA = "packtrain-encoded-1"
#: What a folder of packs is of, by what people call it.
_NAMED = {"schema": "version", "plan": "plan", "key": "template or source", "of_media": "state of the media"}

Progress = Callable[[int, int], None]


class EncodeCache:
    """Encoded packs of one plan in a folder. Picklable; a worker maps the chunks anew.

    Args:
        folder: where the chunks lie; made by `fill`.
        plan: the raw plan.
        key: plain JSON that decides how samples are encoded (`template.config()`, and what else there is).
        packs_per_chunk: packs of a chunk; taken from the folder where there is one.
        media: `uint8` or `tensor`, see `store.chunks`.
        of_media: digest of the media that are encoded (`Lengths.media`); None: not looked at.

    Raises:
        ForeignArtefactError: the folder holds packs of another plan, template or source, or of other media.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: PackPlan,
        *,
        key: Mapping[str, Any],
        packs_per_chunk: int = 64,
        media: str = DEFAULT_MEDIA,
        of_media: str | None = None,
    ) -> None:
        whole("packs_per_chunk", packs_per_chunk, 1)
        one_of("media of an encode cache", media, ("uint8", "tensor"))
        if not isinstance(key, Mapping):
            raise InputError(f"key is a {type(key).__name__}, not a mapping", hint="key=template.config()")
        self.folder, self.packs, self.media = Path(folder), len(plan), media
        self._own = {"schema": _SCHEMA, "plan": plan.checksum, "key": files.digest_json(dict(key))}
        if of_media is not None:
            self._own["of_media"] = of_media
        held = files.read_json(self.folder / MARKER) if (self.folder / MARKER).is_file() else None
        if held is not None:
            with files.reading(self.folder / MARKER, "the marker of an encode cache", "remove the folder"):
                self._check(held)
                packs_per_chunk = whole("packs_per_chunk", held["packs_per_chunk"], 1)
        self.packs_per_chunk = packs_per_chunk
        self._readers = OpenChunks(self._opened, verify=True)

    def _check(self, held: Mapping[str, Any]) -> None:
        """Refuse a folder of something else; older ones do not name their media."""
        held = {"of_media": self._own.get("of_media"), **held}
        for name, value in self._own.items():
            if held.get(name) != value:
                raise ForeignArtefactError(
                    f"{self.folder} holds encoded packs of another {_NAMED[name]}",
                    hint="choose another folder for the encode cache, or remove this one",
                )

    def _opened(self, chunk: int) -> ChunkReader:
        reader = ChunkReader(self.path(chunk))
        due = min(self.packs_per_chunk, self.packs - chunk * self.packs_per_chunk)
        if len(reader) != due:
            raise FormatError(
                f"{reader.path} holds {len(reader)} packs, {self.folder / MARKER} means {due}",
                hint="remove the folder; it is made again",
            )
        return reader

    @property
    def chunks(self) -> int:
        return -(-self.packs // self.packs_per_chunk)

    def path(self, chunk: int) -> Path:
        return self.folder / f"chunk_{chunk:08d}.arrow"

    def has(self, chunk: int) -> bool:
        """Is this chunk whole?"""
        return manifest_of(self.path(chunk)).is_file()

    def get(self, pack: int) -> list[dict[str, Any]] | None:
        """The encoded samples of a raw pack as `fill` got them; None where its chunk is not there yet."""
        chunk, row = divmod(operator.index(pack), self.packs_per_chunk)
        return self._readers[chunk][row] if chunk in self._readers or self.has(chunk) else None

    def fill(
        self,
        dataset: Any,
        *,
        share: tuple[int, int] = (0, 1),
        workers: int | None = 1,
        progress: Progress | None = None,
    ) -> int:
        """Encode the chunks that are not there; returns how many were made.

        Args:
            dataset: a PackedDataset over the raw plan (not an aligned one), without a cache.
            share: (r, n): only chunks r, r + n, r + 2n, … so that n processes fill one folder.
            workers: processes, see `execute.local.map_shards`.
            progress: called with (chunks done, chunks to do).

        Raises:
            InputError: the dataset is not over this plan's packs, or its samples change with the epoch.
            SampleError, DriftError: from encoding; chunks made before stay.
        """
        if (
            len(dataset) != self.packs
            or dataset.plan.checksum != self._own["plan"]
            or dataset.cache is not None
        ):
            raise InputError(
                "the dataset is not over the raw plan of this cache",
                hint="use PackedDataset(plan, source, encode)",
            )
        if listens(dataset.samples):
            raise InputError(
                "the samples change with the epoch: encoded once, they would stay those of one epoch"
            )
        rank, ranks = share
        if not (self.folder / MARKER).is_file():
            files.make_folder(self.folder)
            files.publish_json(self.folder / MARKER, {**self._own, "packs_per_chunk": self.packs_per_chunk})
        todo = [chunk for chunk in range(rank, self.chunks, ranks) if not self.has(chunk)]
        for done, _ in enumerate(map_shards(_encode, todo, workers=workers, context=(self, dataset)), 1):
            if progress is not None:
                progress(done, len(todo))
        return len(todo)


def _encode(context: tuple[EncodeCache, Any], chunk: int) -> int:
    """Write one chunk."""
    cache, dataset = context
    first = chunk * cache.packs_per_chunk
    with ChunkWriter(cache.path(chunk), media=cache.media, meta={"first_pack": first}) as writer:
        for pack in range(first, min(first + cache.packs_per_chunk, cache.packs)):
            writer.add(dataset[pack])
    return chunk

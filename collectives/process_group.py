"""Host arrays over a torch process group: gloo, on connections of our own."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from collectives.closing import closes
from collectives.errors import MissingRanksError
from collectives.host_transport import HostTransport
from collectives.limit import PAUSE, GivenUp, Limit, Note, missing_ranks, wait_within

__all__ = ["Meeting", "ProcessGroup", "ProcessGroupTransport", "connect"]

_PAYLOAD, _COUNT = 0, 1  # tags

_LOST = 1.0
"""Seconds in which ranks tell that they, too, have lost a connection. Others may only be late, or wait for a third one."""

_TIMEOUT = timedelta(days=30)
"""Of gloo. Our own limits are shorter, and a rank that dies closes its connections."""


def connect(group: ProcessGroup, limit: Limit | None = None) -> ProcessGroupTransport:
    """The transport for host arrays among the ranks of a process group, of whatever backend. Collective.

    The group itself carries no message of ours: ranks meet in the default store, and connect by gloo.

    Args:
        limit: on the time that ranks may come late to this call; None: they are waited for.

    Raises:
        MissingRanksError: they did not come in time; on the others, and on a missing one when it comes. The group must not be
            used for a transport after that.
    """
    ranks = hashlib.blake2b(repr(dist.get_process_group_ranks(group)).encode(), digest_size=8).hexdigest()
    base = dist.distributed_c10d._get_default_store()
    own = dist.PrefixStore(f"oktopk/{group.group_name}/{ranks}", base)
    # numbers this transport among those of the group: all its ranks count alike, and with another store they begin anew
    store = dist.PrefixStore(f"{own.add(f'transports/{group.rank()}', 1)}", own)
    meeting = Meeting(store, group.rank(), group.size(), "cuda:nccl" in dist.get_backend_config(group))
    if limit is not None and meeting.size > 1:
        given_up = GivenUp(StoreNotes(meeting))
        meeting.arrive()
        wait_within(limit, meeting.everyone_is_here, given_up)
        if given_up.notes.any_left():
            raise missing_ranks(limit, given_up)
    return ProcessGroupTransport(meeting)


class Meeting:
    """Where some ranks find each other: part of a store. Every rank must ask for the same parts in the same order.

    Args:
        store: of these ranks alone.
        rank, size: this rank's number among them, and how many there are.
        nccl: whether the process group that was given moves device arrays by NCCL.

    Attributes:
        store, rank, size, nccl: as given.
        whole: the meeting of all ranks that this is a part of.
        ranks: int[size], the number of each rank there.
        messages: of `whole`, what moves device arrays for all transports of it; None before there is any.
        gave_up: of `whole`, whether ranks did not come to an operation of one of its transports.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, nccl: bool = False) -> None:
        self.store, self.rank, self.size, self.nccl = store, rank, size, nccl
        self.whole, self.ranks = self, list(range(size))
        self.messages: Any = None
        self.gave_up = False
        self._parts = 0
        self._one_host: bool | None = None

    def on_one_host(self) -> bool:
        """Whether the ranks are those of one host. Collective, when it is asked first."""
        if self._one_host is None:
            self.store.set(f"host/{self.rank}", host_name())
            self._one_host = len({self.store.get(f"host/{rank}") for rank in range(self.size)}) == 1
        return self._one_host

    def part(self, members: list[int], name: str = "") -> Meeting:
        """Of some of the ranks, this one among them."""
        self._parts += 1
        store = dist.PrefixStore(f"{self._parts}{name}", self.store)
        part = Meeting(store, members.index(self.rank), len(members), self.nccl)
        part.whole, part.ranks = self.whole, [self.ranks[member] for member in members]
        return part

    def again(self) -> Meeting:
        """Of the same ranks."""
        return self.part(list(range(self.size)))

    def arrive(self) -> None:
        """Tell the others that this rank is here."""
        self.store.set(f"here/{self.rank}", "")

    def everyone_is_here(self, seconds: float) -> bool:
        """Whether all ranks have arrived."""
        keys = [f"here/{rank}" for rank in range(self.size)]
        if self.store.check(keys):
            return True
        if seconds:
            time.sleep(PAUSE)
        return False


class StoreNotes:
    """As `collectives.limit.Notes`, in a store."""

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._store = meeting.store
        self._collected: set[int] = set()

    def leave(self, note: Note) -> None:
        self._store.set(f"gave up/{self.rank}", f"{note.waited} {note.what}")
        self._store.set("gave up", "")  # last: who finds it finds the other one, too

    def any_left(self) -> bool:
        return self._store.check(["gave up"])

    def collect(self) -> dict[int, Note]:
        others = set(range(self.size)) - {self.rank} - self._collected
        came = {rank: f"gave up/{rank}" for rank in others if self._store.check([f"gave up/{rank}"])}
        self._collected |= set(came)
        texts = {rank: self._store.get(key).decode().split(" ", 1) for rank, key in came.items()}
        return {rank: Note(int(waited), what) for rank, (waited, what) in texts.items()}

    def silent_ranks(self) -> list[int]:
        """Tell the others that this rank has lost a connection; those that do not tell as much, one that has ended among them."""
        self._store.set(f"lost/{self.rank}", "")
        silent, end = set(range(self.size)) - {self.rank}, time.monotonic() + _LOST
        while silent and time.monotonic() < end:
            silent -= {rank for rank in silent if self._store.check([f"lost/{rank}"])}
            time.sleep(PAUSE)
        return sorted(silent)

    def close(self) -> Callable[[], bool]:
        self._store.set(f"closed/{self.rank}", "")
        return lambda: True

    def closed(self) -> set[int]:
        return {
            rank for rank in range(self.size) if rank != self.rank and self._store.check([f"closed/{rank}"])
        }


class ProcessGroupTransport(HostTransport):
    """Host arrays over gloo.

    A message whose length its receiver cannot know follows one of 8 bytes that tells it, which counts as control.

    Args:
        comm: where the ranks meet; they connect in a part of it, so that several transports never see each other's messages.
            Collective.
    """

    library = "gloo"

    def __init__(self, comm: Meeting) -> None:
        self.comm = comm.again()
        super().__init__(comm.rank, comm.size, StoreNotes(self.comm))
        self.by_nccl = comm.nccl
        self._announced = 0  # calls that ranks have told each other
        store = dist.PrefixStore("gloo", self.comm.store)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _TIMEOUT
        # what listens for ranks of this host alone is not for others to reach
        own = self.comm.whole.on_one_host() and "GLOO_SOCKET_IFNAME" not in os.environ
        device = gloo.create_device(hostname="127.0.0.1") if own else gloo.create_default_device()
        options._devices = [device]
        self._gloo: Any = gloo(store, self.rank, self.size, options)
        # A thread of gloo's drops its work some time after that is over. Were it the last to hold the arrays, it would want the
        # interpreter's lock, which whoever ends the threads holds.
        self._recent: deque[Any] = deque(maxlen=8)

    @closes
    def close(self) -> None:
        # where an operation was given up, gloo may still be working on it
        if not self.gave_up:
            self._gloo = None
            self._recent.clear()

    def send(self, array: NDArray[Any], dest: int, even_if_empty: bool = False) -> list[Any]:
        requests = []
        if even_if_empty:
            count = np.array([array.nbytes], np.int64)
            self.traffic.count_control(count.nbytes)
            with self._connections():
                requests.append(self._gloo.send([_tensor(count)], dest, _COUNT))
        if array.size:
            self._count(array.nbytes, dest)
            requests.append(self._post("send", array, dest))
        return requests

    def receive(self, array: NDArray[Any], source: int) -> list[Any]:
        return [self._post("recv", array, source)] if array.size else []

    def receive_counted(self, array: NDArray[Any], source: int) -> int:
        nbytes = np.empty(1, np.int64)
        with self._connections():
            self._gloo.recv([_tensor(nbytes)], source, _COUNT).wait()
        count = int(nbytes[0]) // array.itemsize
        if count:
            self._finish([self._post("recv", array[:count], source)])
        return count

    def _post(self, operation: str, array: NDArray[Any], rank: int) -> Any:
        """The request of a "send" or a "recv" of payload."""
        with self._connections():
            return getattr(self._gloo, operation)([_tensor(array)], rank, _PAYLOAD)

    def wait(self, requests: list[Any]) -> None:
        self._finish(requests)

    def _finish(self, requests: list[Any]) -> None:
        """Wait for requests of `_post`; `wait` may take others."""
        with self._connections():
            for request in requests:
                request.wait()

    @contextmanager
    def _connections(self) -> Iterator[None]:
        """Raise what the others raised, or a sentence, in place of gloo's own error where a rank has closed its connections."""
        try:
            yield
        except RuntimeError as error:
            given_up, limit, among = self._given_up, self._given_up.limit, ""
            self._leave_gloo()
            with suppress(RuntimeError):  # the store may have ended, too
                notes = given_up.notes
                if given_up.error is None and limit is not None and (notes.any_left() or notes.closed()):
                    given_up.error = missing_ranks(limit, given_up)
                elif (
                    given_up.error is None
                    and isinstance(notes, StoreNotes)
                    and (silent := notes.silent_ranks())
                ):
                    among = f", and is among rank(s) {', '.join(map(str, silent))}, which do not answer"
            if given_up.error is not None:
                raise given_up.error from None
            raise RuntimeError(
                f"{'' if limit is None else f'{limit.what}: '}a rank has closed its connections: it has ended or raised"
                f"{among}; see its output"
            ) from error

    def _run(self, operation: str, *arrays: NDArray[Any]) -> None:
        with self._connections():
            self._work(operation, *arrays).wait()

    def _start(self, operation: str, *arrays: NDArray[Any]) -> Callable[[float], bool]:
        work = self._work(operation, *arrays)

        def done(seconds: float) -> bool:
            if seconds >= PAUSE:
                with suppress(RuntimeError):  # it takes longer; or it has failed, which the next line finds
                    work.wait(timedelta(seconds=seconds))
            with self._connections():
                return bool(work.is_completed()) and bool(work.wait())

        return done

    def _work(self, operation: str, *arrays: NDArray[Any]) -> Any:
        """A collective operation that was started."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if operation == "barrier":
            work = self._gloo.barrier()
        elif operation == "alltoall":
            work = self._gloo.alltoall_base(tensors[1], tensors[0], [], [])
        elif operation == "reduce":
            options: Any = dist.ReduceOptions()
            options.reduceOp, options.rootRank = dist.ReduceOp.BOR, 0
            work = self._gloo.reduce(tensors, options)
        elif operation == "broadcast":
            work = self._gloo.broadcast(tensors, _broadcast_of(0))
        elif operation == "allgather":
            work = self._gloo.allgather([list(tensors[1])], [tensors[0]])
        else:
            tensors[1].copy_(tensors[0])
            work = self._gloo.allreduce([tensors[1]])
        self._recent.append((work, tensors))
        return work

    def _start_any(self, flags: NDArray[np.int64]) -> Callable[[float], bool]:
        # gloo tells kinds of operations apart, and no other call begins with these
        stage, left = self._start("reduce", flags), ["broadcast"]

        def done(seconds: float) -> bool:
            nonlocal stage
            while stage(seconds):
                if not left:
                    return True
                stage = self._start(left.pop(), flags)
            return False

        return done

    def _start_telling(self, calls: NDArray[Any]) -> Callable[[float], bool]:
        # in the store: gloo ends the connections where one waits for a message that does not come
        self._announced += 1
        store = self.comm.store
        keys = [f"called/{self._announced}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], calls[self.rank].decode())
        store.delete_key(
            f"called/{self._announced - 2}/{self.rank}"
        )  # all have read it when they told the next one

        def done(seconds: float) -> bool:
            if not store.check(keys):
                time.sleep(PAUSE if seconds else 0)
                return False
            calls[:] = [store.get(key) for key in keys]
            return True

        return done

    def _wait_expected(self, done: Callable[[float], bool]) -> None:
        try:
            super()._wait_expected(done)
        except MissingRanksError:
            self._leave_gloo()
            raise

    def _leave_gloo(self) -> None:
        """Never end the connections: their threads may be waiting, and the end of the process, too, would wait for them."""
        self.comm.whole.gave_up = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _allgather_objects(self, value: object) -> list[Any]:
        packed = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty((self.size, 1), np.int64)
        self._run("allgather", np.array([packed.size], np.int64), sizes)
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: packed.size] = packed
        everyone = np.empty((self.size, padded.size), np.uint8)
        self._run("allgather", padded, everyone)
        rows = [row[:size].tobytes() for row, (size,) in zip(everyone, sizes, strict=True)]
        return [pickle.loads(row) for row in rows]  # noqa: S301 - of the job's own ranks

    def allreduce_or(self, bits: NDArray[np.uint8]) -> None:
        tensors = [torch.from_numpy(bits)]
        with self._connections():
            work = self._gloo.allreduce(tensors, dist.ReduceOp.BOR)
            self._recent.append((work, tensors))
            work.wait()

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        tensors = [_tensor(array)]
        with self._connections():
            work = self._gloo.broadcast(tensors, _broadcast_of(root))
            self._recent.append((work, tensors))
            work.wait()

    def _first_ranks_of_hosts(self) -> list[int]:
        names = self._allgather_objects(host_name())
        return [names.index(name) for name in names]

    def _among(self, members: list[int], color: int | None) -> HostTransport | None:
        part = self.comm.part(members, f"-{color}")
        return None if color is None else self._like_this(part)


def _broadcast_of(root: int) -> Any:
    """Options of gloo's."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _tensor(array: NDArray[Any]) -> Tensor:
    """The bytes of a contiguous array, not copied."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def host_name() -> str:
    """What only the ranks of one host have in common: containers of a host may share its kernel, and hosts a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"

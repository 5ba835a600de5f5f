"""Memory of a launch and of a program, which tells what a GPU would leave undefined.

Whether accesses need order is told in grains of a few bytes: two that follow one another are fine in one warp, or with
a barrier between, or, in global memory, in one program.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
NOBODY, SEVERAL = -1, -2
GRAIN = 2  # bytes of shared memory


class UndefinedError(RuntimeError):
    """What a GPU may answer with anything, or with an end of the process."""


@dataclass
class _Stretch:
    """The bytes of one tensor's storage, and by grain which program wrote and read them in this launch."""

    start: int
    bytes: Bytes
    grain: int
    writer: Numbers
    reader: Numbers

    @classmethod
    def of(cls, tensor: Tensor) -> _Stretch:
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        grain = min(4, tensor.element_size())
        owners = (np.full(-(-size // grain), NOBODY, np.int64) for _ in range(2))
        return cls(start, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)), grain, *owners)


class GlobalMemory:
    """What the tensors of a launch hold."""

    def __init__(self) -> None:
        self.stretches: dict[int, _Stretch] = {}

    def add(self, tensor: Tensor) -> None:
        """Let a launch reach the storage of a tensor."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.stretches:
            self.stretches[storage.data_ptr()] = _Stretch.of(tensor)

    def read(self, addresses: Numbers, size: int, program: int) -> Bytes:
        """(threads, size) bytes."""
        stretch, at, grains = self._find(addresses, size)
        writer = stretch.writer[grains]
        if ((writer != NOBODY) & (writer != program)).any():
            raise UndefinedError("a program reads what another wrote in the same launch")
        reader = stretch.reader[grains]
        stretch.reader[grains] = np.where((reader == NOBODY) | (reader == program), program, SEVERAL)
        return stretch.bytes[at]

    def write(self, addresses: Numbers, values: Bytes, program: int) -> None:
        """(threads, size) bytes."""
        stretch, at, grains = self._find(addresses, values.shape[1])
        for owners in (stretch.writer, stretch.reader):
            if ((owners[grains] != NOBODY) & (owners[grains] != program)).any():
                raise UndefinedError("a program writes what another wrote or read in the same launch")
        stretch.writer[grains] = program
        stretch.bytes[at] = values
        if not np.array_equal(stretch.bytes[at], values):
            raise UndefinedError("threads write different values to one address")

    def _find(self, addresses: Numbers, size: int) -> tuple[_Stretch, Numbers, Numbers]:
        """The storage that all of the addresses lie in, the bytes there and their grains."""
        _check_boundaries(addresses, size)
        first, end = int(addresses.min()), int(addresses.max()) + size
        for stretch in self.stretches.values():
            if stretch.start <= first and end <= stretch.start + len(stretch.bytes):
                at = (addresses - stretch.start)[:, None] + np.arange(size)
                return stretch, at, at[:, :: min(stretch.grain, size)] // stretch.grain
        raise UndefinedError("an address lies outside of every tensor of the launch")


class SharedMemory:
    """What the threads of a program share; unwritten it holds NaN."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.barriers = 0  # that were passed
        grains = -(-size // GRAIN)
        # By grain: the barriers before the last write and read, and the warp that made it.
        self.written, self.writer, self.read_at, self.reader = np.full((4, grains), NOBODY, np.int64)
        self.coming = np.zeros(grains, np.bool_)  # a copy there is under way

    def read(self, addresses: Numbers, size: int, warps: Numbers) -> Bytes:
        """(threads, size) bytes, each thread in the warp named."""
        at, grains = self._find(addresses, size)
        warp = warps[:, None]
        unordered = (self.written[grains] == self.barriers) & (self.writer[grains] != warp)
        if (unordered | self.coming[grains]).any():
            raise UndefinedError("a warp reads what another wrote without a barrier, or what is still being copied")
        others = (self.read_at[grains] == self.barriers) & (self.reader[grains] != warp)
        self.reader[grains] = np.where(others, SEVERAL, warp)
        self.reader[grains] = np.where(self.reader[grains] != warp, SEVERAL, warp)  # several in this very access
        self.read_at[grains] = self.barriers
        return self.bytes[at]

    def read_by_group(self, places: Numbers, size: int) -> Bytes:
        """(n, size) bytes, for a product that four warps have made together: all writers need a barrier before."""
        at, grains = self._find(places, size)
        if ((self.written[grains] == self.barriers) | self.coming[grains]).any():
            raise UndefinedError("a product reads what was written without a barrier, or what is still being copied")
        self.read_at[grains], self.reader[grains] = self.barriers, SEVERAL
        return self.bytes[at]

    def write(self, addresses: Numbers, values: Bytes, warps: Numbers) -> None:
        """(threads, size) bytes, each thread in the warp named."""
        at, grains = self._check_write(addresses, values.shape[1], warps)
        self.written[grains], self.writer[grains] = self.barriers, warps[:, None]
        self.bytes[at] = values

    def begin_copy(self, addresses: Numbers, size: int, warps: Numbers) -> None:
        """A copy that a thread starts may write at any moment from here on."""
        _, grains = self._check_write(addresses, size, warps)
        self.coming[grains] = True

    def end_copy(self, addresses: Numbers, values: Bytes, warps: Numbers) -> None:
        """The copy has been waited for."""
        _, grains = self._find(addresses, values.shape[1])
        self.coming[grains] = False
        self.write(addresses, values, warps)

    def _check_write(self, addresses: Numbers, size: int, warps: Numbers) -> tuple[Numbers, Numbers]:
        at, grains = self._find(addresses, size)
        warp = warps[:, None]
        for when, who in ((self.written, self.writer), (self.read_at, self.reader)):
            if ((when[grains] == self.barriers) & (who[grains] != warp)).any() or self.coming[grains].any():
                raise UndefinedError("a warp writes what another wrote or read without a barrier")
        return at, grains

    def _find(self, addresses: Numbers, size: int) -> tuple[Numbers, Numbers]:
        _check_boundaries(addresses, size)
        if addresses.min() < 0 or addresses.max() + size > len(self.bytes):
            raise UndefinedError(f"an address lies outside of the {len(self.bytes)} bytes of shared memory")
        at = addresses[:, None] + np.arange(size)
        return at, at[:, ::GRAIN] // GRAIN


def _check_boundaries(addresses: Numbers, size: int) -> None:
    if (addresses % size).any():
        raise UndefinedError(f"an address of {size} bytes is no multiple of that")

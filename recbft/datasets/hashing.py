"""SHA-256 of ids and numbers, the same whatever file format or type they came in."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


def text_parts(ids: Any) -> tuple[NDArray[np.int64], bytes]:
    """Lengths and bytes of the canonical texts of ids without blanks, an array of numpy or arrow."""
    texts = (ids if isinstance(ids, pa.Array) else pa.array(ids)).cast(pa.large_string())
    lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, b"".join(pc.cast(texts, pa.large_binary()).to_pylist())


def sha256_of(*parts: str | bytes | NDArray[Any]) -> str:
    """Of texts, bytes and arrays (little-endian, whole numbers in 64 bits), each with its length before it.

    >>> sha256_of("ab", "c") == sha256_of("a", "bc")
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        if isinstance(content, np.ndarray):
            content = content.astype(
                "<i8" if content.dtype.kind in "biu" else content.dtype.newbyteorder("<")
            ).tobytes()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()

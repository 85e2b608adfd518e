"""Decompression of the parts of a message, of which a part cannot become larger than what it must be."""

import zlib

from kvjax.errors import CheckpointError


def inflate(data: bytes, limit: int) -> bytes:
    """Decompresses zlib's bytes.

    Args:
      data: from `zlib.compress`.
      limit: the most bytes that they may become.

    Raises:
      CheckpointError: they are damaged, or become more.
    """
    stream = zlib.decompressobj()
    try:
        # One byte more than there may be shows that there are more.
        made = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise CheckpointError(f"the message is damaged: {error}.") from None
    if len(made) > limit or not stream.eof or stream.unused_data:
        raise CheckpointError("the message is damaged: the size of a part is not that of the context.")
    return made

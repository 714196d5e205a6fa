"""Package cuvmm maps GPU memory of other processes, without a copy.

A process, in Go or in Python, publishes a growing GPU array. Others :func:`connect` to its socket, :meth:`Client.follow`
the array, and pass it to PyTorch or CuPy. The package needs the standard library and the CUDA driver alone::

    import cuvmm, torch

    with cuvmm.connect("/run/user/1000/app/table.sock") as client:
        with client.follow("table") as table:
            table.next()
            rows = torch.from_dlpack(table.array.allow_readonly())
            print(rows.sum())
            del rows
"""

from ._driver import MemoryInfo, memory_info
from .array import Array
from .broker import Broker, Object, ObjectListing, Writer, attach, connect_broker, writer
from .client import Client, Listing, connect
from .errors import (AccessError, ArgumentError, CapacityError, ChangedError, ClosedError, DigestError, DriverError, EndedError, Error, ExcludedError, ExistsError, FilesError, ForkedError, FormatError, GoneError,
                     InUseError, IncompleteError, LostError, MismatchError, MovedError, NotSupported, OutOfMemory, PeerError, ProtocolError, RefusedError, RewritingError, StalledError, SuspendedError,
                     TooLargeError, UnfinishedError, UnknownError, WaitTimeout, WithdrawnError, WritingError)
from .follower import Follower
from .imported import Channel, Imported, Message, dial, inherit, open_lease
from .kept import Kept
from .server import FollowerStats, Publication, Rewrite, Server
from .shared import Shared, empty, export
from .weights import Shard, Tensor, Weights, load_file, manifest_of, tensors

__all__ = ["AccessError", "ArgumentError", "Array", "Broker", "CapacityError", "ChangedError", "Channel", "Client", "ClosedError", "DigestError", "DriverError", "EndedError", "Error", "ExcludedError",
           "ExistsError", "FilesError", "Follower", "FollowerStats", "ForkedError", "FormatError", "GoneError", "Imported", "InUseError", "IncompleteError", "Kept", "Listing", "LostError",
           "MemoryInfo", "Message", "MismatchError", "MovedError", "NotSupported", "Object", "ObjectListing", "OutOfMemory", "PeerError", "ProtocolError", "Publication", "RefusedError",
           "Rewrite", "RewritingError", "Server", "Shard", "Shared", "StalledError", "SuspendedError", "Tensor", "TooLargeError", "UnfinishedError", "UnknownError", "WaitTimeout",
           "Weights", "WithdrawnError", "Writer", "WritingError", "attach", "connect", "connect_broker", "dial", "empty", "export", "inherit", "load_file", "manifest_of", "memory_info", "open_lease",
           "tensors", "writer"]

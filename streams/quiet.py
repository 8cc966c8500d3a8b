"""Import this before grpc: it would write to stderr what becomes an error anyway, such as a handshake that failed.

Whoever sets GRPC_VERBOSITY gets what it says.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

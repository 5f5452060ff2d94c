"""The worker: weights, KV memory, stages, sampling and exit gates.

Threads that have nothing to do spin for some 50 us (GOMP_SPINCOUNT) and then sleep, unless the environment says
otherwise: OpenMP's default, milliseconds, takes the core that scheduler and frontend need between two steps. It is set
here since it must be there before torch is loaded.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

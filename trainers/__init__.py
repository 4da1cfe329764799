"""Everything that learns: rollout engines, the actor, algorithms, the loop."""

import logging
import os

# Threads that spin while they wait for each other take the cores from those who have work (an engine beside an actor,
# sandboxes, other programs), and threads that sleep at once make small models slow: so they spin for some microseconds.
# Read when torch starts its threads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# On CPUs a kernel is made for each shape of a product in bfloat16, and every micro-batch has shapes of its own: of the
# thousand that are kept by default, some hundred kilobytes each, few are met again.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "128")
# torchao, where it is installed, warns at import about its GPU kernels and torch's deprecations; DTensor, that
# parameters under tensor parallelism are gathered in two steps.
for _name in ("torchao", "torch.utils._pytree", "torch.distributed.tensor._redistribute"):
    logging.getLogger(_name).setLevel(logging.ERROR)

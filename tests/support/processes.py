"""The server that all tests fork processes from: they begin with all imported that any of them needs.

There is one list of imports for a whole pytest process, whoever starts its first child, so it stands here alone.
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *("torch.distributed", "torch._dynamo"),  # the second one takes a second, at a process's first optimizer
        *("lsg", "lsg.checkpoint", "lsg.step.assembly", "tests.support.small_run", "dp_accounting.rdp"),
    ]
)

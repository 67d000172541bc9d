"""The program of test_launch.py's jobs: collectives in which rank 1 fails as
the first argument says, once for each start of the job; then it ends
well."""
import os
import signal
import sys
import time

import mgpu

steps, world = int(sys.argv[2]), mgpu.distributed.init()
how = dict(enumerate(sys.argv[1].split(","))).get(world.restarts)
print(f"rank {world.rank} of {world.size}", sys.argv[3:],
      *(os.environ.get(name) for name in (
          "MGPU_BACKEND", "MGPU_COMM", "MGPU_TIMEOUT", "OMP_NUM_THREADS")))
for step in range(steps):
    world.gather("step", step)
    if step == 2 and world.rank == 1:
        if how == "raises":
            with world.guard():
                raise ValueError("rank 1 has a fault")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "ends early":
            sys.exit(0)
    if how == "waits":
        print("here", flush=True)
        time.sleep(0.1)
print("the end")

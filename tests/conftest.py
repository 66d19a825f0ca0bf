"""What holds for every test."""

import os

# Tests run in as many processes as there are processors. With threads of their own, the processes would wait for each
# other in torch's barriers: the suite takes a multiple of the time on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

"""What rewards consume in this process: requests to judges, their tokens, their price.

One recorder for all rewards; the actor sends what it takes from it with its heartbeats.
"""

from metrics.record import Recorder

usage = Recorder()

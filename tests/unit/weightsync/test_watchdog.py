import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WATCHER = """
import sys, threading
from weightsync.watchdog import end_with

end_with(int(sys.argv[1]))
print("watching", flush=True)
threading.Event().wait(60)
"""


def test_a_process_ends_with_the_one_it_watches():
    watched = subprocess.Popen(["sleep", "60"])
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(watched.pid)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None and watcher.stdout.readline() == "watching\n"
    assert watcher.poll() is None
    watched.kill()
    watched.wait(10)
    assert watcher.wait(10) == 1


def test_a_process_whose_actor_is_already_gone_ends_at_once():
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    done = subprocess.run([sys.executable, "-c", WATCHER, str(gone.pid)], cwd=ROOT, timeout=20)
    assert done.returncode == 1

"""Tasks: data, prompts, tools and rewards. `from tasks import reward` is all that a user's module needs."""

from tasks.loading import load_task
from tasks.reward import reward
from tasks.scoring import Unscorable, score
from tasks.types import Episode, Reward, Score, Task

__all__ = ["Episode", "Reward", "Score", "Task", "Unscorable", "load_task", "reward", "score"]

"""What `launch.py` does: preflight, the supervisor of the roles, and the terminal picture. No RL in here."""

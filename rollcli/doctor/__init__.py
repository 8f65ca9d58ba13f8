"""What is wrong with an installation, and why trainer and rollout engine disagree."""

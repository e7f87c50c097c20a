"""What this host offers to jobs on several ranks."""

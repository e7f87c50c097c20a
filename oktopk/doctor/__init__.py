"""What this host offers to several ranks: `oktopk-doctor`."""

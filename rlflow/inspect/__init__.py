"""What can be said of a run from its configuration and files, without a GPU and without starting it."""

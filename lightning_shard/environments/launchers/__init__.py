"""Lightning launchers: start the ranks and run the trainer's function on each."""

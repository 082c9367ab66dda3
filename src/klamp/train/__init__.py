"""Models, sampling, processes: the trainer on top of the objective."""

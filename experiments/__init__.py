"""Many-seed scenarios: `make experiments` runs them and writes docs/results/."""

"""Speed side by side in one run, printed as ratios. `make bench` runs them all."""

"""What one does with head affinities: compare, evaluate, calibrate, read out, draw."""

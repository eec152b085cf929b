"""What one does with head affinities: every function takes or returns a ``HeadAffinityResult``."""

"""Many runs and what they say: arms over seeds, the queue that trains them, comparisons, sweeps and searches."""

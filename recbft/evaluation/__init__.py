"""From a model and a data set to ranks, from ranks to metrics: numbers only, no files."""

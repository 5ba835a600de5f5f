"""Published experiments on single mechanisms, each a command that prints the published figure beside ours."""

"""The command ``recbft``; installed as the package ``recbft_cli``."""

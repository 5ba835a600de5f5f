"""Configuration files; installed as the package ``recbft_configs``."""
